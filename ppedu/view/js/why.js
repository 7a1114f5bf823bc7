// @ts-check
// Numbers that say where they come from: a click opens sentences, and the formula with this timeline's numbers.

import { element } from "./elements.js";

/**
 * @typedef {[text: string, words: string[], sources: [string, string][]]} Why as Why in Python's why.py: a number, the
 *   sentences that it opens, and the names and addresses of papers
 * @typedef {string | Why} Part of a text
 * @typedef {{ part: Part, left: number, y: number, width: number, aside?: boolean }} Placed a text in a picture; y is that
 *   of its middle, and the keyboard does not stop at what is aside
 */

const HIGH = 16; // pixels, of a button over a picture

/** @param {Part} part */
export const textOf = (part) => (typeof part === "string" ? part : part[0]);

/**
 * The nodes of a text, with a button for each of its numbers.
 * @param {string | Part[]} told
 * @returns {(string | HTMLElement)[]}
 */
export function tell(told) {
  const parts = typeof told === "string" ? [told] : told;
  return parts.flatMap((part) => (typeof part === "string" ? [part] : number(part, part[0])));
}

/**
 * A button, and after it the words that it opens. The browser closes them, by Escape or a click elsewhere.
 * @param {Why} why
 * @param {string} shown the text on the button
 * @param {Record<string, any>} attributes
 * @returns {(string | HTMLElement)[]}
 */
function number([text, said, sources], shown, attributes = {}) {
  const opener = element("button", { type: "button", class: "ppedu-why", title: "why?", ...attributes }, shown);
  const about = { popover: "auto", role: "dialog", "aria-label": `why ${text}`, "aria-live": "off", tabindex: "-1" };
  const words = element("div", { class: "ppedu-reason", ...about });
  const hide = (/** @type {Event} */ { target }) => target instanceof Element && !words.contains(target) && words.hidePopover();
  words.addEventListener("beforetoggle", ({ newState }) => {
    const opens = (words.autofocus = newState === "open"); // so that they are read aloud; not while the page loads
    words.replaceChildren(...(opens ? paragraphs(said, sources) : []));
    if (opens) beside(opener, words);
    // Where a part of the page scrolls, as a notebook does, the words would lose their number.
    document[opens ? "addEventListener" : "removeEventListener"]("scroll", /** @type {EventListener} */ (hide), true);
  });
  opener.popoverTargetElement = words;
  return [opener, words];
}

/**
 * @param {string[]} said
 * @param {[string, string][]} sources
 */
function paragraphs(said, sources) {
  const all = said.map((sentence) => element("p", {}, sentence));
  return sources.length ? [...all, element("p", {}, "Source: ", ...linksTo(sources))] : all;
}

/**
 * Links to papers and pages, with words between them.
 * @param {[string, string][]} sources names and addresses
 */
export function linksTo(sources, between = ", ") {
  const links = sources.map(([name, at]) => element("a", { href: `https://${at}`, target: "_blank", rel: "noopener" }, name));
  return links.flatMap((link, place) => (place ? [between, link] : [link]));
}

/**
 * Place words below their number, or above it in the lower half of the window, where half of its height has room for them.
 * @param {HTMLElement} opener
 * @param {HTMLElement} words
 */
function beside(opener, words) {
  const { left, top, bottom } = opener.getBoundingClientRect();
  const { clientHeight } = document.documentElement;
  const below = top + bottom < clientHeight;
  words.style.setProperty("--left", `${left + scrollX}px`);
  words.style.top = below ? `${bottom + scrollY + 4}px` : "auto";
  words.style.bottom = below ? "auto" : `${clientHeight - top - scrollY + 4}px`;
}

/**
 * Lay buttons over the numbers of a picture, which ends at the top of their holder.
 * @param {HTMLElement} holder
 * @param {Placed[]} placed
 * @param {number} height of the picture
 */
export function layOver(holder, placed, height) {
  const buttons = placed.flatMap(({ part, left, y, width, aside }) => {
    if (typeof part === "string") return [];
    const style = `left:${left - 2}px;top:${y - HIGH / 2 - height}px;width:${width + 4}px;height:${HIGH}px`;
    return number(part, "", { style, "aria-label": part[0], ...(aside && { tabindex: "-1" }) });
  });
  holder.replaceChildren(...buttons);
}
