"""The colours of an action, on paper and on the screen alike. Needs the standard library alone."""

from __future__ import annotations

from ppedu.core.actions import Op

# Told apart by hue and, for those who see fewer hues, by lightness as well.
COLORS = {Op.F: "#3b76b8", Op.B: "#2f8f6b", Op.I: "#8ccfae", Op.W: "#e3a92f"}
NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward for the input", Op.W: "backward for the weights"}
MEMORY = "#a99cc4"
MARK = "#d62f2f"  # what differs
LIGHTER = 0.16  # every other microbatch, so that neighbours of a kind are told apart without numbers
DARKER = 0.38  # a rank's last chunk; those between lie between
