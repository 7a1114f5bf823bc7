// @ts-check
// The legend below the timelines, on the page and in saved pictures.

import { element } from "./elements.js";

/**
 * @typedef {import("./figure.js").Figure} Figure
 * @typedef {import("./layout.js").Context} Context
 * @typedef {import("./model.js").Look} Look
 *
 * @typedef {{ key: string, words: string, colors: string[] }} Entry `colors` is empty for lines and edges
 * @typedef {{ entries: Entry[], width: number }} Line
 */

const SWATCH = 11;

/**
 * The entries of the legend, which contains only what the picture contains.
 * @param {Figure} figure
 * @returns {Entry[]}
 */
function entriesOf(figure) {
  const { by, look, fills } = figure;
  const path = figure.path && figure.timelines.some(({ data }) => data.path.length);
  const legend = path ? [...figure.legend, ["path", "critical path"]] : figure.legend;
  const shown = legend.filter(([key]) => by === "op" || key === "memory" || !(key in fills || key === "chunk"));
  const entries = shown.map(([key, words]) => {
    const colors = key === "memory" ? [look.memory] : (fills[key] ?? []).map((color) => `rgb(${color})`);
    return { key, words, colors };
  });
  if (by !== "op") entries.unshift({ key: "", words: `one hue per ${by}; backwards are darker`, colors: [] });
  return entries;
}

/**
 * Write the legend on the page.
 * @param {Figure} figure
 */
export function describeColors(figure) {
  const entries = entriesOf(figure);
  figure.key.classList.toggle("ppedu-lanes", figure.lanes);
  const state = JSON.stringify(entries);
  if (figure.key.dataset.state === state) return;
  figure.key.dataset.state = state;
  const described = entries.map(({ key, words, colors }) => {
    const part = 100 / colors.length;
    const stops = colors.map((color, k) => `${color} ${part * k}% ${part * (k + 1)}%`);
    const style = stops.length ? `background:linear-gradient(to right, ${stops.join(", ")})` : null;
    return element("span", {}, ...(key ? [element("i", { class: `ppedu-${key}`, style })] : []), words);
  });
  figure.key.replaceChildren(...described);
}

/** @param {Entry} entry */
const hasSwatch = ({ key }) => key !== "" && key !== "chunk";

/**
 * The space that an entry's colors take in a saved picture.
 * @param {Entry} entry
 */
const colorsWidth = (entry) => (hasSwatch(entry) ? SWATCH * Math.max(1, entry.colors.length) + 6 : 0);

/**
 * The space that an entry takes. An estimate, because the viewer's font is unknown.
 * @param {Entry} entry
 */
const widthOf = (entry) => colorsWidth(entry) + 6.8 * entry.words.length + 12;

/**
 * The legend in lines, for a saved picture.
 * @param {Figure} figure
 * @param {number} width
 */
export function legendLines(figure, width) {
  /** @type {Line[]} */
  const lines = [];
  for (const entry of entriesOf(figure)) {
    let last = lines[lines.length - 1];
    if (!last || last.width + widthOf(entry) > width) lines.push((last = { entries: [], width: 0 }));
    last.entries.push(entry);
    last.width += widthOf(entry);
  }
  return lines;
}

/**
 * Paint a line of the legend.
 * @param {Context} context
 * @param {Line} line
 * @param {number} x
 * @param {number} y of its middle
 * @param {{ ink: string, look: Look, lanes: boolean }} style
 */
export function paintLegend(context, { entries }, x, y, { ink, look, lanes }) {
  context.textAlign = "left";
  for (const entry of entries) {
    const { key, words, colors } = entry;
    const top = y - SWATCH / 2;
    const edge = { outline: look.colors.F, mark: look.mark, path: look.path }[key] ?? ink;
    colors.forEach((color, k) => {
      context.fillStyle = color;
      context.fillRect(x + SWATCH * k, top, SWATCH, SWATCH);
    });
    context.strokeStyle = context.fillStyle = edge;
    context.lineWidth = 1.5;
    if (key === "outline" && lanes) {
      context.globalAlpha = 1 - look.pale;
      context.fillRect(x, top, SWATCH, SWATCH);
      context.globalAlpha = 1;
    }
    if (key === "cap") context.fillRect(x, y - 0.5, SWATCH, 1);
    else if (!colors.length && hasSwatch(entry)) context.strokeRect(x + 0.75, top + 0.75, SWATCH - 1.5, SWATCH - 1.5);
    context.fillStyle = ink;
    context.fillText(words, x + colorsWidth(entry), y);
    x += widthOf(entry);
  }
}
