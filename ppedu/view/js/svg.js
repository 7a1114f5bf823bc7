// @ts-check
// SVG, written by the same calls as a picture on a canvas.

/** @typedef {[number, number, number, number]} Rectangle left, top, width and height */

export const FONT = "system-ui, sans-serif";

/** @param {string | number} value */
const escaped = (value) =>
  `${typeof value === "number" ? +value.toFixed(2) : value}`.replace(/[&<"]/g, (c) => `&#${c.charCodeAt(0)};`);

/** The part of a canvas's context that `paint` and `paintOver` use, written as SVG. After each `save` comes one `clip`. */
export class SvgContext {
  globalAlpha = 1;
  lineWidth = 1;
  fillStyle = "";
  strokeStyle = "";
  font = "";
  textAlign = "start";
  textBaseline = "alphabetic";
  path = "";
  clips = 0;
  /** @type {string[]} */
  parts = [];

  /**
   * @param {number} width
   * @param {number} height
   * @param {number} number tells the clip paths of several pictures in one file apart
   */
  constructor(width, height, number = 0) {
    this.width = width;
    this.height = height;
    this.number = number;
  }
  /**
   * @param {string} name
   * @param {Record<string, string | number>} attributes
   * @param {string} text
   */
  tag(name, attributes, text = "") {
    const all = this.globalAlpha < 1 ? { ...attributes, opacity: `${this.globalAlpha}` } : attributes;
    const written = Object.entries(all).map(([key, each]) => ` ${key}="${escaped(each)}"`).join("");
    this.parts.push(text ? `<${name}${written}>${escaped(text)}</${name}>` : `<${name}${written}/>`);
  }
  get size() {
    return parseFloat(this.font.replace("bold ", ""));
  }
  /** @param {Rectangle} rectangle */
  fillRect(...[x, y, width, height]) {
    this.tag("rect", { x, y, width, height, fill: this.fillStyle });
  }
  /** @param {Rectangle} rectangle */
  strokeRect(...[x, y, width, height]) {
    this.tag("rect", { x, y, width, height, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
  }
  /**
   * @param {string} text
   * @param {number} x
   * @param {number} y
   */
  fillText(text, x, y) {
    const down = this.textBaseline === "middle" ? 0.35 * this.size : 0;
    const anchor = { center: "middle", right: "end" }[this.textAlign] ?? "start";
    const weight = this.font.startsWith("bold") ? "bold" : "normal";
    const type = { "font-size": this.size, "font-family": FONT, "font-weight": weight, "text-anchor": anchor };
    this.tag("text", { x, y: y + down, ...type, fill: this.fillStyle }, text);
  }
  /**
   * An upper estimate, because the viewer's font is unknown.
   * @param {string} text
   */
  measureText(text) {
    return { width: 0.7 * this.size * text.length };
  }
  beginPath() {
    this.path = "";
  }
  /**
   * @param {number} x
   * @param {number} y
   */
  moveTo(x, y) {
    this.path += `M${x.toFixed(2)} ${y.toFixed(2)}`;
  }
  /**
   * @param {number} x
   * @param {number} y
   */
  lineTo(x, y) {
    this.path += `L${x.toFixed(2)} ${y.toFixed(2)}`;
  }
  /** @param {Rectangle} rectangle */
  rect(...[x, y, width, height]) {
    this.path += `M${x} ${y}h${width}v${height}h${-width}z`;
  }
  fill() {
    this.tag("path", { d: this.path, fill: this.fillStyle });
  }
  stroke() {
    this.tag("path", { d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
  }
  setLineDash() {} // only what is in focus is dashed, which no saved picture shows
  clip() {
    const id = `c${this.number}-${this.clips++}`;
    this.parts.push(`<clipPath id="${id}"><path d="${this.path}"/></clipPath><g clip-path="url(#${id})">`);
  }
  save() {}
  restore() {
    this.parts.push("</g>"); // of `clip`
  }
  text() {
    const [width, height] = [this.width, this.height];
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${this.parts.join("")}</svg>`;
  }
}
