// @ts-check
// A figure: timelines under each other on one time axis, with a toolbar, a line of explanation and a legend.

import { behind, button, element, fitted, menu } from "./elements.js";
import { Layout } from "./layout.js";
import { describeColors } from "./legend.js";
import { Timeline } from "./model.js";
import { paintOver } from "./over.js";
import { paint } from "./painting.js";
import { Palette } from "./palette.js";
import { createPlace } from "./pointing.js";
import { atOnce, inTasks } from "./tasks.js";
import { icon, toolbar } from "./toolbar.js";
import { layOver } from "./why.js";
import { placeTip, sentence } from "./words.js";

/**
 * @typedef {import("./block.js").Block} Block
 * @typedef {import("./block.js").Ghost} Ghost
 * @typedef {import("./boxes.js").Style} Style
 * @typedef {import("./model.js").Color} Color
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {import("./palette.js").ColorBy} ColorBy
 * @typedef {import("./pointing.js").Focus} Focus
 * @typedef {import("./pointing.js").Place} Place
 */

const LARGE = 10_000; // boxes: painting them for the first time takes so long that it has tasks of its own
const THEME = ["class", "style", "theme", "data-theme", "data-jp-theme-light", "data-jp-theme-name"];

/** Timelines under each other on one time axis, with a toolbar, a line of explanation and a legend. */
export class Figure {
  /** @type {Timeline[]} */
  timelines = [];
  /** @type {Place[]} */
  panels = [];
  view = { left: 0, right: 0 };
  end = 0;
  most = 0;
  /** @type {[string, string][]} */
  legend = [];
  /** @type {Record<string, Color[]>} the colors of each op */
  fills = {};
  /** @type {{ x: number, y: number } | null} the pointer on the page; null while the keyboard moves the focus */
  pointer = null;
  /** @type {ColorBy} */
  by = "op";
  path = false;
  lanes = false; // whether outlines have lanes of their own
  address = ""; // of the page on the web that saved pictures name
  frame = 0;
  /** @type {Promise<void> | null} ends when a large timeline is painted */
  painting = null;
  /** @type {{ timer?: ReturnType<typeof setTimeout>, frame?: number } | null} */
  playing = null;
  /** @type {number | null} the moment of playing; null: everything is shown */
  time = null;
  /** @type {Focus | null} */
  current = null;
  /** @type {{ panel: number, lane: number, microbatch: number } | null} the journey that is shown, and in which timeline */
  chosen = null;
  /** @type {(() => void) | null} repeats the block that is marked; null where none can be */
  repeat = null;
  /** @type {Block | null} */
  block = null;
  /** @type {Ghost | null} */
  ghost = null;

  /**
   * @param {HTMLElement} root
   * @param {Look} look
   */
  constructor(root, look) {
    this.root = root;
    this.look = look;
    /** Called when a reader has switched `lanes`. */
    this.switched = () => {};
    const choose = () => {
      this.showLanes(this.ways.value === "lanes");
      this.switched();
    };
    this.ways = menu({ "aria-label": "show the second timeline as", onchange: choose }, [
      ["outline", "outline"],
      ["lanes", "two lanes"],
    ]);
    const path = element("input", { type: "checkbox", onchange: () => this.set({ path: path.checked }) });
    this.critical = element("label", {}, path, " critical path");
    this.playButton = button(icon("play"), "play", () => this.toggle());
    this.stack = element("div", { class: "ppedu-stack" });
    this.line = element("p", { class: "ppedu-line", "aria-live": "polite" });
    this.tip = element("div", { class: "ppedu-tip", "aria-hidden": "true", hidden: true }); // the line is read aloud
    this.words = element("pre", { tabindex: "0", role: "group", "aria-label": "orders" });
    const attributes = { class: "ppedu-words", ontoggle: () => this.spell() };
    this.table = element("details", attributes, element("summary", {}, "orders as text"), this.words);
    this.key = element("div", { class: "ppedu-legend" });
    if (look.plain) root.append(this.stack, this.line, this.tip);
    else root.append(toolbar(this), this.stack, this.line, element("div", { class: "ppedu-foot" }, this.key, this.table), this.tip);
    this.redraw = () => this.draw();
    this.watch = new ResizeObserver(this.redraw);
    this.watch.observe(this.stack);
    this.themes = new MutationObserver(this.redraw);
    for (const node of [document.documentElement, document.body])
      this.themes.observe(node, { attributes: true, attributeFilter: THEME });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.redraw);
  }

  destroy() {
    this.pause();
    this.watch.disconnect();
    this.themes.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
    cancelAnimationFrame(this.frame);
    for (const place of this.panels) place.painted = []; // ends what is being painted
  }

  /**
   * Show these timelines. The visible part of the time axis stays, if the new axis contains it.
   * @param {Stack} state
   */
  update({ panels, end, most, legend, fills }) {
    const zoomed = this.view.left > 0 || this.view.right < this.end;
    this.timelines = panels.map((data) => new Timeline(data));
    this.end = end || 1;
    this.most = most;
    this.legend = legend;
    this.fills = fills;
    if (!zoomed || this.view.left >= this.end) this.view = { left: 0, right: this.end };
    Object.assign(this, { current: null, block: null });
    if (this.timelines.some(({ outline }) => outline)) this.critical.before(this.ways);
    else this.ways.remove();
    if (this.chosen && !(this.chosen.microbatch < (this.drawn(this.chosen)?.data.microbatches ?? 0))) this.chosen = null;
    if (this.playing) this.pause();
    this.time = null; // it was a moment of other timelines
    for (const { holder, numbers } of this.panels.splice(panels.length)) [holder, numbers].forEach((each) => each.remove());
    while (this.panels.length < panels.length) this.panels.push(createPlace(this, this.panels.length));
    this.describePanels();
    this.explain();
    // Now and not with the next frame, because a learner who moves a slider waits for it. The first picture has a task
    // of its own: building what is around it takes as long.
    if (this.root.dataset.painted || this.timelines.some(({ count }) => count > LARGE)) this.paint();
    else this.draw();
  }

  /** @param {number} n */
  layout(n, width = this.stack.clientWidth) {
    return new Layout(this.timelines[n], this.look, width, this.view, this.pair(n) ? "upper" : "whole");
  }

  /**
   * The layouts of a panel's lanes, or its only one.
   * @param {number} n
   */
  lanesOf(n, width = this.stack.clientWidth) {
    const layout = this.layout(n, width);
    return layout.lanes ? [layout, layout.as("lower")] : [layout];
  }

  /**
   * What tells two lanes of a panel apart, or null if it has one.
   * @param {number} n
   */
  pair(n) {
    return (this.lanes && this.timelines[n]?.data.pair) || null;
  }

  /**
   * The timeline of a lane.
   * @param {Pick<Focus, "panel" | "lane">} focus
   * @returns {Timeline | undefined}
   */
  drawn({ panel, lane }) {
    return (lane && this.timelines[panel]?.outline) || this.timelines[panel];
  }

  /** The timelines that are shown in lanes, from top to bottom. */
  get everyLane() {
    return this.timelines.flatMap((each) => (this.lanes && each.outline ? [each, each.outline] : [each]));
  }

  /**
   * Show outlines in lanes of their own, or as outlines.
   * @param {boolean} lanes
   */
  showLanes(lanes) {
    this.ways.value = lanes ? "lanes" : "outline";
    if (lanes === this.lanes) return;
    this.lanes = lanes;
    this.describePanels();
    this.set({ current: this.current?.lane ? null : this.current, chosen: this.chosen?.lane ? null : this.chosen });
  }

  /** Name the panels for screen readers, and write their orders as text. */
  describePanels() {
    this.panels.forEach(({ holder }, n) => {
      const [{ data, outline }, pair] = [this.timelines[n], this.pair(n)];
      const below = pair && outline ? `; in a lane below it, ${pair.names[1]}: ${outline.data.summary}` : "";
      holder.setAttribute("aria-label", data.summary + below);
    });
    this.spell();
  }

  /**
   * Change the state of the figure, and draw it.
   * @param {Partial<Pick<Figure, "by" | "path" | "time" | "current" | "chosen" | "block" | "ghost">>} changes
   */
  set(changes) {
    Object.assign(this, changes);
    this.explain();
    this.draw();
  }

  /** Show the journey of the focused box's microbatch. Hide the journey that is shown if it is the same. */
  choose() {
    const { panel = 0, lane = 0, i } = this.current ?? {};
    const microbatch = i === undefined ? -1 : (this.drawn({ panel, lane })?.boxes.microbatch[i] ?? -1);
    const again = microbatch === this.chosen?.microbatch && panel === this.chosen?.panel && lane === this.chosen?.lane;
    this.set({ chosen: microbatch < 0 || again ? null : { panel, lane, microbatch } });
  }

  /** Write the tooltip of the action or gap in focus, and the line below the timelines, which screen readers read. */
  explain() {
    const { i, gap } = this.current ?? {};
    this.line.textContent = sentence(this);
    this.tip.hidden = (!gap && i === undefined) || !!this.block;
    this.line.classList.toggle("ppedu-unseen", !this.tip.hidden); // the tooltip says the same
    if (this.tip.hidden) return;
    const [first, ...rest] = (this.line.textContent ?? "").split(/(?<=\.) (?=[A-Z])/);
    this.tip.replaceChildren(rest.length ? element("b", {}, first) : first, ...rest.map((each) => `\n${each}`));
    placeTip(this);
  }

  /** Write the orders as text, once a reader has opened them. */
  spell() {
    if (this.table.open) this.words.textContent = this.everyLane.map((timeline) => timeline.spell()).join("\n");
  }

  /**
   * Show the part of the time axis that begins at a time, within its ends.
   * @param {number} left
   */
  lookAt(left, width = this.view.right - this.view.left) {
    const most = Math.min(width, this.end);
    const from = Math.max(0, Math.min(left, this.end - most));
    this.view = { left: from, right: from + most };
    this.draw();
  }

  /**
   * Multiply the visible time by a factor, and keep the time `around` in its place.
   * @param {number} factor
   */
  zoom(factor, around = (this.view.left + this.view.right) / 2) {
    const before = this.view.right - this.view.left;
    const width = Math.max(this.end / 5000, before * factor);
    this.lookAt(around - (around - this.view.left) * (width / before), width);
  }

  /** Show the whole timeline, without a journey, and end playing. */
  whole() {
    this.view = { left: 0, right: this.end };
    this.set({ time: null, chosen: null });
  }

  /**
   * Go to the next or previous time at which an action starts or ends.
   * @param {number} by 1, -1, or -Infinity for the start
   */
  step(by) {
    this.pause();
    const now = this.time ?? (by > 0 ? -1 : this.end);
    const every = this.everyLane.flatMap(({ boxes }) => [...boxes.start, ...boxes.end]);
    const times = [...new Set(every)].toSorted((a, b) => a - b);
    const later = times.find((each) => each > now + 1e-9) ?? this.end;
    const before = times.findLast((each) => each < now - 1e-9) ?? 0;
    this.set({ time: by === -Infinity ? 0 : by > 0 ? later : before });
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  /**
   * How long playing a part of the time axis takes.
   * @param {number} length
   */
  secondsFor(length) {
    return Math.min(20, Math.max(4, length / 4));
  }

  play() {
    if (this.time === null || this.time >= this.end) this.time = 0;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const seconds = this.secondsFor(this.end);
    const [begun, from] = [performance.now(), this.time];
    this.labelPlayButton("pause");
    this.line.setAttribute("aria-live", "off"); // or a screen reader would speak without end
    const advance = () => {
      const passed = (performance.now() - begun) / 1000;
      const time = Math.min(this.end, from + (this.end * passed) / seconds);
      this.set({ time });
      if (time >= this.end) this.pause();
      else this.playing = calm ? { timer: setTimeout(advance, 700) } : { frame: requestAnimationFrame(advance) };
    };
    advance();
  }

  pause() {
    if (this.playing) {
      clearTimeout(this.playing.timer);
      cancelAnimationFrame(this.playing.frame ?? 0);
    }
    this.playing = null;
    this.labelPlayButton("play");
    this.line.setAttribute("aria-live", "polite");
  }

  /** @param {"play" | "pause"} name what a click on the button does */
  labelPlayButton(name) {
    this.playButton.replaceChildren(icon(name));
    for (const attribute of ["title", "aria-label"]) this.playButton.setAttribute(attribute, name);
  }

  /** Paint with the next frame, once for all changes until then. */
  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  /**
   * @param {number} n
   * @returns {Style}
   */
  style(n) {
    const [ink, paper] = [getComputedStyle(this.root).color, behind(this.root)];
    const palette = new Palette(this.timelines[n].data, this.by);
    return { palette, look: this.look, ink, paper, most: this.most };
  }

  /** What lies over the pictures, but for the focus. */
  get highlight() {
    return { microbatch: this.chosen?.microbatch ?? null, path: this.path, time: this.time };
  }

  paint() {
    const width = this.stack.clientWidth;
    if (!width || !this.timelines.length) return;
    this.panels.forEach((place, n) => {
      const [timeline, drawn, style] = [this.timelines[n], this.lanesOf(n), this.style(n)];
      const [layout] = drawn;
      const { left, right } = this.view;
      place.holder.style.height = `${layout.height}px`;
      const { ink, paper } = style;
      const shown = [timeline, this.lanes, left, right, this.by, this.most];
      const painted = [...shown, width, layout.height, ink, paper, devicePixelRatio];
      if (painted.some((each, k) => each !== place.painted[k])) {
        place.painted = painted;
        if (place.shown !== timeline && timeline.count > LARGE) this.painting = this.paintLarge(place, layout, style);
        else {
          layOver(place.numbers, atOnce(paint(fitted(place.base, width, layout.height), layout, style)), layout.height);
          place.shown = timeline;
        }
      }
      if (place.shown !== timeline) return;
      const { lane = 0, i: box, gap } = (this.current?.panel === n && this.current) || {};
      const over = fitted(place.over, width, layout.height);
      over.clearRect(0, 0, width, layout.height);
      const { block, ghost } = this;
      paintOver(over, drawn, style, { ...this.highlight, lane, box, gap, block, ghost });
    });
    describeColors(this);
    placeTip(this);
    if (this.panels.some(({ shown }, n) => shown !== this.timelines[n])) return;
    this.root.dataset.painted = `${1 + Number(this.root.dataset.painted ?? 0)}`;
  }

  /**
   * Paint a large timeline for the first time, in small tasks. Until it is complete, the picture before it stays.
   * @param {Place} place
   * @param {Layout} layout
   * @param {Style} style
   */
  async paintLarge(place, layout, style) {
    const [base, { painted }] = [element("canvas"), place];
    const work = paint(fitted(base, layout.width, layout.height), layout, style);
    const placed = await inTasks(work, () => place.painted === painted);
    if (!placed) return;
    place.base.replaceWith(base);
    layOver(place.numbers, placed, layout.height);
    Object.assign(place, { base, shown: layout.panel });
    this.paint();
  }
}
