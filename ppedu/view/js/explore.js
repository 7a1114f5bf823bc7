// @ts-check
// `explore`: a schedule's settings as controls, its timeline, and the code for it.

import { button, code, element, menu } from "./elements.js";
import { Figure } from "./figure.js";
import { linksTo, tell } from "./why.js";

/**
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {import("./widgets.js").Send} Send
 * @typedef {import("./widgets.js").Widget} Widget
 *
 * @typedef {object} Control
 * @property {string} name
 * @property {string} label
 * @property {string} value
 * @property {string[]} [choices]
 * @property {string} [min]
 * @property {string} [max]
 * @property {string} [step]
 *
 * @typedef {object} Settings
 * @property {Control[]} controls
 * @property {string | import("./why.js").Part[]} note
 * @property {[string, string][]} sources names and addresses of the schedule's page and of its paper
 * @property {[string, Record<string, string>][]} offers
 * @property {boolean} wrong
 * @property {import("./why.js").Part[]} over a sentence about the memory limit, if a rank exceeds it
 * @property {string} code
 * @typedef {Stack & Settings} ExploreState
 */

/**
 * A schedule's settings as controls, its timeline, and the code for it.
 * @param {HTMLElement} root
 * @param {Look} look
 * @param {Send} send
 * @returns {Widget}
 */
export function explore(root, look, send) {
  const settings = element("div", { class: "ppedu-settings" });
  const sources = element("p");
  const note = element("p", { class: "ppedu-note", role: "status" });
  root.append(settings, note);
  const figure = new Figure(root, look);
  const { text } = code(root, "the code for this timeline");
  /** @type {Map<string, { input: HTMLInputElement | HTMLSelectElement, output: HTMLOutputElement }>} */
  const inputs = new Map();
  /** @type {Record<string, string> | null} */
  let waiting = null; // changes to send after the next answer
  let busy = false; // a request is in flight
  // The states for a slider's next values are requested in advance, because the kernel may be far away.
  /** @type {Map<string, string | null>} */
  const ahead = new Map();
  let active = ""; // the slider in use
  let lookingAhead = false; // a request in advance is in flight

  /**
   * Send a change. One request is in flight at a time; changes made in the meantime are merged into the next one.
   * @param {Record<string, string>} change
   */
  function ask(change) {
    waiting = { ...waiting, ...change };
    if (busy) return;
    busy = true;
    send({ set: waiting });
    waiting = null;
  }

  /**
   * Respond to a slider. A state that is known in advance is shown at once; the change is sent in any case.
   * @param {string} name
   * @param {string} value
   */
  function slide(name, value) {
    write(name, value);
    const known = ahead.get(key());
    if (known) display(JSON.parse(known));
    ask({ [name]: value });
  }

  /** The values of all controls, as a key of `ahead`. */
  function key(change = {}) {
    const values = [...inputs].map(([name, { input }]) => [name, input.value]);
    return JSON.stringify({ ...Object.fromEntries(values), ...change });
  }

  /** Request the state for the nearest value of the active slider that is not known yet, unless that is much work. */
  function lookAhead() {
    const input = inputs.get(active)?.input;
    if (busy || lookingAhead || !(input instanceof HTMLInputElement)) return;
    for (let far = 1; far <= Math.min(4, 10_000 / figure.timelines[0].count); far++) {
      for (const way of [far, -far]) {
        const next = +(+input.value + way * +input.step).toFixed(9); // 0.3 and not 0.30000000000000004
        const wanted = key({ [active]: `${next}` });
        if (next < +input.min || next > +input.max || ahead.has(wanted)) continue;
        lookingAhead = true;
        send({ ahead: JSON.parse(wanted) });
        return;
      }
    }
  }

  /**
   * Keep a state that was requested in advance; null means that its settings are invalid.
   * @param {{ ahead: Record<string, string>, state: string | null }} answer
   */
  function receive(answer) {
    lookingAhead = false;
    ahead.set(JSON.stringify(answer.ahead), answer.state);
    if (ahead.size > 24) ahead.delete([...ahead.keys()][0]);
    lookAhead();
  }

  /** @param {ExploreState} state */
  function update(state) {
    busy = false;
    if (!waiting || !ahead.get(key())) display(state); // otherwise a newer state is already shown
    if (waiting) ask({});
    lookAhead();
  }

  /** @param {ExploreState} state */
  function display(state) {
    for (const each of state.controls) control(each);
    for (const label of settings.querySelectorAll("label"))
      label.hidden = !state.controls.some(({ name }) => name === label.dataset.name);
    sources.replaceChildren(...linksTo(state.sources, " was published in "));
    const offers = state.offers.map(([label, change]) => button(label, label, () => ask(change)));
    note.replaceChildren(...tell(state.note), " ", element("strong", {}, ...tell(state.over)), ...offers);
    note.classList.toggle("ppedu-wrong", state.wrong || state.over.length > 0);
    figure.stack.classList.toggle("ppedu-stale", state.wrong);
    figure.update(state);
    text.textContent = state.code;
  }

  /** @param {Control} control */
  function control({ name, label, value, choices, min, max, step }) {
    const { input } = inputs.get(name) ?? create(name, label, choices);
    if (!choices) Object.assign(input, { min, max, step });
    if (waiting && name in waiting) return; // the learner has moved it since
    if (input.value !== value) input.value = value;
    if (!choices) write(name, value);
  }

  /**
   * Create a menu of choices, or a slider.
   * @param {string} name
   * @param {string} label
   * @param {string[]} [choices]
   */
  function create(name, label, choices) {
    /** @type {HTMLInputElement | HTMLSelectElement} */
    const input = choices
      ? menu({ "aria-label": label, onchange: () => ask({ [name]: input.value }) }, choices.map((each) => [each, each]))
      : element("input", { "aria-label": label, type: "range", oninput: () => slide(name, input.value) });
    const activate = () => {
      active = name;
      lookAhead();
    };
    for (const kind of ["pointerenter", "focus", "input"]) input.addEventListener(kind, activate);
    const created = { input, output: element("output") };
    inputs.set(name, created);
    settings.append(element("label", { "data-name": name }, element("span", {}, label), input, created.output));
    if (choices) settings.append(sources);
    return created;
  }

  /**
   * Write the value of a slider beside it.
   * @param {string} name
   * @param {string} value
   */
  function write(name, value) {
    const zero = { memory: "none", overlap: "nothing" }[name] ?? value;
    Object.assign(inputs.get(name)?.output ?? {}, { textContent: +value ? value : zero });
  }

  return { figure, update, receive };
}
