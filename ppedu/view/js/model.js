// @ts-check
// Timelines as Python sends them, and what can be looked up in them. It knows neither canvas nor page.

/**
 * @typedef {"F" | "B" | "I" | "W" | "R"} Op
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
 * @property {boolean} [plain] whether idle time is painted, and words stand in place of names and numbers
 *
 * @typedef {object} Boxes columns with an entry for each compute action, or for each half of an overlapped pair
 * @property {number[]} rank
 * @property {number[]} start
 * @property {number[]} end
 * @property {Op[]} op
 * @property {number[]} stage
 * @property {number[]} microbatch
 * @property {number[]} chunk
 * @property {number[]} copy 1 for the second copy of the model
 * @property {number[]} part 1 or 2 for a half of an overlapped pair, otherwise 0
 * @property {number[]} mark 1 where the action is marked
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
 * @property {number} stages
 * @property {number} microbatches
 * @property {number} makespan
 * @property {import("./why.js").Part[]} numbers
 * @property {Boxes} boxes
 * @property {number[][]} sources for each box, the boxes whose results it requires
 * @property {Record<Op, [Color, Color][]>} shades by op, chunk and parity of the microbatch
 * @property {[number, number, number, string][]} gaps rank, start, end and the reason
 * @property {[number[], number[]][]} memory for each rank, times and the activations held from each time on
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
    const { boxes, sources, ranks } = data;
    this.data = data;
    this.row = data.row ?? "rank";
    this.boxes = boxes;
    this.count = sources.length;
    this.rows = Array.from({ length: ranks + 1 }, () => 0); // where each rank's boxes begin
    for (let i = 0; i < this.count; i++) this.rows[boxes.rank[i] + 1] = i + 1;
    for (let rank = 1; rank <= ranks; rank++) this.rows[rank] = Math.max(this.rows[rank], this.rows[rank - 1]);
    /** @type {number[][]} */
    this.users = sources.map(() => []); // the boxes that require each box's result
    sources.forEach((those, i) => those.forEach((source) => this.users[source].push(i)));
    /** @type {Gap[]} */
    this.gaps = data.gaps.map(([rank, start, end, why]) => ({ rank, start, end, why }));
    /** @type {Timeline | null} */
    this.outline = data.outline && new Timeline(data.outline);
    /** @type {Map<string, number>} */
    this.places = new Map(); // where `find` finds each action
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
    if (!this.places.size) for (let i = 0; i < this.count; i++) this.places.set(this.label(i), i);
    return this.places.get(label);
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
    const sources = next < this.rows[rank + 1] ? this.data.sources[next] : [];
    const last = sources.toSorted((a, b) => this.boxes.end[b] - this.boxes.end[a])[0];
    return last === undefined ? rank : this.boxes.rank[last];
  }

  /**
   * The boxes in view, rank after rank.
   * @param {View} view
   */
  visible({ left, right }) {
    const found = [];
    for (let rank = 0; rank < this.data.ranks; rank++)
      for (let i = this.after(rank, left); i < this.rows[rank + 1] && this.boxes.start[i] < right; i++) found.push(i);
    return found;
  }

  /**
   * The activations that a rank holds at a time.
   * @param {number} rank
   * @param {number} time
   */
  held(rank, time) {
    const [times, values] = this.data.memory[rank];
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
    const { rank, start, op, stage, microbatch, part } = this.boxes;
    /** @param {number[]} those */
    const list = (those) =>
      those.map((j) => this.label(j) + (rank[j] === rank[i] ? "" : ` (${this.row} ${rank[j]})`)).join(", ") || "nothing";
    return (
      `${this.label(i)}${lane && `, ${lane}`}: ${names[op[i]]} of microbatch ${microbatch[i]} in stage ${stage[i]}, on ${this.row} ${rank[i]}, ` +
      `${this.when(i)}${part[i] ? ", overlapped" : ""}. ${beside}` +
      `Requires ${list(this.data.sources[i])}; required by ${list(this.users[i])}.` +
      (this.data.peaks.length ? ` While it runs, ${this.row} ${rank[i]} holds ${pretty(this.held(rank[i], start[i]))}${this.data.memory_unit && ` ${this.data.memory_unit}`}.` : "")
    );
  }

  /**
   * The boxes of a microbatch, in the order in which they run.
   * @param {number} microbatch
   */
  journey(microbatch) {
    const { start, end } = this.boxes;
    const found = this.data.sources.map((_, i) => i).filter((i) => this.boxes.microbatch[i] === microbatch);
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
    for (let rank = 0; rank < this.data.ranks; rank++) {
      const own = [];
      // The unusual spaces keep an action and its time on one line.
      for (let i = this.rows[rank]; i < this.rows[rank + 1]; i++)
        own.push(`${this.label(i)}\u00a0${pretty(start[i])}–\u2060${pretty(end[i])}`);
      lines.push(`${this.row} ${rank}: ${own.join(", ")}`);
    }
    return `${lines.join("\n")}\n`;
  }
}
