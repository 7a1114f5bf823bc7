// @ts-check
// `puzzle`: a board on which a learner makes a schedule by hand.

import { insideBlock } from "./block.js";
import { button, code, element, options } from "./elements.js";
import { Figure } from "./figure.js";
import { tell, textOf } from "./why.js";

/**
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Op} Op
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {import("./why.js").Part} Part
 * @typedef {import("./widgets.js").Send} Send
 * @typedef {import("./widgets.js").Widget} Widget
 *
 * @typedef {[string, string, string, boolean, Part[], [number, number, boolean] | null]} Slot the action, its label, the ops
 *   that color it, whether it is left, what placing it leads to, and start, end and whether par is lost, if it can be placed
 *
 * @typedef {object} Board
 * @property {[string, string][]} levels names and titles
 * @property {string} level
 * @property {string[]} can
 * @property {Part[]} goal
 * @property {string} best
 * @property {string} rules
 * @property {string} note
 * @property {string} tone
 * @property {[string, string] | null} built the words and the address of a link to the published schedule on the board
 * @property {number} rank
 * @property {(Slot | null)[][][]} trays for each rank, blocks of buttons; null for a slot that is empty
 * @property {string} code
 * @typedef {Stack & Board} PuzzleState
 */

const COMMANDS = { undo: "Control+Z", redo: "Control+Shift+Z", reset: "", repeat: "R", hint: "", finish: "" };
const LABELS = { repeat: "repeat the marked block, or the last microbatch", finish: "finish it for me" };
const RESTS = 60; // milliseconds
const GUIDE =
  "Point at an action to see what it leads to. With Shift, or M, it is placed with all that can follow of its microbatch. " +
  "In the timeline, Shift and drag, or Shift and the arrow keys, marks a block; R repeats it.";

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
  const whole = element("input", { type: "checkbox" });
  const way = element("label", { title: "a click also places what can follow of the same microbatch" }, whole, " whole microbatch");
  const bar = element("div", { class: "ppedu-bar" }, ...commands, way, best);
  const cost = element("p", { class: "ppedu-cost" }, GUIDE);
  root.append(element("div", { class: "ppedu-bar" }, levels), goal, bar, trays, cost, note);
  const figure = new Figure(root, look);
  figure.repeat = repeat;
  const { holder, text } = code(root, "the code for this schedule");
  let resting = 0; // the timer of what happens when the pointer has rested
  let placing = ""; // the action that was sent; a second click before the answer must not place another one
  /** @type {Map<string, Slot>} */
  let slots = new Map();

  /**
   * @param {string} name
   * @param {string} key the key that does the same, with Ctrl or Cmd; empty for none
   */
  function command(name, key) {
    const label = /** @type {Record<string, string>} */ (LABELS)[name] ?? name;
    const attributes = { "data-do": name, "aria-label": label, "aria-keyshortcuts": key };
    const keys = key ? [element("kbd", {}, key.replace("Control", "Ctrl"))] : [];
    const shown = element("span", {}, name, ...keys);
    return button(shown, label, () => (name === "repeat" ? repeat() : send({ do: name })), attributes);
  }

  /** Repeat the block that is marked, or the microbatch whose journey is shown; else Python takes the last microbatch. */
  function repeat() {
    const [timeline] = figure.timelines;
    const { block, chosen } = figure;
    const boxes = block ? insideBlock(timeline, block) : chosen ? timeline.journey(chosen.microbatch) : [];
    figure.set({ block: null, chosen: null, current: null });
    send({ repeat: boxes.map((i) => timeline.label(i)) });
  }

  root.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if ((event.ctrlKey || event.metaKey) && !event.altKey && key.toLowerCase() === "z") {
      send({ do: event.shiftKey ? "redo" : "undo" });
      event.preventDefault();
      event.stopPropagation(); // the notebook would undo a change of a cell
    } else if (key === "r" && !event.ctrlKey && !event.metaKey && !event.altKey) {
      if (!(target instanceof HTMLSelectElement) && !commands.find(({ dataset }) => dataset.do === "repeat")?.disabled) repeat();
    }
  });
  trays.addEventListener("keydown", (event) => {
    const next = nextButton(trays, event.key);
    next?.focus();
    const action = event.target instanceof HTMLElement ? event.target.dataset.place : undefined;
    if (event.key === "m" && !event.ctrlKey && !event.metaKey && !event.altKey && action) place(action, true);
    if (next) event.preventDefault();
  });
  trays.addEventListener("focusin", ({ target }) => preview(target));
  trays.addEventListener("focusout", () => preview(null));
  // The words stay, so that their numbers can be clicked: on its way there, a pointer does not rest on other actions.
  trays.addEventListener("pointerover", ({ target }) => cost.querySelector(":popover-open") || later(target));
  trays.addEventListener("pointerleave", () => later(null));

  const later = (/** @type {EventTarget | null} */ target) => {
    clearTimeout(resting);
    resting = setTimeout(preview, RESTS, target);
  };

  /**
   * Show what placing an action leads to, and its box where it would be, or no box.
   * @param {EventTarget | null} target the button of the action
   */
  function preview(target) {
    const of = target instanceof Element ? target.closest("button") : null;
    const [, label, ops, , words, times] = slots.get(of?.dataset.place ?? "") ?? [];
    if (of) {
      cost.replaceChildren(...tell(words?.length ? words : GUIDE));
      cost.classList.toggle("ppedu-over", !!times?.[2]);
    }
    const [start, end, lost] = times ?? [0, 0, false];
    const color = look.colors[/** @type {Op} */ (ops?.[0] ?? "F")];
    figure.set({ ghost: times ? { rank: Number(of?.dataset.rank), start, end, label: label ?? "", color, lost } : null });
  }

  /** @param {string} action */
  function place(action, all = whole.checked) {
    if (placing === action) return;
    placing = action;
    send(all ? { walk: action } : { place: action });
  }

  /**
   * @param {Board["trays"][0]} blocks
   * @param {number} rank
   */
  function trayOf(blocks, rank) {
    const grids = blocks.map((block) => {
      const pairs = block.some((slot) => !slot || slot[2].includes("+"));
      const attributes = pairs ? { class: "ppedu-pairs" } : { class: "ppedu-block", style: `--columns:${block.length}` };
      return element("div", attributes, ...block.map((slot) => slotOf(slot, rank)));
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
    const [action, label, ops, left, words, times] = slot;
    slots.set(action, slot);
    const colors = ops.split("+").map((op) => look.colors[/** @type {Op} */ (op)]);
    const style = `border-color:${colors[0]};border-right-color:${colors[colors.length - 1]}`;
    /** @param {MouseEvent} event */
    const onclick = ({ shiftKey }) => place(action, shiftKey !== whole.checked);
    const lost = times?.[2] ? "ppedu-lost" : null;
    const about = { "aria-label": `place ${action}`, "aria-description": words.map(textOf).join("") || null };
    const attributes = { ...about, "data-place": action, "data-rank": rank, class: lost, style, disabled: !left, onclick };
    return element("button", { type: "button", ...attributes }, label);
  }

  /** @param {PuzzleState} state */
  function update(state) {
    placing = "";
    levels.replaceChildren(...options(state.levels));
    levels.value = state.level;
    for (const each of commands) each.disabled = !state.can.includes(each.dataset.do ?? "");
    goal.replaceChildren(...tell(state.goal));
    Object.assign(best, { textContent: state.best, title: state.rules });
    note.textContent = state.note;
    if (state.built) {
      const [words, href] = state.built;
      note.append(" ", element("a", { href, target: "_blank", rel: "noopener" }, words));
    }
    note.className = `ppedu-note ppedu-${state.tone}`;
    const active = focusedBeside(trays);
    const focused = active instanceof HTMLElement ? active.dataset.place : undefined;
    preview(null);
    cost.textContent = GUIDE;
    cost.classList.remove("ppedu-over");
    slots = new Map();
    trays.replaceChildren(...state.trays.map(trayOf));
    if (focused) {
      // The keyboard's focus stays on its action, or moves to an action that is left on the same rank.
      const left = enabled(trays);
      const same = left.find(({ dataset }) => dataset.place === focused);
      (same ?? left.find(({ dataset }) => dataset.rank === `${state.rank}`) ?? commands[0]).focus();
    }
    figure.update(state);
    preview(focusedBeside(trays));
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
