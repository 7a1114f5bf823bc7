"""Colors and row geometry, the same in every front end. Needs only the standard library."""

from __future__ import annotations

from ppedu.core import Op

# Told apart by hue, and by lightness for readers who see fewer hues.
COLORS = {Op.F: "#2567b0", Op.B: "#1b7453", Op.I: "#8ccfae", Op.W: "#e3a92f", Op.R: "#6fa8f5", Op.U: "#8c5230"}
COLORS |= {Op.O: "#56616f", Op.L: "#a9b4c4", Op.S: "#9a3b76", Op.T: "#d99ac0"}
NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward for the input",
    Op.W: "backward for the weights",
    Op.R: "forward again",
    Op.U: "update of the weights",
    Op.S: "shared head: logits",
    Op.T: "shared head: gradients",
    Op.O: "offload to the host",
    Op.L: "load from the host",
}
MEMORY = "#a99cc4"
MARK = "#d62f2f"  # an action that differs, or memory above its limit
PATH = "#aa22ff"  # the critical path
PALE = 0.55  # how pale the boxes of the lower lane are, which have edges
LIGHTER = 0.1  # how much lighter odd microbatches are where a rank has one chunk, so that neighbors differ
DARKER = 0.34  # how much darker a rank's last chunk is than its first; chunks in between are spread evenly

# Heights within a rank's row, which is 1 high: the boxes, and below them the memory strip. Where another timeline is
# outlined, it takes the upper part of the boxes' height, down to "lane".
ROW = {"top": 0.04, "lane": 0.17, "bottom": 0.54, "strip": 0.6, "floor": 0.96}
# Where the other timeline has a lane of its own: the upper and the lower lane, and below both the memory strip.
LANES = tuple({"top": top, "lane": top, "bottom": top + 0.32, "strip": 0.77, "floor": 0.96} for top in (0.04, 0.39))
BARE_LANES = tuple({"top": top, "bottom": top + 0.42} for top in (0.06, 0.52))
BARE_ROW = {"top": 0.06, "lane": 0.28, "bottom": 0.94, "strip": 0.94, "floor": 0.94}  # without a memory strip

COPIES = 0.28  # the part of the boxes' height, at its lower end, that a rank's copies to the host and back take

LOOK = {
    "colors": COLORS,
    "names": NAMES,
    "memory": MEMORY,
    "mark": MARK,
    "path": PATH,
    "pale": PALE,
    "row": ROW,
    "lanes": LANES,
    "copies": COPIES,
}


def ends_of(top: float, bottom: float, part: int, copied: bool, copies: bool) -> tuple[float, float]:
    """Return the top and the bottom of a box, between those of its lane.

    Args:
        part: 1 or 2 for a half of an overlapped pair, otherwise 0.
        copied, copies: Whether it is a copy to the host or back, and whether the timeline has any.
    """
    if copied:
        return bottom - (bottom - top) * COPIES, bottom
    if copies:
        bottom -= (bottom - top) * (COPIES + 0.04)  # and a gap
    middle = (top + bottom) / 2
    return (middle if part == 2 else top), (middle if part == 1 else bottom)


def shade(op: Op, microbatch: int, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the fill of a box as red, green and blue, each from 0 to 1.

    Args:
        chunk: The box's chunk on its rank, from 0.
        chunks: The number of chunks on each rank.
    """
    dark = 1 - DARKER * chunk / max(1, chunks - 1)
    lighter = microbatch % 2 * LIGHTER if chunks == 1 else 0
    red, green, blue = (int(COLORS[op][at : at + 2], 16) / 255 * dark for at in (1, 3, 5))
    return red + (1 - red) * lighter, green + (1 - green) * lighter, blue + (1 - blue) * lighter


def paler(color: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return the fill of a box in the lower lane, from the fill of the same box above."""
    red, green, blue = (channel + (1 - channel) * PALE for channel in color)
    return red, green, blue


def ink_on(color: tuple[float, float, float]) -> str:
    """Return white or black, whichever is easier to read on a color; the contrast is at least 4.5 to 1."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue  # as WCAG 2 defines it
    # The contrast with white is 1.05 / (luminance + 0.05), and with black (luminance + 0.05) / 0.05.
    return "#ffffff" if (luminance + 0.05) ** 2 < 0.05 * 1.05 else "#000000"
