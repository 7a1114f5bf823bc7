// @ts-check
// Colors: the fill of each box, and what can be read on it.

/**
 * @typedef {import("./model.js").Color} Color
 * @typedef {import("./model.js").Op} Op
 * @typedef {import("./model.js").Panel} Panel
 * @typedef {"op" | "microbatch" | "stage"} ColorBy
 * @typedef {{ rgb: Color, fill: string, ink: string }} Shade the fill of a box and the color of the number on it
 */

/**
 * White or black, whichever is easier to read on a color. The contrast is at least 4.5 to 1.
 * @param {Color} color
 */
export function inkOn(color) {
  const [red, green, blue] = color.map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue; // as WCAG 2 defines it
  return (luminance + 0.05) ** 2 < 0.05 * 1.05 ? "#ffffff" : "#000000";
}

/**
 * The red, green and blue in a color as the browser computes it, such as rgb(255, 255, 255).
 * @param {string} color
 */
export const numbersIn = (color) => (color.match(/[\d.]+/g) ?? []).map(Number);

/**
 * @param {number} degrees
 * @param {number} light
 * @returns {Color}
 */
function hue(degrees, light) {
  /** @param {number} offset */
  const channel = (offset) => {
    const k = (offset + degrees / 30) % 12;
    return 255 * (light - 0.5 * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1)));
  };
  return [channel(0), channel(8), channel(4)];
}

/** The shades of a timeline's boxes, for each way to color them. */
export class Palette {
  /**
   * @param {Pick<Panel, "shades" | "stages">} data
   * @param {ColorBy} by
   */
  constructor({ shades, stages }, by) {
    this.shades = shades;
    this.stages = stages;
    this.by = by;
    /** @type {Map<number, Shade>} */
    this.known = new Map();
  }

  /**
   * @param {Op} op
   * @param {number} stage
   * @param {number} microbatch
   * @param {number} chunk
   */
  of(op, stage, microbatch, chunk) {
    const which = this.by === "op" ? 2 * chunk + (microbatch % 2) : this.by === "microbatch" ? microbatch : stage;
    const key = which * 10 + "FBIWRUOLST".indexOf(op);
    let shade = this.known.get(key);
    if (!shade) {
      const rgb = this.mix(op, which);
      const fill = `rgb(${rgb.map(Math.round).join(",")})`;
      shade = { rgb, fill, ink: inkOn(rgb) };
      this.known.set(key, shade);
    }
    return shade;
  }

  /**
   * @param {Op} op
   * @param {number} which the microbatch, the stage, or the shade of the op
   */
  mix(op, which) {
    if (this.by === "op") return this.shades[op][which >> 1][which % 2];
    // Neighboring microbatches are far apart, neighboring stages close; backwards are darker than forwards.
    const degrees = this.by === "microbatch" ? (which * 137.5) % 360 : (which * 300) / Math.max(1, this.stages);
    const light = { F: 0.66, B: 0.42, I: 0.5, W: 0.34, R: 0.78, U: 0.26, O: 0.6, L: 0.74, S: 0.58, T: 0.72 };
    return hue(degrees, light[op]);
  }
}
