// @ts-check
// A block of boxes that a reader marks in a timeline: across ranks, and between two times.

import { FONT } from "./svg.js";

/**
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {import("./model.js").Timeline} Timeline
 *
 * @typedef {{ rank: number, time: number }} Corner
 * @typedef {{ from: Corner, to: Corner }} Block
 *
 * @typedef {object} Ghost the box of an action that is not placed yet
 * @property {number} rank
 * @property {number} start
 * @property {number} end
 * @property {string} label
 * @property {string} color
 * @property {boolean} lost whether par is out of reach behind it
 */

/**
 * The lowest and the highest rank and time of a block.
 * @param {Block} block
 */
function sides({ from, to }) {
  const [low, high] = from.rank < to.rank ? [from.rank, to.rank] : [to.rank, from.rank];
  const [left, right] = from.time < to.time ? [from.time, to.time] : [to.time, from.time];
  return { low, high, left, right };
}

/**
 * The boxes that have their middle inside a block.
 * @param {Timeline} timeline
 * @param {Block} block
 */
export function insideBlock({ boxes, count }, block) {
  const { low, high, left, right } = sides(block);
  const inside = [];
  for (let i = 0; i < count; i++) {
    const middle = (boxes.start[i] + boxes.end[i]) / 2;
    if (low <= boxes.rank[i] && boxes.rank[i] <= high && left <= middle && middle <= right) inside.push(i);
  }
  return inside;
}

/**
 * The block that reaches from the middle of one box to that of another.
 * @param {Timeline} timeline
 * @param {Corner} from
 * @param {number} i
 * @returns {Block}
 */
export const blockTo = ({ boxes }, from, i) => ({ from, to: { rank: boxes.rank[i], time: (boxes.start[i] + boxes.end[i]) / 2 } });

/**
 * A marked block in words.
 * @param {Timeline} timeline
 * @param {Block} block
 */
export function describeBlock(timeline, block) {
  const names = insideBlock(timeline, block).map((i) => timeline.label(i));
  const actions = `${names.length} action${names.length === 1 ? "" : "s"} marked`;
  return names.length ? `${actions}: ${names.join(", ")}. R repeats the block, Escape unmarks it.` : "No action marked.";
}

/**
 * @param {import("./layout.js").Context} context
 * @param {Layout} layout
 * @param {Block} block
 */
export function paintBlock(context, layout, block) {
  const { low, high, left, right } = sides(block);
  const { row, timeline } = layout;
  const [x, y] = [layout.x(left), layout.y(low, row.top)];
  context.lineWidth = 1.5;
  context.setLineDash([5, 3]);
  context.strokeRect(x, y, Math.max(2, layout.x(right) - x), layout.y(high, row.bottom) - y);
  context.setLineDash([]);
  context.lineWidth = 2.5;
  for (const i of insideBlock(timeline, block)) {
    const [begin, top, width, height] = layout.box(i);
    context.strokeRect(begin + 1, top + 1, Math.max(1, width - 3), height - 2);
  }
}

/**
 * @param {import("./layout.js").Context} context
 * @param {Layout} layout
 * @param {import("./boxes.js").Style} style
 * @param {Ghost} ghost
 */
export function paintGhost(context, layout, { ink, paper, look }, { rank, start, end, label, color, lost }) {
  const [x, y] = [layout.x(start), layout.y(rank, layout.lane)];
  const [width, height] = [layout.x(end) - x - 1, (layout.row.bottom - layout.lane) * layout.rowHeight];
  context.fillStyle = paper;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 0.3;
  context.fillStyle = color;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
  context.lineWidth = 2;
  context.setLineDash([4, 3]);
  context.strokeStyle = lost ? look.mark : ink;
  context.strokeRect(x + 1, y + 1, Math.max(1, width - 2), height - 2);
  context.setLineDash([]);
  const size = Math.min(11, height * 0.8, (width - 4) / (0.62 * label.length));
  if (size < 7) return;
  Object.assign(context, { fillStyle: ink, textAlign: "center", textBaseline: "middle", font: `${size.toFixed(1)}px ${FONT}` });
  context.fillText(label, x + width / 2, y + height / 2);
}
