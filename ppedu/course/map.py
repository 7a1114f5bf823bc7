"""The map of the course: its lessons, the ideas that they are about, the tools, and the faults that these find."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from ppedu.course.exercises.faults import FAULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Lesson(NamedTuple):
    """A lesson.

    Args:
        after: the earlier lessons that it builds on.
        faults: those of the finale that it teaches.
    """

    number: int
    idea: str
    tools: str
    after: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()


LESSONS = [
    Lesson(1, "memory says how many ranks", "pp.Costs"),
    Lesson(2, "y goes down, its gradient comes up", "torch.autograd", (1,)),
    Lesson(3, "bubble = (p−1) / (m+p−1)", "pp.theory, pp.explore", (1,), ("too few microbatches",)),
    Lesson(4, "an order is legal if every input comes first", "pp.check, pp.puzzle", (3,), ("illegal order",)),
    Lesson(5, "1F1B: the same time, p activations", "pp.simulate, peak_activations", (4,), ("too many activations",)),
    Lesson(6, "a send waits for its receive", "%%torchrun, pp.lower", (2, 5), ("crossed messages",)),
    Lesson(
        7,
        "a loss curve proves nothing, one process does",
        "parity.difference, MUSEUM",
        (6,),
        tuple(fault.name for fault in FAULTS.values() if fault.breaks == ("gradients",)),
    ),
    Lesson(
        8,
        "measured = simulated + slower + waiting",
        "Costs.fit, Run.autopsy",
        (5, 6),
        ("imbalance", "slow node", "slow link", "interruptions", "long sequence"),
    ),
    Lesson(9, "v chunks: 1/v of the bubble, v times the hops", "pp.compare", (5,), ("too many chunks",)),
    Lesson(10, "I cannot wait, W can", "zb-h1, zb-v", (2, 5), ("late weight gradients",)),
    Lesson(11, "what a cure would save, before the cure", "pp.Run, autopsy, predict", (8, 10)),
    Lesson(12, "two directions, and what a copy costs", "dualpipe, dualpipev", (9, 10), ("two copies",)),
    Lesson(13, "an order of your own, and the best one", "pp.register, pp.search", (4, 10)),
    Lesson(14, "move work first, then choose a schedule", "pp.plan", (8, 13)),
]
COLUMNS = {"lesson": 1.6, "idea": 2.35, "tools": 5.8, "what they find": 8.3}  # and where each begins
COLORS = {"order": "#8e5bb5", "messages": "#c0392b", "memory": "#c2701c", "gradients": "#2f8f6b", "time": "#3b76b8"}
PLAIN = "#7f7f7f"


def course_map(faults: bool = True) -> Axes:
    """Draw the lessons as a table. An arc leads to each lesson from those that it builds on.

    Args:
        faults: whether the last column has the faults that a lesson's tools find. Then a lesson has the color of the
            goal that its faults break; see `Setup.failing`.
    """
    from matplotlib import pyplot
    from matplotlib.patches import Arc

    _, ax = pyplot.subplots(figsize=(11, 0.36 * len(LESSONS) + 0.9), layout="constrained")
    ax.set(xlim=(0.4, 12.1), ylim=(len(LESSONS) - 0.6, -1.9 if faults else -1.1))
    ax.axis("off")
    columns = list(COLUMNS.items())[: 4 if faults else 3]
    for name, left in columns:
        ax.text(left, -0.6, name, size=10, weight="bold", va="center")
    if faults:
        ax.text(1.6, -1.5, "what breaks:", size=9, va="center")
        for place, (goal, color) in enumerate({**COLORS, "no fault of the finale": PLAIN}.items()):
            ax.text(2.8 + 1.3 * place, -1.5, goal, size=9, weight="bold", va="center", color=color)
    rows = {lesson.number: row for row, lesson in enumerate(LESSONS)}
    for lesson in LESSONS:
        goal = FAULTS[lesson.faults[0]].breaks[0] if lesson.faults else ""
        color, row = COLORS.get(goal, PLAIN) if faults else PLAIN, rows[lesson.number]
        found = fill(", ".join(lesson.faults).replace(" ", "\xa0").replace(",\xa0", ", "), 58)  # breaks between names
        texts = (str(lesson.number), lesson.idea, lesson.tools, found)
        families = (None, None, "monospace", None)
        for (_, left), text, family in zip(columns, texts, families, strict=False):
            ax.text(left, row, text, size=9, va="center", color=color, family=family)
        for earlier in lesson.after:
            middle, high = (row + rows[earlier]) / 2, row - rows[earlier]
            wide = 2.6 * high / len(LESSONS) + 0.3
            ax.add_patch(Arc((1.5, middle), wide, high, theta1=90, theta2=270, color=color, alpha=0.6))
    return ax
