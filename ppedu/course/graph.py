"""Pictures of autograd graphs, cut in two, and of the messages that cross the cut, for lesson 2."""

from __future__ import annotations

from typing import Any

NAMES = {"MmBackward0": "Linear", "AddmmBackward0": "Linear", "MseLossBackward0": "loss"}
CUT = "#c0392b"  # legible on white and on black, like EDGE
EDGE, INK = "#7f7f7f", "#222222"
REACHED = "#cfe0f3"


def draw_graph(ax: Any, function: Any, names: Any, x: float, y: float = 0) -> Any:
    """Draw the autograd graph that starts at `function`, in the direction of the backward; return its box.

    A leaf is blue if it has a gradient, and dashed if not.

    Args:
        names: the name of each leaf, by tensor.
    """
    leaf = getattr(function, "variable", None)
    words = names[leaf] if leaf is not None else NAMES.get(function.name(), function.name().removesuffix("Backward0"))
    look = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": EDGE}
    if leaf is not None:
        look |= {"linestyle": "--"} if leaf.grad is None else {"facecolor": REACHED}
    text = ax.text(x, y, words, ha="center", va="center", fontsize=12, color=INK, bbox=look)
    box = text.get_bbox_patch()
    for before, _ in function.next_functions:
        if before is None:
            continue
        place = x - 1, y
        if before.name() == "TBackward0":  # a Linear uses its weight transposed: draw the weight below
            before = before.next_functions[0][0]
            place = x, y - 1
        ends = {"patchA": box, "patchB": draw_graph(ax, before, names, *place), "shrinkA": 2, "shrinkB": 2}
        ax.annotate("", place, (x, y), arrowprops={"arrowstyle": "->", "color": EDGE, **ends})
    return box


def draw_halves(ax: Any, title: str, cut: float, width: float, gap: float = 0, scissors: bool = False) -> None:
    """Draw the line between the two halves of a model, for graphs that `draw_graph` draws.

    Args:
        gap: how far the line stays away from the graph, above and below.
    """
    for start, end in ((1, gap), (-gap, -1.5)):
        ax.plot([cut, cut], [start, end], color=CUT, linestyle="--")
    ax.text(cut - 0.05, 0.75, "first half", ha="right", color=CUT, fontsize=12)
    ax.text(cut + 0.05, 0.75, "second half", color=CUT, fontsize=12)
    if scissors:
        ax.text(cut, 0, "✂", ha="center", va="center", size=20, color=CUT)
    ax.set(xlim=(0.5, width + 0.5), ylim=(-1.5, 1))
    ax.set_title(title, fontsize=13)
    ax.axis("off")


def draw_messages(ax: Any, left: float, right: float, back: bool = True) -> None:
    """Draw the activation that crosses a cut between `left` and `right` and, with `back`, its gradient."""
    middle = (left + right) / 2
    messages = [("activation", left, right, 1, "bottom")]
    if back:
        messages.append(("its gradient", right, left, -1, "top"))
    for message, start, end, side, va in messages:
        ax.annotate("", (end, 0.15 * side), (start, 0.15 * side), arrowprops={"arrowstyle": "->", "color": CUT})
        ax.text(middle, 0.2 * side, message, ha="center", va=va, color=CUT, fontsize=12)
