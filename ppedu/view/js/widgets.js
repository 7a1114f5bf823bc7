// @ts-check
// The simple widgets: timelines alone, or with a table, a chart, or the progress of a training.

import { chart } from "./chart.js";
import { element } from "./elements.js";
import { Figure } from "./figure.js";
import { pretty } from "./model.js";
import { tell } from "./why.js";

/**
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {(message: Record<string, any>) => void} Send
 *
 * @typedef {object} Widget a widget builds itself below a root element and returns this
 * @property {Figure} figure
 * @property {(state: any) => void} update show another state
 * @property {(answer: any) => void} [receive] handle a message from Python
 *
 * @typedef {Stack & { table: import("./why.js").Part[][], points: [string, number, number][] }} CompareState
 * @typedef {Stack & { points: [string, number, number, string][], axis: string, note: import("./why.js").Part[] }} FrontierState
 * @typedef {Stack & { losses: (number | null)[], steps: number }} LiveState
 */

/** @param {number} value */
const percent = (value) => `${+(100 * value).toFixed(1)}%`;

/**
 * Timelines and nothing else.
 * @param {HTMLElement} root
 * @param {Look} look
 * @returns {Widget}
 */
export function show(root, look) {
  const figure = new Figure(root, look);
  return { figure, update: (/** @type {Stack} */ state) => figure.update(state) };
}

/** Timelines without controls, legend and numbers, for readers who have not seen one before. */
class Plain extends Figure {
  /**
   * @param {HTMLElement} root
   * @param {Look} look
   */
  constructor(root, look) {
    super(root, { ...look, plain: true });
    this.line.classList.add("ppedu-heard");
  }

  explain() {
    super.explain();
    if (this.tip.hidden) this.line.textContent = ""; // help for controls, or what is seen while it plays
  }

  zoom() {} // no button would lead back
}

/**
 * Plain timelines and nothing else; the page around them may call `figure.play()`.
 * @param {HTMLElement} root
 * @param {Look} look
 * @returns {Widget}
 */
export function plain(root, look) {
  const figure = new Plain(root, look);
  return { figure, update: (/** @type {Stack} */ state) => figure.update(state) };
}

/**
 * A row of a table: of its head, or with a head in its first column.
 * @param {"th" | "td"} tag
 * @param {import("./why.js").Part[]} cells
 */
function tableRow(tag, [first, ...rest]) {
  const scope = tag === "th" ? "col" : "row";
  const others = rest.map((cell) => element(tag, tag === "th" ? { scope } : {}, ...tell([cell])));
  return element("tr", {}, element("th", { scope }, ...tell([first])), ...others);
}

/**
 * A table whose first row is its head.
 * @param {import("./why.js").Part[][]} rows
 */
export function tableOf([head, ...rows]) {
  const body = element("tbody", {}, ...rows.map((row) => tableRow("td", row)));
  return element("table", {}, element("thead", {}, tableRow("th", head)), body);
}

/**
 * Timelines, a table of their numbers, and a chart of bubble against memory.
 * @param {HTMLElement} root
 * @param {Look} look
 * @returns {Widget}
 */
export function compare(root, look) {
  const figure = new Figure(root, look);
  const below = element("div", { class: "ppedu-numbers" });
  root.append(below);

  /** @param {CompareState} state */
  function update(state) {
    figure.update(state);
    const points = state.points.map(([name, peak, bubble]) => ({ name, x: peak, y: bubble }));
    const axes = { x: { label: "peak activations", format: pretty }, y: { label: "bubble", format: percent } };
    below.replaceChildren(tableOf(state.table), chart(points, axes));
  }
  return { figure, update };
}

/**
 * A chart of the best schedules for each memory, and the timeline of the one that is chosen.
 * @param {HTMLElement} root
 * @param {Look} look
 * @param {Send} send
 * @returns {Widget}
 */
export function frontier(root, look, send) {
  const above = element("div", { class: "ppedu-numbers" });
  const note = element("p", { class: "ppedu-note", role: "status" });
  root.append(above, note);
  const figure = new Figure(root, look);

  const pick = (/** @type {number} */ point) => send({ point });

  /** @param {FrontierState} state */
  function update(state) {
    figure.update(state);
    const points = state.points.map(([name, memory, value, kind]) => ({ name, x: memory, y: value, kind }));
    const from = 0.8 * Math.min(...points.map((p) => p.y));
    const axes = { x: { label: "peak activations", format: pretty }, y: { label: state.axis, format: pretty, from } };
    const focused = [...above.querySelectorAll("circle")].findIndex((each) => each === document.activeElement);
    above.replaceChildren(chart(points, { ...axes, pick, width: 820, height: 300 }));
    above.querySelectorAll("circle")[focused]?.focus();
    note.replaceChildren(...tell(state.note));
  }
  return { figure, update };
}

/**
 * A training run: its progress, the timeline of its last step, and its loss.
 * @param {HTMLElement} root
 * @param {Look} look
 * @returns {Widget}
 */
export function live(root, look) {
  const progress = element("progress", { "aria-label": "steps" });
  const status = element("span", { role: "status" });
  root.append(element("div", { class: "ppedu-bar" }, progress, status));
  const figure = new Figure(root, look);
  const curve = element("div");
  root.append(curve);
  const axes = { x: { label: "step", format: pretty, whole: true }, y: { label: "loss", format: pretty } };

  /** @param {LiveState} state */
  function update(state) {
    const { losses, steps } = state;
    figure.update(state);
    Object.assign(progress, { max: steps, value: losses.length });
    const last = losses[losses.length - 1]?.toFixed(3) ?? "not a number";
    status.textContent = `step ${losses.length} of ${steps}, loss ${last}`;
    const points = losses.flatMap((loss, step) => (loss === null ? [] : [{ x: step + 1, y: loss }]));
    curve.replaceChildren(chart(points, { ...axes, line: true, width: 900, height: 160 }));
  }
  return { figure, update };
}
