// @ts-check
// The timelines as files, which a reader downloads: pictures for slides and papers, and an animation.

import { element, fitted } from "./elements.js";
import { Gif, frequentColors } from "./gif.js";
import { legendLines, paintLegend } from "./legend.js";
import { paintOver } from "./over.js";
import { paint } from "./painting.js";
import { FONT, SvgContext } from "./svg.js";
import { atOnce } from "./tasks.js";

/**
 * @typedef {import("./figure.js").Figure} Figure
 * @typedef {import("./layout.js").Context} Context
 *
 * @typedef {object} Part what is painted below the parts before it
 * @property {number} height
 * @property {(context: Context, time: number | null) => void} paint at a moment of playing
 */

const LEAST = 860; // pixels across; less would cut off headings
const LINE_OF_FOOT = 18;
const ADDRESS = 72; // characters; a longer one is printed without its fragment
const FRAME = 8; // hundredths of a second
const SHARP = 600_000; // pixels; a larger picture is not animated with twice the page's resolution

/** The forms of a saved picture, in words. */
export const FORMS = { png: "PNG, for slides", svg: "SVG, for papers", gif: "GIF, playing" };

/**
 * Save what a figure shows.
 * @param {Figure} figure
 * @param {keyof typeof FORMS} form
 */
export async function save(figure, form) {
  const width = Math.max(LEAST, figure.stack.clientWidth);
  const content = await { png, svg, gif }[form](figure, width, partsOf(figure, width));
  if (!content) return;
  const href = URL.createObjectURL(content);
  element("a", { href, download: `${savedName(figure)}.${form}` }).click();
  URL.revokeObjectURL(href);
}

/**
 * The name of a saved file, without its ending: schedules, ranks and microbatches, such as 1f1b-4x8.
 * @param {Figure} figure
 */
export function savedName(figure) {
  const headings = figure.timelines.map(({ data }) => data.heading.split(",")[0]);
  const names = headings.map((heading) => heading.replace(/[^\p{L}\p{N}_-]+/gu, "-").slice(0, 60));
  const sizes = figure.timelines.map(({ data }) => `${data.ranks}x${data.microbatches}`);
  if (new Set(sizes).size === 1) return `${[...new Set(names)].join("-and-").slice(0, 120)}-${sizes[0]}`;
  return names.map((name, n) => `${name}-${sizes[n]}`).join("-and-").slice(0, 120);
}

/**
 * The timelines of a figure, with what lies over them, and below them the legend and where the picture comes from.
 * @param {Figure} figure
 * @param {number} width
 * @returns {Part[]}
 */
function partsOf(figure, width) {
  const { lanes, highlight: { microbatch, path } } = figure;
  const panels = figure.timelines.map((_, n) => {
    const [layouts, style] = [figure.lanesOf(n, width), figure.style(n)];
    const over = { microbatch, path, lane: 0, box: undefined, gap: undefined };
    /** @type {Part["paint"]} */
    const both = (context, time) => {
      atOnce(paint(context, layouts[0], style));
      if (microbatch !== null || path || time !== null) paintOver(context, layouts, style, { ...over, time });
    };
    return { height: layouts[0].height, paint: both };
  });

  const [{ ink, paper, look }, { left }] = [figure.style(0), figure.layout(0, width)];
  const address = legible(figure.address);
  const lines = legendLines(figure, width - left - 8);
  const last = lines[lines.length - 1];
  if (!last || last.width + 7 * address.length > width - left - 24) lines.push({ entries: [], width: 0 });
  const height = LINE_OF_FOOT * lines.length + 8;
  /** @type {Part["paint"]} */
  const foot = (context) => {
    context.fillStyle = paper;
    context.fillRect(0, 0, width, height);
    context.font = `12px ${FONT}`;
    context.textBaseline = "middle";
    lines.forEach((line, k) => paintLegend(context, line, left, LINE_OF_FOOT * (k + 0.5), { ink, look, lanes }));
    context.textAlign = "right";
    context.fillStyle = ink;
    context.globalAlpha = 0.8;
    if (address) context.fillText(address, width - 8, height - 8 - LINE_OF_FOOT / 2);
    context.globalAlpha = 1;
  };
  return [...panels, { height, paint: foot }];
}

/**
 * An address as a reader would type it: without the protocol, and without a long fragment.
 * @param {string} address
 */
function legible(address) {
  const typed = address.replace(/^https?:\/\//, "").replace(/#$/, "");
  return typed.length > ADDRESS ? typed.replace(/#.*/, "") : typed;
}

/** @param {Part[]} parts */
const heightOf = (parts) => parts.reduce((sum, { height }) => sum + height, 0);

/**
 * Paint parts below each other.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {Part[]} parts
 * @param {number} ratio
 * @param {number | null} time
 */
function painted(canvas, width, parts, ratio, time) {
  const context = fitted(canvas, width, heightOf(parts), ratio);
  for (const part of parts) {
    part.paint(context, time);
    context.translate(0, part.height);
  }
  return context;
}

/**
 * @param {Figure} figure
 * @param {number} width
 * @param {Part[]} parts
 */
function svg(figure, width, parts) {
  let y = 0;
  const inner = parts.map((part, n) => {
    const context = new SvgContext(width, part.height, n);
    part.paint(context, figure.time);
    y += part.height;
    return context.text().replace("<svg ", `<svg y="${y - part.height}" `);
  });
  const size = `width="${width}" height="${y}" viewBox="0 0 ${width} ${y}"`;
  const text = `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${inner.join("")}</svg>`;
  return new Blob([text], { type: "image/svg+xml" });
}

/**
 * @param {Figure} figure
 * @param {number} width
 * @param {Part[]} parts
 * @returns {Promise<Blob | null>}
 */
function png(figure, width, parts) {
  const canvas = element("canvas");
  painted(canvas, width, parts, 2, figure.time);
  return new Promise((done) => canvas.toBlob(done));
}

/**
 * The visible part of the timelines, as "play" shows it. All browsers write the same file, and faster than it plays: a
 * recorded video would depend on their codecs, take as long as it plays, and need software that plays it.
 * @param {Figure} figure
 * @param {number} width
 * @param {Part[]} parts
 */
async function gif(figure, width, parts) {
  const canvas = element("canvas");
  canvas.getContext("2d", { willReadFrequently: true });
  const ratio = width * heightOf(parts) > SHARP ? 1 : 2;
  const { left, right } = figure.view;
  const pixelsAt = (/** @type {number | null} */ time) => {
    const context = painted(canvas, width, parts, ratio, time);
    return new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  };
  const whole = pixelsAt(null);
  const file = new Gif(canvas.width, canvas.height, frequentColors([whole, pixelsAt((left + right) / 2)]));
  const count = Math.round((100 * figure.secondsFor(right - left)) / FRAME);
  for (let k = 0; k < count; k++) {
    file.add(pixelsAt(left + ((right - left) * k) / count), FRAME);
    if (k % 5 === 0) await new Promise((done) => setTimeout(done)); // the page stays responsive
  }
  file.add(whole, 200);
  return file.file();
}
