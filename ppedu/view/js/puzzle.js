// @ts-check
// `puzzle`: a board on which a learner makes a schedule by hand.

import { button, code, element, options } from "./elements.js";
import { Figure } from "./figure.js";

/**
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Op} Op
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {import("./widgets.js").Send} Send
 * @typedef {import("./widgets.js").Widget} Widget
 *
 * @typedef {[string, string, string, boolean]} Slot the action, its label, the ops that color it, and if it is left
 *
 * @typedef {object} Board
 * @property {[string, string][]} levels names and titles
 * @property {string} level
 * @property {string[]} can
 * @property {string} goal
 * @property {string} best
 * @property {string} rules
 * @property {string} note
 * @property {string} tone
 * @property {number} rank
 * @property {(Slot | null)[][][]} trays for each rank, blocks of buttons; null for a slot that is empty
 * @property {string} code
 * @typedef {Stack & Board} PuzzleState
 */

const COMMANDS = { undo: "Z", redo: "Shift+Z", reset: "", hint: "", finish: "" };

/**
 * A board on which to make a schedule by hand.
 * @param {HTMLElement} root
 * @param {Look} look
 * @param {Send} send
 * @returns {Widget}
 */
export function puzzle(root, look, send) {
  const levels = element("select", { "aria-label": "level", onchange: () => send({ level: levels.value }) });
  const commands = Object.entries(COMMANDS).map(([name, key]) => command(name, key));
  const best = element("span", { class: "ppedu-best" });
  const goal = element("p", { class: "ppedu-goal" });
  const note = element("p", { class: "ppedu-note", role: "status" });
  const trays = element("div", { class: "ppedu-trays", role: "group", "aria-label": "actions to place" });
  const bar = element("div", { class: "ppedu-bar" }, ...commands, best);
  root.append(element("div", { class: "ppedu-bar" }, levels), goal, bar, trays, note);
  const figure = new Figure(root, look);
  const { holder, text } = code(root, "the code for this schedule");
  let placing = ""; // the action that was sent; a second click before the answer must not place another one

  /**
   * @param {string} name
   * @param {string} key the key that does the same, with Ctrl or Cmd; empty for none
   */
  function command(name, key) {
    const label = name === "finish" ? "finish it for me" : name;
    const attributes = { "data-do": name, "aria-label": label, "aria-keyshortcuts": key && `Control+${key}` };
    const shown = element("span", {}, name, ...(key ? [element("kbd", {}, `Ctrl+${key}`)] : []));
    return button(shown, label, () => send({ do: name }), attributes);
  }

  root.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "z") {
      send({ do: event.shiftKey ? "redo" : "undo" });
      event.preventDefault();
      event.stopPropagation(); // the notebook would undo a change of a cell
    }
  });
  trays.addEventListener("keydown", (event) => {
    const next = nextButton(trays, event.key);
    next?.focus();
    if (next) event.preventDefault();
  });

  /** @param {string} action */
  function place(action) {
    if (placing === action) return;
    placing = action;
    send({ place: action });
  }

  /**
   * @param {Board["trays"][0]} blocks
   * @param {number} rank
   */
  function trayOf(blocks, rank) {
    const buttons = (/** @type {(Slot | null)[]} */ slots) => slots.map((slot) => slotOf(slot, rank));
    const grids = blocks.map((slots) => {
      const pairs = slots.some((slot) => !slot || slot[2].includes("+"));
      const attributes = pairs ? { class: "ppedu-pairs" } : { class: "ppedu-block", style: `--columns:${slots.length}` };
      return element("div", attributes, ...buttons(slots));
    });
    const attributes = { class: "ppedu-tray", role: "group", "aria-label": `rank ${rank}` };
    return element("div", attributes, element("span", {}, `rank ${rank}`), element("div", {}, ...grids));
  }

  /**
   * @param {Slot | null} slot
   * @param {number} rank
   */
  function slotOf(slot, rank) {
    if (!slot) return element("span", { class: "ppedu-empty" });
    const [action, label, ops, left] = slot;
    const colors = ops.split("+").map((op) => look.colors[/** @type {Op} */ (op)]);
    const style = `border-color:${colors[0]};border-right-color:${colors[colors.length - 1]}`;
    const attributes = { "data-place": action, "data-rank": rank, style, disabled: !left };
    return button(label, `place ${action}`, () => place(action), attributes);
  }

  /** @param {PuzzleState} state */
  function update(state) {
    placing = "";
    levels.replaceChildren(...options(state.levels));
    levels.value = state.level;
    for (const each of commands) each.disabled = !state.can.includes(each.dataset.do ?? "");
    goal.textContent = state.goal;
    Object.assign(best, { textContent: state.best, title: state.rules });
    note.textContent = state.note;
    note.className = `ppedu-note ppedu-${state.tone}`;
    const active = focusedBeside(trays);
    const focused = active instanceof HTMLElement ? active.dataset.place : undefined;
    trays.replaceChildren(...state.trays.map(trayOf));
    if (focused) {
      // The keyboard's focus stays on its action, or moves to an action that is left on the same rank.
      const left = enabled(trays);
      const same = left.find(({ dataset }) => dataset.place === focused);
      (same ?? left.find(({ dataset }) => dataset.rank === `${state.rank}`) ?? commands[0]).focus();
    }
    figure.update(state);
    holder.hidden = !state.code;
    text.textContent = state.code;
  }
  return { figure, update };
}

/**
 * The element with the keyboard's focus; the page may be a shadow tree.
 * @param {HTMLElement} node
 */
const focusedBeside = (node) => /** @type {Document | ShadowRoot} */ (node.getRootNode()).activeElement;

/** @param {HTMLElement} trays */
const enabled = (trays) => [...trays.querySelectorAll("button")].filter(({ disabled }) => !disabled);

/**
 * The enabled button next to the focused one in the direction of an arrow key.
 * @param {HTMLElement} trays
 * @param {string} key
 */
function nextButton(trays, key) {
  const here = focusedBeside(trays)?.getBoundingClientRect();
  const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key] ?? [0, 0];
  if (!here || (!across && !down)) return null;
  /** @type {{ far: number, each: HTMLButtonElement | null }} */
  let nearest = { far: Infinity, each: null };
  for (const each of enabled(trays)) {
    const there = each.getBoundingClientRect();
    const [right, below] = [there.left - here.left, there.top - here.top];
    const ahead = right * across + below * down;
    const far = ahead + 3 * Math.abs(across ? below : right); // a button in line comes before a near one aside
    if (ahead > 1 && far < nearest.far) nearest = { far, each };
  }
  return nearest.each;
}
