"""The map of the course: its lessons, what they are about, their tools, and the faults that they teach."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Lesson(NamedTuple):
    """A lesson.

    Args:
        tools: some that it uses, with a comma between them.
        faults: those of the finale that it teaches.
    """

    number: int
    idea: str
    tools: str
    faults: tuple[str, ...] = ()


LESSONS = [
    Lesson(1, "memory says how many ranks", "heron, pp.simulate"),
    Lesson(2, "y goes down, its gradient comes up", "detach, requires_grad_"),
    Lesson(3, "bubble = (p−1) / (m+p−1)", "pp.explore, pp.Costs", ("too few microbatches",)),
    Lesson(4, "an order is legal if every input comes first", "pp.check, pp.puzzle", ("illegal order",)),
    Lesson(5, "1F1B: the same time, p activations", "pp.register, peak_activations", ("too many activations",)),
    Lesson(6, "a send waits for its receive", "pp.lower, rendezvous", ("crossed messages", "gradients newest first")),
    Lesson(
        7,
        "a loss curve proves nothing, one process does",
        "difference, MUSEUM",
        ("loss not divided", "norm per stage", "tied copies drift apart", "one receive buffer"),
    ),
    Lesson(8, "measured = simulated + slower + waiting", "Costs.fit, emulate"),
    Lesson(9, "v chunks: 1/v of the idle time, more than v times the hops", "interleaved", ("too many chunks",)),
    Lesson(10, "I cannot wait, W can", "zb-h1, zb-v", ("late weight gradients",)),
    Lesson(
        11,
        "what a cure would save, before the cure",
        "pp.Run, autopsy, predict",
        ("imbalance", "slow node", "slow link", "interruptions", "long sequence"),
    ),
    Lesson(12, "two directions, and what a copy costs", "dualpipe, dualpipev", ("two copies",)),
    Lesson(13, "a sequence in slices that take equally long", "seq1f1b, pp.prefill"),
    Lesson(14, "an order of your own, and the best one", "pp.register, pp.explore"),
    Lesson(15, "move work first, then choose a schedule", "pp.plan, pp.Machine"),
]
PLAIN, TOOLS, FOUND = "#7f7f7f", "#3b76b8", "#c2701c"
# Where each column begins, and its color.
COLUMNS = {"lesson": (0, PLAIN), "idea": (0.7, PLAIN), "tools": (5.1, TOOLS), "faults of the finale": (8, FOUND)}


def course_map() -> Axes:
    """Draw the lessons as a table: what each is about, tools that it uses, and the faults that it teaches."""
    from matplotlib import pyplot

    _, ax = pyplot.subplots(figsize=(11, 0.36 * len(LESSONS) + 0.4), layout="constrained")
    ax.set(xlim=(-0.1, 12.3), ylim=(len(LESSONS) - 0.5, -1.3))
    ax.axis("off")
    for name, (left, color) in COLUMNS.items():
        ax.text(left, -0.9, name, size=10, weight="bold", va="center", color=color)
    for row, lesson in enumerate(LESSONS):
        found = fill(", ".join(lesson.faults).replace(" ", "\xa0").replace(",\xa0", ", "), 58)  # breaks between names
        texts = (str(lesson.number), lesson.idea, lesson.tools, found)
        families = (None, None, "monospace", None)
        for (left, color), text, family in zip(COLUMNS.values(), texts, families, strict=True):
            ax.text(left, row, text, size=9, va="center", color=color, family=family)
    return ax
