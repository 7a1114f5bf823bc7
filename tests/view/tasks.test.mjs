// Long work, at once or in small tasks. Run with `make test-widgets`.

import assert from "node:assert/strict";
import { test } from "node:test";

import { atOnce, inTasks } from "../../ppedu/view/js/tasks.js";

/** Work that takes some milliseconds, one in each step. */
function* working(milliseconds) {
  for (let done = 0; done < milliseconds; done++) {
    for (const begun = performance.now(); performance.now() < begun + 1; );
    yield;
  }
  return "done";
}

test("work can be done at once", () => {
  assert.equal(atOnce(working(2)), "done");
});

test("a page answers between small tasks", async () => {
  let answers = 0;
  const timer = setInterval(() => answers++);
  assert.equal(await inTasks(working(100), () => true), "done");
  clearInterval(timer);
  assert.ok(answers > 3, `${answers} answers`);
});

test("work that is no longer wanted ends without a result", async () => {
  let steps = 0;
  const work = (function* () {
    while (true) yield steps++;
  })();
  assert.equal(await inTasks(work, () => steps < 5), null);
  assert.equal(steps, 5);
});
