// @ts-check
// The picture of a timeline: ranks, heading, axis, memory, boxes and outlines.

import { paintBoxes } from "./boxes.js";
import { LINE, NAME } from "./layout.js";
import { largest, pretty, ticks } from "./model.js";
import { FONT } from "./svg.js";
import { textOf } from "./why.js";

/**
 * @typedef {import("./boxes.js").Style} Style
 * @typedef {import("./layout.js").Context} Context
 * @typedef {import("./layout.js").Layout} Layout
 * @typedef {import("./why.js").Placed} Placed
 */

const [NARROW, FLAT] = [0.5, 0.1]; // pixels: narrower steps, and steps that differ less in height, look like one
const EDGE = 0.55; // how dark the upper edge of a memory strip is

/**
 * Paint a timeline: ranks, heading, axis, memory, boxes and outlines. Return where its numbers are.
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 * @returns {Generator<void, Placed[]>} work for `atOnce` or `inTasks`
 */
export function* paint(context, layout, style) {
  const { width, height, rowHeight, left, right, top, bottom, view, lanes } = layout;
  const { ink, look } = style;
  const { data, outline } = layout.panel;
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
    context.fillText(`${layout.panel.row} ${rank}`, left - 8 - (lanes ? NAME : 0), layout.y(rank, middle));
  if (lanes) nameLanes(context, parts, lanes.names);
  const { room, placed } = paintNumbers(context, layout);
  context.font = `bold 12px ${FONT}`;
  context.textAlign = "left";
  context.fillText(shortened(context, layout.heading, room), left, 12);

  context.textAlign = "center";
  context.font = `11px ${FONT}`;
  const axis = shortened(context, data.axis, width / 3);
  const end = width - 8 - context.measureText(axis).width - 6; // of the space for ticks
  for (const time of look.plain ? [] : ticks(view.left, view.right, Math.min(10, (right - left) / 60))) {
    const x = layout.x(time);
    context.globalAlpha = 0.18;
    context.fillRect(Math.round(x), top, 1, bottom - top);
    context.globalAlpha = 0.8;
    if (x + context.measureText(`${time}`).width / 2 < end) context.fillText(`${time}`, x, bottom + 11);
  }
  context.globalAlpha = 1;
  context.textAlign = "right";
  context.fillText(axis, look.plain ? right : width - 8, bottom + 11);

  layout.clip(context);
  if (look.plain) paintIdle(context, layout, style);
  yield* paintMemory(context, layout, style);
  for (const part of parts) yield* paintBoxes(context, part, style, part.timeline.visible(view));
  if (outline && !lanes) {
    const outlined = layout.as("outline");
    context.lineWidth = 1.2;
    for (let i = 0; i < outline.count; i++) {
      if (i % 1024 === 1023) yield;
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
    data.peaks.forEach((part, rank) => {
      const [text, y] = [textOf(part), layout.y(rank, (layout.row.strip + layout.row.floor) / 2)];
      context.fillText(text, right + 6, y);
      placed.push({ part, left: right + 6, y, width: context.measureText(text).width, aside: true });
    });
    paintScale(context, layout, style);
  }
  return placed;
}

/**
 * Write the numbers at the right, in columns, and return where they are and the width that remains for the heading. Columns
 * that do not fit are left out, from the right.
 * @param {Context} context
 * @param {Layout} layout
 */
function paintNumbers(context, { width, left, top, lines, room }) {
  context.font = `12px ${FONT}`;
  context.textAlign = "right";
  const widths = lines.map((line) => line.map((part) => context.measureText(textOf(part)).width));
  const columns = lines[0].map((_, k) => largest(widths.map((line) => line[k])));
  const gap = context.measureText("    ").width;
  const taken = () => columns.reduce((sum, each) => sum + each + gap, -gap);
  while (columns.length > 2 && taken() > width - 16) columns.pop();
  /** @type {Placed[]} */
  const placed = [];
  lines.forEach((line, row) => {
    const y = top - 14 - LINE * (lines.length - 1 - row);
    let x = width - 8;
    for (let k = columns.length - 1; k >= 0; x -= columns[k--] + gap) {
      context.fillText(textOf(line[k]), x, y);
      placed.push({ part: line[k], left: x - widths[row][k], y, width: widths[row][k] });
    }
  });
  return { room: room ?? width - 24 - left - Math.max(0, taken()), placed: placed.toReversed() };
}

/**
 * Paint the time in which ranks are idle, with the word where it fits.
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 */
function paintIdle(context, layout, { ink }) {
  const height = (layout.row.bottom - layout.lane) * layout.rowHeight;
  context.fillStyle = ink;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  for (const { rank, start, end } of layout.timeline.gaps) {
    const [x, y, width] = [layout.x(start), layout.y(rank, layout.lane), layout.x(end) - layout.x(start) - 1];
    context.globalAlpha = 0.07;
    context.fillRect(x, y, width, height);
    context.globalAlpha = 0.75;
    if (width > 30 && height > 12) context.fillText("idle", x + width / 2, y + height / 2);
  }
  context.globalAlpha = 1;
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
  if (layout.look.plain || !most || (floor - strip) * layout.rowHeight < 12) return;
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
 * The steps of a rank's memory in view. Those that look like one are one, because a path of very many takes long.
 * @param {Layout} layout
 * @param {number} rank
 * @param {number} flat the difference of two values that cannot be seen
 */
function stepsOf({ panel, view, scale, left }, rank, flat) {
  const [times, values] = panel.memory(rank);
  const steps = [];
  for (let k = 0; k < times.length && times[k] < view.right; ) {
    const [from, first] = [times[k], values[k]];
    let value = first;
    for (k++; k < times.length && ((times[k] - from) * scale < NARROW || Math.abs(values[k] - first) < flat); k++) value = Math.max(value, values[k]);
    const until = times[k] ?? panel.data.makespan;
    if (until >= view.left) steps.push({ begin: left + (from - view.left) * scale, end: left + (until - view.left) * scale, value });
  }
  return steps;
}

/**
 * @param {Context} context
 * @param {Layout} layout
 * @param {Style} style
 * @returns {Generator<void, void>}
 */
function* paintMemory(context, layout, { look, most, ink }) {
  if (layout.row.strip === layout.row.floor) return;
  const { ranks, makespan, cap, until } = layout.panel.data;
  const unit = ((layout.row.floor - layout.row.strip) * layout.rowHeight) / (most || 1);
  for (let rank = 0; rank < ranks; rank++) {
    yield;
    const floor = layout.y(rank, layout.row.floor);
    context.fillStyle = look.memory;
    context.beginPath();
    const steps = stepsOf(layout, rank, FLAT / unit);
    for (const [k, { begin, end, value }] of steps.entries()) {
      const y = floor - unit * Math.min(value, most);
      if (!k) context.moveTo(begin, floor);
      context.lineTo(begin, y);
      context.lineTo(end, y);
    }
    context.lineTo(layout.x(Math.min(layout.panel.data.makespan, layout.view.right)), floor);
    context.fill();
    context.fillStyle = ink; // an edge, because a rank that holds little has a strip that is hard to see
    context.globalAlpha = EDGE;
    context.beginPath();
    for (const { begin, end, value } of steps)
      if (value > 0) context.rect(begin, floor - unit * Math.min(value, most) - 1, end - begin, 1);
    context.fill();
    context.globalAlpha = 1;
    if (cap !== null) {
      context.fillStyle = look.mark;
      for (const { begin, end, value } of steps)
        if (value > cap) context.fillRect(begin, floor - unit * value, end - begin, unit * (value - cap));
      context.fillStyle = largest(layout.panel.memory(rank)[1]) > cap ? look.mark : ink;
      const [begin, end] = [layout.x(0), layout.x(Math.max(makespan, until))];
      context.fillRect(begin, floor - unit * cap, end - begin, 1);
    }
  }
}
