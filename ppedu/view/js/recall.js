// @ts-check
// The zoom, the colors, the path and the journey that a reader has set in a figure, as a part of an address.

/** @typedef {import("./figure.js").Figure} Figure */

/** @param {Figure} figure */
const controls = ({ root }) => ({
  color: /** @type {HTMLSelectElement} */ (root.querySelector('[aria-label="color by"]')),
  path: /** @type {HTMLInputElement} */ (root.querySelector(".ppedu-bar input[type=checkbox]")),
});

/**
 * The settings of a figure, such as from=3&to=9&color=stage&follow=0.5; empty where all is as it was at first.
 * @param {Figure} figure
 */
export function setIn(figure) {
  const { view, end, by, path, chosen } = figure;
  const zoomed = view.left > 0 || view.right < end;
  return new URLSearchParams({
    ...(zoomed && { from: `${+view.left.toPrecision(6)}`, to: `${+view.right.toPrecision(6)}` }),
    ...(by !== "op" && { color: by }),
    ...(path && { path: "1" }),
    ...(chosen && !chosen.lane && { follow: `${chosen.panel}.${chosen.microbatch}` }),
  }).toString();
}

/**
 * Set what `setIn` has returned. Whatever a figure does not have is left out.
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
  const [left, right] = [Number(told.get("from")), Number(told.get("to"))];
  if (left >= 0 && left < right) figure.lookAt(left, right - left);
  const [panel, microbatch] = (told.get("follow") ?? "").split(".").map(Number);
  if (microbatch >= 0 && microbatch < figure.timelines[panel]?.data.microbatches) figure.set({ chosen: { panel, lane: 0, microbatch } });
}
