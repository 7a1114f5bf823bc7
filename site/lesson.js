// Makes a lesson's page run: Python in a worker computes its cells, and their outputs take the place of the recorded ones.
import { read } from "./book.js";
import { Python } from "./python.js";
import { mount } from "./widgets.js";

const IDLE = "The outputs on this page were recorded. Python can run most of its cells right here, in your browser.";

/** @param {string} tag @param {object} properties @param {...(Node | string)} children */
function element(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** Return a control for a prediction. @param {any} asked @param {(question: object) => void} ask */
function control(asked, ask) {
  const name = String(asked.name);
  const tell = (/** @type {string} */ value) => ask({ predict: name, value });
  const node = element("fieldset", { className: "output asked" }, element("legend", { textContent: `${name}: your prediction?` }));
  for (const choice of asked.choices) {
    const box = element("input", { type: "radio", name, value: String(choice) });
    box.addEventListener("change", () => tell(String(choice)));
    node.append(element("label", {}, box, ` ${choice}`));
  }
  if (asked.step) {
    const { min, max, step } = asked;
    const input = /** @type {HTMLInputElement} */ (element("input", { type: "number", min: String(min), max: String(max), step: String(step) }));
    input.addEventListener("change", () => tell(input.value));
    node.append(element("label", {}, `from ${min} to ${max}: `, input));
  }
  return node;
}

/** A cell of the page: its code, and what stands below it. */
class Cell {
  /** @param {Element} node @param {number} number */
  constructor(node, number) {
    this.number = number;
    this.code = /** @type {HTMLElement} */ (node.querySelector(".cell_input pre"));
    this.original = (this.code.textContent ?? "").replace(/\n$/, "");
    this.edited = false;
    const recorded = node.querySelector(".cell_output");
    this.output = recorded ?? element("div", { className: "cell_output" });
    if (!recorded) node.querySelector(".cell_input")?.after(this.output);
    this.pictures = [...this.output.querySelectorAll("img")];
  }

  get source() {
    return this.edited ? this.code.innerText.replace(/\n$/, "") : this.original;
  }

  /** Let a reader edit and run the code. @param {() => void} start */
  open(start) {
    const { code } = this;
    if (code.isContentEditable) return;
    code.contentEditable = "plaintext-only";
    for (const [name, value] of Object.entries({ role: "textbox", "aria-multiline": "true", "aria-label": `code of cell ${this.number + 1}`, spellcheck: "false" })) {
      code.setAttribute(name, value);
    }
    code.addEventListener("input", () => {
      this.edited = true;
    });
    code.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !event.shiftKey) return;
      event.preventDefault();
      start();
    });
    const button = element("button", { type: "button", className: "run", textContent: "run" });
    button.setAttribute("aria-label", `run cell ${this.number + 1}`);
    button.addEventListener("click", start);
    code.after(button);
  }

  /** Show what the cell has computed. @param {any[]} outputs @param {Map<number, any>} widgets @param {(question: object) => void} ask */
  show(outputs, widgets, ask) {
    if (outputs.length === 1 && outputs[0].recorded) {
      this.output.querySelector(".recorded")?.remove();
      this.output.prepend(element("p", { className: "recorded", textContent: String(outputs[0].recorded) }));
      return;
    }
    const same = this.source === this.original;
    const shown = outputs.filter((output) => !(output.more && same)).map((output) => {
      if (output.state) {
        const node = element("div", { className: "output" });
        const number = Number(output.widget);
        const widget = mount(node, output.state, (/** @type {any} */ said) => ask({ widget: number, message: said }));
        widget.figure.address = location.href.split("#")[0];
        widgets.set(number, widget);
        return node;
      }
      if (output.asked) return control(output.asked, ask);
      if (output.folded) {
        const summary = element("summary", { textContent: `${output.folded} Show the answer` });
        return element("details", { className: "output" }, summary, String(output.answer));
      }
      const wrong = typeof output.error === "string";
      return element("pre", { className: wrong ? "output wrong" : "output", textContent: String(wrong ? output.error : output.text) });
    });
    // A widget shows the same as the picture. Where a cell drew more, the picture stays, as long as the code does.
    const replaced = outputs.some((output) => output.state && !output.more);
    const pictures = replaced || !same ? [] : this.pictures;
    this.output.replaceChildren(...pictures, ...shown);
  }
}

const cells = [...document.querySelectorAll("div.cell:has(.cell_input)")].map((node, number) => new Cell(node, number));
const status = element("span", { textContent: IDLE });
status.setAttribute("role", "status");
const all = /** @type {HTMLButtonElement} */ (element("button", { type: "button", textContent: "run this lesson" }));
const stop = /** @type {HTMLButtonElement} */ (element("button", { type: "button", textContent: "stop", hidden: true }));
/** @type {Map<number, any>} */ const widgets = new Map();
/** @type {Python | null} */ let python = null;
let running = 0; // cells that were asked for

/** @param {object} question */
async function message(question) {
  const answer = await python?.ask(question);
  const widget = answer && widgets.get(answer.widget);
  if (answer?.received) widget?.receive?.(answer.received);
  else if (answer?.state) widget?.update(answer.state);
}

/** @param {Cell} cell @param {boolean} first whether all cells are run, which shows no hints */
async function run(cell, first = false) {
  running += 1;
  stop.hidden = false;
  status.textContent = `Cell ${cell.number + 1} of ${cells.length} is running.`;
  let ended = false;
  try {
    const answer = await python?.ask({ cell: cell.number, source: cell.source, first });
    if (answer?.cell === cell.number && Array.isArray(answer.outputs)) {
      cell.show(answer.outputs, widgets, message);
      if (answer.solved) read();
      ended = true;
    }
  } catch {
    status.textContent = "Python could not be loaded, or answered with something that cannot be shown.";
  }
  running -= 1;
  stop.hidden = running === 0;
  if (ended && !running) status.textContent = "Edit a cell, and run it with its button or Shift+Enter.";
  return ended;
}

all.addEventListener("click", async () => {
  all.disabled = true;
  status.textContent = "Python is loading: 7 MB, the first time.";
  python ??= new Python("cells", () => {});
  for (const cell of cells) {
    if (!(await run(cell, true))) break;
    cell.open(() => run(cell));
  }
  all.disabled = false;
});
stop.addEventListener("click", () => {
  python?.stop();
  stop.hidden = true;
  status.textContent = "Stopped. Python has forgotten all names: run the lesson again.";
});
document.querySelector("h1")?.after(element("div", { className: "live" }, all, stop, status));
