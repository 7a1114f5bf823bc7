// @ts-check
// The boxes of a timeline, with their names.

import { FONT, SvgContext } from "./svg.js";

/**
 * @typedef {import("./layout.js").Context} Context
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {import("./svg.js").Rectangle} Rectangle
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./palette.js").Palette} Palette
 * @typedef {import("./palette.js").Shade} Shade
 *
 * @typedef {object} Style how a timeline is painted
 * @property {Palette} palette
 * @property {Look} look
 * @property {string} ink
 * @property {string} paper
 * @property {number} most the activations that fill a memory strip
 */

export const MANY = 5000; // boxes in view
const NAMED = 9; // the smallest font for names such as 2B0 in boxes; a name that would be smaller is replaced by a number

/**
 * The space left between neighboring boxes.
 * @param {number} width
 */
const gapOf = (width) => (width > 6 ? 1 : width > 2 ? 0.4 : 0);

/**
 * Paint some boxes of a timeline, with their names or numbers where they fit.
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 * @param {number[]} boxes
 * @returns {Generator<void, void>} work for `atOnce` or `inTasks`
 */
export function* paintBoxes(context, layout, style, boxes) {
  const { ink, look } = style;
  const { copy, mark } = layout.timeline.boxes;
  if (boxes.length > MANY && !(context instanceof SvgContext)) yield* paintPixels(context, layout, style, boxes);
  else paintRectangles(context, layout, style, boxes);
  for (const i of boxes) {
    if (!copy[i] && !mark[i]) continue;
    const [x, y, width, height] = layout.box(i);
    context.strokeStyle = mark[i] ? look.mark : ink;
    context.lineWidth = mark[i] ? 2.5 : 1;
    if (mark[i]) context.strokeRect(x + 1, y + 1, width - 3, height - 2);
    else if (width > 2) context.strokeRect(x + 0.5, y + 0.5, width - 2, height - 1);
  }
}

/**
 * Paint very many boxes, which have no space for numbers. A pixel takes the mean of the boxes that it covers, and each
 * rank's row is one row of pixels, stretched. Filling as many rectangles would take several times as long.
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {Style} style
 * @param {number[]} boxes
 * @returns {Generator<void, void>}
 */
function* paintPixels(context, layout, { look, palette }, boxes) {
  const { rank, start, end, op, stage, microbatch, chunk, part } = layout.timeline.boxes;
  const ratio = context.canvas.width / layout.width;
  const [from, to] = [layout.left * ratio, layout.right * ratio].map(Math.round);
  const width = to - from;
  const halves = part.some(Boolean) ? 2 : 1; // a line of pixels for each half of an overlapped pair
  const lines = halves * (layout.timeline.rows.length - 1);
  const sums = new Float32Array(width * lines * 4);
  for (let k = 0; k < boxes.length; k++) {
    if (k % 1024 === 1023) yield;
    const i = boxes[k];
    const { rgb } = palette.of(op[i], stage[i], microbatch[i], chunk[i]);
    const [begin, over] = [layout.x(start[i]), layout.x(end[i])];
    const left = Math.max(0, begin * ratio - from);
    const right = Math.min(width, (over - gapOf(over - begin)) * ratio - from);
    for (let half = 0; half < halves; half++) {
      if (halves === 2 && part[i] && part[i] !== half + 1) continue;
      for (let pixel = Math.floor(left); pixel < right; pixel++) {
        const covered = Math.min(pixel + 1, right) - Math.max(pixel, left);
        const at = ((rank[i] * halves + half) * width + pixel) * 4;
        for (let channel = 0; channel < 3; channel++) sums[at + channel] += rgb[channel] * covered;
        sums[at + 3] += covered;
      }
    }
  }
  const small = /** @type {OffscreenCanvasRenderingContext2D} */ (new OffscreenCanvas(width, lines).getContext("2d"));
  const image = small.createImageData(width, lines);
  const { data } = image; // outside the loop, because each look-up calls the browser
  yield;
  for (let at = 0; at < sums.length; at += 4) {
    const covered = sums[at + 3];
    if (!covered) continue;
    for (let channel = 0; channel < 3; channel++) data[at + channel] = sums[at + channel] / covered;
    data[at + 3] = 255 * Math.min(1, covered) * (layout.pale ? 1 - look.pale : 1);
  }
  yield;
  small.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  for (let line = 0; line < lines; line++) {
    const row = Math.floor(line / halves);
    const [top, bottom] = layout.ends(row, halves === 2 ? 1 + (line % 2) : 0);
    const y = layout.y(row % layout.timeline.data.ranks, top);
    context.drawImage(small.canvas, 0, line, width, 1, from / ratio, y, width / ratio, (bottom - top) * layout.rowHeight);
  }
}

/**
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 * @param {number[]} boxes
 */
function paintRectangles(context, layout, style, boxes) {
  const { op, stage, microbatch, chunk, part } = layout.timeline.boxes;
  const { pale } = layout;
  /** @type {Map<Shade, number[]>} */
  const shades = new Map(); // painted shade by shade, because changing the fill takes longer than a box
  for (const i of boxes) {
    const shade = style.palette.of(op[i], stage[i], microbatch[i], chunk[i]);
    const those = shades.get(shade);
    if (those) those.push(i);
    else shades.set(shade, [i]);
  }
  /**
   * @param {number} i
   * @returns {Rectangle}
   */
  const inner = (i) => {
    const [x, y, width, height] = layout.box(i);
    const gap = gapOf(width);
    return [x, y, Math.max(width - gap, 0.3), part[i] === 1 ? height - gap : height];
  };
  for (const [{ fill, ink }, those] of shades) {
    if (pale) {
      context.fillStyle = style.paper; // hides the lines of the time axis
      for (const i of those) context.fillRect(...inner(i));
      context.globalAlpha = 1 - style.look.pale;
    }
    context.fillStyle = fill;
    for (const i of those) context.fillRect(...inner(i));
    context.globalAlpha = 1;
    if (pale) {
      context.strokeStyle = fill;
      context.lineWidth = 1;
      for (const i of those) {
        const [x, y, width, height] = inner(i);
        if (width > 3) context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      }
    }
    context.fillStyle = pale ? style.ink : ink;
    paintNames(context, layout, those);
  }
}

/**
 * Write the names or the numbers of boxes of one color, where they fit. A plain picture has words in place of names, in
 * all of its boxes or in none.
 * @param {Context} context
 * @param {Layout} layout
 * @param {number[]} boxes
 */
export function paintNames(context, layout, boxes) {
  const { microbatches, stages } = layout.timeline.data;
  const digits = `${microbatches - 1}`.length; // of boxes with one width, all are named, all are numbered, or none
  const { plain, names } = layout.look;
  const { op, start, end } = layout.timeline.boxes;
  const letters = plain ? names.B.length : digits + 1 + `${stages - 1}`.length; // of a name such as 2B0
  const least = plain ? layout.scale * Math.min(...start.map((time, i) => end[i] - time)) : Infinity;
  context.textAlign = "center";
  context.textBaseline = "middle";
  let font = "";
  for (const i of boxes) {
    const [x, y, width, height] = layout.box(i);
    const named = (Math.min(width, least) - 3) / (0.7 * letters) >= NAMED;
    const size = Math.min(11, height * 0.8, (width - 2) / (named ? 0.7 * letters : 0.6 * digits));
    if (size < 7) continue;
    const wanted = `${size.toFixed(1)}px ${FONT}`;
    if (font !== wanted) context.font = font = wanted; // setting a font is slow
    const name = plain ? names[op[i]] : layout.timeline.label(i);
    context.fillText(named ? name : `${layout.timeline.boxes.microbatch[i]}`, x + (width - 1) / 2, y + height / 2);
  }
}
