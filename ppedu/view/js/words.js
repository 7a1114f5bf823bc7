// @ts-check
// What is in focus, in words, and the place of its tooltip.

import { describeBlock } from "./block.js";

/** @typedef {import("./figure.js").Figure} Figure */

const HELP =
  "Point at an action or a gap for details. Click an action to follow its microbatch. Drag to move, Ctrl and wheel to " +
  "zoom. Keys: arrows, +, −, Space, Enter.";

/**
 * What is in focus, chosen or played, in words.
 * @param {Figure} figure
 */
export function sentence(figure) {
  if (figure.block) return describeBlock(figure.timelines[0], figure.block);
  const { i, gap } = figure.current ?? {};
  const place = figure.current ?? figure.chosen ?? { panel: 0, lane: 0 };
  const [timeline, names] = [figure.drawn(place), figure.pair(place.panel)?.names];
  const lane = names?.[place.lane] ?? "";
  if (gap) return `${gap.why}${lane && ` (${lane})`}.`;
  if (timeline && i !== undefined) {
    const other = figure.drawn({ ...place, lane: 1 - place.lane });
    const same = names && other?.find(timeline.label(i));
    const beside = same === undefined ? "" : `The same action, ${names?.[1 - place.lane]}: ${other?.when(same)}. `;
    return timeline.describe(i, figure.look.names, lane, beside);
  }
  if (timeline && figure.chosen) return timeline.tell(figure.chosen.microbatch, lane);
  const { time } = figure;
  if (time === null) return HELP;
  return figure.everyLane.slice(0, names ? 2 : 1).map((each, k) => each.moment(time, names?.[k])).join(" ");
}

/**
 * Put the tooltip below the pointer, or below the box that the keyboard has reached. Where the window ends, put it above.
 * A backward's gradient comes from the rank below, which stays in view: its tooltip is above. That of a gap lies beyond
 * the lanes of the rank that waits and of the one that it waits for.
 * @param {Figure} figure
 */
export function placeTip(figure) {
  if (figure.tip.hidden || !figure.current) return;
  const { panel, lane, i, gap } = figure.current;
  const home = figure.root.getBoundingClientRect();
  const { left: near, top: edge } = figure.panels[panel].holder.getBoundingClientRect();
  const layout = figure.lanesOf(panel)[lane];
  let [x, top, bottom] = [0, 0, 0];
  if (figure.pointer) [x, top, bottom] = [figure.pointer.x + 12, figure.pointer.y - 8, figure.pointer.y + 18];
  else {
    const [left, upper, width, height] = i === undefined ? [layout.x(gap?.start ?? 0), layout.y(gap?.rank ?? 0, 0), 0, 20] : layout.box(i);
    [x, top, bottom] = [near + left + width / 2, edge + upper - 4, edge + upper + height + 6];
  }
  const { offsetWidth, offsetHeight } = figure.tip;
  let upward = i !== undefined && "BI".includes(figure.drawn(figure.current)?.boxes.op[i] ?? " ");
  if (gap) {
    const awaited = layout.timeline.awaited(gap);
    top = edge + layout.y(Math.min(gap.rank, awaited), 0) - 2;
    bottom = edge + layout.y(Math.max(gap.rank, awaited) + 1, 0) + 2;
    upward = awaited > gap.rank;
  }
  const fits = bottom - home.top + offsetHeight <= home.height;
  const below = (fits && !upward) || top - home.top < offsetHeight;
  figure.tip.style.left = `${Math.max(0, Math.min(x - home.left, home.width - offsetWidth))}px`;
  figure.tip.style.top = `${(below ? bottom : top - offsetHeight) - home.top}px`;
}
