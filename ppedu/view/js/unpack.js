// @ts-check
// Numbers as Python packs them.

/** @typedef {Uint8Array | Uint16Array | Uint32Array | Float64Array} Numbers */

/**
 * Numbers that Python's `packed` wrote. Their size tells their type.
 * @param {string} text
 * @param {number} count
 * @returns {Numbers}
 */
export function unpack(text, count) {
  if (!text) return new Uint8Array(count);
  const bytes = bytesIn(text);
  const sizes = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array, 8: Float64Array };
  return new sizes[/** @type {1 | 2 | 4 | 8} */ (bytes.length / count)](bytes.buffer);
}

/**
 * The bytes in base64. Browsers from before 2025 cannot read them, and a loop takes several times as long.
 * @param {string} text
 * @returns {Uint8Array<ArrayBuffer>}
 */
function bytesIn(text) {
  const Bytes = /** @type {any} */ (Uint8Array);
  if (Bytes.fromBase64) return Bytes.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let k = 0; k < letters.length; k++) bytes[k] = letters.charCodeAt(k); // Uint8Array.from takes 20 times as long
  return bytes;
}
