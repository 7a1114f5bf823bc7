// The page around the widgets. Python runs in a worker; what it answers is shown here, as text or by a widget.
import { Python } from "./python.js";
import { mount, recall, savedName, setIn, tableOf, tell } from "./widgets.js";

const find = (/** @type {string} */ selector) => /** @type {HTMLElement} */ (document.querySelector(selector));
const [tabs, form, shown, status, stop, report, copied] = ["[role=tablist]", "form", "#shown", "#status", "#stop", "#report", "#copied"].map(find);

const MOVING = 800; // milliseconds between two changes of a slider that moves, at most

const share = find("#share"); // moves between the footer and the picture's toolbar

/** @type {any} */ let widget = null;
const all = [...tabs.querySelectorAll("button")];
const views = all.map((tab) => tab.dataset.view);
let shape = ""; // the widget's kind
/** A link's view, and after its first &, what is set in the picture. @param {string} fragment */
const parts = (fragment) => ({ to: fragment.split("&", 1)[0], set: fragment.split("&").slice(1).join("&") });
let link = parts(location.hash.slice(1)).to; // to the open view, or to the one that opens first
/** @type {string | null} */ let wanted = null; // to be set in the picture of the answer; null where it keeps what is set
let code = "";
let asked = link !== ""; // whether the address names the view: not before a reader has changed anything
/** @type {string[]} */ const before = []; // links to what was shown before, for undo
let changed = 0; // when the link last changed, in milliseconds
/** @type {object | null} */ let next = null; // asked while another question is open; only the last counts
let busy = false;
let running = ""; // the question that is open, as JSON
/** @type {boolean | null} */ let legal = null; // the schedule that a reader has written
let verdict = ""; // on it
/** @type {string | null} */ let judged = null; // the text that the verdict and the picture are about
/** @type {Map<string, object>} */ const kept = new Map(); // by view, the question that shows what a reader has written there

const python = new Python("playground", (slow) => {
  stop.hidden = !slow;
  // What is shown is not the answer to a new question; a widget's own change says where it shows an older state.
  find("#playground").classList.toggle("searching", slow && /^\{"(view|open)"/.test(running));
  if (slow) say("Python is working.");
});

/** @param {any} question text: what the form holds, if not what was checked */
async function ask(question) {
  if (busy) {
    // A widget's change is not of the view that a reader has opened since.
    // Enter in a field is a change of it, and then the form's submission: the same question, which is open already.
    if ("view" in question && JSON.stringify(question) === running) next = null;
    else if (!next || "widget" in next || !("widget" in question)) next = question;
    return;
  }
  busy = true;
  running = JSON.stringify(question);
  if ("set" in question) {
    wanted = question.set;
    delete form.dataset.names; // its values are those of the view before
  }
  try {
    receive(await python.ask(question), question.text);
    await widget?.figure.painting; // before Python takes time again, and a more detailed answer replaces this one
  } catch (error) {
    say(/** @type {Error} */ (error).message, true);
  }
  busy = false;
  if (next) {
    const waiting = next;
    next = null;
    ask(waiting);
  }
}

/** Use nothing of an answer but text and numbers. @param {any} answer @param {string} [text] */
function receive(answer, text) {
  if (answer === null) return; // stopped
  if (typeof answer.wrong === "string") {
    choose(String(answer.view));
    fields(String(answer.view), answer.inputs, text);
    judged = null;
    judge();
    say(answer.wrong, true);
    report.replaceChildren(); // what was found before is not about this
    wanted = null;
  } else if (answer.received) widget?.receive?.(answer.received);
  else if (answer.more) {
    judge(); // Python is not working any more
    widget?.update(answer.more);
  } else if (views.includes(answer.view) && /^[\w-]*$/.test(answer.link)) {
    try {
      display(answer, text);
    } catch {
      say("Python answered with something that cannot be shown.", true);
    }
  }
}

/** @param {any} answer @param {string} [text] */
function display(answer, text) {
  copied.textContent = "";
  [legal, verdict] = [answer.legal, String(answer.verdict)];
  find("#first").hidden = true;
  choose(String(answer.view));
  fields(String(answer.view), answer.inputs, text);
  judged = String(answer.inputs.find((/** @type {any} */ { kind }) => kind === "area")?.value ?? "");
  judge();
  if (answer.state && widget && shape === answer.state.kind) widget.update(answer.state);
  else {
    widget?.figure.destroy();
    shown.replaceChildren();
    widget = answer.state ? mount(shown, answer.state, (/** @type {any} */ message) => ask({ widget: message })) : null;
    shape = answer.state?.kind ?? "";
  }
  find("#examples").replaceChildren("Start from: ", ...answer.examples.flatMap(example));
  report.replaceChildren(...(answer.report ?? []).map(paragraph));
  report.insertAdjacentHTML("beforeend", answer.picture ?? "");
  remember(String(answer.link));
  if (written()) kept.set(String(answer.view), { open: link });
  code = String(answer.code);
  if (widget && wanted !== null) recall(widget.figure, wanted);
  if (widget) wanted = null;
  if (asked && parts(location.hash.slice(1)).to !== link) history.replaceState(null, "", `#${link}`);
  asked = true;
  for (const button of document.querySelectorAll("footer button")) button.removeAttribute("disabled");
  find("#undo").toggleAttribute("disabled", !before.length);
  placeShare();
  find("#playground").classList.add("ready");
  const whole = `${location.href.split("#")[0].replace("?embed", "")}#${link}`;
  find("#whole").setAttribute("href", whole);
  if (widget) widget.figure.address = whole;
  next ??= answer.again ?? null; // unless a reader has gone on
}

/** Put the button that copies a link beside the one that saves a picture, if there is a picture. */
function placeShare() {
  const bar = shown.querySelector("[role=toolbar]");
  if (bar) bar.append(share);
  else find("#undo").after(share);
  share.tabIndex = bar ? -1 : 0; // the arrow keys lead to it in a toolbar
}

/** Take a link for that of the open view. A slider that moves is one change. @param {string} now */
function remember(now) {
  const moment = performance.now();
  if (asked && link && now !== link && now !== before.at(-1) && moment - changed > MOVING) before.push(link);
  if (now === before.at(-1)) before.pop();
  [link, changed] = [now, moment];
}

/** Open a view by a link, with its inputs. @param {string} to @param {string | null} set in its picture */
function open(to, set = parts(to).set) {
  keep();
  ask({ open: parts(to).to, set });
}

/** Wait until the link is that of the picture, which may show what Python has not answered yet. */
async function answered() {
  if (!busy) return;
  await python.last;
  await answered();
}

/** Return the link to the open view, with what is set in its picture. */
const linked = () => [link, ...(widget ? [setIn(widget.figure)] : [])].filter(Boolean).join("&");

/** Return the address of the open view. */
const address = () => `${location.href.split("#")[0]}#${linked()}`;

/** Return an element with a paragraph, with several lines as they are, or with a table, which a click may open. @param {any} told */
function paragraph(told) {
  const table = told.rows ?? null;
  const lines = typeof told === "string" && told.includes("\n");
  const node = document.createElement(lines ? "pre" : table ? "div" : "p");
  if (table) node.className = "ppedu"; // looks as in a widget
  if (table || lines) node.tabIndex = 0; // it may be wider than the page, and then scrolls
  node.append(...(table ? [tableOf(table)] : tell(told)));
  if (!told.opens) return node;
  const opened = document.createElement("details");
  opened.append(Object.assign(document.createElement("summary"), { textContent: String(told.opens) }), node);
  return opened;
}

/** Return a link to an example, after a separator if it is not the first. @param {any} each @param {number} place */
function example([text, to], place) {
  const node = Object.assign(document.createElement("a"), { href: `#${to}`, textContent: String(text) });
  return place ? [" · ", node] : [node];
}

/** Say whether the schedule of a reader is legal, unless the text is not the one that was checked. */
function judge() {
  const stale = judged !== written();
  find("#playground").classList.toggle("stale", stale);
  if (stale) say("Not checked yet: press “check and draw”, or Ctrl+Enter.");
  else say(verdict, legal === false);
}

/** Return what a reader has written, if the view has a place for it. */
const written = () => form.querySelector("textarea")?.value ?? "";

/** @param {string} text */
function say(text, wrong = false) {
  status.textContent = text;
  status.classList.toggle("wrong", wrong);
}

/** Show which view is open, and what it is for. @param {string} view */
function choose(view) {
  for (const tab of all) {
    const chosen = tab.dataset.view === view;
    if (chosen) find("#about").textContent = tab.dataset.about ?? "";
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
}

/** Build the inputs of a view, unless the form has them already. @param {string} view @param {any[]} inputs @param {string} [text] */
function fields(view, inputs, text) {
  form.dataset.view = view;
  const names = inputs.map(({ name }) => String(name)).join();
  if (form.dataset.names === names) return;
  form.dataset.names = names;
  form.replaceChildren(...inputs.map((each) => field(each.kind === "area" ? { ...each, value: text ?? each.value } : each)));
  const question = form.querySelector("[name=question]");
  if (question) form.prepend(...shortcuts(question));
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
  if (tag === "textarea") Object.assign(control, { rows: Math.min(16, Math.max(8, String(value).split("\n").length)), spellcheck: false, maxLength: 1 << 20 });
  if (tag === "select") control.append(...choices.map((/** @type {unknown} */ each) => new Option(String(each))));
  if (kind === "number") control.min = 1;
  control.name = String(name);
  control.value = String(value);
  const node = document.createElement("label");
  node.className = String(kind);
  node.append(String(label), control);
  return node;
}

/** Return number fields for lines of a question. They have no names: they edit the text, which is what is asked. @param {any} area */
function shortcuts(area) {
  const edited = [["ranks", "ranks", ""], ["microbatches", "microbatches", ""], ["memory", "GB of a GPU", "e9"]];
  return edited.map(([key, label, unit]) => {
    const line = new RegExp(`^(${key} *= *)([\\d.]+)${unit}(?![\\w.])`, "m");
    const node = field({ name: "", label, kind: "number", value: "" });
    const control = /** @type {HTMLInputElement} */ (node.lastElementChild);
    if (unit) control.step = "any";
    const read = () => {
      control.value = area.value.match(line)?.[2] ?? "";
      node.hidden = !control.value; // a machine with a name, or a list
    };
    area.addEventListener("input", read);
    control.addEventListener("change", () => {
      if (control.value) area.value = area.value.replace(line, (/** @type {string} */ _, /** @type {string} */ start) => `${start}${control.value}${unit}`);
      read();
    });
    read();
    return node;
  });
}

/** Ask for the view with what the form holds now. */
function submit() {
  const view = tabs.querySelector('[aria-selected="true"]')?.getAttribute("data-view");
  ask({ view, inputs: Object.fromEntries([...new FormData(/** @type {any} */ (form))].map(([name, value]) => [name, String(value)])) });
}

/** Keep what a reader has written for when its view opens again. It is not run then: it may never end. */
function keep() {
  const view = String(form.dataset.view);
  if (written()) kept.set(view, { view, inputs: {}, ...kept.get(view), text: written() });
}

for (const tab of all)
  tab.addEventListener("click", () => {
    const view = String(tab.dataset.view);
    keep();
    choose(view);
    ask(kept.get(view) ?? { view, inputs: {} });
  });
tabs.addEventListener("keydown", ({ key }) => {
  const at = all.indexOf(/** @type {any} */ (document.activeElement));
  const to = key === "ArrowRight" ? at + 1 : key === "ArrowLeft" ? at - 1 : at;
  if (to !== at) all[(to + all.length) % all.length].focus();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
form.addEventListener("input", ({ target }) => {
  if (/** @type {any} */ (target).localName === "textarea" && !busy) judge();
});
form.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  submit();
});
form.addEventListener("change", ({ target }) => {
  if (/** @type {any} */ (target).localName !== "textarea") submit();
});
stop.addEventListener("click", () => {
  next = link ? { open: link } : null; // what was shown before
  say("Stopped. Python starts again.");
  python.stop();
});
/** @param {HTMLElement} button @param {() => string} text */
function copies(button, text) {
  button.addEventListener("click", async () => {
    await answered();
    try {
      await navigator.clipboard.writeText(text());
      copied.textContent = "Copied.";
    } catch {
      copied.textContent = "The browser does not allow this page to copy.";
    }
    if (button !== share) return;
    share.textContent = copied.textContent === "Copied." ? "copied" : "not copied"; // the message may be out of sight
    setTimeout(() => (share.textContent = "copy link"), 1500);
  });
}
copies(share, address);
copies(find("#python"), () => code);
copies(find("#frame"), () => {
  const source = `${location.origin}${location.pathname}?embed#${linked()}`;
  return `<iframe src="${source}" width="100%" height="640" title="A pipeline schedule" style="border: 0"></iframe>`;
});
find("#notebook").addEventListener("click", async () => {
  await answered();
  const text = { cell_type: "markdown", id: "from", metadata: {}, source: `From the [playground](${address()}).` };
  const cell = { cell_type: "code", id: "code", metadata: {}, source: code, outputs: [], execution_count: null };
  const kernelspec = { name: "python3", display_name: "Python 3", language: "python" };
  const notebook = { cells: [text, cell], metadata: { kernelspec }, nbformat: 4, nbformat_minor: 5 };
  const href = URL.createObjectURL(new Blob([JSON.stringify(notebook, null, 1)], { type: "application/x-ipynb+json" }));
  const name = widget ? savedName(widget.figure) : "schedule";
  Object.assign(document.createElement("a"), { href, download: `${name}.ipynb` }).click();
  URL.revokeObjectURL(href);
});
addEventListener("hashchange", ({ newURL }) => {
  const to = newURL.split("#")[1] ?? ""; // an answer may have changed the address since
  if (busy || parts(to).to !== link) open(to);
  else if (widget) recall(widget.figure, parts(to).set);
});
find("#undo").addEventListener("click", () => {
  const last = before.at(-1);
  if (last) open(last, null);
});
open(location.hash.slice(1));
navigator.serviceWorker?.register("sw.js").catch(() => {}); // without it, the page needs the network each time
