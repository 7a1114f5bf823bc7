// @ts-check
// Makes a schedule's page live: its picture can be played, and its formulas have values for other sizes.
import { mount } from "./widgets.js";

/** @typedef {{ state: any, values: Record<string, string[]> }} Live the widget; texts by ranks, each by microbatches */

/** Put the widget where the picture is, which stays for the printer. @param {HTMLElement} figure @param {any} state */
function play(figure, state) {
  const widget = mount(figure, state);
  widget.figure.address = location.href;
  figure.classList.add("live");
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "build", textContent: "Watch it build up" });
  button.addEventListener("click", () => widget.figure.toggle());
  figure.append(button);
}

/** Show the formulas' values for the inputs. @param {HTMLFormElement} form @param {Live["values"]} values */
function evaluate(form, values) {
  const [ranks, microbatches] = [...form.querySelectorAll("input")];
  if (!ranks.checkValidity() || !microbatches.checkValidity()) return;
  for (const output of document.querySelectorAll("output")) {
    const row = values[output.name]?.[ranks.valueAsNumber - Number(ranks.min)];
    if (row) output.value = row.split(" ")[microbatches.valueAsNumber - Number(microbatches.min)];
  }
}

const figure = /** @type {HTMLElement} */ (document.querySelector("figure[data-live]"));
const form = /** @type {HTMLFormElement} */ (document.querySelector("form"));
const answer = await fetch(String(figure.dataset.live));
/** @type {Live} */ const { state, values } = await answer.json();
play(figure, state);
form.hidden = form.children.length === 0;
form.addEventListener("input", () => evaluate(form, values));
form.addEventListener("submit", (event) => event.preventDefault());
evaluate(form, values); // a browser may have kept what was in the inputs
navigator.serviceWorker?.register(new URL("sw.js", import.meta.url)).catch(() => {});
