// @ts-check
// The third of four files that Python joins into one ES module: a figure of timelines with its toolbar, and the widgets
// around it. There is no framework and no network: Jupyter loads the module through anywidget (the default export), and
// a saved page calls `mount`. Python computes; the module draws what it is sent and sends back what is clicked.

import { Timeline, pretty } from "./model.js";
import { Layout, Palette, SvgContext, assemble, chart, paint, paintOver, svgElement } from "./painting.js";

/**
 * @typedef {import("./model.js").Color} Color
 * @typedef {import("./model.js").Gap} Gap
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Op} Op
 * @typedef {import("./model.js").Panel} Panel
 * @typedef {import("./model.js").Stack} Stack
 * @typedef {import("./model.js").View} View
 * @typedef {import("./painting.js").ColorBy} ColorBy
 * @typedef {import("./painting.js").Style} Style
 * @typedef {{ panel: number, lane: number, i?: number, gap?: Gap }} Focus the box or gap under the pointer or the keyboard;
 *   lane 1 is that of an outline
 * @typedef {{ holder: HTMLElement, base: HTMLCanvasElement, over: HTMLCanvasElement, painted: unknown[] }} Place
 * @typedef {(message: Record<string, any>) => void} Send
 *
 * @typedef {object} Control
 * @property {string} name
 * @property {string} label
 * @property {string} value
 * @property {string[]} [choices]
 * @property {string} [min]
 * @property {string} [max]
 * @property {string} [step]
 *
 * @typedef {Stack & { table: string[][], points: [string, number, number][] }} CompareState
 * @typedef {Stack & { points: [string, number, number, string][], axis: string, note: string }} FrontierState
 * @typedef {Stack & { losses: (number | null)[], steps: number }} LiveState
 *
 * @typedef {object} Settings
 * @property {Control[]} controls
 * @property {string} note
 * @property {[string, Record<string, string>][]} offers
 * @property {boolean} wrong
 * @property {string} over a sentence about the memory limit, if a rank exceeds it
 * @property {string} code
 * @typedef {Stack & Settings} ExploreState
 */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export const element = (tag, attributes = {}, ...children) => assemble(document.createElement(tag), attributes, children);

/**
 * @param {Node | string} label
 * @param {string} title
 * @param {() => void} click
 * @param {Record<string, any>} attributes
 */
export const button = (label, title, click, attributes = {}) =>
  element("button", { type: "button", title, "aria-label": title, onclick: click, ...attributes }, label);

const ICONS = {
  start: "M1 1h2v10h-2zM11 1v10l-7-5z",
  back: "M10 1v10l-8-5z",
  play: "M2 1v10l8-5z",
  pause: "M2 1h3v10h-3zM7 1h3v10h-3z",
  forward: "M1 1v10l7-5zM9 1h2v10h-2z",
};

/**
 * A drawn icon for a button. Fonts may lack these characters, or color them.
 * @param {keyof typeof ICONS} name
 */
function icon(name) {
  const attributes = { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true", fill: "currentColor" };
  return svgElement("svg", attributes, svgElement("path", { d: ICONS[name] }));
}

/**
 * @param {string} name
 * @param {Blob} content
 */
function download(name, content) {
  const address = URL.createObjectURL(content);
  element("a", { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}

const HELP =
  "Point at an action or a gap for details. Click an action to follow its microbatch. Drag to move, Ctrl and wheel to " +
  "zoom. Keys: arrows, +, −, Space, Enter.";
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
  frame = 0;
  /** @type {{ timer?: ReturnType<typeof setTimeout>, frame?: number } | null} */
  playing = null;
  /** @type {number | null} the moment of playing; null: everything is shown */
  time = null;
  /** @type {Focus | null} */
  current = null;
  /** @type {{ panel: number, lane: number, microbatch: number } | null} the journey that is shown, and in which timeline */
  chosen = null;

  /**
   * @param {HTMLElement} root
   * @param {Look} look
   */
  constructor(root, look) {
    this.root = root;
    this.look = look;
    /** Called when a reader has switched `lanes`. */
    this.switched = () => {};
    this.ways = element("select", {
      "aria-label": "show the second timeline as",
      onchange: () => {
        this.showLanes(this.ways.value === "lanes");
        this.switched();
      },
    });
    this.ways.append(element("option", { value: "outline" }, "outline"), element("option", { value: "lanes" }, "two lanes"));
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
    root.append(this.toolbar(), this.stack, this.line, element("div", { class: "ppedu-foot" }, this.key, this.table), this.tip);
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
  }

  toolbar() {
    const color = element("select", {
      "aria-label": "color by",
      onchange: () => this.set({ by: /** @type {ColorBy} */ (color.value) }),
    });
    for (const each of ["op", "microbatch", "stage"]) color.append(element("option", { value: each }, `color: ${each}`));
    const space = () => element("span", { class: "ppedu-space" });
    const bar = element(
      "div",
      { class: "ppedu-bar", role: "toolbar", "aria-label": "timeline" },
      button(icon("start"), "go to the start", () => this.step(-Infinity)),
      button(icon("back"), "step back", () => this.step(-1)),
      this.playButton,
      button(icon("forward"), "step forward", () => this.step(1)),
      space(),
      button("+", "zoom in", () => this.zoom(0.5)),
      button("−", "zoom out", () => this.zoom(2)),
      button("whole", "show the whole timeline", () => this.whole()),
      space(),
      color,
      this.critical,
      space(),
      button("SVG", "save as SVG", () => this.saveSvg()),
      button("PNG", "save as PNG", () => this.savePng()),
    );
    // Tab stops once at the buttons; the arrow keys move between them.
    const buttons = [...bar.querySelectorAll("button")];
    const stopAt = (/** @type {HTMLButtonElement} */ one) => buttons.forEach((each) => (each.tabIndex = each === one ? 0 : -1));
    stopAt(this.playButton);
    bar.addEventListener("focusin", ({ target }) => target instanceof HTMLButtonElement && stopAt(target));
    bar.addEventListener("keydown", ({ key, target }) => {
      const here = target instanceof HTMLButtonElement ? buttons.indexOf(target) : -1;
      const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
      if (here >= 0 && by) buttons[(here + by + buttons.length) % buttons.length].focus();
    });
    return bar;
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
    this.current = null;
    if (this.timelines.some(({ outline }) => outline)) this.critical.before(this.ways);
    else this.ways.remove();
    if (this.chosen && !(this.chosen.microbatch < (this.drawn(this.chosen)?.data.microbatches ?? 0))) this.chosen = null;
    if (this.playing) this.pause();
    this.time = null; // it was a moment of other timelines
    while (this.panels.length > panels.length) this.panels.pop()?.holder.remove();
    while (this.panels.length < panels.length) this.panels.push(this.panel(this.panels.length));
    this.describePanels();
    this.explain();
    this.paint(); // now and not with the next frame, because a learner who moves a slider waits for it
  }

  /**
   * Create the place of a timeline, with what the mouse and the keyboard do there.
   * @param {number} n
   * @returns {Place}
   */
  panel(n) {
    const [base, over] = [element("canvas"), element("canvas")];
    const attributes = { class: "ppedu-panel", tabindex: "0", role: "application", "aria-roledescription": "timeline" };
    const holder = element("div", attributes, base, over);
    /** @param {MouseEvent} event */
    const at = (event) => {
      const { left, top } = holder.getBoundingClientRect();
      return { x: event.clientX - left, y: event.clientY - top };
    };
    /** @type {{ x: number, view: View, moved: boolean } | null} */
    let grabbed = null;
    holder.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.clientX, view: { ...this.view }, moved: false };
    });
    holder.addEventListener("pointermove", (event) => {
      this.pointer = { x: event.clientX, y: event.clientY };
      if (!grabbed || !event.buttons) {
        this.point(n, at(event));
        return this.placeTip();
      }
      const { x, view, moved } = grabbed;
      const far = event.clientX - x;
      if (Math.abs(far) > 3 && !moved) {
        grabbed.moved = true;
        holder.setPointerCapture(event.pointerId);
      }
      if (grabbed.moved) this.lookAt(view.left - far / this.layout(n).scale, view.right - view.left);
    });
    holder.addEventListener("pointerup", (event) => {
      const click = grabbed && !grabbed.moved;
      grabbed = null;
      this.pointer = { x: event.clientX, y: event.clientY };
      if (!click) return;
      this.point(n, at(event));
      this.choose();
    });
    holder.addEventListener("pointerleave", () => {
      if (!grabbed?.moved) this.set({ current: null });
    });
    /** @param {WheelEvent} event */
    const turn = (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey) return; // the page scrolls
      event.preventDefault();
      if (event.shiftKey) this.lookAt(this.view.left + (event.deltaY + event.deltaX) / this.layout(n).scale);
      else this.zoom(Math.exp(event.deltaY / 300), this.layout(n).time(at(event).x));
    };
    holder.addEventListener("wheel", turn, { passive: false });
    holder.addEventListener("keydown", (event) => this.press(event, n));
    holder.addEventListener("focus", () => this.explain());
    holder.addEventListener("blur", () => (this.tip.hidden = true));
    this.stack.append(holder);
    return { holder, base, over, painted: [] };
  }

  /** @param {number} n */
  layout(n) {
    const part = this.pair(n) ? "upper" : "whole";
    return new Layout(this.timelines[n], this.look, this.stack.clientWidth, this.view, part);
  }

  /**
   * The layouts of a panel's lanes, or its only one.
   * @param {number} n
   */
  lanesOf(n) {
    const layout = this.layout(n);
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
   * @param {Partial<Pick<Figure, "by" | "path" | "time" | "current" | "chosen">>} changes
   */
  set(changes) {
    Object.assign(this, changes);
    this.explain();
    this.draw();
  }

  /**
   * Focus the box or gap at a position of a panel.
   * @param {number} n
   * @param {{ x: number, y: number }} position
   */
  point(n, { x, y }) {
    const [layout, lower] = this.lanesOf(n);
    const row = (y - layout.top) / layout.rowHeight;
    const [rank, time] = [Math.floor(row), layout.time(x)];
    const part = row - rank;
    const lane = lower && part > (layout.row.bottom + lower.lane) / 2 && part <= lower.row.bottom ? 1 : 0;
    const { timeline, middle } = lane ? lower : layout;
    /** @type {Focus | null} */
    let current = null;
    if (rank >= 0 && rank < timeline.data.ranks && x >= layout.left && x <= layout.right) {
      const i = timeline.at(rank, time, part < middle);
      const gap = timeline.gaps.find((each) => each.rank === rank && each.start <= time && time < each.end);
      if (i >= 0) current = { panel: n, lane, i };
      else if (gap) current = { panel: n, lane, gap };
    }
    const { panel, lane: before, i, gap } = this.current ?? {};
    const same = current?.i === i && current?.gap === gap && current?.panel === panel && current?.lane === before;
    if (!same) this.set({ current });
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
    this.line.textContent = this.sentence();
    this.tip.hidden = !gap && i === undefined;
    this.line.classList.toggle("ppedu-unseen", !this.tip.hidden); // the tooltip says the same
    if (this.tip.hidden) return;
    const [first, ...rest] = (this.line.textContent ?? "").split(/(?<=\.) (?=[A-Z])/);
    this.tip.replaceChildren(rest.length ? element("b", {}, first) : first, ...rest.map((each) => `\n${each}`));
    this.placeTip();
  }

  /** What is in focus, chosen or played, in words. */
  sentence() {
    const { i, gap } = this.current ?? {};
    const place = this.current ?? this.chosen ?? { panel: 0, lane: 0 };
    const [timeline, names] = [this.drawn(place), this.pair(place.panel)?.names];
    const lane = names?.[place.lane] ?? "";
    if (gap) return `${gap.why}${lane && ` (${lane})`}.`;
    if (timeline && i !== undefined) {
      const other = this.drawn({ ...place, lane: 1 - place.lane });
      const same = names && other?.find(timeline.label(i));
      const beside = same === undefined ? "" : `The same action, ${names?.[1 - place.lane]}: ${other?.when(same)}. `;
      return timeline.describe(i, this.look.names, lane, beside);
    }
    if (timeline && this.chosen) return timeline.tell(this.chosen.microbatch, lane);
    if (this.time === null) return HELP;
    const { time } = this;
    return this.everyLane.slice(0, names ? 2 : 1).map((each, k) => each.moment(time, names?.[k])).join(" ");
  }

  /**
   * Put the tooltip below the pointer, or below the box that the keyboard has reached; or above, if there is no space.
   * A backward's gradient comes from the rank below, which stays in view: its tooltip is above. That of a gap lies beyond
   * the lanes of the rank that waits and of the one that it waits for.
   */
  placeTip() {
    if (this.tip.hidden || !this.current) return;
    const { panel, lane, i, gap } = this.current;
    const home = this.root.getBoundingClientRect();
    let [x, top, bottom] = [0, 0, 0];
    if (this.pointer) [x, top, bottom] = [this.pointer.x + 12, this.pointer.y - 8, this.pointer.y + 18];
    else {
      const [layout, holder] = [this.lanesOf(panel)[lane], this.panels[panel].holder.getBoundingClientRect()];
      const [left, upper, width, height] = i === undefined ? [layout.x(gap?.start ?? 0), layout.y(gap?.rank ?? 0, 0), 0, 20] : layout.box(i);
      [x, top, bottom] = [holder.left + left + width / 2, holder.top + upper - 4, holder.top + upper + height + 6];
    }
    const { offsetWidth, offsetHeight } = this.tip;
    let upward = i !== undefined && "BI".includes(this.drawn(this.current)?.boxes.op[i] ?? " ");
    if (gap) {
      const [layout, { top: edge }] = [this.lanesOf(panel)[lane], this.panels[panel].holder.getBoundingClientRect()];
      const awaited = layout.timeline.awaited(gap);
      top = edge + layout.y(Math.min(gap.rank, awaited), 0) - 2;
      bottom = edge + layout.y(Math.max(gap.rank, awaited) + 1, 0) + 2;
      upward = awaited > gap.rank;
    }
    const fits = bottom - home.top + offsetHeight <= home.height;
    const below = (fits && !upward) || top - home.top < offsetHeight;
    this.tip.style.left = `${Math.max(0, Math.min(x - home.left, home.width - offsetWidth))}px`;
    this.tip.style.top = `${(below ? bottom : top - offsetHeight) - home.top}px`;
  }

  /** Write the orders as text, once a reader has opened them. */
  spell() {
    if (this.table.open) this.words.textContent = this.everyLane.map((timeline) => timeline.spell()).join("\n");
  }

  /**
   * @param {KeyboardEvent} event
   * @param {number} n
   */
  press(event, n) {
    const { key } = event;
    const { lane = 0, i } = this.current?.panel === n ? this.current : {};
    const { boxes } = this.drawn({ panel: n, lane }) ?? this.timelines[n];
    this.pointer = null;
    if (key.startsWith("Arrow")) this.move(key, n, lane, i);
    else if (["+", "=", "-"].includes(key))
      this.zoom(key === "-" ? 2 : 0.5, i === undefined ? undefined : (boxes.start[i] + boxes.end[i]) / 2);
    else if (key === "Home") this.whole();
    else if (key === " ") this.toggle();
    else if (key === "Enter") this.choose();
    else if (key === "Escape") this.set({ chosen: null, current: null, time: null });
    else return;
    event.preventDefault();
  }

  /**
   * Move the focus from box `i` of a lane to the next box in the direction of an arrow key, or to the first one. From one
   * lane of a rank to the other, it stays on the same action.
   * @param {string} arrow
   * @param {number} n
   * @param {number} from
   * @param {number} [i]
   */
  move(arrow, n, from, i) {
    const lanes = this.lanesOf(n).map(({ timeline }) => timeline);
    const { rank, start } = lanes[from].boxes;
    let [lane, next] = [from, 0];
    if (i !== undefined && ["ArrowUp", "ArrowDown"].includes(arrow)) {
      const row = rank[i] * lanes.length + from + (arrow === "ArrowUp" ? -1 : 1);
      if (row < 0 || row >= lanes[from].data.ranks * lanes.length) next = i;
      else {
        const other = Math.floor(row / lanes.length);
        lane = row % lanes.length;
        const { rows, boxes } = lanes[lane];
        const same = other === rank[i] ? lanes[lane].find(lanes[from].label(i)) : undefined;
        const near = Math.min(lanes[lane].after(other, start[i]), rows[other + 1] - 1);
        next = same !== undefined && boxes.rank[same] === other ? same : near;
      }
    } else if (i !== undefined) {
      next = i + (arrow === "ArrowLeft" ? -1 : 1);
      if (rank[next] !== rank[i]) next = i;
    }
    if (next < 0 || next >= lanes[lane].count) return;
    this.set({ current: { panel: n, lane, i: next }, chosen: null });
    const { boxes } = lanes[lane];
    const width = this.view.right - this.view.left;
    if (boxes.start[next] < this.view.left || boxes.end[next] > this.view.right) this.lookAt(boxes.start[next] - width / 2, width);
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

  play() {
    if (this.time === null || this.time >= this.end) this.time = 0;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const seconds = Math.min(20, Math.max(4, this.end / 4)); // for the whole timeline
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
        paint(fitted(place.base, width, layout.height), timeline, layout, style);
        place.painted = painted;
      }
      const { lane = 0, i: box, gap } = (this.current?.panel === n && this.current) || {};
      const microbatch = this.chosen?.microbatch ?? null;
      const highlight = { microbatch, path: this.path, time: this.time, lane, box, gap };
      paintOver(fitted(place.over, width, layout.height), drawn, style, highlight);
    });
    this.describeColors();
    this.placeTip();
    this.root.dataset.painted = `${1 + Number(this.root.dataset.painted ?? 0)}`;
  }

  /** Write the legend, which contains only what the picture contains. */
  describeColors() {
    const path = this.path && this.timelines.some(({ data }) => data.path.length);
    this.key.classList.toggle("ppedu-lanes", this.lanes);
    const state = JSON.stringify([this.by, this.legend, this.fills, path]);
    if (this.key.dataset.state === state) return;
    this.key.dataset.state = state;
    /** @type {Record<string, string>} */
    const fills = { memory: this.look.memory };
    for (const [op, colors] of Object.entries(this.fills)) {
      const stop = (/** @type {Color} */ color, /** @type {number} */ k) =>
        `rgb(${color}) ${(100 * k) / colors.length}% ${(100 * (k + 1)) / colors.length}%`;
      fills[op] = `linear-gradient(to right, ${colors.map(stop).join(", ")})`;
    }
    const legend = path ? [...this.legend, ["path", "critical path"]] : this.legend;
    const shown = legend.filter(([key]) => this.by === "op" || key === "memory" || !(key in fills || key === "chunk"));
    const entries = shown.map(([key, words]) => {
      const style = key in fills ? `background:${fills[key]}` : null;
      return element("span", {}, element("i", { class: `ppedu-${key}`, style }), words);
    });
    if (this.by !== "op") entries.unshift(element("span", {}, `one hue per ${this.by}; backwards are darker`));
    this.key.replaceChildren(...entries);
  }

  /** The name of a saved file. */
  get name() {
    const names = this.timelines.map(({ data }) => data.heading.split(",")[0].replace(/[^\w-]+/g, "-").slice(0, 60));
    return names.join("-and-");
  }

  saveSvg() {
    let y = 0;
    const parts = this.timelines.map((timeline, n) => {
      const layout = this.layout(n);
      const context = new SvgContext(layout.width, layout.height, n);
      paint(context, timeline, layout, this.style(n));
      y += layout.height;
      return context.text().replace("<svg ", `<svg y="${y - layout.height}" `);
    });
    const size = `width="${this.stack.clientWidth}" height="${y}"`;
    const text = `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${parts.join("")}</svg>`;
    download(`${this.name}.svg`, new Blob([text], { type: "image/svg+xml" }));
  }

  savePng() {
    const layouts = this.timelines.map((_, n) => this.layout(n));
    const canvas = element("canvas");
    const context = fitted(canvas, this.stack.clientWidth, layouts.reduce((sum, { height }) => sum + height, 0), 2);
    this.timelines.forEach((timeline, n) => {
      paint(context, timeline, layouts[n], this.style(n));
      context.translate(0, layouts[n].height);
    });
    canvas.toBlob((content) => content && download(`${this.name}.png`, content));
  }
}

/**
 * Give a canvas this size on the page, sharp on any screen, and return its context.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
function fitted(canvas, width, height, ratio = devicePixelRatio) {
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    Object.assign(canvas, { width: across, height: down });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/**
 * Return the background color behind a node.
 * @param {HTMLElement | null} node
 */
function behind(node) {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (color && color !== "transparent" && !color.endsWith(", 0)")) return color;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(30, 30, 30)" : "rgb(255, 255, 255)";
}

// ----------------------------------------------------------------------------------------------------------- widgets

/**
 * A widget builds itself below a root element and returns this.
 * @typedef {object} Widget
 * @property {Figure} figure
 * @property {(state: any) => void} update show another state
 * @property {(answer: any) => void} [receive] handle a message from Python
 */

/** @param {number} value */
const percent = (value) => `${+(100 * value).toFixed(1)}%`;

/**
 * Timelines and nothing else.
 * @param {HTMLElement} root
 * @param {Look} look
 * @returns {Widget}
 */
function show(root, look) {
  const figure = new Figure(root, look);
  return { figure, update: (/** @type {Stack} */ state) => figure.update(state) };
}

/**
 * Timelines, a table of their numbers, and a chart of bubble against memory.
 * @param {HTMLElement} root
 * @param {Look} look
 * @returns {Widget}
 */
function compare(root, look) {
  const figure = new Figure(root, look);
  const below = element("div", { class: "ppedu-numbers" });
  root.append(below);

  /**
   * @param {"th" | "td"} tag
   * @param {string[]} cells
   */
  const line = (tag, [first, ...rest]) => {
    const scope = tag === "th" ? "col" : "row";
    const others = rest.map((cell) => element(tag, tag === "th" ? { scope } : {}, cell));
    return element("tr", {}, element("th", { scope }, first), ...others);
  };

  /** @param {CompareState} state */
  function update(state) {
    figure.update(state);
    const [head, ...rows] = state.table;
    const body = element("tbody", {}, ...rows.map((row) => line("td", row)));
    const points = state.points.map(([name, peak, bubble]) => ({ name, x: peak, y: bubble }));
    const axes = { x: { label: "peak activations", format: pretty }, y: { label: "bubble", format: percent } };
    below.replaceChildren(element("table", {}, element("thead", {}, line("th", head)), body), chart(points, axes));
  }
  return { figure, update };
}

/**
 * A chart of the best schedules for each memory, and the timeline of the one that is chosen.
 * @param {HTMLElement} root
 * @param {Look} look
 * @param {Send} send
 * @returns {Widget}
 */
function frontier(root, look, send) {
  const above = element("div", { class: "ppedu-numbers" });
  const note = element("p", { class: "ppedu-note", role: "status" });
  root.append(above, note);
  const figure = new Figure(root, look);

  const pick = (/** @type {number} */ point) => send({ point });

  /** @param {FrontierState} state */
  function update(state) {
    figure.update(state);
    const points = state.points.map(([name, memory, value, kind]) => ({ name, x: memory, y: value, kind }));
    const from = 0.8 * Math.min(...points.map((p) => p.y));
    const axes = { x: { label: "peak activations", format: pretty }, y: { label: state.axis, format: pretty, from } };
    const focused = [...above.querySelectorAll("circle")].findIndex((each) => each === document.activeElement);
    above.replaceChildren(chart(points, { ...axes, pick, width: 820, height: 300 }));
    above.querySelectorAll("circle")[focused]?.focus();
    note.textContent = state.note;
  }
  return { figure, update };
}

/**
 * Append code with a button that copies it.
 * @param {HTMLElement} root
 * @param {string} label
 */
export function code(root, label) {
  const text = element("pre", { tabindex: "0", role: "group", "aria-label": label });
  const copy = button("copy", "copy the code", async () => {
    await navigator.clipboard?.writeText(text.textContent ?? "").catch(() => null);
    getSelection()?.selectAllChildren(text); // where the clipboard is not accessible, Ctrl+C copies the selection
    copy.textContent = "copied";
    setTimeout(() => (copy.textContent = "copy"), 1500);
  });
  const holder = element("div", { class: "ppedu-code" }, text, copy);
  root.append(holder);
  return { holder, text };
}

/**
 * A schedule's settings as controls, its timeline, and the code for it.
 * @param {HTMLElement} root
 * @param {Look} look
 * @param {Send} send
 * @returns {Widget}
 */
function explore(root, look, send) {
  const settings = element("div", { class: "ppedu-settings" });
  const note = element("p", { class: "ppedu-note", role: "status" });
  root.append(settings, note);
  const figure = new Figure(root, look);
  const { text } = code(root, "the code for this timeline");
  /** @type {Map<string, { input: HTMLInputElement | HTMLSelectElement, output: HTMLOutputElement }>} */
  const inputs = new Map();
  /** @type {Record<string, string> | null} */
  let waiting = null; // changes to send after the next answer
  let busy = false; // a request is in flight
  // The states for a slider's next values are requested in advance, because the kernel may be far away.
  /** @type {Map<string, string | null>} */
  const ahead = new Map();
  let active = ""; // the slider in use
  let lookingAhead = false; // a request in advance is in flight

  /**
   * Send a change. One request is in flight at a time; changes made in the meantime are merged into the next one.
   * @param {Record<string, string>} change
   */
  function ask(change) {
    waiting = { ...waiting, ...change };
    if (busy) return;
    busy = true;
    send({ set: waiting });
    waiting = null;
  }

  /**
   * Respond to a slider. A state that is known in advance is shown at once; the change is sent in any case.
   * @param {string} name
   * @param {string} value
   */
  function move(name, value) {
    write(name, value);
    const known = ahead.get(key());
    if (known) display(JSON.parse(known));
    ask({ [name]: value });
  }

  /** The values of all controls, as a key of `ahead`. */
  function key(change = {}) {
    const values = [...inputs].map(([name, { input }]) => [name, input.value]);
    return JSON.stringify({ ...Object.fromEntries(values), ...change });
  }

  /** Request the state for the nearest value of the active slider that is not known yet, unless that is much work. */
  function lookAhead() {
    const input = inputs.get(active)?.input;
    if (busy || lookingAhead || !(input instanceof HTMLInputElement)) return;
    for (let far = 1; far <= Math.min(4, 10_000 / figure.timelines[0].count); far++) {
      for (const way of [far, -far]) {
        const next = +(+input.value + way * +input.step).toFixed(9); // 0.3 and not 0.30000000000000004
        const wanted = key({ [active]: `${next}` });
        if (next < +input.min || next > +input.max || ahead.has(wanted)) continue;
        lookingAhead = true;
        send({ ahead: JSON.parse(wanted) });
        return;
      }
    }
  }

  /**
   * Keep a state that was requested in advance; null means that its settings are invalid.
   * @param {{ ahead: Record<string, string>, state: string | null }} answer
   */
  function receive(answer) {
    lookingAhead = false;
    ahead.set(JSON.stringify(answer.ahead), answer.state);
    if (ahead.size > 24) ahead.delete([...ahead.keys()][0]);
    lookAhead();
  }

  /** @param {ExploreState} state */
  function update(state) {
    busy = false;
    if (!waiting || !ahead.get(key())) display(state); // otherwise a newer state is already shown
    if (waiting) ask({});
    lookAhead();
  }

  /** @param {ExploreState} state */
  function display(state) {
    for (const each of state.controls) control(each);
    for (const label of settings.querySelectorAll("label"))
      label.hidden = !state.controls.some(({ name }) => name === label.dataset.name);
    const offers = state.offers.map(([label, change]) => button(label, label, () => ask(change)));
    note.replaceChildren(state.note, " ", element("strong", {}, state.over), ...offers);
    note.classList.toggle("ppedu-wrong", state.wrong || !!state.over);
    figure.stack.classList.toggle("ppedu-stale", state.wrong);
    figure.update(state);
    text.textContent = state.code;
  }

  /** @param {Control} control */
  function control({ name, label, value, choices, min, max, step }) {
    const { input } = inputs.get(name) ?? create(name, label, choices);
    if (!choices) Object.assign(input, { min, max, step });
    if (waiting && name in waiting) return; // the learner has moved it since
    if (input.value !== value) input.value = value;
    if (!choices) write(name, value);
  }

  /**
   * Create a menu of choices, or a slider.
   * @param {string} name
   * @param {string} label
   * @param {string[]} [choices]
   */
  function create(name, label, choices) {
    const input = choices
      ? element("select", { "aria-label": label, onchange: () => ask({ [name]: input.value }) })
      : element("input", { "aria-label": label, type: "range", oninput: () => move(name, input.value) });
    if (choices) input.append(...choices.map((each) => element("option", { value: each }, each)));
    const activate = () => {
      active = name;
      lookAhead();
    };
    for (const kind of ["pointerenter", "focus", "input"]) input.addEventListener(kind, activate);
    const created = { input, output: element("output") };
    inputs.set(name, created);
    settings.append(element("label", { "data-name": name }, element("span", {}, label), input, created.output));
    return created;
  }

  /**
   * Write the value of a slider beside it.
   * @param {string} name
   * @param {string} value
   */
  function write(name, value) {
    const zero = { memory: "none", overlap: "nothing" }[name] ?? value;
    Object.assign(inputs.get(name)?.output ?? {}, { textContent: +value ? value : zero });
  }

  return { figure, update, receive };
}

/**
 * A training run: its progress, the timeline of its last step, and its loss.
 * @param {HTMLElement} root
 * @param {Look} look
 * @returns {Widget}
 */
function live(root, look) {
  const progress = element("progress", { "aria-label": "steps" });
  const status = element("span", { role: "status" });
  root.append(element("div", { class: "ppedu-bar" }, progress, status));
  const figure = new Figure(root, look);
  const curve = element("div");
  root.append(curve);
  const axes = { x: { label: "step", format: pretty, whole: true }, y: { label: "loss", format: pretty } };

  /** @param {LiveState} state */
  function update(state) {
    const { losses, steps } = state;
    figure.update(state);
    Object.assign(progress, { max: steps, value: losses.length });
    const last = losses[losses.length - 1]?.toFixed(3) ?? "not a number";
    status.textContent = `step ${losses.length} of ${steps}, loss ${last}`;
    const points = losses.flatMap((loss, step) => (loss === null ? [] : [{ x: step + 1, y: loss }]));
    curve.replaceChildren(chart(points, { ...axes, line: true, width: 900, height: 160 }));
  }
  return { figure, update };
}

/**
 * The kinds of widgets; play.js adds its own.
 * @type {Record<string, (root: HTMLElement, look: Look, send: Send) => Widget>}
 */
export const KINDS = { show, compare, frontier, explore, live };

/**
 * Build the widget that a state describes below an element. Python receives what `send` is called with.
 * @param {HTMLElement} target
 * @param {Stack & { kind: string }} state
 * @param {Send} send
 */
export function mount(target, state, send = () => {}) {
  const root = element("div", { class: "ppedu" });
  root.addEventListener("keydown", (event) => {
    // The notebook has shortcuts of its own for keys without a modifier.
    if (!event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey) event.stopPropagation();
  });
  target.append(root);
  const widget = KINDS[state.kind](root, state.look, send);
  widget.figure.showLanes(!!state.lanes);
  widget.update(state);
  return widget;
}

/**
 * Display a widget in Jupyter, and return the function that removes it.
 * @param {{ model: any, el: HTMLElement }} view
 */
function render({ model, el }) {
  const state = () => JSON.parse(model.get("state"));
  /** @type {Widget | null} */
  let widget = mount(el, state(), (message) => model.send(message));
  const update = () => widget?.update(state());
  const receive = (/** @type {any} */ answer) => widget?.receive?.(answer);
  const recall = () => widget?.figure.showLanes(model.get("lanes"));
  const { figure } = widget;
  figure.switched = () => {
    model.set("lanes", figure.lanes);
    model.save_changes();
  };
  recall();
  model.on("change:lanes", recall);
  model.on("change:state", update);
  model.on("msg:custom", receive);
  return () => {
    model.off("change:lanes", recall);
    model.off("change:state", update);
    model.off("msg:custom", receive);
    widget?.figure.destroy();
    widget = null;
    el.replaceChildren(); // Jupyter keeps the element of a view that is gone, so leave nothing in it
    model.send({ gone: true });
  };
}

export default { render };
