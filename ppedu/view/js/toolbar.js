// @ts-check
// The buttons and menus above the timelines.

import { button, element, menu, popup, svgElement } from "./elements.js";
import { FORMS, save } from "./saving.js";

/**
 * @typedef {import("./figure.js").Figure} Figure
 * @typedef {import("./palette.js").ColorBy} ColorBy
 */

const ICONS = {
  start: "M1 1h2v10h-2zM11 1v10l-7-5z",
  back: "M10 1v10l-8-5z",
  play: "M2 1v10l8-5z",
  pause: "M2 1h3v10h-3zM7 1h3v10h-3z",
  forward: "M1 1v10l7-5zM9 1h2v10h-2z",
};

/**
 * A drawn icon for a button. Fonts may lack these characters, or color them.
 * @param {keyof typeof ICONS} name
 */
export function icon(name) {
  const attributes = { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true", fill: "currentColor" };
  return svgElement("svg", attributes, svgElement("path", { d: ICONS[name] }));
}

/** The space between groups of buttons. */
const space = () => element("span", { class: "ppedu-space" });

/** @param {Figure} figure */
export function toolbar(figure) {
  const change = () => figure.set({ by: /** @type {ColorBy} */ (color.value) });
  const color = menu({ "aria-label": "color by", onchange: change }, [
    ["op", "color: op"],
    ["microbatch", "color: microbatch"],
    ["stage", "color: stage"],
  ]);
  const saveAs = async (/** @type {keyof typeof FORMS} */ form) => {
    saving.toggle.textContent = "saving…";
    await save(figure, form);
    saving.toggle.textContent = "save";
  };
  const forms = /** @type {[keyof typeof FORMS, string][]} */ (Object.entries(FORMS));
  const saving = popup("save", "save a picture", forms.map(([form, words]) => [words, () => saveAs(form)]));
  const bar = element(
    "div",
    { class: "ppedu-bar", role: "toolbar", "aria-label": "timeline" },
    button(icon("start"), "go to the start", () => figure.step(-Infinity)),
    button(icon("back"), "step back", () => figure.step(-1)),
    figure.playButton,
    button(icon("forward"), "step forward", () => figure.step(1)),
    space(),
    button("+", "zoom in", () => figure.zoom(0.5)),
    button("−", "zoom out", () => figure.zoom(2)),
    button("whole", "show the whole timeline", () => figure.whole()),
    space(),
    color,
    figure.critical,
    space(),
    saving.holder,
  );
  // Tab stops once at the buttons; the arrow keys move between them.
  const all = () => [...bar.querySelectorAll("button")].filter((each) => !each.matches("[role]")); // a page may add some
  const stopAt = (/** @type {HTMLButtonElement} */ one) => all().forEach((each) => (each.tabIndex = each === one ? 0 : -1));
  stopAt(figure.playButton);
  bar.addEventListener("focusin", ({ target }) => {
    if (target instanceof HTMLButtonElement && all().includes(target)) stopAt(target);
  });
  bar.addEventListener("keydown", ({ key, target }) => {
    const buttons = all();
    const here = target instanceof HTMLButtonElement ? buttons.indexOf(target) : -1;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (here >= 0 && by) buttons[(here + by + buttons.length) % buttons.length].focus();
  });
  return bar;
}
