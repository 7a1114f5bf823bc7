// @ts-check
// Elements of a page: nodes, buttons, menus, code to copy, and canvases.

/**
 * Set the attributes of a new element and append its children. Attributes that begin with "on" are event handlers; false
 * and null leave an attribute out.
 * @template {Element} Kind
 * @param {Kind} node
 * @param {Record<string, any>} attributes
 * @param {(Node | string)[]} children
 */
export function assemble(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {(Node | string)[]} children
 */
export const svgElement = (tag, attributes, ...children) =>
  assemble(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export const element = (tag, attributes = {}, ...children) => assemble(document.createElement(tag), attributes, children);

/**
 * @param {Node | string} label
 * @param {string} title
 * @param {() => void} click
 * @param {Record<string, any>} attributes
 */
export const button = (label, title, click, attributes = {}) =>
  element("button", { type: "button", title, "aria-label": title, onclick: click, ...attributes }, label);

/**
 * The options of a menu.
 * @param {[string, string][]} choices values and words
 */
export const options = (choices) => choices.map(([value, words]) => element("option", { value }, words));

/**
 * @param {Record<string, any>} attributes
 * @param {[string, string][]} choices
 */
export const menu = (attributes, choices) => element("select", attributes, ...options(choices));

/**
 * A button that opens a menu of commands.
 * @param {string} label
 * @param {string} title
 * @param {[string, () => void][]} commands words, and what each does
 */
export function popup(label, title, commands) {
  const show = (/** @type {boolean} */ open) => {
    list.hidden = !open;
    toggle.setAttribute("aria-expanded", `${open}`);
    const end = holder.offsetLeft + list.offsetWidth;
    list.classList.toggle("ppedu-leftward", end > (holder.parentElement?.clientWidth ?? end));
  };
  const items = commands.map(([words, act]) => {
    const click = () => {
      show(false);
      toggle.focus();
      act();
    };
    return element("button", { type: "button", role: "menuitem", tabindex: -1, onclick: click }, words);
  });
  const toggle = button(label, title, () => {
    show(!!list.hidden);
    if (!list.hidden) items[0].focus();
  }, { "aria-haspopup": "menu", "aria-expanded": "false" });
  const press = (/** @type {KeyboardEvent} */ event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const here = items.findIndex((each) => each === event.target);
    if (by && here >= 0) items[(here + by + items.length) % items.length].focus();
    else if (event.key === "Escape") {
      show(false);
      toggle.focus();
    } else return;
    event.preventDefault();
  };
  const leave = (/** @type {FocusEvent} */ event) => {
    if (!holder.contains(/** @type {Node | null} */ (event.relatedTarget))) show(false);
  };
  const list = element("div", { role: "menu", "aria-label": title, hidden: true }, ...items);
  const holder = element("span", { class: "ppedu-popup", onkeydown: press, onfocusout: leave }, toggle, list);
  return { holder, toggle };
}

/**
 * Append code with a button that copies it.
 * @param {HTMLElement} root
 * @param {string} label
 */
export function code(root, label) {
  const text = element("pre", { tabindex: "0", role: "group", "aria-label": label });
  const copy = button("copy", "copy the code", async () => {
    await navigator.clipboard?.writeText(text.textContent ?? "").catch(() => null);
    getSelection()?.selectAllChildren(text); // where the clipboard is not accessible, Ctrl+C copies the selection
    copy.textContent = "copied";
    setTimeout(() => (copy.textContent = "copy"), 1500);
  });
  const holder = element("div", { class: "ppedu-code" }, text, copy);
  root.append(holder);
  return { holder, text };
}

/**
 * Give a canvas this size on the page, sharp on any screen, and return its context.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function fitted(canvas, width, height, ratio = devicePixelRatio) {
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    Object.assign(canvas, { width: across, height: down });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/**
 * Return the background color behind a node.
 * @param {HTMLElement | null} node
 */
export function behind(node) {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (color && color !== "transparent" && !color.endsWith(", 0)")) return color;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(30, 30, 30)" : "rgb(255, 255, 255)";
}
