// @ts-check
// Work that takes long: all at once, or in small tasks, between which the page answers clicks.

const TASK = 16; // milliseconds

/**
 * Do all of some work now, and return its result.
 * @template Result
 * @param {Generator<void, Result>} work
 * @returns {Result}
 */
export function atOnce(work) {
  let step = work.next();
  while (!step.done) step = work.next();
  return step.value;
}

/**
 * Do some work in small tasks, and return its result, or null if it was not wanted until its end.
 * @template Result
 * @param {Generator<void, Result>} work
 * @param {() => boolean} wanted
 * @returns {Promise<Result | null>}
 */
export async function inTasks(work, wanted) {
  while (true) {
    await new Promise((resolve) => setTimeout(resolve));
    const begun = performance.now();
    while (wanted() && performance.now() - begun < TASK) {
      const step = work.next();
      if (step.done) return step.value;
    }
    if (!wanted()) return null;
  }
}
