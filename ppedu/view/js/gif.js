// @ts-check
// GIF: animations that slides, papers' pages and README files play. The file knows neither canvas nor page.

const [CLEAR, END, FULL] = [256, 257, 4096]; // codes: begin a new table, the end, and one more than the last

/**
 * The most frequent colors of pictures. The bytes of a pixel are red, green, blue and alpha, the lowest first.
 * @param {Uint32Array[]} pictures
 */
export function frequentColors(pictures, most = 256) {
  /** @type {Map<number, number>} */
  const counts = new Map();
  for (const picture of pictures)
    for (const pixel of picture) counts.set(pixel & 0xffffff, (counts.get(pixel & 0xffffff) ?? 0) + 1);
  return [...counts].toSorted(([, a], [, b]) => b - a).slice(0, most).map(([color]) => color);
}

/** @param {number} color */
const channels = (color) => [color & 255, (color >> 8) & 255, (color >> 16) & 255];

/** @param {number} number */
const twoBytes = (number) => [number & 255, number >> 8];

/** An animation that repeats forever. Of a frame, only the rectangle that differs from the one before is stored. */
export class Gif {
  /** @type {Uint32Array | null} */
  before = null;
  /** @type {Map<number, number>} the places of the nearest colors */
  places = new Map();
  codes = new Uint16Array(FULL * 256); // by the code of some pixels and the pixel that follows them

  /**
   * @param {number} width
   * @param {number} height
   * @param {number[]} colors at most 256, as `frequentColors` returns them
   */
  constructor(width, height, colors) {
    this.width = width;
    this.height = height;
    this.colors = colors.map(channels);
    const table = Array.from({ length: 256 }, (_, k) => this.colors[k] ?? [0, 0, 0]).flat();
    this.bytes = [..."GIF89a"].map((letter) => letter.charCodeAt(0));
    this.bytes.push(...twoBytes(width), ...twoBytes(height), 0xf7, 0, 0, ...table);
    this.bytes.push(0x21, 0xff, 11, ...[..."NETSCAPE2.0"].map((letter) => letter.charCodeAt(0)), 3, 1, 0, 0, 0);
  }

  /**
   * Add a frame.
   * @param {Uint32Array} pixels
   * @param {number} duration in hundredths of a second
   */
  add(pixels, duration) {
    const [left, top, right, bottom] = this.changed(pixels);
    const part = new Uint8Array((right - left) * (bottom - top));
    for (let y = top, at = 0; y < bottom; y++)
      for (let x = left; x < right; x++) part[at++] = this.place(pixels[y * this.width + x] & 0xffffff);
    this.before = pixels;
    this.bytes.push(0x21, 0xf9, 4, 4, ...twoBytes(duration), 0, 0);
    this.bytes.push(0x2c, ...[left, top, right - left, bottom - top].flatMap(twoBytes), 0, 8);
    const packed = this.pack(part);
    for (let at = 0; at < packed.length; at += 255) {
      const block = packed.slice(at, at + 255);
      this.bytes.push(block.length, ...block);
    }
    this.bytes.push(0);
  }

  /** The file, once all frames are added. */
  file() {
    return new Blob([new Uint8Array([...this.bytes, 0x3b])], { type: "image/gif" });
  }

  /**
   * The left, top, right and bottom of the rectangle that differs from the frame before. It has at least one pixel.
   * @param {Uint32Array} pixels
   */
  changed(pixels) {
    const { width, height, before } = this;
    if (!before) return [0, 0, width, height];
    let [left, top, right, bottom] = [width, height, 0, 0];
    for (let y = 0, at = 0; y < height; y++) {
      for (let x = 0; x < width; x++, at++) {
        if (pixels[at] === before[at]) continue;
        if (x < left) left = x;
        if (x >= right) right = x + 1;
        if (y < top) top = y;
        bottom = y + 1;
      }
    }
    return right ? [left, top, right, bottom] : [0, 0, 1, 1];
  }

  /**
   * The place of the nearest color in the table.
   * @param {number} color
   */
  place(color) {
    let found = this.places.get(color);
    if (found === undefined) {
      const wanted = channels(color);
      const away = this.colors.map((each) => each.reduce((sum, channel, k) => sum + (channel - wanted[k]) ** 2, 0));
      found = away.indexOf(Math.min(...away));
      this.places.set(color, found);
    }
    return found;
  }

  /**
   * Compress pixels by LZW, with codes of 9 to 12 bits.
   * @param {Uint8Array} pixels
   */
  pack(pixels) {
    /** @type {number[]} */
    const bytes = [];
    let [bits, count, width, next] = [0, 0, 9, END + 1];
    const put = (/** @type {number} */ code) => {
      bits |= code << count;
      for (count += width; count >= 8; count -= 8, bits >>= 8) bytes.push(bits & 255);
    };
    this.codes.fill(0);
    put(CLEAR);
    let code = pixels[0];
    for (let at = 1; at < pixels.length; at++) {
      const longer = (code << 8) | pixels[at];
      if (this.codes[longer]) {
        code = this.codes[longer];
        continue;
      }
      put(code);
      code = pixels[at];
      if (next === FULL) {
        put(CLEAR);
        this.codes.fill(0);
        [width, next] = [9, END + 1];
      } else {
        if (next === 1 << width) width++;
        this.codes[longer] = next++;
      }
    }
    put(code);
    if (next === 1 << width && width < 12) width++; // a reader has now filled the table up to here
    put(END);
    if (count) bytes.push(bits & 255);
    return bytes;
  }
}
