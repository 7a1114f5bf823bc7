// @ts-check
// Charts.

import { assemble, svgElement } from "./elements.js";
import { largest, ticks } from "./model.js";

/**
 * @typedef {{ x: number, y: number, name?: string, kind?: string }} Point
 * @typedef {{ label: string, format: (value: number) => string, whole?: boolean, from?: number }} Axis
 */

/**
 * A small chart: points with names, or a line through them. With `pick`, points are buttons.
 * @param {Point[]} points
 * @param {{ x: Axis, y: Axis, line?: boolean, pick?: (point: number) => void, width?: number, height?: number }} options
 */
export function chart(points, { x, y, line = false, pick, width = 420, height = 220 }) {
  const [left, right, top, bottom] = [58, 14, 12, 36];
  const most = { x: largest(points.map((p) => p.x)) * (line ? 1.12 : 1.3) || 1, y: largest(points.map((p) => p.y)) * 1.15 || 1 };
  const least = y.from ?? 0;
  /** @param {number} value */
  const across = (value) => left + (value / most.x) * (width - left - right);
  /** @param {number} value */
  const up = (value) => height - bottom - ((value - least) / (most.y - least)) * (height - top - bottom);
  const values = points.map((p) => `${p.name ? `${p.name}: ` : ""}${x.format(p.x)}, ${y.format(p.y)}`).join("; ");
  const name = `${y.label} against ${x.label}. ${values}`;
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, class: "ppedu-chart", role: pick ? "group" : "img", "aria-label": name });
  svg.style.maxWidth = `${width}px`;
  /**
   * @param {number} from
   * @param {number} down
   * @param {string} content
   */
  const text = (from, down, content, anchor = "start") =>
    svg.append(svgElement("text", { x: from, y: down, "text-anchor": anchor }, content));
  for (const value of ticks(0, most.x).filter((each) => !x.whole || Number.isInteger(each))) {
    svg.append(svgElement("line", { x1: across(value), x2: across(value), y1: top, y2: height - bottom, class: "ppedu-grid" }));
    text(across(value), height - bottom + 14, x.format(value), "middle");
  }
  for (const value of ticks(least, most.y).filter((_, k) => k % 2 === 0)) {
    svg.append(svgElement("line", { x1: left, x2: width - right, y1: up(value), y2: up(value), class: "ppedu-grid" }));
    if (up(value) > top + 8) text(left - 6, up(value) + 4, y.format(value), "end"); // below the axis's label
  }
  text(width - right, height - 4, x.label, "end");
  text(4, top - 1, y.label);
  if (line) {
    const d = points.map((p, k) => `${k ? "L" : "M"}${across(p.x)} ${up(p.y)}`).join("");
    svg.append(svgElement("path", { d, class: "ppedu-curve" }));
    return svg;
  }
  /** @type {Map<string, Point[]>} */
  const groups = new Map(); // points at the same place, which share a label
  for (const p of points) {
    const key = `${Math.round(across(p.x) / 4)},${Math.round(up(p.y) / 4)}`;
    groups.set(key, [...(groups.get(key) ?? []), p]);
  }
  const taken = [...groups.values()].map(([p]) => {
    const [cx, cy] = [across(p.x), up(p.y)];
    return { left: cx - 5, top: cy - 5, right: cx + 5, bottom: cy + 5 };
  });
  taken.push({ left: 0, top: 0, right: left, bottom: height }); // the axes
  taken.push({ left: 0, top: height - bottom + 6, right: width, bottom: height });
  for (const group of groups.values()) {
    const [cx, cy] = [across(group[0].x), up(group[0].y)];
    const circle = svgElement("circle", { cx, cy, r: 4.5, class: `ppedu-point ${group[0].kind ?? ""}` });
    svg.append(circle);
    if (pick) {
      const choose = () => pick(points.indexOf(group[0]));
      const enter = (/** @type {KeyboardEvent} */ { key }) => (key === "Enter" || key === " ") && choose();
      const label = group.map((p) => `${p.name || p.kind}: ${x.format(p.x)}, ${y.format(p.y)}`).join("; ");
      assemble(circle, { tabindex: 0, role: "button", "aria-label": label, onclick: choose, onkeydown: enter }, []);
    }
    const names = group.flatMap((p) => p.name || []).join(", ");
    const size = names.length * 6.6;
    // The label goes to the right or the left of its point, or above or below, where it covers nothing.
    const spots = [4, 17, -9, 30, -22, 43].flatMap((down) =>
      [cx + 9, cx - 9 - size].map((from) => ({ left: from, top: cy + down - 11, right: from + size, bottom: cy + down + 2 })),
    );
    const spot = spots.find(
      (box) =>
        box.right <= width - 6 &&
        box.top >= 0 &&
        !taken.some((o) => box.left < o.right && o.left < box.right && box.top < o.bottom && o.top < box.bottom),
    );
    if (!spot) continue;
    taken.push(spot);
    const before = spot.right < cx;
    text(before ? spot.right : spot.left, spot.bottom - 2, names, before ? "end" : "start");
  }
  return svg;
}
