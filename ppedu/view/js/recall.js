// @ts-check
// The zoom, the colors, the path and the journey that a reader has set in a figure, as a part of an address.

/** @typedef {import("./figure.js").Figure} Figure */

/** @param {Figure} figure */
const controls = ({ root }) => ({
  color: /** @type {HTMLSelectElement} */ (root.querySelector('[aria-label="color by"]')),
  path: /** @type {HTMLInputElement} */ (root.querySelector(".ppedu-bar input[type=checkbox]")),
});

const DIGITS = 10; // of times: a timeline can be zoomed in 5000 times, and then has a thousand pixels

/** @param {number} time */
const precise = (time) => `${+time.toPrecision(DIGITS)}`;

/**
 * The settings of a figure, such as from=3&to=9&color=stage&follow=0.5; empty where all is as it was at first.
 * @param {Figure} figure
 */
export function setIn(figure) {
  const { view, end, by, path, lanes, time, chosen } = figure;
  const zoomed = view.left > 0 || view.right < end;
  return new URLSearchParams({
    ...(zoomed && { from: precise(view.left), to: precise(view.right) }),
    ...(by !== "op" && { color: by }),
    ...(path && { path: "1" }),
    ...(lanes && { lanes: "1" }),
    ...(time !== null && { at: precise(time) }),
    ...(chosen && { follow: `${chosen.panel}.${chosen.microbatch}${chosen.lane ? ".1" : ""}` }),
  }).toString();
}

/**
 * Set what `setIn` has returned, and nothing else. Whatever a figure does not have is left out.
 * @param {Figure} figure
 * @param {string} text
 */
export function recall(figure, text) {
  const told = new URLSearchParams(text);
  const { color, path } = controls(figure);
  const by = told.get("color") ?? "op";
  if ([...color.options].some(({ value }) => value === by)) color.value = by;
  color.dispatchEvent(new Event("change"));
  if (path.checked !== told.has("path")) path.click();
  figure.pause();
  figure.showLanes(told.has("lanes"));
  figure.whole();
  const [left, right, time] = [Number(told.get("from")), Number(told.get("to")), Number(told.get("at"))];
  if (left >= 0 && left < right) figure.lookAt(left, right - left);
  if (told.has("at") && time >= 0) figure.set({ time: Math.min(time, figure.end) });
  const [panel, microbatch, lane = 0] = (told.get("follow") ?? "").split(".").map(Number);
  const timeline = figure.drawn({ panel, lane });
  if (microbatch >= 0 && microbatch < (timeline?.data.microbatches ?? 0)) figure.set({ chosen: { panel, lane, microbatch } });
}
