"""Colours and row geometry, the same in every front end. Needs only the standard library."""

from __future__ import annotations

from ppedu.core.actions import Op

# Told apart by hue, and by lightness for readers who see fewer hues.
COLORS = {Op.F: "#3b76b8", Op.B: "#2f8f6b", Op.I: "#8ccfae", Op.W: "#e3a92f"}
NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward for the input", Op.W: "backward for the weights"}
MEMORY = "#a99cc4"
MARK = "#d62f2f"  # an action that differs, or memory above its limit
LIGHTER = 0.16  # how much lighter odd microbatches are, so that neighbours differ even without numbers
DARKER = 0.38  # how much darker a rank's last chunk is than its first; chunks in between are spread evenly

# Heights within a rank's row, which is 1 high: the boxes, and below them the memory strip.
ROW = {"top": 0.06, "bottom": 0.66, "strip": 0.7, "floor": 0.94}
BARE_ROW = {"top": 0.06, "bottom": 0.94, "strip": 0.94, "floor": 0.94}  # without a memory strip

LOOK = {"colors": COLORS, "names": NAMES, "memory": MEMORY, "mark": MARK, "row": ROW}


def shade(op: Op, microbatch: int, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the fill of a box as red, green and blue, each from 0 to 1.

    chunk: the box's chunk on its rank, from 0; each rank has `chunks`.
    """
    dark = 1 - DARKER * chunk / max(1, chunks - 1)
    lighter = microbatch % 2 * LIGHTER
    red, green, blue = (int(COLORS[op][at : at + 2], 16) / 255 * dark for at in (1, 3, 5))
    return red + (1 - red) * lighter, green + (1 - green) * lighter, blue + (1 - blue) * lighter
