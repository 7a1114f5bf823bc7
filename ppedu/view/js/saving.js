// @ts-check
// The timelines as files, which a reader downloads.

import { element, fitted } from "./elements.js";
import { paint } from "./painting.js";
import { SvgContext } from "./svg.js";

/** @typedef {import("./figure.js").Figure} Figure */

/**
 * @param {string} name
 * @param {Blob} content
 */
function download(name, content) {
  const address = URL.createObjectURL(content);
  element("a", { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}

/**
 * The name of a saved file.
 * @param {Figure} figure
 */
function savedName(figure) {
  const names = figure.timelines.map(({ data }) => data.heading.split(",")[0].replace(/[^\w-]+/g, "-").slice(0, 60));
  return names.join("-and-");
}

/** @param {Figure} figure */
export function saveSvg(figure) {
  let y = 0;
  const parts = figure.timelines.map((_, n) => {
    const layout = figure.layout(n);
    const context = new SvgContext(layout.width, layout.height, n);
    paint(context, layout, figure.style(n));
    y += layout.height;
    return context.text().replace("<svg ", `<svg y="${y - layout.height}" `);
  });
  const size = `width="${figure.stack.clientWidth}" height="${y}"`;
  const text = `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${parts.join("")}</svg>`;
  download(`${savedName(figure)}.svg`, new Blob([text], { type: "image/svg+xml" }));
}

/** @param {Figure} figure */
export function savePng(figure) {
  const layouts = figure.timelines.map((_, n) => figure.layout(n));
  const canvas = element("canvas");
  const context = fitted(canvas, figure.stack.clientWidth, layouts.reduce((sum, { height }) => sum + height, 0), 2);
  layouts.forEach((layout, n) => {
    paint(context, layout, figure.style(n));
    context.translate(0, layout.height);
  });
  canvas.toBlob((content) => content && download(`${savedName(figure)}.png`, content));
}
