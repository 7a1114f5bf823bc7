// @ts-check
// Timelines as Python sends them, and what can be looked up in them. It knows neither canvas nor page.

import { unpack } from "./unpack.js";

/**
 * @typedef {"F" | "B" | "I" | "W" | "R" | "U" | "O" | "L" | "S" | "T"} Op
 * @typedef {[number, number, number]} Color red, green and blue, each from 0 to 255
 * @typedef {{ left: number, right: number }} View the visible part of the time axis
 *
 * @typedef {{ top: number, lane: number, bottom: number, strip: number, floor: number }} Row heights in a rank's row, which
 *   is 1 high
 *
 * @typedef {object} Look what Python's look.py defines
 * @property {Record<Op, string>} colors
 * @property {Record<Op, string>} names
 * @property {string} memory
 * @property {string} mark
 * @property {string} path
 * @property {number} pale how pale boxes of the lower lane are, from 0 to 1
 * @property {Row} row
 * @property {Row[]} lanes the upper and the lower one
 * @property {number} copies the part of the boxes' height that copies take, if there are any
 * @property {boolean} [plain] whether idle time is painted, and words stand in place of names and numbers
 *
 * @typedef {"rank" | "start" | "end" | "stage" | "microbatch" | "chunk" | "copy" | "part" | "mark"} Column of numbers: `rank` is
 *   ranks + rank of a copy to the host or back, which has a lane of its own below the rank's other boxes, `chunk`
 *   counts on the rank, `copy` is 1 for the second copy of the model, `part` is 1 or 2 for a half of an overlapped pair,
 *   otherwise 0, and `mark` is 1 where the action is marked
 * @typedef {{ op: ArrayLike<Op> } & Record<Column, import("./unpack.js").Numbers>} Boxes columns with an entry for each compute action, or for each
 *   half of an overlapped pair
 *
 * @typedef {object} Panel one timeline, as Panel.state in Python's model.py returns it
 * @property {string} heading
 * @property {string} summary
 * @property {string} axis
 * @property {string} unit
 * @property {string} memory_unit
 * @property {number} tall the height of a rank's row, in pixels
 * @property {string} [row] the word for a row, if it is not "rank"
 * @property {number} ranks
 * @property {boolean} copies whether there are copies to the host or back
 * @property {number} stages
 * @property {number} microbatches
 * @property {number} makespan
 * @property {import("./why.js").Part[]} numbers
 * @property {{ op: string } & Record<Column, string>} boxes their ops, a letter for each, and numbers that `unpack` reads
 * @property {number} slices
 * @property {Record<string, [string, number, number][]>} needs by stage and op, such as 2B: the kinds and the stages of the
 *   results that these boxes require, and the steps from their own slice to that of the result
 * @property {Record<Op, [Color, Color][]>} shades by op, chunk and parity of the microbatch
 * @property {[number, number, number, string][]} gaps rank, start, end and the reason
 * @property {{ one: number, period: number, changes: Record<string, [number, number]> } | null} memory what boxes allocate
 *   at their start and free at their end, where `one` is one activation, by stage, op and slice (the microbatch modulo
 *   `period`), such as 2B0, or 2B0R if there is an R; null: memory is not shown
 * @property {import("./why.js").Part[]} peaks
 * @property {number} until a time that the axis must reach
 * @property {number | null} cap
 * @property {number[]} path the boxes of the critical path
 * @property {Panel | null} outline
 * @property {{ heading: string, names: string[], lines: import("./why.js").Part[][] } | null} pair what tells the panel from its outline,
 *   and the numbers of both
 *
 * @typedef {object} Stack panels under each other, as Stack.state in Python's model.py returns them
 * @property {Look} look
 * @property {boolean} lanes whether outlines have lanes of their own
 * @property {number} end the last time on the axis
 * @property {number} most the activations that fill a memory strip
 * @property {[string, string][]} legend keys and words
 * @property {Record<string, Color[]>} fills the colors of each op
 * @property {Panel[]} panels
 *
 * @typedef {object} Gap
 * @property {number} rank
 * @property {number} start
 * @property {number} end
 * @property {string} why
 */

/**
 * Format a number as Python's `pretty` does.
 * @param {number} number
 */
export const pretty = (number) =>
  Math.abs(number) < 10000 ? `${+number.toPrecision(4)}` : Math.round(number).toLocaleString("en-US");

/**
 * The largest of numbers that are not negative. Math.max(...values) would overflow the stack with very many values.
 * @param {number[]} values
 */
export const largest = (values) => values.reduce((most, each) => Math.max(most, each), 0);

/**
 * Steps of 1, 2 or 5 times a power of ten. Their number is near the wanted one.
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

/** One timeline and indices into it. A box is known by its position in the columns. */
export class Timeline {
  /** @param {Panel} data */
  constructor(data) {
    const { boxes, ranks } = data;
    const { op, ...numbers } = boxes;
    this.data = data;
    this.row = data.row ?? "rank";
    this.count = op.length;
    const columns = Object.entries(numbers).map(([name, text]) => [name, unpack(text, this.count)]);
    this.boxes = /** @type {Boxes} */ ({ op, ...Object.fromEntries(columns) });
    this.lanes = data.copies ? 2 : 1; // of a rank: its computations, and its copies
    this.rows = Array.from({ length: ranks * this.lanes + 1 }, () => 0); // where each rank's boxes begin
    for (let i = 0; i < this.count; i++) this.rows[this.boxes.rank[i] + 1] = i + 1;
    for (let rank = 1; rank < this.rows.length; rank++) this.rows[rank] = Math.max(this.rows[rank], this.rows[rank - 1]);
    /** @type {[number[], number[]][]} */
    this.curves = []; // what `memory` has found
    /** @type {Gap[]} */
    this.gaps = data.gaps.map(([rank, start, end, why]) => ({ rank, start, end, why }));
    /** @type {Timeline | null} */
    this.outline = data.outline && new Timeline(data.outline);
    /** @type {Map<string, number[]>} */
    this.places = new Map(); // where `find` finds the actions of a stage and an op, by microbatch
  }

  /**
   * The sequence that a slice belongs to; of whole sequences, its microbatch.
   * @param {number} m
   */
  sequence(m) {
    return Math.floor(m / this.data.slices);
  }

  /**
   * The rank of a box, also of a copy.
   * @param {number} i
   */
  rankOf(i) {
    return this.boxes.rank[i] % this.data.ranks;
  }

  /** @param {number} i */
  label(i) {
    const { stage, op, microbatch } = this.boxes;
    return `${stage[i]}${op[i]}${microbatch[i]}`;
  }

  /**
   * The box of an action, or undefined.
   * @param {string} label
   */
  find(label) {
    const { stage, op, microbatch } = this.boxes;
    if (!this.places.size) {
      for (let i = 0; i < this.count; i++) {
        const kind = `${stage[i]}${op[i]}`;
        if (!this.places.has(kind)) this.places.set(kind, []);
        /** @type {number[]} */ (this.places.get(kind))[microbatch[i]] = i;
      }
    }
    const [, kind, m] = /** @type {RegExpMatchArray} */ (label.match(/^(\d+\D+)(\d+)$/));
    return this.places.get(kind)?.[Number(m)];
  }

  /**
   * The boxes whose results a box requires.
   * @param {number} i
   */
  sources(i) {
    const { stage, op, microbatch } = this.boxes;
    /** @param {[string, number, number]} result */
    const maker = ([kind, from, step]) => {
      const m = microbatch[i] + step;
      if (this.sequence(m) !== this.sequence(microbatch[i])) return undefined;
      return this.find(`${from}${kind}${m}`) ?? (kind === "B" ? this.find(`${from}I${m}`) : undefined);
    };
    return this.data.needs[`${stage[i]}${op[i]}`].map(maker).filter((each) => each !== undefined);
  }

  /**
   * The boxes that require a box's result.
   * @param {number} i
   */
  users(i) {
    const { stage, op, microbatch } = this.boxes;
    const kind = op[i] === "I" ? "B" : op[i];
    const found = Object.entries(this.data.needs).flatMap(([user, results]) =>
      results.filter(([made, from]) => made === kind && from === stage[i]).map(([, , step]) => {
        const m = microbatch[i] - step;
        return this.sequence(m) === this.sequence(microbatch[i]) ? this.find(`${user}${m}`) : undefined;
      }),
    );
    return found.filter((each) => each !== undefined).toSorted((a, b) => a - b);
  }

  /**
   * The memory of a rank as a step curve: times, and the activations held from each time on.
   * @param {number} rank
   */
  memory(rank) {
    const { start, end, op, stage, microbatch, part } = this.boxes;
    if (this.curves[rank] || !this.data.memory) return this.curves[rank] ?? [[0], [0]];
    const { one, period, changes } = this.data.memory;
    const [times, values] = (this.curves[rank] = [[0], [0]]);
    /** @type {[number, number][]} */
    const steps = [];
    /** @param {number} time @param {number} change */
    const add = (time, change) => change && steps.push([time, change]);
    const again = this.data.boxes.op.includes("R");
    /** @param {number} k */
    const change = (k) => {
      const recomputed = again && this.find(`${stage[k]}R${microbatch[k]}`) !== undefined;
      return changes[`${stage[k]}${op[k]}${microbatch[k] % period}${recomputed ? "R" : ""}`];
    };
    for (let row = rank; row < this.rows.length - 1; row += this.data.ranks)
      for (let i = this.rows[row]; i < this.rows[row + 1]; i++) {
        const last = part[i] === 1 ? i + 1 : i;
        const both = last > i ? [change(i), change(last)] : [change(i)];
        both.forEach(([held], k) => add(start[i + k], held));
        both.forEach(([, freed], k) => add(end[i + k], -freed));
        i = last;
      }
    if (this.lanes > 1) steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]); // what ends frees its memory for what starts
    let held = 0;
    for (const [time, step] of steps) {
      held += step;
      times.push(time);
      values.push(held / one);
    }
    return this.curves[rank];
  }

  /**
   * The first box of a rank that ends after a time.
   * @param {number} rank
   * @param {number} time
   */
  after(rank, time) {
    let [low, high] = [this.rows[rank], this.rows[rank + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.boxes.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /**
   * The box that a rank runs at a time, or -1. Of an overlapped pair, the upper or the lower half.
   * @param {number} rank
   * @param {number} time
   */
  at(rank, time, upper = true) {
    const i = this.after(rank, time);
    if (i >= this.rows[rank + 1] || this.boxes.start[i] > time) return -1;
    return this.boxes.part[i] === 1 && !upper ? i + 1 : i;
  }

  /**
   * The rank whose result ends a gap; the gap's own rank if it is not another one.
   * @param {Gap} gap
   */
  awaited({ rank, end }) {
    const next = this.after(rank, end);
    const sources = next < this.rows[rank + 1] ? this.sources(next) : [];
    const last = sources.toSorted((a, b) => this.boxes.end[b] - this.boxes.end[a])[0];
    return last === undefined ? rank : this.rankOf(last);
  }

  /**
   * The boxes in view, rank after rank.
   * @param {View} view
   */
  visible({ left, right }) {
    const found = [];
    for (let row = 0; row < this.rows.length - 1; row++)
      for (let i = this.after(row, left); i < this.rows[row + 1] && this.boxes.start[i] < right; i++) found.push(i);
    return found;
  }

  /**
   * The activations that a rank holds at a time.
   * @param {number} rank
   * @param {number} time
   */
  held(rank, time) {
    const [times, values] = this.memory(rank);
    let value = 0;
    for (let k = 0; k < times.length && times[k] <= time; k++) value = values[k];
    return value;
  }

  /**
   * The time of a box in words.
   * @param {number} i
   */
  when(i) {
    const { start, end } = this.boxes;
    return `${pretty(start[i])}–${pretty(end[i])}${this.data.unit && ` ${this.data.unit}`}`;
  }

  /**
   * A box in words: its action, its time, its dependencies and the memory of its rank.
   * @param {number} i
   * @param {Record<Op, string>} names
   * @param {string} lane the name of this timeline, where another one is beside it
   * @param {string} beside the same action in the other one, as `when` describes it
   */
  describe(i, names, lane = "", beside = "") {
    const { start, op, stage, microbatch, part } = this.boxes;
    const own = this.rankOf(i);
    /** @param {number[]} those */
    const list = (those) =>
      those.map((j) => this.label(j) + (this.rankOf(j) === own ? "" : ` (${this.row} ${this.rankOf(j)})`)).join(", ") || "nothing";
    return (
      `${this.label(i)}${lane && `, ${lane}`}: ${names[op[i]]} of microbatch ${microbatch[i]} in stage ${stage[i]}, on ${this.row} ${own}, ` +
      `${this.when(i)}${part[i] ? ", overlapped" : ""}. ${beside}` +
      `Requires ${list(this.sources(i))}; required by ${list(this.users(i))}.` +
      (this.data.memory ? ` While it runs, ${this.row} ${own} holds ${pretty(this.held(own, start[i]))}${this.data.memory_unit && ` ${this.data.memory_unit}`}.` : "")
    );
  }

  /**
   * The boxes of a microbatch, in the order in which they run.
   * @param {number} microbatch
   */
  journey(microbatch) {
    const { start, end } = this.boxes;
    const found = [];
    for (let i = 0; i < this.count; i++) if (this.boxes.microbatch[i] === microbatch) found.push(i);
    return found.toSorted((a, b) => start[a] - start[b] || end[a] - end[b]);
  }

  /**
   * The journey of a microbatch in words.
   * @param {number} microbatch
   * @param {string} lane the name of this timeline, where another one is beside it
   */
  tell(microbatch, lane = "") {
    const journey = this.journey(microbatch);
    const { start, end } = this.boxes;
    const ends = journey.length ? `, ${pretty(start[journey[0]])}–${pretty(largest(journey.map((i) => end[i])))}` : "";
    return `Microbatch ${microbatch}${lane && `, ${lane}`}${ends}: ${journey.map((i) => this.label(i)).join(" → ")}`;
  }

  /**
   * What the ranks do and hold at a time, in words.
   * @param {number} time
   * @param {string} lane the name of this timeline, where another one is beside it
   */
  moment(time, lane = "") {
    const ranks = [...Array(this.data.ranks).keys()];
    const now = ranks.slice(0, 16).map((rank) => {
      const i = this.at(rank, time);
      return `${this.row} ${rank} ${i < 0 ? "idle" : this.label(i)}`;
    });
    const held = ranks.map((rank) => pretty(this.held(rank, time)));
    return `At ${pretty(time)}${lane && `, ${lane}`}: ${now.join(", ")}${ranks.length > 16 ? " …" : `. Activations held: ${held.join(", ")}.`}`;
  }

  /** The orders of all ranks with their times, as text. */
  spell() {
    const { start, end } = this.boxes;
    const lines = [this.data.summary];
    for (let rank = 0; rank < this.rows.length - 1; rank++) {
      const own = [];
      // The unusual spaces keep an action and its time on one line.
      for (let i = this.rows[rank]; i < this.rows[rank + 1]; i++)
        own.push(`${this.label(i)}\u00a0${pretty(start[i])}–\u2060${pretty(end[i])}`);
      const copies = rank < this.data.ranks ? "" : " copies";
      if (own.length || !copies) lines.push(`${this.row} ${rank % this.data.ranks}${copies}: ${own.join(", ")}`);
    }
    return `${lines.join("\n")}\n`;
  }
}
