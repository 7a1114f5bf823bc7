// @ts-check
// The second of four files that Python joins into one ES module: timelines painted on a canvas or as SVG, and charts.

import { largest, pretty } from "./model.js";

/**
 * @typedef {import("./model.js").Color} Color
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Op} Op
 * @typedef {import("./model.js").Panel} Panel
 * @typedef {import("./model.js").Timeline} Timeline
 * @typedef {import("./model.js").View} View
 * @typedef {"op" | "microbatch" | "stage"} ColorBy
 * @typedef {"whole" | "outline" | "upper" | "lower"} Part what is drawn of a panel: its timeline, which has the whole height
 *   of a rank's boxes, or its outline; or one of them in a lane of its own
 * @typedef {{ rgb: Color, fill: string, ink: string }} Shade the fill of a box and the color of the number on it
 * @typedef {CanvasRenderingContext2D | SvgContext} Context
 * @typedef {[number, number, number, number]} Rectangle left, top, width and height
 *
 * @typedef {object} Style how a timeline is painted
 * @property {Palette} palette
 * @property {Look} look
 * @property {string} ink
 * @property {string} paper
 * @property {number} most the activations that fill a memory strip
 */

const MARGIN = { left: 62, right: 66, top: 26, bottom: 26 };
const LINE = 16;
const NAME = 66; // the space for the names of lanes
const FONT = "system-ui, sans-serif";
const MANY = 5000; // boxes in view
const FADED = 0.78; // the part of the page's color in what is faded
const EDGE = 0.55; // how dark the upper edge of a memory strip is
const NAMED = 9; // the smallest font for names such as 2B0 in boxes; a name that would be smaller is replaced by a number

// ----------------------------------------------------------------------------------------------------------- colors

/**
 * White or black, whichever is easier to read on a color. The contrast is at least 4.5 to 1.
 * @param {Color} color
 */
function inkOn(color) {
  const [red, green, blue] = color.map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue; // as WCAG 2 defines it
  return (luminance + 0.05) ** 2 < 0.05 * 1.05 ? "#ffffff" : "#000000";
}

/**
 * The red, green and blue in a color as the browser computes it, such as rgb(255, 255, 255).
 * @param {string} color
 */
const numbersIn = (color) => (color.match(/[\d.]+/g) ?? []).map(Number);

/**
 * @param {number} degrees
 * @param {number} light
 * @returns {Color}
 */
function hue(degrees, light) {
  /** @param {number} offset */
  const channel = (offset) => {
    const k = (offset + degrees / 30) % 12;
    return 255 * (light - 0.5 * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1)));
  };
  return [channel(0), channel(8), channel(4)];
}

/** The shades of a timeline's boxes, for each way to color them. */
export class Palette {
  /**
   * @param {Pick<Panel, "shades" | "stages">} data
   * @param {ColorBy} by
   */
  constructor({ shades, stages }, by) {
    this.shades = shades;
    this.stages = stages;
    this.by = by;
    /** @type {Map<number, Shade>} */
    this.known = new Map();
  }

  /**
   * @param {Op} op
   * @param {number} stage
   * @param {number} microbatch
   * @param {number} chunk
   */
  of(op, stage, microbatch, chunk) {
    const which = this.by === "op" ? 2 * chunk + (microbatch % 2) : this.by === "microbatch" ? microbatch : stage;
    const key = which * 4 + "FBIW".indexOf(op);
    let shade = this.known.get(key);
    if (!shade) {
      const rgb = this.mix(op, which);
      const fill = `rgb(${rgb.map(Math.round).join(",")})`;
      shade = { rgb, fill, ink: inkOn(rgb) };
      this.known.set(key, shade);
    }
    return shade;
  }

  /**
   * @param {Op} op
   * @param {number} which the microbatch, the stage, or the shade of the op
   */
  mix(op, which) {
    if (this.by === "op") return this.shades[op][which >> 1][which % 2];
    // Neighboring microbatches are far apart, neighboring stages close; backwards are darker than forwards.
    const degrees = this.by === "microbatch" ? (which * 137.5) % 360 : (which * 300) / Math.max(1, this.stages);
    return hue(degrees, { F: 0.66, B: 0.42, I: 0.5, W: 0.34 }[op]);
  }
}

// --------------------------------------------------------------------------------------------------------------- SVG

/** @param {string | number} value */
const escaped = (value) =>
  `${typeof value === "number" ? +value.toFixed(2) : value}`.replace(/[&<"]/g, (c) => `&#${c.charCodeAt(0)};`);

/** The part of a canvas's context that `paint` uses, written as SVG. */
export class SvgContext {
  globalAlpha = 1;
  lineWidth = 1;
  fillStyle = "";
  strokeStyle = "";
  font = "";
  textAlign = "start";
  textBaseline = "alphabetic";
  path = "";
  /** @type {string[]} */
  parts = [];

  /**
   * @param {number} width
   * @param {number} height
   * @param {number} number tells the clip paths of several pictures in one file apart
   */
  constructor(width, height, number = 0) {
    this.width = width;
    this.height = height;
    this.number = number;
  }
  /**
   * @param {string} name
   * @param {Record<string, string | number>} attributes
   * @param {string} text
   */
  tag(name, attributes, text = "") {
    const all = this.globalAlpha < 1 ? { ...attributes, opacity: `${this.globalAlpha}` } : attributes;
    const written = Object.entries(all).map(([key, each]) => ` ${key}="${escaped(each)}"`).join("");
    this.parts.push(text ? `<${name}${written}>${escaped(text)}</${name}>` : `<${name}${written}/>`);
  }
  get size() {
    return parseFloat(this.font.replace("bold ", ""));
  }
  /** @param {Rectangle} rectangle */
  fillRect(...[x, y, width, height]) {
    this.tag("rect", { x, y, width, height, fill: this.fillStyle });
  }
  /** @param {Rectangle} rectangle */
  strokeRect(...[x, y, width, height]) {
    this.tag("rect", { x, y, width, height, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
  }
  /**
   * @param {string} text
   * @param {number} x
   * @param {number} y
   */
  fillText(text, x, y) {
    const down = this.textBaseline === "middle" ? 0.35 * this.size : 0;
    const anchor = { center: "middle", right: "end" }[this.textAlign] ?? "start";
    const weight = this.font.startsWith("bold") ? "bold" : "normal";
    const type = { "font-size": this.size, "font-family": FONT, "font-weight": weight, "text-anchor": anchor };
    this.tag("text", { x, y: y + down, ...type, fill: this.fillStyle }, text);
  }
  /**
   * An upper estimate, because the viewer's font is unknown.
   * @param {string} text
   */
  measureText(text) {
    return { width: 0.7 * this.size * text.length };
  }
  beginPath() {
    this.path = "";
  }
  /**
   * @param {number} x
   * @param {number} y
   */
  moveTo(x, y) {
    this.path += `M${x.toFixed(2)} ${y.toFixed(2)}`;
  }
  /**
   * @param {number} x
   * @param {number} y
   */
  lineTo(x, y) {
    this.path += `L${x.toFixed(2)} ${y.toFixed(2)}`;
  }
  /** @param {Rectangle} rectangle */
  rect(...[x, y, width, height]) {
    this.path += `M${x} ${y}h${width}v${height}h${-width}z`;
  }
  fill() {
    this.tag("path", { d: this.path, fill: this.fillStyle });
  }
  clip() {
    const id = `c${this.number}`;
    this.parts.push(`<clipPath id="${id}"><path d="${this.path}"/></clipPath><g clip-path="url(#${id})">`);
  }
  save() {}
  restore() {
    this.parts.push("</g>"); // of `clip`
  }
  text() {
    const [width, height] = [this.width, this.height];
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${this.parts.join("")}</svg>`;
  }
}

// --------------------------------------------------------------------------------------------------------- timelines

/**
 * Steps of 1, 2 or 5 times a power of ten, about as many as wanted.
 * @param {number} left
 * @param {number} right
 */
export function ticks(left, right, wanted = 10) {
  const rough = (right - left) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5].find((each) => each * power >= rough * 0.999) ?? 10) * power;
  const found = [];
  for (let k = Math.ceil(left / step - 1e-9); k * step <= right + step * 1e-9; k++) found.push(+(k * step).toPrecision(10));
  return found;
}

/** The geometry of one timeline on the page. Layouts of a panel's parts differ only in the boxes. */
export class Layout {
  /**
   * @param {Timeline} panel
   * @param {Look} look
   * @param {number} width
   * @param {View} view
   * @param {Part} part
   */
  constructor(panel, look, width, view, part = "whole") {
    const { ranks, pair } = panel.data;
    const { row } = look;
    this.panel = panel;
    this.look = look;
    this.width = width;
    this.view = view;
    this.pale = part === "lower";
    this.lanes = part === "upper" || part === "lower" ? pair : null;
    this.timeline = (part === "outline" || part === "lower" ? panel.outline : null) ?? panel;
    this.boxes = this.timeline.boxes;
    this.row = this.lanes ? look.lanes[this.pale ? 1 : 0] : part === "outline" ? { ...row, bottom: row.lane - 0.04 } : row;
    this.lane = part === "whole" && panel.outline ? row.lane : this.row.top; // the upper end of boxes
    this.rowHeight = panel.data.tall;
    if (this.lanes) this.rowHeight = Math.max(ranks <= 32 ? 26 : 16, Math.floor(1.5 * this.rowHeight));
    this.left = MARGIN.left + (this.lanes ? NAME : 0);
    this.right = width - MARGIN.right;
    this.heading = pair && this.lanes ? pair.heading : panel.data.heading;
    this.lines = pair && this.lanes ? pair.lines : [[panel.data.numbers]];
    // Where both do not fit into one line, the heading has a line of its own, above the numbers.
    const longest = largest(this.lines.map((line) => line.join("    ").length));
    const alone = 7.2 * this.heading.length + 6.6 * longest > width - this.left - 32;
    this.top = MARGIN.top + LINE * (this.lines.length - 1 + (alone ? 1 : 0));
    this.room = alone ? width - 24 - this.left : null; // for the heading; null: what the numbers leave
    this.bottom = this.top + this.rowHeight * ranks;
    this.height = this.bottom + MARGIN.bottom;
    this.scale = (this.right - this.left) / (view.right - view.left || 1);
  }
  /**
   * The layout of another part of the same panel.
   * @param {Part} part
   */
  as(part) {
    return new Layout(this.panel, this.look, this.width, this.view, part);
  }
  /** @param {number} time */
  x(time) {
    return this.left + (time - this.view.left) * this.scale;
  }
  /**
   * @param {number} rank
   * @param {number} part of the rank's row, from 0 at its top to 1
   */
  y(rank, part) {
    return this.top + (rank + part) * this.rowHeight;
  }
  /** @param {number} x */
  time(x) {
    return this.view.left + (x - this.left) / this.scale;
  }
  /** The middle of a rank's boxes: above it is the first half of an overlapped pair. */
  get middle() {
    return (this.lane + this.row.bottom) / 2;
  }
  /**
   * @param {number} i
   * @returns {Rectangle}
   */
  box(i) {
    const { rank, start, end, part } = this.boxes;
    const left = this.x(start[i]);
    const top = part[i] === 2 ? this.middle : this.lane;
    const height = (part[i] === 1 ? this.middle : this.row.bottom) - top;
    return [left, this.y(rank[i], top), this.x(end[i]) - left, height * this.rowHeight];
  }
  /**
   * Let only what lies on the time axis be painted, until the context is restored.
   * @param {Context} context
   */
  clip(context) {
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.right - this.left + (this.lanes ? 2 : 0), this.height); // with a line at the end
    context.clip();
  }
}

/**
 * Paint a timeline: ranks, heading, axis, memory, boxes and outlines.
 * @param {Context} context
 * @param {Timeline} timeline
 * @param {Layout} layout
 * @param {Style} style
 */
export function paint(context, timeline, layout, style) {
  const { width, height, rowHeight, left, right, top, bottom, view, lanes } = layout;
  const { ink } = style;
  const { data, outline } = timeline;
  const parts = lanes ? [layout, layout.as("lower")] : [layout];
  context.fillStyle = style.paper;
  context.fillRect(0, 0, width, height);

  context.textBaseline = "middle";
  context.font = `${Math.max(8, Math.min(11, rowHeight * 0.8))}px ${FONT}`;
  context.fillStyle = ink;
  context.textAlign = "right";
  const every = rowHeight < 11 ? Math.ceil(11 / rowHeight) : 1;
  const middle = (parts[0].middle + parts[parts.length - 1].middle) / 2;
  for (let rank = 0; rank < data.ranks; rank += every)
    context.fillText(`rank ${rank}`, left - 8 - (lanes ? NAME : 0), layout.y(rank, middle));
  if (lanes) nameLanes(context, parts, lanes.names);
  const room = paintNumbers(context, layout);
  context.font = `bold 12px ${FONT}`;
  context.textAlign = "left";
  context.fillText(shortened(context, layout.heading, room), left, 12);

  context.textAlign = "center";
  context.font = `11px ${FONT}`;
  const axis = shortened(context, data.axis, width / 3);
  const end = width - 8 - context.measureText(axis).width - 6; // of the space for ticks
  for (const time of ticks(view.left, view.right, Math.min(10, (right - left) / 60))) {
    const x = layout.x(time);
    context.globalAlpha = 0.18;
    context.fillRect(Math.round(x), top, 1, bottom - top);
    context.globalAlpha = 0.8;
    if (x + context.measureText(`${time}`).width / 2 < end) context.fillText(`${time}`, x, bottom + 11);
  }
  context.globalAlpha = 1;
  context.textAlign = "right";
  context.fillText(axis, width - 8, bottom + 11);

  layout.clip(context);
  paintMemory(context, timeline, layout, style);
  for (const part of parts) paintBoxes(context, part.timeline, part, style, part.timeline.visible(view));
  if (outline && !lanes) {
    const outlined = layout.as("outline");
    context.lineWidth = 1.2;
    for (let i = 0; i < outline.count; i++) {
      const [x, y, w, h] = outlined.box(i);
      context.strokeStyle = style.palette.of(outline.boxes.op[i], outline.boxes.stage[i], outline.boxes.microbatch[i], 0).fill;
      context.strokeRect(x + 0.6, y, Math.max(0.4, w - 1.2), h);
    }
  }
  context.restore();
  if (lanes) paintEnds(context, parts, ink);

  if (rowHeight >= 20) {
    context.font = `10px ${FONT}`;
    context.textAlign = "left";
    context.fillStyle = ink;
    data.peaks.forEach((peak, rank) => context.fillText(`peak ${peak}`, right + 6, layout.y(rank, lanes ? 0.87 : 0.82)));
    paintScale(context, layout, style);
  }
}

/**
 * Write the numbers at the right, in columns, and return the width that remains for the heading. Columns that do not fit
 * are left out, from the right.
 * @param {Context} context
 * @param {Layout} layout
 */
function paintNumbers(context, { width, left, top, lines, room }) {
  context.font = `12px ${FONT}`;
  context.textAlign = "right";
  const columns = lines[0].map((_, k) => largest(lines.map((line) => context.measureText(line[k]).width)));
  const gap = context.measureText("    ").width;
  const taken = () => columns.reduce((sum, each) => sum + each + gap, -gap);
  while (columns.length > 2 && taken() > width - 16) columns.pop();
  lines.forEach((line, row) => {
    let x = width - 8;
    for (let k = columns.length - 1; k >= 0; x -= columns[k--] + gap)
      context.fillText(line[k], x, top - 14 - LINE * (lines.length - 1 - row));
  });
  return room ?? width - 24 - left - taken();
}

/**
 * Write the name of each lane beside it.
 * @param {Context} context
 * @param {Layout[]} parts
 * @param {string[]} names
 */
function nameLanes(context, parts, names) {
  parts.forEach((part, k) => {
    const size = Math.min(10, (part.row.bottom - part.lane) * part.rowHeight * 0.95);
    if (size < 7.5) return;
    context.font = `${size}px ${FONT}`;
    context.textAlign = "right";
    context.globalAlpha = 0.8;
    const name = shortened(context, names[k], NAME - 2);
    for (let rank = 0; rank < part.panel.data.ranks; rank++) context.fillText(name, part.left - 8, part.y(rank, part.middle));
  });
  context.globalAlpha = 1;
}

/**
 * Paint a line where the timeline of each lane ends, with its makespan in the first row.
 * @param {Context} context
 * @param {Layout[]} parts
 * @param {string} ink
 */
function paintEnds(context, parts, ink) {
  context.fillStyle = ink;
  context.font = `10px ${FONT}`;
  context.textAlign = "left";
  for (const part of parts) {
    const { ranks, makespan, unit } = part.timeline.data;
    const x = part.x(makespan);
    if (x < part.left || x > part.right + 0.5) continue;
    const height = (part.row.bottom - part.lane) * part.rowHeight;
    for (let rank = 0; rank < ranks; rank++) context.fillRect(x, part.y(rank, part.lane), 1.5, height);
    const words = `${pretty(makespan)}${unit && ` ${unit}`}`;
    if (height > 9 && x + 6 + context.measureText(words).width < part.width) context.fillText(words, x + 6, part.y(0, part.middle));
  }
}

/**
 * Label the axis of each memory strip, from 0 to what fills it.
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 */
function paintScale(context, layout, { most }) {
  const { strip, floor } = layout.row;
  if ((floor - strip) * layout.rowHeight < 12) return;
  context.font = `9px ${FONT}`;
  context.textAlign = "right";
  for (let y = layout.top; y < layout.bottom; y += layout.rowHeight) {
    context.globalAlpha = 0.25;
    context.fillRect(layout.left, Math.round(y + strip * layout.rowHeight), layout.right - layout.left, 1);
    context.globalAlpha = 0.85;
    context.fillText(pretty(most), layout.left - 8, y + strip * layout.rowHeight + 1);
    context.fillText("0", layout.left - 8, y + floor * layout.rowHeight - 1);
  }
  context.globalAlpha = 1;
}

/**
 * The text, cut to fit.
 * @param {Context} context
 * @param {string} text
 * @param {number} room
 */
function shortened(context, text, room) {
  let kept = text;
  while (kept.length > 1 && context.measureText(kept).width > room) kept = `${kept.slice(0, -2)}…`;
  return kept;
}

/**
 * @param {Context} context
 * @param {Timeline} timeline
 * @param {Layout} layout
 * @param {Style} style
 */
function paintMemory(context, timeline, layout, { look, most, ink }) {
  const { memory, makespan, cap, until } = timeline.data;
  const { view } = layout;
  const unit = ((layout.row.floor - layout.row.strip) * layout.rowHeight) / (most || 1);
  memory.forEach(([times, values], rank) => {
    const floor = layout.y(rank, layout.row.floor);
    context.fillStyle = look.memory;
    context.beginPath();
    let begun = false;
    for (let k = 0; k < times.length && times[k] < view.right; k++) {
      const end = k + 1 < times.length ? times[k + 1] : makespan;
      if (end < view.left) continue;
      const y = floor - unit * Math.min(values[k], most);
      if (!begun) context.moveTo(layout.x(times[k]), floor);
      begun = true;
      context.lineTo(layout.x(times[k]), y);
      context.lineTo(layout.x(end), y);
    }
    context.lineTo(layout.x(Math.min(makespan, view.right)), floor);
    context.fill();
    context.fillStyle = ink; // an edge, because a rank that holds little has a strip that is hard to see
    context.globalAlpha = EDGE;
    context.beginPath();
    for (let k = 0; k < times.length && times[k] < view.right; k++) {
      const [begin, end] = [layout.x(times[k]), layout.x(times[k + 1] ?? makespan)];
      if (values[k] > 0) context.rect(begin, floor - unit * Math.min(values[k], most) - 1, end - begin, 1);
    }
    context.fill();
    context.globalAlpha = 1;
    if (cap !== null && largest(values) > cap) {
      context.fillStyle = look.mark;
      for (let k = 0; k < times.length; k++) {
        if (values[k] <= cap) continue;
        const [begin, end] = [layout.x(times[k]), layout.x(times[k + 1] ?? makespan)];
        context.fillRect(begin, floor - unit * values[k], end - begin, unit * (values[k] - cap));
      }
    }
    if (cap !== null) {
      context.fillStyle = largest(values) > cap ? look.mark : ink;
      const [begin, end] = [layout.x(0), layout.x(Math.max(makespan, until))];
      context.fillRect(begin, floor - unit * cap, end - begin, 1);
    }
  });
}

/**
 * The space left between neighboring boxes.
 * @param {number} width
 */
const gapOf = (width) => (width > 6 ? 1 : width > 2 ? 0.4 : 0);

/**
 * Paint some boxes of a timeline, with their names or numbers where they fit.
 * @param {Context} context
 * @param {Timeline} timeline
 * @param {Layout} layout
 * @param {Style} style
 * @param {number[]} boxes
 */
function paintBoxes(context, timeline, layout, style, boxes) {
  const { palette, ink, look } = style;
  const { op, stage, microbatch, chunk, copy, mark } = timeline.boxes;
  /** @type {Map<Shade, number[]>} */
  const shades = new Map(); // painted shade by shade, because changing the fill takes longer than a box
  for (const i of boxes) {
    const shade = palette.of(op[i], stage[i], microbatch[i], chunk[i]);
    const those = shades.get(shade);
    if (those) those.push(i);
    else shades.set(shade, [i]);
  }
  if (boxes.length > MANY && !(context instanceof SvgContext)) paintPixels(context, timeline, layout, style, shades);
  else paintRectangles(context, timeline, layout, style, shades);
  for (const i of [...shades.values()].flat()) {
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
 * @param {Timeline} timeline
 * @param {Layout} layout
 * @param {Style} style
 * @param {Map<Shade, number[]>} shades
 */
function paintPixels(context, timeline, layout, { look }, shades) {
  const { rank, start, end, part } = timeline.boxes;
  const ratio = context.canvas.width / layout.width;
  const [from, to] = [layout.left * ratio, layout.right * ratio].map(Math.round);
  const width = to - from;
  const halves = part.some(Boolean) ? 2 : 1; // a line of pixels for each half of an overlapped pair
  const lines = halves * timeline.data.ranks;
  const sums = new Float32Array(width * lines * 4);
  for (const [{ rgb }, boxes] of shades) {
    for (const i of boxes) {
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
  }
  const small = /** @type {OffscreenCanvasRenderingContext2D} */ (new OffscreenCanvas(width, lines).getContext("2d"));
  const image = small.createImageData(width, lines);
  for (let at = 0; at < sums.length; at += 4) {
    const covered = sums[at + 3];
    if (!covered) continue;
    for (let channel = 0; channel < 3; channel++) image.data[at + channel] = sums[at + channel] / covered;
    image.data[at + 3] = 255 * Math.min(1, covered) * (layout.pale ? 1 - look.pale : 1);
  }
  small.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  const height = ((layout.row.bottom - layout.lane) / halves) * layout.rowHeight;
  for (let line = 0; line < lines; line++) {
    const y = layout.y(Math.floor(line / halves), layout.lane) + (line % halves) * height;
    context.drawImage(small.canvas, 0, line, width, 1, from / ratio, y, width / ratio, height);
  }
}

/**
 * @param {Context} context
 * @param {Timeline} timeline
 * @param {Layout} layout
 * @param {Style} style
 * @param {Map<Shade, number[]>} shades
 */
function paintRectangles(context, timeline, layout, style, shades) {
  const { part } = timeline.boxes;
  const { pale } = layout;
  /**
   * @param {number} i
   * @returns {Rectangle}
   */
  const inner = (i) => {
    const [x, y, width, height] = layout.box(i);
    const gap = gapOf(width);
    return [x, y, Math.max(width - gap, 0.3), part[i] === 1 ? height - gap : height];
  };
  for (const [{ fill, ink }, boxes] of shades) {
    if (pale) {
      context.fillStyle = style.paper; // hides the lines of the time axis
      for (const i of boxes) context.fillRect(...inner(i));
      context.globalAlpha = 1 - style.look.pale;
    }
    context.fillStyle = fill;
    for (const i of boxes) context.fillRect(...inner(i));
    context.globalAlpha = 1;
    if (pale) {
      context.strokeStyle = fill;
      context.lineWidth = 1;
      for (const i of boxes) {
        const [x, y, width, height] = inner(i);
        if (width > 3) context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      }
    }
    context.fillStyle = pale ? style.ink : ink;
    paintNames(context, timeline, layout, boxes);
  }
}

/**
 * Write the names or the numbers of boxes of one color, where they fit.
 * @param {Context} context
 * @param {Timeline} timeline
 * @param {Layout} layout
 * @param {number[]} boxes
 */
function paintNames(context, timeline, layout, boxes) {
  const { microbatches, stages } = timeline.data;
  const digits = `${microbatches - 1}`.length; // of boxes with one width, all are named, all are numbered, or none
  const letters = digits + 1 + `${stages - 1}`.length; // of a name such as 2B0
  context.textAlign = "center";
  context.textBaseline = "middle";
  let font = "";
  for (const i of boxes) {
    const [x, y, width, height] = layout.box(i);
    const named = (width - 3) / (0.7 * letters) >= NAMED;
    const size = Math.min(11, height * 0.8, (width - 2) / (named ? 0.7 * letters : 0.6 * digits));
    if (size < 7) continue;
    const wanted = `${size.toFixed(1)}px ${FONT}`;
    if (font !== wanted) context.font = font = wanted; // setting a font is slow
    context.fillText(named ? timeline.label(i) : `${timeline.boxes.microbatch[i]}`, x + (width - 1) / 2, y + height / 2);
  }
}

/**
 * @typedef {object} Highlight what lies over the picture of one panel
 * @property {number | null} microbatch whose journey is shown
 * @property {boolean} path whether the critical path is shown
 * @property {number | null} time the moment up to which the timeline is played
 * @property {number} lane that of the box or the gap
 * @property {number | undefined} box
 * @property {import("./model.js").Gap | undefined} gap
 */

/**
 * Paint the journey, the critical path, the moment of playing, and the box or gap in focus.
 * @param {CanvasRenderingContext2D} context
 * @param {Layout[]} lanes one layout, or two lanes
 * @param {Style} style
 * @param {Highlight} highlight
 */
export function paintOver(context, lanes, style, { microbatch, path, time, lane, box, gap }) {
  const [layout] = lanes;
  context.clearRect(0, 0, layout.width, layout.height);
  layout.clip(context);
  /** @param {number} from */
  const fade = (from) => {
    context.save();
    context.beginPath();
    context.rect(Math.max(0, from), layout.top, layout.width, layout.bottom - layout.top);
    context.clip();
    context.globalAlpha = FADED;
    context.fillStyle = style.paper;
    context.fillRect(0, 0, layout.width, layout.height);
    context.globalAlpha = 1;
    for (const each of lanes) paintFadedNames(context, each, style);
    context.restore();
  };
  context.strokeStyle = style.ink;
  context.lineWidth = 1.3;
  if (microbatch !== null) {
    fade(0);
    for (const each of lanes) paintJourney(context, each, style, microbatch);
  }
  if (path) for (const each of lanes) paintPath(context, each, style);
  if (time !== null) {
    const x = layout.x(time);
    fade(x);
    context.fillStyle = style.ink;
    context.fillRect(x - 0.5, layout.top, 1.5, layout.bottom - layout.top);
  }
  context.strokeStyle = style.ink;
  if (box !== undefined) paintFocus(context, lanes, lane, box, microbatch === null);
  if (gap) {
    const { row, rowHeight } = lanes[lane];
    context.lineWidth = 1.5;
    context.setLineDash([4, 3]);
    const [x, y] = [layout.x(gap.start), layout.y(gap.rank, row.top)];
    context.strokeRect(x, y, layout.x(gap.end) - x - 1, (row.bottom - row.top) * rowHeight);
  }
  context.setLineDash([]);
  context.restore();
}

/**
 * Write the names of faded boxes again, in what is easy to read on their new colors.
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {Style} style
 */
function paintFadedNames(context, layout, { palette, paper, look }) {
  const { timeline, view, pale } = layout;
  const { op, stage, microbatch, chunk } = timeline.boxes;
  const boxes = timeline.visible(view);
  if (boxes.length > MANY) return;
  const page = numbersIn(paper);
  const kept = (1 - FADED) * (pale ? 1 - look.pale : 1); // of a box's color
  /** @type {Map<string, number[]>} */
  const inks = new Map();
  for (const i of boxes) {
    const { rgb } = palette.of(op[i], stage[i], microbatch[i], chunk[i]);
    const ink = inkOn(/** @type {Color} */ (rgb.map((c, k) => kept * c + (1 - kept) * page[k])));
    inks.set(ink, [...(inks.get(ink) ?? []), i]);
  }
  for (const [ink, those] of inks) {
    context.fillStyle = ink;
    paintNames(context, timeline, layout, those);
  }
}

/**
 * Connect the end of a box with the start of another one, between the rows of boxes, where the line crosses no name.
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {number} from
 * @param {number} to
 */
function connect(context, layout, from, to) {
  const [x1, y1, width, height1] = layout.box(from);
  const [x2, y2, , height2] = layout.box(to);
  context.beginPath();
  context.moveTo(x1 + width, y2 < y1 ? y1 : y1 + height1);
  context.lineTo(x2, y2 > y1 ? y2 : y2 + height2);
  context.stroke();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {number} i
 * @param {number} line
 */
function ring(context, layout, i, line, inside = 0) {
  const [x, y, width, height] = layout.box(i);
  const inset = Math.min(inside, width / 4);
  context.lineWidth = line;
  context.strokeRect(x + inset, y + inset, Math.max(1, width - 1 - 2 * inset), height - 2 * inset);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {Style} style
 * @param {number} microbatch
 */
function paintJourney(context, layout, style, microbatch) {
  const { timeline } = layout;
  const { rank } = timeline.boxes;
  const journey = timeline.journey(microbatch);
  paintBoxes(context, timeline, layout, style, journey);
  context.strokeStyle = style.ink;
  context.lineWidth = 1.3;
  for (const i of journey)
    for (const source of timeline.data.sources[i]) if (rank[source] !== rank[i]) connect(context, layout, source, i);
}

/**
 * Paint the critical path. A line in the color of the page separates its color from those of the boxes.
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {Style} style
 */
function paintPath(context, layout, { look, paper }) {
  const { data, boxes } = layout.timeline;
  for (const [color, wider] of /** @type {[string, number][]} */ ([[paper, 1.8], [look.path, 0]])) {
    context.strokeStyle = color;
    data.path.forEach((i) => ring(context, layout, i, 2 + wider, 0.8));
    context.lineWidth = 1.7 + wider;
    data.path.slice(1).forEach((i, k) => {
      if (boxes.rank[i] !== boxes.rank[data.path[k]]) connect(context, layout, data.path[k], i);
    });
  }
}

/**
 * Paint the box in focus, those that it requires and that require it, and the same action in the other lane.
 * @param {CanvasRenderingContext2D} context
 * @param {Layout[]} lanes
 * @param {number} lane
 * @param {number} box
 * @param {boolean} linked whether lines lead to them; not over a journey, which has its own
 */
function paintFocus(context, lanes, lane, box, linked) {
  const layout = lanes[lane];
  const { timeline } = layout;
  ring(context, layout, box, 2.5);
  for (const each of lanes) {
    const same = each === layout ? undefined : each.timeline.find(timeline.label(box));
    if (same !== undefined) ring(context, each, same, 2.5);
  }
  for (const source of timeline.data.sources[box]) {
    ring(context, layout, source, 1.5);
    if (linked) connect(context, layout, source, box);
  }
  context.setLineDash([4, 3]);
  for (const user of timeline.users[box]) {
    ring(context, layout, user, 1);
    if (linked) connect(context, layout, box, user);
  }
}

// ------------------------------------------------------------------------------------------------------------ charts

/**
 * Set the attributes of a new element and append its children. Attributes that begin with "on" are event handlers; false
 * and null leave an attribute out.
 * @template {Element} Kind
 * @param {Kind} node
 * @param {Record<string, any>} attributes
 * @param {(Node | string)[]} children
 */
export function assemble(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {(Node | string)[]} children
 */
export const svgElement = (tag, attributes, ...children) =>
  assemble(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/**
 * @typedef {{ x: number, y: number, name?: string, kind?: string }} Point
 * @typedef {{ label: string, format: (value: number) => string, whole?: boolean, from?: number }} Axis
 */

/**
 * A small chart: points with names, or a line through them. With `pick`, points are buttons.
 * @param {Point[]} points
 * @param {{ x: Axis, y: Axis, line?: boolean, pick?: (point: number) => void, width?: number, height?: number }} options
 */
export function chart(points, { x, y, line = false, pick, width = 420, height = 220 }) {
  const [left, right, top, bottom] = [58, 14, 12, 36];
  const most = { x: largest(points.map((p) => p.x)) * (line ? 1.12 : 1.3) || 1, y: largest(points.map((p) => p.y)) * 1.15 || 1 };
  const least = y.from ?? 0;
  /** @param {number} value */
  const across = (value) => left + (value / most.x) * (width - left - right);
  /** @param {number} value */
  const up = (value) => height - bottom - ((value - least) / (most.y - least)) * (height - top - bottom);
  const values = points.map((p) => `${p.name ? `${p.name}: ` : ""}${x.format(p.x)}, ${y.format(p.y)}`).join("; ");
  const name = `${y.label} against ${x.label}. ${values}`;
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, class: "ppedu-chart", role: pick ? "group" : "img", "aria-label": name });
  svg.style.maxWidth = `${width}px`;
  /**
   * @param {number} from
   * @param {number} down
   * @param {string} content
   */
  const text = (from, down, content, anchor = "start") =>
    svg.append(svgElement("text", { x: from, y: down, "text-anchor": anchor }, content));
  for (const value of ticks(0, most.x).filter((each) => !x.whole || Number.isInteger(each))) {
    svg.append(svgElement("line", { x1: across(value), x2: across(value), y1: top, y2: height - bottom, class: "ppedu-grid" }));
    text(across(value), height - bottom + 14, x.format(value), "middle");
  }
  for (const value of ticks(least, most.y).filter((_, k) => k % 2 === 0)) {
    svg.append(svgElement("line", { x1: left, x2: width - right, y1: up(value), y2: up(value), class: "ppedu-grid" }));
    text(left - 6, up(value) + 4, y.format(value), "end");
  }
  text(width - right, height - 4, x.label, "end");
  text(4, top - 1, y.label);
  if (line) {
    const d = points.map((p, k) => `${k ? "L" : "M"}${across(p.x)} ${up(p.y)}`).join("");
    svg.append(svgElement("path", { d, class: "ppedu-curve" }));
    return svg;
  }
  /** @type {Map<string, Point[]>} */
  const groups = new Map(); // points at the same place, which share a label
  for (const p of points) {
    const key = `${Math.round(across(p.x) / 4)},${Math.round(up(p.y) / 4)}`;
    groups.set(key, [...(groups.get(key) ?? []), p]);
  }
  const taken = [...groups.values()].map(([p]) => {
    const [cx, cy] = [across(p.x), up(p.y)];
    return { left: cx - 5, top: cy - 5, right: cx + 5, bottom: cy + 5 };
  });
  taken.push({ left: 0, top: 0, right: left, bottom: height }); // the axes
  taken.push({ left: 0, top: height - bottom + 6, right: width, bottom: height });
  for (const group of groups.values()) {
    const [cx, cy] = [across(group[0].x), up(group[0].y)];
    const circle = svgElement("circle", { cx, cy, r: 4.5, class: `ppedu-point ${group[0].kind ?? ""}` });
    svg.append(circle);
    if (pick) {
      const choose = () => pick(points.indexOf(group[0]));
      const enter = (/** @type {KeyboardEvent} */ { key }) => (key === "Enter" || key === " ") && choose();
      const label = group.map((p) => `${p.name || p.kind}: ${x.format(p.x)}, ${y.format(p.y)}`).join("; ");
      assemble(circle, { tabindex: 0, role: "button", "aria-label": label, onclick: choose, onkeydown: enter }, []);
    }
    const names = group.flatMap((p) => p.name || []).join(", ");
    const size = names.length * 6.6;
    // The label goes to the right or the left of its point, or above or below, where it covers nothing.
    const spots = [4, 17, -9, 30, -22, 43].flatMap((down) =>
      [cx + 9, cx - 9 - size].map((from) => ({ left: from, top: cy + down - 11, right: from + size, bottom: cy + down + 2 })),
    );
    const spot = spots.find(
      (box) =>
        box.right <= width - 6 &&
        box.top >= 0 &&
        !taken.some((o) => box.left < o.right && o.left < box.right && box.top < o.bottom && o.top < box.bottom),
    );
    if (!spot) continue;
    taken.push(spot);
    const before = spot.right < cx;
    text(before ? spot.right : spot.left, spot.bottom - 2, names, before ? "end" : "start");
  }
  return svg;
}
