// @ts-check
// The legend below the timelines.

import { element } from "./elements.js";

/**
 * @typedef {import("./figure.js").Figure} Figure
 * @typedef {import("./model.js").Color} Color
 */

/**
 * Write the legend, which contains only what the picture contains.
 * @param {Figure} figure
 */
export function describeColors(figure) {
  const path = figure.path && figure.timelines.some(({ data }) => data.path.length);
  figure.key.classList.toggle("ppedu-lanes", figure.lanes);
  const state = JSON.stringify([figure.by, figure.legend, figure.fills, path]);
  if (figure.key.dataset.state === state) return;
  figure.key.dataset.state = state;
  /** @type {Record<string, string>} */
  const fills = { memory: figure.look.memory };
  for (const [op, colors] of Object.entries(figure.fills)) {
    const stop = (/** @type {Color} */ color, /** @type {number} */ k) =>
      `rgb(${color}) ${(100 * k) / colors.length}% ${(100 * (k + 1)) / colors.length}%`;
    fills[op] = `linear-gradient(to right, ${colors.map(stop).join(", ")})`;
  }
  const legend = path ? [...figure.legend, ["path", "critical path"]] : figure.legend;
  const shown = legend.filter(([key]) => figure.by === "op" || key === "memory" || !(key in fills || key === "chunk"));
  const entries = shown.map(([key, words]) => {
    const style = key in fills ? `background:${fills[key]}` : null;
    return element("span", {}, element("i", { class: `ppedu-${key}`, style }), words);
  });
  if (figure.by !== "op") entries.unshift(element("span", {}, `one hue per ${figure.by}; backwards are darker`));
  figure.key.replaceChildren(...entries);
}
