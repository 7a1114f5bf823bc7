// The pure parts of the widgets' model: numbers as text, ticks, and looking up boxes. Run with `make test-widgets`.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Timeline, largest, pretty, ticks } from "../../ppedu/view/js/model.js";
import { unpack } from "../../ppedu/view/js/unpack.js";

/** Numbers as Python sends them. */
const packed = (numbers, Type = Uint8Array) => Buffer.from(new Type(numbers).buffer).toString("base64");

/** GPipe on two ranks with two microbatches: rank 1 waits for 1 at the start, rank 0 for 2 in the middle. */
const gpipe = () =>
  new Timeline({
    ranks: 2,
    boxes: {
      rank: packed([0, 0, 0, 0, 1, 1, 1, 1]),
      start: packed([0, 1, 5, 7, 1, 2, 3, 5], Float64Array),
      end: packed([1, 2, 7, 9, 2, 3, 5, 7], Uint16Array),
      op: "FFBBFFBB",
      stage: packed([0, 0, 0, 0, 1, 1, 1, 1]),
      microbatch: packed([0, 1, 0, 1, 0, 1, 0, 1]),
      part: "",
    },
    slices: 1,
    needs: { "0F": [], "1F": [["F", 0, 0]], "1B": [["F", 1, 0]], "0B": [["F", 0, 0], ["B", 1, 0]] },
    gaps: [[0, 2, 5, "rank 0 waits"]],
    memory: { one: 2, period: 1, changes: { "0F0": [2, 0], "1F0": [2, 0], "0B0": [0, 2], "1B0": [0, 2] } },
    outline: null,
  });

test("a slice needs the one before, and its backward the one after, of its own sequence", () => {
  const timeline = new Timeline({
    ranks: 1,
    slices: 2,
    boxes: {
      ...Object.fromEntries(["rank", "stage"].map((name) => [name, packed([0, 0, 0, 0, 0, 0])])),
      start: packed([0, 1, 2, 4, 6, 7]),
      end: packed([1, 2, 4, 6, 7, 8]),
      op: "FFBBFR",
      microbatch: packed([0, 1, 1, 0, 2, 2]),
      part: "",
    },
    needs: { "0F": [["F", 0, -1]], "0B": [["F", 0, 0], ["B", 0, 1]], "0R": [["F", 0, 0]] },
    gaps: [],
    memory: { one: 1, period: 2, changes: { "0F0": [2, 0], "0F1": [3, 0], "0B0": [0, 2], "0B1": [0, 3], "0F0R": [1, 0], "0R0R": [1, 0] } },
    outline: null,
  });
  assert.deepEqual([0, 1, 2, 3, 4].map((i) => timeline.sources(i)), [[], [0], [1], [0, 2], []]);
  assert.deepEqual([0, 1, 2, 3, 4].map((i) => timeline.users(i)), [[1, 3], [2], [3], [], [5]]);
  assert.deepEqual(timeline.memory(0)[1], [0, 2, 5, 2, 0, 1, 2]);
});

test("numbers have four digits, and thousands are separated", () => {
  assert.deepEqual([33, 0.012345, 9999.6, 12345.6].map(pretty), ["33", "0.01235", "10000", "12,346"]);
});

test("the largest of no numbers is 0", () => {
  assert.equal(largest([]), 0);
  assert.equal(largest([1, 3, 2]), 3);
});

test("ticks are multiples of 1, 2 or 5", () => {
  assert.deepEqual(ticks(0, 33, 10), [0, 5, 10, 15, 20, 25, 30]);
  assert.deepEqual(ticks(0.1, 0.3, 2), [0.1, 0.2, 0.3]);
});

test("a rank's box at a time begins then or before, and ends later", () => {
  const timeline = gpipe();
  const label = (i) => (i < 0 ? null : timeline.label(i));
  assert.deepEqual([0, 1, 2, 5, 9].map((time) => label(timeline.at(0, time))), ["0F0", "0F1", null, "0B0", null]);
  assert.equal(label(timeline.after(1, 0)), "1F0");
});

test("an action is found by its name", () => {
  assert.equal(gpipe().find("1B1"), 7);
  assert.equal(gpipe().find("2F0"), undefined);
});

test("a gap ends with the result of another rank", () => {
  const timeline = gpipe();
  assert.equal(timeline.awaited(timeline.gaps[0]), 1);
});

test("a box is linked to the boxes before and after it", () => {
  const timeline = gpipe();
  assert.deepEqual(timeline.sources(2), [0, 6]);
  assert.deepEqual([0, 6, 3].map((i) => timeline.users(i)), [[2, 4], [2], []]);
});

test("numbers are read as Python packs them, in the fewest bytes", () => {
  assert.deepEqual([...unpack("AAEsAQ==", 2)], [256, 300]);
  assert.deepEqual([...unpack("", 3)], [0, 0, 0]);
});

test("a journey follows a microbatch through the stages", () => {
  const timeline = gpipe();
  assert.deepEqual(timeline.journey(1).map((i) => timeline.label(i)), ["0F1", "1F1", "1B1", "0B1"]);
});

test("the boxes in view overlap it", () => {
  assert.deepEqual(gpipe().visible({ left: 1, right: 3 }), [1, 4, 5]);
});

test("what is held changes at the curve's times", () => {
  assert.deepEqual([-1, 0, 1, 6.9, 9].map((time) => gpipe().held(0, time)), [0, 1, 2, 2, 0]);
});

test("copies have rows of their own, and free memory while activations are on the host", () => {
  const timeline = new Timeline({
    ranks: 1,
    copies: true,
    slices: 1,
    unit: "",
    memory_unit: "",
    boxes: {
      rank: packed([0, 0, 0, 0, 1, 1]),
      stage: packed([0, 0, 0, 0, 0, 0]),
      start: packed([0, 1, 5, 7, 1, 3]),
      end: packed([1, 2, 7, 9, 3, 5]),
      op: "FFBBOL",
      microbatch: packed([0, 1, 0, 1, 0, 0]),
      part: "",
    },
    needs: { "0F": [], "0B": [["F", 0, 0], ["L", 0, 0]], "0O": [["F", 0, 0]], "0L": [["O", 0, 0]] },
    gaps: [],
    memory: { one: 1, period: 1, changes: { "0F0": [1, 0], "0B0": [0, 1], "0O0": [0, 1], "0L0": [1, 0] } },
    outline: null,
  });
  assert.deepEqual(timeline.memory(0), [[0, 0, 1, 3, 3, 7, 9], [0, 1, 2, 1, 2, 1, 0]]);
  assert.deepEqual(timeline.visible({ left: 0, right: 9 }), [0, 1, 2, 3, 4, 5]);
  assert.equal(timeline.label(timeline.at(1, 2)), "0O0");
  assert.deepEqual(timeline.sources(2).map((i) => timeline.label(i)), ["0F0", "0L0"]);
  assert.match(timeline.describe(5, { L: "load" }), /^0L0: load of microbatch 0 in stage 0, on rank 0, 3–5\. Requires 0O0; required by 0B0\./);
});
