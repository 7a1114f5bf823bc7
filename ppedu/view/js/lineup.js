// @ts-check
// `lineup`: timelines that a learner judges.

import { button, element, menu } from "./elements.js";
import { Figure } from "./figure.js";

/**
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {import("./widgets.js").Send} Send
 * @typedef {import("./widgets.js").Widget} Widget
 *
 * @typedef {object} Case a timeline to judge
 * @property {string} name
 * @property {string} about
 * @property {string} verdict in words; empty until it is given
 * @property {boolean} legal
 * @property {string} missing the action that never runs; empty for none
 * @property {string[]} actions
 * @typedef {Stack & { cases: Case[], note: string }} LineupState
 */

const ACCUSE = "Point at an action to see what it requires. Click the one that is wrong. Keys: arrows, Enter.";

/** Timelines that a learner judges: a click on an action accuses it. */
class Lineup extends Figure {
  /**
   * @param {HTMLElement} root
   * @param {Look} look
   * @param {Send} send
   */
  constructor(root, look, send) {
    super(root, look);
    this.send = send;
    root.classList.add("ppedu-lineup");
  }

  /**
   * Show other verdicts. The timelines stay, and so does the focused box.
   * @param {Stack} state
   */
  update(state) {
    const { current } = this;
    super.update(state);
    this.set({ current });
  }

  /** @param {number} n */
  layout(n, width = this.stack.clientWidth) {
    const layout = super.layout(n, width);
    layout.top = 6; // the name of the timeline is in the line above it
    layout.rowHeight = 30;
    layout.bottom = layout.top + layout.rowHeight * this.timelines[n].data.ranks;
    layout.height = layout.bottom + 26;
    return layout;
  }

  explain() {
    super.explain();
    if (!this.current) this.line.textContent = ACCUSE;
  }

  choose() {
    const { panel, i } = this.current ?? {};
    if (i !== undefined) this.send({ case: panel, box: i });
  }
}

/**
 * Let a menu show the verdict, once the arrow keys do not move through it anymore.
 * @param {HTMLSelectElement} missing
 */
function settle(missing) {
  if (!missing.matches(":focus")) missing.value = missing.dataset.said ?? "";
}

/**
 * Timelines with a verdict on each: "runs as drawn", an action that is wrong, or an action that is missing.
 * @param {HTMLElement} root
 * @param {Look} look
 * @param {Send} send
 * @returns {Widget}
 */
export function lineup(root, look, send) {
  const figure = new Lineup(root, look, send);
  const note = element("p", { class: "ppedu-note ppedu-ok", role: "status" });
  root.append(note);
  /** @type {{ row: HTMLElement, legal: HTMLButtonElement, missing: HTMLSelectElement, verdict: HTMLElement }[]} */
  const rows = [];

  /**
   * @param {Case} described
   * @param {number} n
   */
  function create({ name, about, actions }, n) {
    const legal = button("runs as drawn", `${name} runs as drawn`, () => send({ case: n, legal: true }));
    const change = () => send({ case: n, missing: missing.value });
    const missing = menu({ "aria-label": `missing in ${name}`, onchange: change, onblur: () => settle(missing) }, [
      ["", "missing: …"],
      ...actions.map((each) => /** @type {[string, string]} */ ([each, `${each} missing`])),
    ]);
    const verdict = element("span", { "aria-live": "polite" });
    const heading = element("span", {}, element("b", {}, name), ` ${about}`);
    const row = element("div", { class: "ppedu-case" }, heading, element("span", {}, verdict, legal, missing));
    figure.stack.insertBefore(row, figure.panels[n].holder);
    return { row, legal, missing, verdict };
  }

  /** @param {LineupState} state */
  function update(state) {
    figure.update(state);
    state.cases.forEach((each, n) => {
      const { legal, missing, verdict } = (rows[n] ??= create(each, n));
      legal.setAttribute("aria-pressed", `${each.legal}`);
      missing.dataset.said = each.missing;
      settle(missing);
      verdict.textContent = each.verdict || "no verdict yet";
      if (each.verdict) verdict.className = each.legal ? "ppedu-legal" : "ppedu-accused";
      else verdict.removeAttribute("class");
    });
    note.textContent = state.note;
  }
  return { figure, update };
}
