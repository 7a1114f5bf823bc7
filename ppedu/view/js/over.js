// @ts-check
// What lies over the picture: a journey, the critical path, the moment of playing, and the focus.

import { paintBlock, paintGhost } from "./block.js";
import { MANY, paintBoxes, paintNames } from "./boxes.js";
import { inkOn, numbersIn } from "./palette.js";
import { atOnce } from "./tasks.js";

/**
 * @typedef {import("./boxes.js").Style} Style
 * @typedef {import("./layout.js").Context} Context
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {import("./model.js").Color} Color
 */

const FADED = 0.78; // the part of the page's color in what is faded

/**
 * @typedef {object} Highlight what lies over the picture of one panel
 * @property {number | null} microbatch whose journey is shown
 * @property {boolean} path whether the critical path is shown
 * @property {number | null} time the moment up to which the timeline is played
 * @property {number} lane that of the box or the gap
 * @property {number | undefined} box
 * @property {import("./model.js").Gap | undefined} gap
 * @property {import("./block.js").Block | null} [block]
 * @property {import("./block.js").Ghost | null} [ghost]
 */

/**
 * Paint the journey, the critical path, the moment of playing, the box or gap in focus, and what is marked or not placed yet.
 * @param {Context} context
 * @param {Layout[]} lanes one layout, or two lanes
 * @param {Style} style
 * @param {Highlight} highlight
 */
export function paintOver(context, lanes, style, { microbatch, path, time, lane, box, gap, block, ghost }) {
  const [layout] = lanes;
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
  if (block) paintBlock(context, layout, block);
  if (ghost) paintGhost(context, layout, style, ghost);
  context.restore();
}

/**
 * Write the names of faded boxes again, in what is easy to read on their new colors.
 * @param {Context} context
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
    paintNames(context, layout, those);
  }
}

/**
 * Connect the end of a box with the start of another one, between the rows of boxes, where the line crosses no name.
 * @param {Context} context
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
 * @param {Context} context
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
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 * @param {number} microbatch
 */
function paintJourney(context, layout, style, microbatch) {
  const { timeline } = layout;
  const journey = timeline.journey(microbatch);
  atOnce(paintBoxes(context, layout, style, journey));
  context.strokeStyle = style.ink;
  context.lineWidth = 1.3;
  for (const i of journey)
    for (const source of timeline.sources(i)) if (timeline.rankOf(source) !== timeline.rankOf(i)) connect(context, layout, source, i);
}

/**
 * Paint the critical path. A line in the color of the page separates its color from those of the boxes.
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 */
function paintPath(context, layout, { look, paper }) {
  const { timeline } = layout;
  const { data } = timeline;
  for (const [color, wider] of /** @type {[string, number][]} */ ([[paper, 1.8], [look.path, 0]])) {
    context.strokeStyle = color;
    data.path.forEach((i) => ring(context, layout, i, 2 + wider, 0.8));
    context.lineWidth = 1.7 + wider;
    data.path.slice(1).forEach((i, k) => {
      if (timeline.rankOf(i) !== timeline.rankOf(data.path[k])) connect(context, layout, data.path[k], i);
    });
  }
}

/**
 * Paint the box in focus, those that it requires and that require it, and the same action in the other lane.
 * @param {Context} context
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
  for (const source of timeline.sources(box)) {
    ring(context, layout, source, 1.5);
    if (linked) connect(context, layout, source, box);
  }
  context.setLineDash([4, 3]);
  for (const user of timeline.users(box)) {
    ring(context, layout, user, 1);
    if (linked) connect(context, layout, box, user);
  }
}
