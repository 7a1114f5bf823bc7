// @ts-check
// What the mouse and the keyboard do in the timelines.

import { blockTo } from "./block.js";
import { element } from "./elements.js";
import { placeTip } from "./words.js";

/**
 * @typedef {import("./figure.js").Figure} Figure
 * @typedef {import("./model.js").Gap} Gap
 * @typedef {import("./model.js").View} View
 * @typedef {{ panel: number, lane: number, i?: number, gap?: Gap }} Focus the box or gap under the pointer or the keyboard;
 *   lane 1 is that of an outline
 * @typedef {{ holder: HTMLElement, numbers: HTMLElement, base: HTMLCanvasElement, over: HTMLCanvasElement, painted: unknown[],
 *   shown: import("./model.js").Timeline | null }} Place `numbers` holds buttons that lie over those in the picture, `painted`
 *   what it depends on; `shown` is in `base`, which is the timeline before while a large one is painted
 */

/**
 * Create the place of a timeline, with what the mouse and the keyboard do there.
 * @param {Figure} figure
 * @param {number} n
 * @returns {Place}
 */
export function createPlace(figure, n) {
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
  /** @param {MouseEvent} event */
  const corner = (event) => {
    const [{ x, y }, layout] = [at(event), figure.layout(n)];
    const rank = Math.floor((y - layout.top) / layout.rowHeight);
    return { rank: Math.max(0, Math.min(rank, layout.timeline.data.ranks - 1)), time: layout.time(x) };
  };
  /** @type {import("./block.js").Corner | null} */
  let marked = null;
  /** @type {Focus | null} where the keyboard was when it left */
  let kept = null;
  holder.addEventListener("pointerdown", (event) => {
    if (event.shiftKey && figure.repeat) {
      marked = corner(event);
      event.preventDefault(); // the page would mark its text
      return holder.setPointerCapture(event.pointerId);
    }
    grabbed = { x: event.clientX, view: { ...figure.view }, moved: false };
  });
  holder.addEventListener("pointermove", (event) => {
    figure.pointer = { x: event.clientX, y: event.clientY };
    if (marked) return figure.set({ block: { from: marked, to: corner(event) }, current: null });
    if (!grabbed || !event.buttons) {
      point(figure, n, at(event));
      return placeTip(figure);
    }
    const { x, view, moved } = grabbed;
    const far = event.clientX - x;
    if (Math.abs(far) > 3 && !moved) {
      grabbed.moved = true;
      holder.setPointerCapture(event.pointerId);
    }
    if (grabbed.moved) figure.lookAt(view.left - far / figure.layout(n).scale, view.right - view.left);
  });
  holder.addEventListener("pointerup", (event) => {
    if (marked) {
      marked = null;
      return figure.block && figure.repeat?.();
    }
    const click = grabbed && !grabbed.moved;
    grabbed = null;
    figure.pointer = { x: event.clientX, y: event.clientY };
    if (!click) return;
    point(figure, n, at(event));
    figure.choose();
  });
  holder.addEventListener("pointerleave", () => {
    if (!grabbed?.moved) figure.set({ current: null });
  });
  /** @param {WheelEvent} event */
  const turn = (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey) figure.lookAt(figure.view.left + (event.deltaY + event.deltaX) / figure.layout(n).scale);
    else figure.zoom(Math.exp(event.deltaY / 300), figure.layout(n).time(at(event).x));
  };
  if (!figure.look.plain) holder.addEventListener("wheel", turn, { passive: false });
  holder.addEventListener("keydown", (event) => press(figure, event, n));
  holder.addEventListener("focus", () => {
    const count = (kept && figure.drawn(kept)?.count) || 0;
    figure.set({ current: (kept?.i ?? 0) < count ? kept : figure.current });
  });
  holder.addEventListener("blur", () => {
    kept = figure.pointer ? null : figure.current;
    if (kept) figure.set({ current: null });
    figure.tip.hidden = true;
  });
  const numbers = element("div", { class: "ppedu-over" });
  figure.stack.append(holder, numbers);
  return { holder, numbers, base, over, painted: [], shown: null };
}

/**
 * Focus the box or gap at a position of a panel.
 * @param {Figure} figure
 * @param {number} n
 * @param {{ x: number, y: number }} position
 */
function point(figure, n, { x, y }) {
  const [layout, lower] = figure.lanesOf(n);
  const row = (y - layout.top) / layout.rowHeight;
  const [rank, time] = [Math.floor(row), layout.time(x)];
  const part = row - rank;
  const lane = lower && part > (layout.row.bottom + lower.lane) / 2 && part <= lower.row.bottom ? 1 : 0;
  const { timeline, middle } = lane ? lower : layout;
  /** @type {Focus | null} */
  let current = null;
  if (rank >= 0 && rank < timeline.data.ranks && x >= layout.left && x <= layout.right) {
    const [, end] = (lane ? lower : layout).ends(rank, 0);
    const copies = timeline.lanes > 1 && part > end;
    const i = timeline.at(copies ? rank + timeline.data.ranks : rank, time, part < middle);
    const gap = timeline.gaps.find((each) => each.rank === rank && each.start <= time && time < each.end);
    if (i >= 0) current = { panel: n, lane, i };
    else if (gap) current = { panel: n, lane, gap };
  }
  const { panel, lane: before, i, gap } = figure.current ?? {};
  const same = current?.i === i && current?.gap === gap && current?.panel === panel && current?.lane === before;
  if (!same) figure.set({ current });
}

/**
 * @param {Figure} figure
 * @param {KeyboardEvent} event
 * @param {number} n
 */
function press(figure, event, n) {
  const { key } = event;
  const { lane = 0, i } = figure.current?.panel === n ? figure.current : {};
  const { boxes } = figure.drawn({ panel: n, lane }) ?? figure.timelines[n];
  figure.pointer = null;
  if (key.startsWith("Arrow") && event.shiftKey && figure.repeat) extend(figure, event, n, i);
  else if (key.startsWith("Arrow")) move(figure, key, n, lane, i);
  else if (["+", "=", "-"].includes(key))
    figure.zoom(key === "-" ? 2 : 0.5, i === undefined ? undefined : (boxes.start[i] + boxes.end[i]) / 2);
  else if (key === "Home") figure.whole();
  else if (key === " ") figure.toggle();
  else if (key === "Enter") figure.choose();
  else if (key === "Escape") figure.set({ chosen: null, current: null, time: null, block: null });
  else return;
  event.preventDefault();
}

/**
 * Move the focus, and mark the block from where it was when Shift was pressed.
 * @param {Figure} figure
 * @param {KeyboardEvent} event
 * @param {number} n
 * @param {number} [i]
 */
function extend(figure, event, n, i) {
  const timeline = figure.timelines[n];
  if (!timeline.count) return;
  const from = figure.block?.from ?? blockTo(timeline, { rank: 0, time: 0 }, i ?? 0).to;
  if (i !== undefined) move(figure, event.key, n, 0, i);
  figure.set({ block: blockTo(timeline, from, figure.current?.i ?? 0), current: figure.current ?? { panel: n, lane: 0, i: 0 } });
  event.stopPropagation(); // the notebook would select cells
}

/**
 * Move the focus from box `i` of a lane to the next box in the direction of an arrow key, or to the first one. From one
 * lane of a rank to the other, it stays on the same action.
 * @param {Figure} figure
 * @param {string} arrow
 * @param {number} n
 * @param {number} from
 * @param {number} [i]
 */
function move(figure, arrow, n, from, i) {
  const lanes = figure.lanesOf(n).map(({ timeline }) => timeline);
  const { rank, start } = lanes[from].boxes;
  let [lane, next] = [from, 0];
  if (i !== undefined && ["ArrowUp", "ArrowDown"].includes(arrow)) {
    const { ranks } = lanes[from].data;
    /** @type {[number, number][]} */
    const places = []; // each lane, and the rank, or ranks + rank of its copies, from the top
    for (let each = 0; each < ranks; each++)
      lanes.forEach(({ rows, lanes: own }, k) => {
        for (let row = each; row < own * ranks; row += ranks) if (rows[row] < rows[row + 1] || row < ranks) places.push([k, row]);
      });
    const here = places.findIndex(([k, row]) => k === from && row === rank[i]);
    const [there, other] = places[here + (arrow === "ArrowUp" ? -1 : 1)] ?? [from, rank[i]];
    const { rows, boxes } = lanes[there];
    const same = other === rank[i] ? lanes[there].find(lanes[from].label(i)) : undefined;
    const near = Math.min(lanes[there].after(other, start[i]), rows[other + 1] - 1);
    [lane, next] = [there, same !== undefined && boxes.rank[same] === other ? same : near];
  } else if (i !== undefined) {
    next = i + (arrow === "ArrowLeft" ? -1 : 1);
    if (rank[next] !== rank[i]) next = i;
  }
  if (next < 0 || next >= lanes[lane].count) return;
  figure.set({ current: { panel: n, lane, i: next }, chosen: null });
  const { boxes } = lanes[lane];
  const width = figure.view.right - figure.view.left;
  if (boxes.start[next] < figure.view.left || boxes.end[next] > figure.view.right) figure.lookAt(boxes.start[next] - width / 2, width);
}
