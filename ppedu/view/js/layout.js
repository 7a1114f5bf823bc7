// @ts-check
// Where things are in the picture of a timeline.

import { largest } from "./model.js";
import { textOf } from "./why.js";

/**
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./model.js").Timeline} Timeline
 * @typedef {import("./model.js").View} View
 * @typedef {import("./svg.js").Rectangle} Rectangle
 * @typedef {CanvasRenderingContext2D | import("./svg.js").SvgContext} Context
 * @typedef {"whole" | "outline" | "upper" | "lower"} Part what is drawn of a panel: its timeline, which has the whole height
 *   of a rank's boxes, or its outline; or one of them in a lane of its own
 */

const MARGIN = { left: 62, right: 66, top: 26, bottom: 26 };
const PLAIN = { left: 52, right: 2, top: 2, bottom: 18 }; // without numbers at the axis, peaks and a heading
export const LINE = 16;
export const NAME = 66; // the space for the names of lanes

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
    const { ranks, pair, heading, memory } = panel.data;
    const { left, right, top, bottom } = { ...MARGIN, ...(look.plain && PLAIN) };
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
    this.left = left + (this.lanes ? NAME : 0);
    this.right = width - (memory ? MARGIN.right : right);
    this.heading = pair && this.lanes ? pair.heading : heading;
    this.lines = pair && this.lanes ? pair.lines : [panel.data.numbers];
    // Where both do not fit into one line, the heading has a line of its own, above the numbers.
    const longest = largest(this.lines.map((line) => line.map(textOf).join("    ").length));
    const alone = 7.2 * this.heading.length + 6.6 * longest > width - this.left - 32;
    this.top = (heading ? MARGIN.top : top) + LINE * (this.lines.length - 1 + (alone ? 1 : 0));
    this.room = alone ? width - 24 - this.left : null; // for the heading; null: what the numbers leave
    this.bottom = this.top + this.rowHeight * ranks;
    this.height = this.bottom + bottom;
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
    return (this.lane + this.bottomOfComputations) / 2;
  }
  /**
   * @param {number} i
   * @returns {Rectangle}
   */
  box(i) {
    const { rank, start, end, part } = this.boxes;
    const left = this.x(start[i]);
    const [top, bottom] = this.ends(rank[i], part[i]);
    return [left, this.y(this.timeline.rankOf(i), top), this.x(end[i]) - left, (bottom - top) * this.rowHeight];
  }
  /**
   * The top and the bottom of boxes in a rank's row.
   * @param {number} rank ranks + rank for its copies
   * @param {number} part 1 or 2 for a half of an overlapped pair, otherwise 0
   */
  ends(rank, part) {
    const copies = (this.row.bottom - this.lane) * this.look.copies;
    if (rank >= this.timeline.data.ranks) return [this.row.bottom - copies, this.row.bottom];
    return [part === 2 ? this.middle : this.lane, part === 1 ? this.middle : this.bottomOfComputations];
  }
  /** Where a rank's computations end in its row, above its copies and a gap. */
  get bottomOfComputations() {
    const copies = this.timeline.lanes > 1 ? this.look.copies + 0.04 : 0;
    return this.row.bottom - (this.row.bottom - this.lane) * copies;
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
