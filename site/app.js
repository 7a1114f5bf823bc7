// The page around the widgets. Python runs in a worker; what it answers is shown here, as text or by a widget.
import { mount } from "./widgets.js";

const VIEWS = { explore: "explore", write: "write your own", compare: "compare", differences: "differences", puzzle: "puzzle", plan: "plan", atlas: "proven best" };
const WAITS = 400; // milliseconds until a question counts as slow, and can be stopped

const find = (/** @type {string} */ selector) => /** @type {HTMLElement} */ (document.querySelector(selector));
const [tabs, form, shown, status, stop, report] = ["[role=tablist]", "form", "#shown", "#status", "#stop", "#report"].map(find);

/** @type {Worker} */ let worker;
/** @type {any} */ let widget = null;
let kind = ""; // of the widget
let ready = false;
let link = location.hash.slice(1); // to the open view, or to the one that opens first
let code = "";
/** @type {object | null} */ let next = null; // asked while another question is open; only the last counts
let open = 0; // questions without an answer
/** @type {any} */ let slow;

/** Start a worker that has the page's content security policy, as one from a blob does. */
function start() {
  ready = false;
  const source = `import { start } from ${JSON.stringify(new URL("worker.js", location.href).href)}; start();`;
  const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  worker = new Worker(address, { type: "module" });
  worker.onmessage = ({ data }) => receive(data);
  worker.onerror = () => say("Python could not be loaded; reload the page.", true);
}

/** @param {object} question */
function ask(question) {
  if (!ready || open) {
    next = question;
    return;
  }
  open = 1;
  slow = setTimeout(() => {
    stop.hidden = false;
    say("Python is working.");
  }, WAITS);
  worker.postMessage(JSON.stringify(question));
}

/** Take an answer of the worker, which reader's code may have written: use nothing of it but text and numbers.
 * @param {unknown} data */
function receive(data) {
  /** @type {any} */ let answer;
  try {
    answer = JSON.parse(String(data));
  } catch {
    return;
  }
  if (typeof answer !== "object" || answer === null) return;
  if (answer.view !== undefined && !(Object.hasOwn(VIEWS, answer.view) && /^[\w-]*$/.test(answer.link))) return;
  if (answer.ready === true && !ready) {
    ready = true;
    ask(next ?? { open: link });
    return;
  }
  open = 0;
  clearTimeout(slow);
  stop.hidden = true;
  if (typeof answer.wrong === "string") {
    say(answer.wrong, true);
    if (!kind) form.childElementCount || fields([]);
  } else if (answer.received) {
    widget?.receive?.(answer.received);
  } else {
    try {
      display(answer);
    } catch {
      say("Python answered with something that cannot be shown.", true);
    }
  }
  if (next) {
    const question = next;
    next = null;
    ask(question);
  }
}

/** @param {any} answer */
function display(answer) {
  say("");
  find("#first").hidden = true;
  choose(String(answer.view));
  fields(answer.inputs);
  if (answer.state && widget && kind === answer.state.kind) widget.update(answer.state);
  else {
    widget?.figure.destroy();
    shown.replaceChildren();
    widget = answer.state ? mount(shown, answer.state, (/** @type {any} */ message) => ask({ widget: message })) : null;
    kind = answer.state?.kind ?? "";
  }
  report.replaceChildren(...(answer.report ?? []).map(paragraph));
  link = String(answer.link);
  code = String(answer.code);
  history.replaceState(null, "", `#${link}`);
  for (const name of ["#share", "#python"]) find(name).removeAttribute("disabled");
}

/** Return an element with a paragraph, or with a table of several lines. @param {unknown} text */
function paragraph(text) {
  const table = String(text).includes("\n");
  const node = Object.assign(document.createElement(table ? "pre" : "p"), { textContent: String(text) });
  if (table) node.tabIndex = 0; // it may be wider than the page, and then scrolls
  return node;
}

/** @param {string} text */
function say(text, wrong = false) {
  status.textContent = text;
  status.classList.toggle("wrong", wrong);
}

/** Show which view is open. @param {string} view */
function choose(view) {
  for (const tab of tabs.querySelectorAll("button")) {
    const chosen = tab.dataset.view === view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
}

/** Build the inputs of a view, unless the form has them already. @param {any[]} inputs */
function fields(inputs) {
  const names = inputs.map(({ name }) => String(name)).join();
  if (form.dataset.names === names) return;
  form.dataset.names = names;
  form.replaceChildren(...inputs.map(field));
  if (inputs.some(({ kind }) => kind === "area")) {
    const run = Object.assign(document.createElement("button"), { type: "submit", textContent: "check and draw" });
    form.append(run);
  }
}

/** @param {any} input */
function field({ name, label, kind, value, choices }) {
  const tag = kind === "area" ? "textarea" : kind === "choice" ? "select" : "input";
  const control = /** @type {any} */ (document.createElement(tag));
  if (tag === "input") control.type = kind === "number" ? "number" : "text";
  if (tag === "textarea") Object.assign(control, { rows: 8, spellcheck: false });
  if (tag === "select") control.append(...choices.map((/** @type {unknown} */ each) => new Option(String(each))));
  if (kind === "number") control.min = 1;
  control.name = String(name);
  control.value = String(value);
  const node = document.createElement("label");
  node.className = String(kind);
  node.append(String(label), control);
  return node;
}

/** Ask for the view with what the form holds now. */
function submit() {
  const view = tabs.querySelector('[aria-selected="true"]')?.getAttribute("data-view");
  ask({ view, inputs: Object.fromEntries([...new FormData(/** @type {any} */ (form))].map(([name, value]) => [name, String(value)])) });
}

for (const [view, label] of Object.entries(VIEWS)) {
  const tab = Object.assign(document.createElement("button"), { type: "button", textContent: label });
  tab.setAttribute("role", "tab");
  tab.dataset.view = view;
  tab.onclick = () => {
    choose(view);
    ask({ view, inputs: {} });
  };
  tabs.append(tab);
}
tabs.onkeydown = ({ key }) => {
  const all = [...tabs.querySelectorAll("button")], at = all.indexOf(/** @type {any} */ (document.activeElement));
  const to = key === "ArrowRight" ? at + 1 : key === "ArrowLeft" ? at - 1 : at;
  if (to !== at) all[(to + all.length) % all.length].focus();
};
form.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
form.addEventListener("change", ({ target }) => {
  if (/** @type {any} */ (target).localName !== "textarea") submit();
});
stop.onclick = () => {
  worker.terminate();
  clearTimeout(slow);
  stop.hidden = true;
  open = 0;
  next = link ? { open: link } : null; // what was shown before
  say("Stopped. Python starts again.");
  start();
};
/** @param {string} id @param {() => string} text */
function copies(id, text) {
  find(id).onclick = async () => {
    try {
      await navigator.clipboard.writeText(text());
      say("Copied.");
    } catch {
      say("The browser does not allow to copy; take it from the address bar.", true);
    }
  };
}
copies("#share", () => location.href);
copies("#python", () => code);
addEventListener("hashchange", () => {
  if (location.hash.slice(1) !== link) ask({ open: location.hash.slice(1) });
});
choose("explore");
start();
navigator.serviceWorker?.register("sw.js").catch(() => {}); // without it, the page needs the network each time
