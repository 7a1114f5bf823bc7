// @ts-check
// The door of the module, which Python joins from these files. It needs no framework and no network. Jupyter loads the
// module through anywidget (the default export), and a saved page calls `mount`. Python computes; the module draws what it
// is sent and sends back what is clicked.

import { element } from "./elements.js";
import { explore } from "./explore.js";
import { lineup } from "./lineup.js";
import { puzzle } from "./puzzle.js";
import { compare, frontier, live, plain, show } from "./widgets.js";

/**
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {import("./widgets.js").Send} Send
 * @typedef {import("./widgets.js").Widget} Widget
 */

/**
 * The widgets, by the kind that Python's `Interactive.kind` names.
 * @type {Record<string, (root: HTMLElement, look: Look, send: Send) => Widget>}
 */
const KINDS = { show, plain, compare, frontier, live, explore, puzzle, lineup };

/**
 * Build the widget that a state describes below an element. Python receives what `send` is called with.
 * @param {HTMLElement} target
 * @param {Stack & { kind: string }} state
 * @param {Send} send
 */
export function mount(target, state, send = () => {}) {
  const root = element("div", { class: "ppedu" });
  root.addEventListener("keydown", (event) => {
    // The notebook has shortcuts of its own for keys without a modifier.
    if (!event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey) event.stopPropagation();
  });
  target.append(root);
  const widget = KINDS[state.kind](root, state.look, send);
  widget.figure.showLanes(!!state.lanes);
  widget.update(state);
  return widget;
}

/**
 * Display a widget in Jupyter, and return the function that removes it.
 * @param {{ model: any, el: HTMLElement }} view
 */
function render({ model, el }) {
  const state = () => JSON.parse(model.get("state"));
  /** @type {any[]} */
  const unanswered = [];

  /**
   * Send a message once those before it are answered. JupyterLab would deliver messages that follow each other closely
   * in any order: some to the kernel's main thread, and some, as soon as it has started, to a thread for widgets.
   * @param {any} message
   */
  function send(message) {
    if (unanswered.push(message) === 1) model.send(message);
  }

  /** @param {{ answer: any }} received */
  function receive({ answer }) {
    unanswered.shift();
    if (unanswered.length) model.send(unanswered[0]);
    if (answer) widget?.receive?.(answer);
  }

  /** @type {Widget | null} */
  let widget = mount(el, state(), send);
  const update = () => widget?.update(state());
  const recall = () => widget?.figure.showLanes(model.get("lanes"));
  const { figure } = widget;
  figure.switched = () => {
    model.set("lanes", figure.lanes);
    model.save_changes();
  };
  recall();
  model.on("change:lanes", recall);
  model.on("change:state", update);
  model.on("msg:custom", receive);
  return () => {
    model.off("change:lanes", recall);
    model.off("change:state", update);
    model.off("msg:custom", receive);
    widget?.figure.destroy();
    widget = null;
    el.replaceChildren(); // Jupyter keeps the element of a view that is gone, so leave nothing in it
    model.send({ gone: true });
  };
}

export default { render };
