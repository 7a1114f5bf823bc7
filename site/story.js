// The story above the playground: four steps, each with a picture that the reader changes or plays.
import { mount, tell } from "./widgets.js";

/**
 * @typedef {import("../ppedu/view/js/why.js").Part} Part
 * @typedef {object} Told what story.py computes; entry n - 1 of a list is that of n GPUs or microbatches
 * @property {number} layer the size of a layer, in GB
 * @property {number} memory that of a GPU
 * @property {any[]} one states with one timeline
 * @property {any[]} two states with GPipe above 1F1B
 * @property {Part[][][][]} count what is counted in each picture: lines, each a number with words
 * @property {Record<string, Part>} why the numbers of the sentences
 */

const root = document.documentElement;
const all = (/** @type {string} */ selector) =>
  /** @type {HTMLElement[]} */ ([...document.querySelectorAll(`#story ${selector}`)]);
const [count, label, amount, play] = [".count", ".amount span", ".amount output", "#play"].map((each) => all(each)[0]);
const slider = /** @type {HTMLInputElement} */ (all(".amount input")[0]);
const [steps, paragraphs, scenes, layers] = [".steps button", ".told > p", ".scene", ".column i"].map(all);

const SCENES = [0, 1, 1, 2]; // the picture of each step

let step = 0;
let gpus = 1;
let microbatches = 8;
let turn = 0; // changes when playing begins or ends, which ends what waits
let playing = false;
/** @type {Told} */ let told;
const shown = [0, 0]; // the microbatches in each widget
/** @type {ReturnType<typeof mount>[]} */ let widgets = [];

/** Divide the layers between the GPUs. */
function cut() {
  const stages = layers.map((_, layer) => Math.floor((layer * gpus) / layers.length));
  layers.forEach((each, layer) => {
    const height = layer - stages.indexOf(stages[layer]); // in its stage
    each.style.setProperty("--right", `${stages[layer]}`);
    each.style.setProperty("--down", `${layer - height}`);
    each.classList.toggle("over", (height + 1) * told.layer > told.memory);
  });
  all(".model")[0].hidden = gpus > 1;
  const pieces = gpus === 1 ? "one piece" : `${gpus} pieces`;
  const line = `a line at a GPU’s ${told.memory} GB`;
  scenes[0].setAttribute("aria-label", `${layers.length} layers in ${pieces}, and ${line}`);
}

/** Show a number of microbatches in a widget. @param {number} which @param {number} m */
function batches(which, m) {
  if (shown[which] !== m) widgets[which].update([told.one, told.two][which][m - 1]);
  shown[which] = m;
}

/** Show the current step, and count. */
function draw() {
  for (const each of steps) each.removeAttribute("aria-current");
  steps[step].setAttribute("aria-current", "step");
  paragraphs.forEach((each, k) => each.classList.toggle("now", k === step));
  scenes.forEach((each, k) => each.classList.toggle("now", k === SCENES[step]));
  const [wanted, most] = step === 0 ? [gpus, 4] : [microbatches, told.one.length];
  label.textContent = step === 0 ? "GPUs" : "microbatches";
  Object.assign(slider, { max: most, value: wanted, disabled: step === 1 });
  amount.textContent = step === 1 ? "1" : `${wanted}`;
  if (step === 1) slider.value = "1";
  if (step === 0) cut();
  if (step === 1 || step === 2) batches(0, step === 1 ? 1 : microbatches);
  if (step === 3) batches(1, microbatches);
  write(told.count[SCENES[step]][slider.valueAsNumber - 1]);
}

/** Write what is counted. @param {Part[][]} lines */
function write(lines) {
  count.replaceChildren(
    ...lines.map(([number, ...words]) => {
      const [line, large] = ["p", "b"].map((tag) => document.createElement(tag));
      large.append(...tell([number]));
      line.append(large, ...tell(words));
      return line;
    }),
  );
  count.classList.toggle("wrong", step === 0 && layers.some((each) => each.classList.contains("over")));
}

/** @param {number} to */
function go(to) {
  step = to;
  for (const { figure } of widgets) {
    figure.pause();
    figure.whole();
  }
  draw();
}

/** End what plays. */
function stop() {
  turn += 1;
  playing = false;
  for (const { figure } of widgets) figure.pause();
  play.textContent = "Play";
  count.removeAttribute("aria-live");
}

/** Play a timeline to its end. @param {any} figure @returns {Generator<number, void>} */
function* watch(figure) {
  figure.play();
  while (figure.playing) yield 200;
  yield 1200;
}

/** What each step plays: changes, each followed by milliseconds to wait. @type {(() => Generator<number, void>)[]} */
const PLAYS = [
  function* () {
    for (gpus = 1; gpus < 4; gpus++) yield 1200;
    yield 2500;
  },
  () => watch(widgets[0].figure),
  function* () {
    for (microbatches = 1; microbatches < told.one.length; microbatches++) yield microbatches === 1 ? 1500 : 450;
    yield 2500;
  },
  function* () {
    microbatches = told.one.length / 2;
    draw();
    yield* watch(widgets[1].figure);
  },
];

/** Play this step and those after it. */
async function begin() {
  const mine = ++turn;
  playing = true;
  play.textContent = "Pause";
  count.setAttribute("aria-live", "off"); // or a screen reader would speak without end
  for (let k = step; k < PLAYS.length; k++) {
    if (k !== step) go(k);
    for (const wait of PLAYS[k]()) {
      draw();
      await new Promise((resolve) => setTimeout(resolve, wait));
      if (turn !== mine) return;
    }
  }
  stop();
}

/** Show the story, once it is wanted. */
async function open() {
  told = await (await fetch("story.json")).json();
  for (const each of all("[data-why]")) each.replaceWith(...tell([told.why[String(each.dataset.why)]]));
  draw();
  for (const [k, states] of [told.one, told.two].entries()) {
    await new Promise((resolve) => setTimeout(resolve)); // a task for each, between which the page answers
    widgets[k] = mount(scenes[k + 1], states[0]);
  }
  shown.fill(1);
  steps.forEach((each, k) => {
    each.addEventListener("click", () => {
      stop();
      go(k);
    });
    each.addEventListener("keydown", ({ key }) => {
      const to = k + (key === "ArrowRight" ? 1 : key === "ArrowLeft" ? -1 : 0);
      if (to !== k && steps[to]) {
        steps[to].focus();
        steps[to].click();
      }
    });
  });
  slider.addEventListener("input", () => {
    stop();
    if (step === 0) gpus = slider.valueAsNumber;
    else microbatches = slider.valueAsNumber;
    draw();
  });
  play.addEventListener("click", () => (playing ? stop() : begin()));
}

// Playing would take a number away while its words are read.
for (const event of ["pointerdown", "focusin"])
  document.querySelector("#story")?.addEventListener(event, ({ target }) => {
    if (/** @type {Element} */ (target).closest(".ppedu-why")) stop();
  });
for (const door of document.querySelectorAll(".below"))
  door.addEventListener("click", () => {
    const heading = /** @type {HTMLElement} */ (document.querySelector("#try"));
    heading.focus({ preventScroll: true });
    heading.scrollIntoView();
  });
document.querySelector("#what")?.addEventListener("click", (event) => {
  event.preventDefault();
  root.classList.remove("linked");
  scrollTo(0, 0);
  open();
});
if (!root.classList.contains("linked")) open();
