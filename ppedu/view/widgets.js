// Timelines that can be touched. One module, no framework and no network: Jupyter loads it through anywidget (the default
// export), a saved page calls `mount`. Python computes; this draws what it is sent and sends back what was clicked.
//
// From top to bottom: colours, the data of one timeline, painting (on a canvas or as SVG), the figure (timelines stacked
// on one time axis, with their controls), and what is built around a figure: explore, compare, the puzzle, the live run.

const MARGIN = { left: 62, right: 66, top: 26, bottom: 26 };
const NARROW = 600; // here the title has a line of its own, above the numbers
const LINE = 16;
const ROW = { top: 0.06, bottom: 0.66, strip: 0.7, floor: 0.94 }; // in a rank's row, which is 1 high
const OPS = "FBIW";
const FONT = "system-ui, sans-serif";
const MARK = "#d62f2f"; // what differs
const MANY = 5000; // boxes on the screen

// ---------------------------------------------------------------------------------------------------------- colours

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const css = ([red, green, blue]) => `rgb(${Math.round(red)},${Math.round(green)},${Math.round(blue)})`;
const luminance = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue) / 255;

function hue(degrees, light) {
  const part = (offset) => {
    const k = (offset + degrees / 30) % 12;
    return 255 * (light - 0.5 * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1)));
  };
  return [part(0), part(8), part(4)];
}

/** The fill of a box and the colour of the number on it, for each way to colour. */
export class Palette {
  constructor(look, by, stages, chunks) {
    Object.assign(this, { look, by, stages, chunks, deepest: Math.max(1, chunks - 1), known: new Map() });
  }

  of(op, stage, microbatch, chunk) {
    const what = this.by === "op" ? microbatch % 2 : this.by === "microbatch" ? microbatch : stage;
    const key = (what * this.chunks + (this.by === "op" ? chunk : 0)) * OPS.length + OPS.indexOf(op);
    let found = this.known.get(key);
    if (!found) {
      const colour = this.mix(op, what, chunk);
      found = { rgb: colour, fill: css(colour), ink: luminance(colour) < 0.54 ? "#ffffff" : "#16302a" };
      this.known.set(key, found);
    }
    return found;
  }

  mix(op, what, chunk) {
    if (this.by !== "op") {
      // Neighbouring microbatches far apart, neighbouring stages a step; a backward is darker than its forward.
      const degrees = this.by === "microbatch" ? (what * 137.5) % 360 : (what * 300) / Math.max(1, this.stages);
      return hue(degrees, { F: 0.66, B: 0.42, I: 0.5, W: 0.34 }[op]);
    }
    const dark = channels(this.look.colors[op]).map((c) => c * (1 - (this.look.darker * chunk) / this.deepest));
    return what ? dark.map((c) => c + (255 - c) * this.look.lighter) : dark;
  }
}

// -------------------------------------------------------------------------------------------- the data of a timeline

/** As Python's `show` writes it. */
const round = (number) => (Math.abs(number) < 10000 ? `${+number.toPrecision(4)}` : Math.round(number).toLocaleString("en-US"));

/** The largest of numbers that are not negative. Math.max(...values) overflows the stack where there are very many. */
const largest = (values) => values.reduce((most, each) => Math.max(most, each), 0);

/** One timeline as Python sent it, with what is looked up often. */
export class Timeline {
  constructor(data) {
    Object.assign(this, data);
    this.count = this.needs.length;
    for (const name of ["rank", "start", "end", "stage", "microbatch", "chunk", "copy", "part", "step", "mark"])
      this[name] = Float64Array.from(this.boxes[name]);
    this.op = this.boxes.op;
    this.rows = Array.from({ length: this.ranks + 1 }, () => 0); // where each rank's boxes begin
    for (let i = 0; i < this.count; i++) this.rows[this.rank[i] + 1] = i + 1;
    for (let rank = 1; rank <= this.ranks; rank++) this.rows[rank] = Math.max(this.rows[rank], this.rows[rank - 1]);
    this.users = this.needs.map(() => []);
    this.needs.forEach((needs, i) => needs.forEach((need) => this.users[need].push(i)));
    this.idle = this.gaps.map(([rank, start, end, why]) => ({ rank, start, end, why }));
  }

  label(i) {
    return `${this.stage[i]}${this.op[i]}${this.microbatch[i]}`;
  }

  /** The first box of a rank that ends after a time. */
  after(rank, time) {
    let [low, high] = [this.rows[rank], this.rows[rank + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** What a rank does at a time; `upper` tells the halves of an overlapped pair apart. -1: nothing. */
  at(rank, time, upper = true) {
    const i = this.after(rank, time);
    if (i >= this.rows[rank + 1] || this.start[i] > time) return -1;
    return this.part[i] === 1 && !upper ? i + 1 : i;
  }

  /** Activations that a rank holds from a time on. */
  held(rank, time) {
    const [times, values] = this.memory[rank];
    let value = 0;
    for (let k = 0; k < times.length && times[k] <= time; k++) value = values[k];
    return value;
  }

  describe(i, names) {
    const list = (those, none) =>
      those.length
        ? those.map((j) => `${this.label(j)}${this.rank[j] === this.rank[i] ? "" : ` (rank ${this.rank[j]})`}`).join(", ")
        : none;
    const [start, end] = [this.start[i], this.end[i]];
    const unit = this.unit && ` ${this.unit}`;
    return (
      `${this.label(i)}: ${names[this.op[i]]} of microbatch ${this.microbatch[i]} in stage ${this.stage[i]}, on rank ` +
      `${this.rank[i]}, ${round(start)}–${round(end)}${unit}${this.part[i] ? ", overlapped" : ""}. ` +
      `Needs ${list(this.needs[i], "nothing")}; needed by ${list(this.users[i], "nothing")}. ` +
      `While it runs, rank ${this.rank[i]} holds ${round(this.held(this.rank[i], start))}.`
    );
  }

  /** Everything a microbatch goes through, in the order of time. */
  journey(microbatch) {
    const all = [];
    for (let i = 0; i < this.count; i++) if (this.microbatch[i] === microbatch) all.push(i);
    return all.toSorted((a, b) => this.start[a] - this.start[b] || this.end[a] - this.end[b]);
  }
}

// ----------------------------------------------------------------------------------------------------------- painting

const forbidden = /[^\t\n\r\x20-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu; // what XML cannot hold, as in label.py
const escaped = (each) =>
  `${typeof each === "number" ? +each.toFixed(2) : each}`.replace(forbidden, "\ufffd").replace(/[&<"]/g, (c) => `&#${c.charCodeAt(0)};`);

/** As much of a canvas's context as `paint` uses, as SVG. */
export class SvgContext {
  /** `clips`: of those in the same file before it, how many clip; they are known by their number. */
  constructor(width, height, clips = 0) {
    Object.assign(this, { width, height, parts: [], path: "", globalAlpha: 1, lineWidth: 1, clips, open: 0, dash: "" });
  }
  tag(name, attributes, text) {
    const written = Object.entries(attributes).map(([key, each]) => ` ${key}="${escaped(each)}"`).join("");
    const alpha = this.globalAlpha < 1 ? ` opacity="${this.globalAlpha}"` : "";
    this.parts.push(text === undefined ? `<${name}${written}${alpha}/>` : `<${name}${written}${alpha}>${escaped(text)}</${name}>`);
  }
  fillRect(x, y, width, height) {
    this.tag("rect", { x, y, width, height, fill: this.fillStyle });
  }
  strokeRect(x, y, width, height) {
    this.tag("rect", { x, y, width, height, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
  }
  fillText(text, x, y) {
    const size = parseFloat(this.font.match(/[\d.]+px/)[0]);
    const shift = { middle: 0.35, top: 0.8, bottom: -0.2 }[this.textBaseline] ?? 0;
    const anchor = { center: "middle", right: "end" }[this.textAlign] ?? "start";
    const weight = this.font.startsWith("bold") ? "bold" : "normal";
    const place = { x, y: y + shift * size, "font-size": size, "font-family": FONT, "font-weight": weight };
    this.tag("text", { ...place, "text-anchor": anchor, fill: this.fillStyle }, text);
  }
  /** About as wide as letters are; which font there will be, nobody knows. */
  measureText(text) {
    return { width: 0.7 * parseFloat(this.font.match(/[\d.]+px/)[0]) * text.length };
  }
  beginPath() {
    this.path = "";
  }
  moveTo(x, y) {
    this.path += `M${x.toFixed(2)} ${y.toFixed(2)}`;
  }
  lineTo(x, y) {
    this.path += `L${x.toFixed(2)} ${y.toFixed(2)}`;
  }
  rect(x, y, width, height) {
    this.path += `M${x} ${y}h${width}v${height}h${-width}z`;
  }
  fill() {
    this.tag("path", { d: this.path, fill: this.fillStyle });
  }
  stroke() {
    this.tag("path", { d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-dasharray": this.dash });
  }
  setLineDash(dash) {
    this.dash = dash.join(" ");
  }
  clip() {
    this.parts.push(`<clipPath id="c${++this.clips}"><path d="${this.path}"/></clipPath><g clip-path="url(#c${this.clips})">`);
    this.open = 1;
  }
  save() {}
  restore() {
    if (this.open) this.parts.push("</g>");
    this.open = 0;
  }
  text() {
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" ` +
      `viewBox="0 0 ${this.width} ${this.height}">${this.parts.join("")}</svg>`
    );
  }
}

/** Steps of 1, 2 or 5 times a power of ten, about as many as wanted. */
export function ticks(left, right, wanted = 10) {
  const rough = (right - left) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough * 0.999) * power;
  const found = [];
  for (let k = Math.ceil(left / step - 1e-9); k * step <= right + step * 1e-9; k++) found.push(+(k * step).toPrecision(10));
  return found;
}

/** Where things are: of one timeline's place on the page. */
export class Layout {
  constructor(timeline, width, view) {
    const rowHeight = timeline.ranks <= 4 ? 46 : timeline.ranks <= 8 ? 38 : Math.max(8, Math.floor(420 / timeline.ranks));
    const top = MARGIN.top + (width < NARROW ? LINE : 0);
    Object.assign(this, { width, view, rowHeight, top });
    this.height = top + rowHeight * timeline.ranks + MARGIN.bottom;
    this.scale = (width - MARGIN.left - MARGIN.right) / (view.right - view.left || 1);
  }
  x(time) {
    return MARGIN.left + (time - this.view.left) * this.scale;
  }
  y(rank, part) {
    return this.top + (rank + part) * this.rowHeight;
  }
  time(x) {
    return this.view.left + (x - MARGIN.left) / this.scale;
  }
  /** left, top, width and height of a box. */
  box(timeline, i) {
    const half = (ROW.bottom - ROW.top) / 2;
    const top = ROW.top + (timeline.part[i] === 2 ? half : 0);
    const left = this.x(timeline.start[i]);
    const height = (timeline.part[i] ? half : 2 * half) * this.rowHeight;
    return [left, this.y(timeline.rank[i], top), this.x(timeline.end[i]) - left, height];
  }
}

/** Draw a timeline. `shown` is { palette, ink, paper, outline, most }. */
export function paint(context, timeline, layout, shown) {
  const { view, width, height, rowHeight } = layout;
  const { palette, ink, paper, outline } = shown;
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);

  context.textBaseline = "middle";
  const small = Math.max(8, Math.min(11, rowHeight * 0.8));
  const every = rowHeight < 11 ? Math.ceil(11 / rowHeight) : 1;
  context.font = `${small}px ${FONT}`;
  context.fillStyle = ink;
  for (let rank = 0; rank < timeline.ranks; rank += every) {
    context.textAlign = "right";
    context.fillText(`rank ${rank}`, left - 8, layout.y(rank, (ROW.top + ROW.bottom) / 2));
  }
  context.font = `12px ${FONT}`;
  context.textAlign = "right";
  const numbers = timeline.numbers.map(([name, value]) => `${name} ${value}`).join("    ");
  context.fillText(numbers, width - 8, layout.top - 14);
  const room = width - 24 - left - (layout.top > MARGIN.top ? 0 : context.measureText(numbers).width);
  context.font = `bold 12px ${FONT}`;
  context.textAlign = "left";
  context.fillText(shortened(context, timeline.source === "simulated" ? timeline.title : `${timeline.title}, ${timeline.source}`, room), left, 12);

  context.textAlign = "center";
  context.font = `11px ${FONT}`;
  const bottom = height - MARGIN.bottom;
  const unit = shortened(context, timeline.unit ? `time, ${timeline.unit}` : "time", width / 3);
  const end = width - 8 - context.measureText(unit).width - 6; // of the room for ticks
  for (const time of ticks(view.left, view.right, Math.min(10, (right - left) / 60))) {
    const x = layout.x(time);
    context.globalAlpha = 0.18;
    context.fillRect(Math.round(x), layout.top, 1, bottom - layout.top);
    context.globalAlpha = 0.8;
    if (x + context.measureText(`${time}`).width / 2 < end) context.fillText(`${time}`, x, bottom + 11);
  }
  context.globalAlpha = 1;
  context.textAlign = "right";
  context.fillText(unit, width - 8, bottom + 11);

  context.save();
  context.beginPath();
  context.rect(left, 0, right - left, height);
  context.clip();
  paintMemory(context, timeline, layout, shown);
  paintBoxes(context, timeline, layout, palette, ink);
  if (outline) {
    context.strokeStyle = ink;
    context.lineWidth = 1;
    for (let i = 0; i < outline.count; i++) context.strokeRect(...layout.box(outline, i));
  }
  context.restore();

  if (rowHeight >= 20) {
    context.font = `10px ${FONT}`;
    context.textAlign = "left";
    context.fillStyle = ink;
    timeline.peaks.forEach((peak, rank) => context.fillText(`peak ${peak}`, right + 6, layout.y(rank, 0.82)));
  }
}

/** As much of a text as there is room for. */
function shortened(context, text, room) {
  let kept = text;
  while (kept.length > 1 && context.measureText(kept).width > room) kept = `${kept.slice(0, -2)}…`;
  return kept;
}

function paintMemory(context, timeline, layout, { look, most, ink }) {
  const room = (ROW.floor - ROW.strip) * layout.rowHeight;
  context.fillStyle = look.memory;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    const [times, values] = timeline.memory[rank];
    const floor = layout.y(rank, ROW.floor);
    context.beginPath();
    let begun = false;
    for (let k = 0; k < times.length && times[k] < layout.view.right; k++) {
      const until = k + 1 < times.length ? times[k + 1] : timeline.makespan;
      if (until < layout.view.left) continue;
      const y = floor - (room * Math.min(values[k], most)) / (most || 1);
      if (!begun) context.moveTo(layout.x(times[k]), floor);
      begun = true;
      context.lineTo(layout.x(times[k]), y);
      context.lineTo(layout.x(until), y);
    }
    context.lineTo(layout.x(Math.min(timeline.makespan, layout.view.right)), floor);
    context.fill();
    if (timeline.cap !== null) {
      context.fillStyle = largest(values) > timeline.cap ? MARK : ink;
      context.fillRect(layout.x(0), floor - (room * timeline.cap) / (most || 1), layout.x(Math.max(timeline.makespan, timeline.until)) - layout.x(0), 1);
      context.fillStyle = look.memory;
    }
  }
}

/** How wide a line of paper is left between neighbours, where there is room. */
const gapOf = (width) => (width > 6 ? 1 : width > 2 ? 0.4 : 0);

function paintBoxes(context, timeline, layout, palette, ink) {
  const { view } = layout;
  // By colour: changing it takes longer than a box.
  const colours = new Map();
  let count = 0;
  for (let rank = 0; rank < timeline.ranks; rank++) {
    for (let i = timeline.after(rank, view.left); i < timeline.rows[rank + 1] && timeline.start[i] < view.right; i++) {
      const colour = palette.of(timeline.op[i], timeline.stage[i], timeline.microbatch[i], timeline.chunk[i]);
      const those = colours.get(colour);
      if (those) those.push(i);
      else colours.set(colour, [i]);
      count++;
    }
  }
  if (count > MANY && context.drawImage) paintPixels(context, timeline, layout, colours);
  else paintRectangles(context, timeline, layout, colours);
  context.strokeStyle = ink;
  context.lineWidth = 1;
  for (const those of colours.values()) {
    for (const i of those) {
      if (!timeline.copy[i] && !timeline.mark[i]) continue;
      const [x, y, width, height] = layout.box(timeline, i);
      if (timeline.mark[i]) {
        Object.assign(context, { strokeStyle: MARK, lineWidth: 2.5 });
        context.strokeRect(x + 1, y + 1, width - 3, height - 2);
        Object.assign(context, { strokeStyle: ink, lineWidth: 1 });
      } else if (width > 2) context.strokeRect(x + 0.5, y + 0.5, width - 2, height - 1);
    }
  }
}

/** Very many boxes, which have no room for numbers: a pixel takes the mean of what it covers, and a rank's row is one
 * row of pixels, stretched. Filling as many rectangles would take several times as long. */
function paintPixels(context, timeline, layout, colours) {
  const ratio = context.canvas.width / layout.width;
  const [from, to] = [MARGIN.left * ratio, (layout.width - MARGIN.right) * ratio].map(Math.round);
  const width = to - from;
  const lines = timeline.part.some(Boolean) ? 2 : 1; // the halves of a pair lie over each other
  const sums = new Float32Array(width * lines * timeline.ranks * 4);
  for (const [{ rgb }, those] of colours) {
    for (const i of those) {
      const left = Math.max(0, layout.x(timeline.start[i]) * ratio - from);
      const end = layout.x(timeline.end[i]);
      const right = Math.min(width, (end - gapOf(end - layout.x(timeline.start[i]))) * ratio - from);
      for (let line = 0; line < lines; line++) {
        if (lines === 2 && timeline.part[i] && timeline.part[i] !== line + 1) continue;
        const row = (timeline.rank[i] * lines + line) * width;
        for (let pixel = Math.floor(left); pixel < right; pixel++) {
          const covered = Math.min(pixel + 1, right) - Math.max(pixel, left);
          const at = (row + pixel) * 4;
          for (let channel = 0; channel < 3; channel++) sums[at + channel] += rgb[channel] * covered;
          sums[at + 3] += covered;
        }
      }
    }
  }
  const rows = made("canvas", { width, height: lines * timeline.ranks });
  const small = rows.getContext("2d");
  const image = small.createImageData(width, lines * timeline.ranks);
  for (let at = 0; at < sums.length; at += 4) {
    const covered = sums[at + 3];
    if (!covered) continue;
    for (let channel = 0; channel < 3; channel++) image.data[at + channel] = sums[at + channel] / covered;
    image.data[at + 3] = 255 * Math.min(1, covered);
  }
  small.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  const high = ((ROW.bottom - ROW.top) / lines) * layout.rowHeight;
  for (let row = 0; row < lines * timeline.ranks; row++) {
    const y = layout.y(Math.floor(row / lines), ROW.top) + (row % lines) * high;
    context.drawImage(rows, 0, row, width, 1, from / ratio, y, width / ratio, high);
  }
}

function paintRectangles(context, timeline, layout, colours) {
  const digits = `${timeline.microbatches - 1}`.length; // boxes of one width have numbers all or none
  for (const [{ fill, ink: number }, those] of colours) {
    context.fillStyle = fill;
    const numbered = [];
    for (const i of those) {
      const [x, y, width, height] = layout.box(timeline, i);
      const gap = gapOf(width);
      context.fillRect(x, y, Math.max(width - gap, 0.3), timeline.part[i] === 1 ? height - gap : height);
      if (width > 6) numbered.push(i);
    }
    context.fillStyle = number;
    context.textAlign = "center";
    let font = "";
    for (const i of numbered) {
      const [x, y, width, height] = layout.box(timeline, i);
      const text = `${timeline.microbatch[i]}`;
      const size = Math.min(11, height * 0.8, (width - 2) / (0.6 * digits));
      if (size < 7) continue;
      const wanted = `${size.toFixed(1)}px ${FONT}`;
      if (font !== wanted) context.font = font = wanted;
      context.fillText(text, x + (width - 1) / 2, y + height / 2);
    }
  }
}

// --------------------------------------------------------------------------------------------------------- the figure

const made = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
};

const button = (label, title, click, attributes = {}) =>
  made("button", { type: "button", title, "aria-label": title, onclick: click, ...attributes }, label);

/** A drawn sign for a button: fonts may have none for it, or a coloured one. */
const icon = (d) => drawn("svg", { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true", fill: "currentColor" }, drawn("path", { d }));
const ICONS = {
  start: "M1 1h2v10h-2zM11 1v10l-7-5z",
  back: "M10 1v10l-8-5z",
  play: "M2 1v10l8-5z",
  pause: "M2 1h3v10h-3zM7 1h3v10h-3z",
  on: "M1 1v10l7-5zM9 1h2v10h-2z",
};

function save(name, content) {
  const address = URL.createObjectURL(content);
  made("a", { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}

/** Timelines stacked on one time axis, with what is needed to look at them closely. */
export class Figure {
  constructor(root, look) {
    Object.assign(this, { root, look, by: "op", path: false, panels: [], view: null, frame: 0, playing: null });
    this.time = null; // where playing is; null: all is shown
    this.current = null; // { panel, i } or { panel, gap }: what is pointed at
    this.chosen = null; // { panel, microbatch }: whose journey is shown, and which timeline is asked for it
    this.controls = this.toolbar();
    this.stack = made("div", { class: "ppedu-stack" });
    this.line = made("p", { class: "ppedu-line", "aria-live": "polite" });
    this.words = made("pre", { tabindex: "0", role: "group", "aria-label": "orders" });
    const table = made("details", { class: "ppedu-words" }, made("summary", {}, "in words"), this.words);
    table.addEventListener("toggle", () => table.open && this.spell());
    this.table = table;
    this.legend = made("div", { class: "ppedu-legend" });
    root.append(this.controls, this.stack, this.line, made("div", { class: "ppedu-foot" }, this.legend, table));
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.stack);
    const repaint = () => this.draw();
    this.themes = new MutationObserver(repaint);
    for (const node of [document.documentElement, document.body])
      this.themes.observe(node, { attributes: true, attributeFilter: ["class", "style", "theme", "data-theme", "data-jp-theme-light", "data-jp-theme-name"] });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", repaint);
    this.repaint = repaint;
  }

  destroy() {
    this.pause();
    this.watch.disconnect();
    this.themes.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
    cancelAnimationFrame(this.frame);
  }

  toolbar() {
    this.playButton = button(icon(ICONS.play), "play", () => this.toggle());
    const colour = made("select", { "aria-label": "colour by", onchange: () => this.set({ by: colour.value }) });
    for (const each of ["op", "microbatch", "stage"]) colour.append(made("option", { value: each }, `colour: ${each}`));
    const path = made("input", { type: "checkbox", onchange: () => this.set({ path: path.checked }) });
    return made(
      "div",
      { class: "ppedu-bar", role: "toolbar", "aria-label": "timeline" },
      button(icon(ICONS.start), "to the start", () => this.step(-Infinity)),
      button(icon(ICONS.back), "a step back", () => this.step(-1)),
      this.playButton,
      button(icon(ICONS.on), "a step on", () => this.step(1)),
      made("span", { class: "ppedu-space" }),
      button("+", "zoom in", () => this.zoom(0.5)),
      button("−", "zoom out", () => this.zoom(2)),
      button("whole", "show the whole timeline", () => this.whole()),
      made("span", { class: "ppedu-space" }),
      colour,
      made("label", {}, path, " critical path"),
      made("span", { class: "ppedu-space" }),
      button("SVG", "save as SVG", () => this.save("svg")),
      button("PNG", "save as PNG", () => this.save("png")),
    );
  }

  /** Show these timelines. The part of the time that is looked at stays, if it is there. */
  update(panels) {
    const zoomed = this.view && (this.view.left > 0 || this.view.right < this.end);
    this.timelines = panels.map((data) => new Timeline(data));
    this.outlines = panels.map((data) => (data.outline ? new Timeline(data.outline) : null));
    const all = [...this.timelines, ...this.outlines].filter(Boolean);
    this.end = largest(all.map((each) => Math.max(each.makespan, each.until))) || 1;
    this.most = largest(this.timelines.flatMap((each) => [each.cap ?? 0, ...each.memory.map(([, values]) => largest(values))]));
    if (!zoomed || this.view.left >= this.end) this.view = { left: 0, right: this.end };
    this.current = null;
    if (!(this.chosen?.microbatch < this.timelines[this.chosen?.panel]?.microbatches)) this.chosen = null;
    if (this.playing) this.pause();
    this.time = null; // it was a moment of other timelines
    while (this.panels.length > panels.length) this.panels.pop().holder.remove();
    while (this.panels.length < panels.length) this.panels.push(this.panel(this.panels.length));
    this.panels.forEach(({ holder }, n) => holder.setAttribute("aria-label", this.timelines[n].summary));
    this.explain();
    if (this.table.open) this.spell();
    this.paint(); // at once: whoever moves a control waits for it
  }

  panel(n) {
    const [base, over] = [made("canvas"), made("canvas")];
    const holder = made("div", { class: "ppedu-panel", tabindex: "0", role: "application", "aria-roledescription": "timeline" }, base, over);
    const at = (event) => {
      const place = holder.getBoundingClientRect();
      return [event.clientX - place.left, event.clientY - place.top];
    };
    let grabbed = null;
    holder.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.clientX, view: { ...this.view }, moved: false };
    });
    holder.addEventListener("pointermove", (event) => {
      if (grabbed && event.buttons) {
        const far = event.clientX - grabbed.x;
        if (Math.abs(far) > 3 && !grabbed.moved) {
          grabbed.moved = true;
          holder.setPointerCapture(event.pointerId);
        }
        if (grabbed.moved) this.lookAt(grabbed.view.left - far / this.layout(n).scale, grabbed.view.right - grabbed.view.left);
        return;
      }
      this.point(n, ...at(event));
    });
    holder.addEventListener("pointerup", (event) => {
      const click = grabbed && !grabbed.moved;
      grabbed = null;
      if (click) {
        this.point(n, ...at(event));
        this.choose();
      }
    });
    holder.addEventListener("pointerleave", () => {
      if (!grabbed?.moved) this.set({ current: null });
    });
    holder.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey) return; // the page scrolls
        event.preventDefault();
        if (event.shiftKey) this.lookAt(this.view.left + (event.deltaY + event.deltaX) / this.layout(n).scale);
        else this.zoom(Math.exp(event.deltaY / 300), this.layout(n).time(at(event)[0]));
      },
      { passive: false },
    );
    holder.addEventListener("keydown", (event) => this.key(event, n));
    holder.addEventListener("focus", () => this.explain());
    this.stack.append(holder);
    return { holder, base, over };
  }

  layout(n) {
    return new Layout(this.timelines[n], this.stack.clientWidth, this.view);
  }

  set(what) {
    Object.assign(this, what);
    this.explain();
    this.draw("by" in what);
  }

  /** What is under a place of a panel becomes the current one. */
  point(n, x, y) {
    const [timeline, layout] = [this.timelines[n], this.layout(n)];
    const row = (y - layout.top) / layout.rowHeight;
    const [rank, time] = [Math.floor(row), layout.time(x)];
    let current = null;
    if (rank >= 0 && rank < timeline.ranks && x >= MARGIN.left && x <= layout.width - MARGIN.right) {
      const i = timeline.at(rank, time, row - rank < (ROW.top + ROW.bottom) / 2);
      const gap = timeline.idle.find((each) => each.rank === rank && each.start <= time && time < each.end);
      current = i >= 0 ? { panel: n, i } : gap ? { panel: n, gap } : null;
    }
    if (current?.i !== this.current?.i || current?.gap !== this.current?.gap || current?.panel !== this.current?.panel)
      this.set({ current });
  }

  /** Show the journey of the microbatch that is pointed at, or no longer. */
  choose() {
    const { panel, i } = this.current ?? {};
    const microbatch = i === undefined ? undefined : this.timelines[panel].microbatch[i];
    const again = microbatch === this.chosen?.microbatch && panel === this.chosen?.panel;
    this.set({ chosen: microbatch === undefined || again ? null : { panel, microbatch } });
  }

  explain() {
    const { panel, i, gap } = this.current ?? {};
    const first = this.timelines?.[0];
    let text = "Point at an action or a gap; click an action for its microbatch's journey; drag to move, Ctrl and wheel to zoom. ";
    text += "Keys: arrows, +, −, space, Enter.";
    if (gap) text = `${gap.why}.`;
    else if (i !== undefined) text = this.timelines[panel].describe(i, this.look.names);
    else if (this.chosen) {
      const its = this.timelines[this.chosen.panel];
      const all = its.journey(this.chosen.microbatch);
      const ends = all.length ? `${round(its.start[all[0]])}–${round(largest(all.map((each) => its.end[each])))}` : "";
      text = `Microbatch ${this.chosen.microbatch}, ${ends}: ${all.map((each) => its.label(each)).join(" → ")}`;
    } else if (this.time !== null) {
      const now = first.rows.slice(0, -1).map((_, rank) => first.at(rank, this.time));
      const held = now.map((_, rank) => round(first.held(rank, this.time)));
      text = `At ${round(this.time)}: ${now.map((each, rank) => `rank ${rank} ${each < 0 ? "idle" : first.label(each)}`).slice(0, 16).join(", ")}`;
      text += first.ranks > 16 ? " …" : `. Held: ${held.join(", ")}.`;
    }
    this.line.textContent = text;
  }

  /** The orders, for those who read rather than look. */
  spell() {
    const lines = this.timelines.flatMap((timeline) => [
      timeline.summary,
      ...Array.from({ length: timeline.ranks }, (_, rank) => {
        const own = [];
        for (let i = timeline.rows[rank]; i < timeline.rows[rank + 1]; i++)
          own.push(`${timeline.label(i)}\u00a0${round(timeline.start[i])}–\u2060${round(timeline.end[i])}`); // not to be broken
        return `rank ${rank}: ${own.join(", ")}`;
      }),
      "",
    ]);
    this.words.textContent = lines.join("\n");
  }

  key(event, n) {
    const timeline = this.timelines[n];
    const arrows = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: "up", ArrowDown: "down" };
    if (event.key in arrows) {
      const i = this.current?.panel === n ? this.current.i : undefined;
      const move = arrows[event.key];
      let next = i === undefined ? 0 : typeof move === "number" ? i + move : i;
      if (i !== undefined && typeof move === "string") {
        const rank = timeline.rank[i] + (move === "up" ? -1 : 1);
        if (rank >= 0 && rank < timeline.ranks) next = Math.min(timeline.after(rank, timeline.start[i]), timeline.rows[rank + 1] - 1);
      } else if (i !== undefined && timeline.rank[next] !== timeline.rank[i]) next = i;
      if (next >= 0 && next < timeline.count) {
        this.set({ current: { panel: n, i: next } });
        const width = this.view.right - this.view.left;
        if (timeline.start[next] < this.view.left || timeline.end[next] > this.view.right) this.lookAt(timeline.start[next] - width / 2, width);
      }
    } else if (["+", "=", "-"].includes(event.key)) {
      const i = this.current?.panel === n ? this.current.i : undefined;
      this.zoom(event.key === "-" ? 2 : 0.5, i === undefined ? undefined : (timeline.start[i] + timeline.end[i]) / 2);
    } else if (event.key === "Home") this.whole();
    else if (event.key === " ") this.toggle();
    else if (event.key === "Enter") this.choose();
    else if (event.key === "Escape") this.set({ chosen: null, current: null, time: null });
    else return;
    event.preventDefault();
  }

  lookAt(left, width = this.view.right - this.view.left) {
    const most = Math.min(width, this.end);
    const from = Math.max(0, Math.min(left, this.end - most));
    this.view = { left: from, right: from + most };
    this.draw();
  }

  zoom(factor, around = (this.view.left + this.view.right) / 2) {
    const width = Math.max(this.end / 5000, (this.view.right - this.view.left) * factor);
    this.lookAt(around - (around - this.view.left) * (width / (this.view.right - this.view.left)), width);
  }

  whole() {
    this.view = { left: 0, right: this.end };
    this.set({ time: null, chosen: null });
  }

  /** To the next or last time at which anything starts or ends. */
  step(by) {
    this.pause();
    const now = this.time ?? (by > 0 ? -1 : this.end);
    const times = [...new Set(this.timelines.flatMap((each) => [...each.start, ...each.end]))].toSorted((a, b) => a - b);
    const later = times.find((each) => each > now + 1e-9) ?? this.end;
    const before = times.filter((each) => each < now - 1e-9).pop() ?? 0;
    this.set({ time: by === -Infinity ? 0 : by > 0 ? later : before });
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.time === null || this.time >= this.end) this.time = 0;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const seconds = Math.min(20, Math.max(4, this.end / 4)); // for the whole
    const [begun, from] = [performance.now(), this.time];
    this.playIs("pause");
    this.line.setAttribute("aria-live", "off"); // or it would speak without end
    const on = () => {
      const passed = (performance.now() - begun) / 1000;
      this.set({ time: Math.min(this.end, from + (this.end * passed) / seconds) });
      if (this.time >= this.end) this.pause();
      else this.playing = calm ? { timer: setTimeout(on, 700) } : { frame: requestAnimationFrame(on) };
    };
    on();
  }

  /** What the button does next, "play" or "pause". */
  playIs(name) {
    this.playButton.replaceChildren(icon(ICONS[name]));
    for (const attribute of ["title", "aria-label"]) this.playButton.setAttribute(attribute, name);
  }

  pause() {
    if (this.playing) {
      clearTimeout(this.playing.timer);
      cancelAnimationFrame(this.playing.frame);
    }
    this.playing = null;
    this.playIs("play");
    this.line.setAttribute("aria-live", "polite");
  }

  /** Paint with the next frame, once for however many changes there are until then. */
  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  shown(n) {
    const style = getComputedStyle(this.root);
    const [timeline, outline] = [this.timelines[n], this.outlines[n]];
    const palette = new Palette(this.look, this.by, timeline.stages, timeline.chunks);
    return { palette, look: this.look, ink: style.color, paper: behind(this.root), outline, most: this.most };
  }

  paint() {
    const width = this.stack.clientWidth;
    if (!width || !this.timelines) return;
    this.panels.forEach(({ holder, base, over }, n) => {
      const [timeline, layout, shown] = [this.timelines[n], this.layout(n), this.shown(n)];
      holder.style.height = `${layout.height}px`;
      const state = JSON.stringify([width, layout.height, this.view, this.by, shown.ink, shown.paper, this.most, devicePixelRatio]);
      if (base.state !== state || base.timeline !== timeline) {
        paint(fitted(base, width, layout.height), timeline, layout, shown);
        Object.assign(base, { state, timeline });
      }
      this.paintOver(fitted(over, width, layout.height), n, layout, shown);
    });
    this.describeColours();
    this.root.dataset.painted = `${1 + Number(this.root.dataset.painted ?? 0)}`;
  }

  /** What lies over the picture: the journey, the critical path, the moment, and what is pointed at. */
  paintOver(context, n, layout, shown) {
    const timeline = this.timelines[n];
    context.clearRect(0, 0, layout.width, layout.height);
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, 0, layout.width - MARGIN.left - MARGIN.right, layout.height);
    context.clip();
    const veil = (from) => {
      context.globalAlpha = 0.78;
      context.fillStyle = shown.paper;
      context.fillRect(Math.max(0, from), layout.top, layout.width, layout.height - layout.top - MARGIN.bottom);
      context.globalAlpha = 1;
    };
    const some = (those) => {
      const bare = { ...timeline, after: (rank) => rank, rows: [0, those.length], ranks: 1 };
      for (const name of ["rank", "start", "end", "stage", "microbatch", "chunk", "copy", "part", "mark", "op"])
        bare[name] = those.map((i) => timeline[name][i]);
      paintBoxes(context, bare, layout, shown.palette, shown.ink);
    };
    const join = (from, to) => {
      const [x1, y1, w1, h1] = layout.box(timeline, from);
      const [x2, y2, , h2] = layout.box(timeline, to);
      context.beginPath();
      context.moveTo(x1 + w1, y1 + h1 / 2);
      context.lineTo(x2, y2 + h2 / 2);
      context.stroke();
    };
    const ring = (i, wide) => {
      const [x, y, width, height] = layout.box(timeline, i);
      context.lineWidth = wide;
      context.strokeRect(x, y, Math.max(1, width - 1), height);
    };
    context.strokeStyle = shown.ink;
    context.lineWidth = 1.3;
    if (this.chosen) {
      veil(0);
      const all = timeline.journey(this.chosen.microbatch);
      some(all);
      for (const i of all) for (const need of timeline.needs[i]) if (timeline.rank[need] !== timeline.rank[i]) join(need, i);
    }
    if (this.path) {
      timeline.path.forEach((i) => ring(i, 2));
      timeline.path.slice(1).forEach((i, k) => timeline.rank[i] !== timeline.rank[timeline.path[k]] && join(timeline.path[k], i));
    }
    if (this.time !== null) {
      const x = layout.x(this.time);
      veil(x);
      context.fillStyle = shown.ink;
      context.fillRect(x - 0.5, layout.top, 1.5, layout.height - layout.top - MARGIN.bottom);
    }
    const { panel, i, gap } = this.current ?? {};
    if (panel === n && i !== undefined) {
      ring(i, 2.5);
      context.setLineDash([]);
      timeline.needs[i].forEach((need) => (ring(need, 1.5), join(need, i)));
      context.setLineDash([4, 3]);
      timeline.users[i].forEach((user) => (ring(user, 1), join(i, user)));
      context.setLineDash([]);
    }
    if (panel === n && gap) {
      context.lineWidth = 1.5;
      context.setLineDash([4, 3]);
      const [x, y] = [layout.x(gap.start), layout.y(gap.rank, ROW.top)];
      context.strokeRect(x, y, layout.x(gap.end) - x - 1, (ROW.bottom - ROW.top) * layout.rowHeight);
      context.setLineDash([]);
    }
    context.restore();
  }

  /** The legend says what is in the picture, and nothing else. */
  describeColours() {
    const state = JSON.stringify([this.by, this.timelines.map((each) => [each.chunks, each.copies, each.count, each.cap])]);
    if (this.legend.dataset.state === state) return;
    this.legend.dataset.state = state;
    const swatch = (style, text) => made("span", {}, made("i", { style }), text);
    const ops = [...new Set(this.timelines.flatMap((each) => [...new Set(each.op)]))];
    const entries = [];
    if (this.by === "op")
      for (const op of Object.keys(this.look.colors))
        if (ops.includes(op)) entries.push(swatch(`background:${this.look.colors[op]}`, this.look.names[op]));
    if (this.by === "op" && this.timelines.some((each) => each.chunks > 1)) entries.push(made("span", {}, "darker: later chunk"));
    if (this.by !== "op") entries.push(made("span", {}, `a hue for each ${this.by}; backwards are darker`));
    if (this.timelines.some((each) => each.copies > 1)) entries.push(swatch("border:1px solid", "second copy"));
    if (this.outlines.some(Boolean)) entries.push(swatch("border:1px solid", `outlined: ${this.outlines.find(Boolean).source}`));
    entries.push(swatch(`background:${this.look.memory}`, "activations held"));
    if (this.timelines.some((each) => each.cap !== null)) entries.push(swatch("border-top:1px solid;height:0", "the most allowed"));
    if (this.timelines.some((each) => each.mark.includes(1))) entries.push(swatch(`border:2px solid ${MARK}`, "differs"));
    this.legend.replaceChildren(...entries);
  }

  save(kind) {
    const [width, layouts] = [this.stack.clientWidth, this.timelines.map((_, n) => this.layout(n))];
    const name = this.timelines.map((each) => each.title.split(",")[0].replace(/[^\w-]+/g, "-").slice(0, 60)).join("-and-");
    const height = layouts.reduce((sum, each) => sum + each.height, 0);
    if (kind === "svg") {
      const parts = this.timelines.map((timeline, n) => {
        const context = new SvgContext(width, layouts[n].height, n);
        paint(context, timeline, layouts[n], this.shown(n));
        const y = layouts.slice(0, n).reduce((sum, each) => sum + each.height, 0);
        return context.text().replace("<svg ", `<svg y="${y}" `);
      });
      const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}">${parts.join("")}</svg>`;
      save(`${name}.svg`, new Blob([text], { type: "image/svg+xml" }));
      return;
    }
    const canvas = made("canvas");
    const context = fitted(canvas, width, height, 2);
    this.timelines.forEach((timeline, n) => {
      paint(context, timeline, layouts[n], this.shown(n));
      context.translate(0, layouts[n].height);
    });
    canvas.toBlob((content) => save(`${name}.png`, content));
  }
}

/** A canvas of this size on the page, sharp on any screen; its context. */
function fitted(canvas, width, height, ratio = devicePixelRatio) {
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    Object.assign(canvas, { width: across, height: down });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** The colour behind an element. */
function behind(element) {
  for (let node = element; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (colour && colour !== "transparent" && !colour.endsWith(", 0)")) return colour;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "#1e1e1e" : "#ffffff";
}

// ------------------------------------------------------------------------------------------ what is built around figures

const SVG = "http://www.w3.org/2000/svg";

function drawn(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A small chart: points with names, or a line through them. `x` and `y` are { label, format }. */
export function chart(points, { x, y, line = false, width = 420, height = 220 }) {
  const [left, right, top, bottom] = [58, 14, 12, 36];
  const most = { x: largest(points.map((p) => p.x)) * 1.12 || 1, y: largest(points.map((p) => p.y)) * 1.15 || 1 };
  const across = (value) => left + (value / most.x) * (width - left - right);
  const up = (value) => height - bottom - (value / most.y) * (height - top - bottom);
  const said = points.map((p) => `${p.name ? `${p.name}: ` : ""}${x.format(p.x)}, ${y.format(p.y)}`).join("; ");
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "ppedu-chart", role: "img", "aria-label": `${y.label} against ${x.label}. ${said}` });
  svg.style.maxWidth = `${width}px`;
  const text = (at, content, attributes) => svg.append(drawn("text", { x: at[0], y: at[1], ...attributes }, content));
  for (const value of ticks(0, most.x)) {
    if (!Number.isInteger(value) && x.whole) continue;
    svg.append(drawn("line", { x1: across(value), x2: across(value), y1: top, y2: height - bottom, class: "ppedu-grid" }));
    text([across(value), height - bottom + 14], x.format(value), { "text-anchor": "middle" });
  }
  const steps = ticks(0, most.y).filter((_, k) => k % 2 === 0);
  for (const value of steps) {
    svg.append(drawn("line", { x1: left, x2: width - right, y1: up(value), y2: up(value), class: "ppedu-grid" }));
    text([left - 6, up(value) + 4], y.format(value), { "text-anchor": "end" });
  }
  text([width - right, height - 4], x.label, { "text-anchor": "end" });
  text([4, top - 1], y.label, {});
  if (line) {
    const way = points.map((p, k) => `${k ? "L" : "M"}${across(p.x)} ${up(p.y)}`).join("");
    svg.append(drawn("path", { d: way, class: "ppedu-curve" }));
    return svg;
  }
  // Points at the same place share a label; a label that would cover anything goes to the other side, or above or below.
  const places = new Map();
  for (const p of points) {
    const key = `${Math.round(across(p.x) / 4)},${Math.round(up(p.y) / 4)}`;
    places.set(key, [...(places.get(key) ?? []), p]);
  }
  const taken = [...places.values()].map(([p]) => {
    const [cx, cy] = [across(p.x), up(p.y)];
    return { left: cx - 5, top: cy - 5, right: cx + 5, bottom: cy + 5 };
  });
  taken.push({ left: 0, top: 0, right: left, bottom: height }, { left: 0, top: height - bottom + 6, right: width, bottom: height }); // the axes
  for (const group of places.values()) {
    const [cx, cy] = [across(group[0].x), up(group[0].y)];
    svg.append(drawn("circle", { cx, cy, r: 4.5, class: "ppedu-point" }));
    const name = group.map((p) => p.name).join(", ");
    const size = name.length * 6.6;
    const spots = [4, 17, -9, 30, -22, 43].flatMap((shift) =>
      [cx + 9, cx - 9 - size].map((from) => ({ left: from, top: cy + shift - 11, right: from + size, bottom: cy + shift + 2 })),
    );
    const free = (box) =>
      box.right <= width - 6 && box.top >= 0 && !taken.some((o) => box.left < o.right && o.left < box.right && box.top < o.bottom && o.top < box.bottom);
    const spot = spots.find(free);
    if (!spot) continue;
    taken.push(spot);
    const before = spot.right < cx;
    text([before ? spot.right : spot.left, spot.bottom - 2], name, { "text-anchor": before ? "end" : "start" });
  }
  return svg;
}

const percent = (value) => `${+(100 * value).toFixed(1)}%`;

class Show {
  constructor(root, look) {
    this.figure = new Figure(root, look);
  }
  update(state) {
    this.figure.update(state.panels);
  }
  destroy() {
    this.figure.destroy();
  }
}

class Compare extends Show {
  constructor(root, look) {
    super(root, look);
    this.below = made("div", { class: "ppedu-numbers" });
    root.append(this.below);
  }
  update(state) {
    super.update(state);
    const [head, ...rows] = state.table;
    const line = (tag, cells) => made("tr", {}, ...cells.map((cell, k) => made(k ? tag : "th", { scope: tag === "th" ? "col" : k ? null : "row" }, `${cell}`)));
    const table = made("table", {}, made("thead", {}, line("th", head)), made("tbody", {}, ...rows.map((row) => line("td", row))));
    const points = state.points.map(([name, peak, bubble]) => ({ name, x: peak, y: bubble }));
    this.below.replaceChildren(table, chart(points, { x: { label: "peak memory", format: round }, y: { label: "bubble", format: percent } }));
  }
}

/** A line of code to take away. */
function code(label) {
  const text = made("pre", { tabindex: "0", role: "group", "aria-label": label });
  const copy = button("copy", "copy as code", async () => {
    await navigator.clipboard?.writeText(text.textContent).catch(() => null);
    getSelection().selectAllChildren(text); // where the clipboard is not to be had, it is one key away
    copy.textContent = "copied";
    setTimeout(() => (copy.textContent = "copy"), 1500);
  });
  return { holder: made("div", { class: "ppedu-code" }, text, copy), text };
}

class Explore {
  constructor(root, look, send) {
    Object.assign(this, { send, waits: null, busy: false, inputs: new Map() });
    // What comes of a slider's next values is asked for while nobody waits: the kernel may be far away.
    Object.assign(this, { near: null, asked: false, ahead: new Map() });
    this.settings = made("div", { class: "ppedu-settings" });
    this.note = made("p", { class: "ppedu-note", role: "status" });
    root.append(this.settings, this.note);
    this.figure = new Figure(root, look);
    this.code = code("the code for what is shown");
    root.append(this.code.holder);
  }

  /** One question is under way at a time; of those asked meanwhile, only what is newest counts. */
  ask(change) {
    this.waits = { ...this.waits, ...change };
    if (this.busy || !this.waits) return;
    this.busy = true;
    this.send({ set: this.waits });
    this.waits = null;
  }

  /** A slider has moved: what is known of it is shown at once. It is asked for all the same, so that Python knows. */
  move(name, value) {
    this.say(name, value);
    const known = this.ahead.get(this.key());
    if (known) this.show(JSON.parse(known));
    this.ask({ [name]: value });
  }

  /** Where the controls stand, one of them elsewhere. */
  key(change = {}) {
    const values = [...this.inputs].map(([name, input]) => [name, input.value]);
    return JSON.stringify({ ...Object.fromEntries(values), ...change });
  }

  /** Ask for the nearest value of the slider in use that is not known yet, if that is no great work. */
  foresee() {
    if (this.busy || this.asked || !this.near) return;
    const { value, min, max, step } = this.inputs.get(this.near);
    for (let far = 1; far <= Math.min(4, 10_000 / this.figure.timelines[0].count); far++) {
      for (const way of [far, -far]) {
        const next = +(+value + way * step).toFixed(9); // as the slider has it, 0.3 and not 0.30000000000000004
        const key = this.key({ [this.near]: `${next}` });
        if (next < min || next > +max || this.ahead.has(key)) continue;
        this.asked = true;
        return this.send({ ahead: JSON.parse(key) });
      }
    }
  }

  hear({ ahead, state }) {
    this.asked = false;
    this.ahead.set(JSON.stringify(ahead), state);
    if (this.ahead.size > 24) this.ahead.delete(this.ahead.keys().next().value);
    this.foresee();
  }

  update(state) {
    this.busy = false;
    if (!this.waits || !this.ahead.get(this.key())) this.show(state); // or something newer is shown already
    if (this.waits) this.ask({});
    this.foresee();
  }

  show(state) {
    for (const control of state.controls) this.control(control);
    this.settings.querySelectorAll("label").forEach((label) => {
      label.hidden = !state.controls.some((control) => control.name === label.dataset.name);
    });
    const offers = state.offers.map(([label, change]) => button(label, label, () => this.ask(change)));
    this.note.replaceChildren(state.note, ...offers);
    this.note.classList.toggle("ppedu-wrong", state.wrong || state.over);
    this.figure.stack.classList.toggle("ppedu-stale", state.wrong);
    this.figure.update(state.panels);
    this.code.text.textContent = state.code;
  }

  control({ name, label, value, choices, min, max, step }) {
    let input = this.inputs.get(name);
    if (!input) {
      input = choices
        ? made("select", { "aria-label": label, onchange: () => this.ask({ [name]: input.value }) })
        : made("input", { "aria-label": label, type: "range", oninput: () => this.move(name, input.value) });
      const use = () => {
        this.near = choices ? null : name;
        this.foresee();
      };
      for (const kind of ["pointerenter", "focus", "input"]) input.addEventListener(kind, use);
      input.shown = made("output", {});
      this.inputs.set(name, input);
      this.settings.append(made("label", { "data-name": name }, made("span", {}, label), input, input.shown));
    }
    if (choices && input.options.length !== choices.length) input.replaceChildren(...choices.map((each) => made("option", { value: each }, each)));
    if (!choices) Object.assign(input, { min, max, step });
    if (this.waits && name in this.waits) return; // it has moved on
    if (input.value !== `${value}`) input.value = value;
    if (!choices) this.say(name, value);
  }

  say(name, value) {
    this.inputs.get(name).shown.textContent = +value ? `${value}` : { memory: "none", overlap: "no gain" }[name] ?? `${value}`;
  }

  destroy() {
    this.figure.destroy();
  }
}

class Puzzle {
  constructor(root, look, send) {
    Object.assign(this, { send });
    this.levels = made("select", { "aria-label": "level", onchange: () => send({ level: this.levels.value }) });
    const act = (name, title) => button(name, title, () => send({ do: name }));
    this.acts = ["undo", "redo", "reset", "hint", "finish"].map((name) => act(name, name === "finish" ? "finish it for me" : name));
    this.goal = made("p", { class: "ppedu-goal" });
    this.note = made("p", { class: "ppedu-note", role: "status" });
    this.trays = made("div", { class: "ppedu-trays", role: "group", "aria-label": "actions left to place" });
    root.append(made("div", { class: "ppedu-bar" }, this.levels, ...this.acts), this.goal, this.trays, this.note);
    this.figure = new Figure(root, look);
    this.code = code("the code for this schedule");
    root.append(this.code.holder);
    this.look = look;
  }

  /** A second click before the answer to the first is not a second action. */
  place(action) {
    if (this.placing === action) return;
    this.placing = action;
    this.send({ place: action });
  }

  update(state) {
    this.placing = null;
    if (this.levels.options.length !== state.levels.length)
      this.levels.replaceChildren(...state.levels.map(([name, title]) => made("option", { value: name }, title)));
    this.levels.value = state.level;
    for (const act of this.acts) act.disabled = !state.can.includes(act.textContent);
    this.goal.textContent = state.goal;
    this.note.textContent = state.note;
    this.note.className = `ppedu-note ppedu-${state.tone}`;
    const focus = document.activeElement?.dataset?.place ?? this.trays.getRootNode().activeElement?.dataset?.place;
    this.trays.replaceChildren(
      ...state.trays.map((tray, rank) =>
        made(
          "div",
          { class: "ppedu-tray", role: "group", "aria-label": `rank ${rank}` },
          made("span", {}, `rank ${rank}`),
          ...tray.map(([action, label, op, free]) => {
            const colours = op.split("+").map((each) => this.look.colors[each]);
            const style = `border-color:${colours[0]};border-right-color:${colours[colours.length - 1]}`;
            return button(label, `place ${action}`, () => this.place(action), { "data-place": action, "data-rank": rank, style, disabled: !free });
          }),
          ...(tray.some(([, , , free]) => free) ? [] : [made("em", {}, "done")]),
        ),
      ),
    );
    if (focus) {
      // The keyboard stays where it was, or goes on to what is left of the same rank.
      const left = [...this.trays.querySelectorAll("button:not(:disabled)")];
      const same = left.find((each) => each.dataset.place === focus);
      (same ?? left.find((each) => each.dataset.rank === `${state.rank}`) ?? this.acts[0]).focus();
    }
    this.figure.update(state.panels);
    this.code.holder.hidden = !state.code;
    this.code.text.textContent = state.code;
  }

  destroy() {
    this.figure.destroy();
  }
}

class Live extends Show {
  constructor(root, look) {
    const head = made("div", { class: "ppedu-bar" });
    root.append(head);
    super(root, look);
    this.done = made("progress", { "aria-label": "steps" });
    this.said = made("span", { role: "status" });
    this.loss = made("div", {});
    head.append(this.done, this.said);
    root.append(this.loss);
  }
  update(state) {
    super.update(state);
    Object.assign(this.done, { max: state.steps, value: state.losses.length });
    const last = state.losses[state.losses.length - 1];
    this.said.textContent = `step ${state.losses.length} of ${state.steps}, loss ${last === null ? "not a number" : last.toFixed(3)}`;
    const points = state.losses.map((loss, step) => ({ x: step + 1, y: loss })).filter((point) => point.y !== null);
    this.loss.replaceChildren(chart(points, { x: { label: "step", format: round, whole: true }, y: { label: "loss", format: round }, line: true, width: 900, height: 160 }));
  }
}

const KINDS = { show: Show, compare: Compare, explore: Explore, puzzle: Puzzle, live: Live };

/** Build what `state` describes in an element. `send` takes what the user does to Python. */
export function mount(element, state, send = () => {}) {
  const root = made("div", { class: "ppedu" });
  root.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey) event.stopPropagation(); // the notebook has keys of its own
  });
  element.append(root);
  const built = new KINDS[state.kind](root, state.look, send);
  built.update(state);
  return built;
}

function render({ model, el }) {
  const state = () => JSON.parse(model.get("state"));
  let built = mount(el, state(), (message) => model.send(message));
  const update = () => built.update(state());
  const hear = (message) => built.hear(message);
  model.on("change:state", update);
  model.on("msg:custom", hear);
  return () => {
    model.off("change:state", update);
    model.off("msg:custom", hear);
    built.destroy();
    built = null;
    el.replaceChildren(); // Jupyter keeps the element of a view that has gone; let it be an empty one
    model.send({ gone: true });
  };
}

export default { render };
