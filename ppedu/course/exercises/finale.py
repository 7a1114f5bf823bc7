"""The finale: a job with a fault that is drawn by chance, its evidence, and the grade of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple

from ppedu.core import Schedule, SettingError
from ppedu.core.numeric import pretty
from ppedu.core.tables import LINE, in_html, in_text
from ppedu.core.validate import require_count
from ppedu.course.exercises.faults import EVERYWHERE, FAULTS, Fault, changed, place, planted
from ppedu.course.exercises.prediction import forget
from ppedu.course.exercises.setups import EXACT, Setup
from ppedu.course.progress_file import record, recorded
from ppedu.sim import Timeline, simulate
from ppedu.trace.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVENT = "finale case"  # in progress.txt, followed by the seed
CASES = 10**6
SYMPTOMS = {  # by the goal that fails first
    "order": "it hangs",
    "messages": "it hangs",
    "memory": "it runs out of memory",
    "time": "a step takes too long",
    "gradients": "the gradients are wrong",
}


def finale(another: bool = False) -> Case:
    """Return the case of this folder: the one in progress.txt, or a new one that is drawn by chance.

    another: draw a new one in any case.
    """
    drawn = cases()
    if not drawn or another:
        since = len(drawn) // len(FAULTS) * len(FAULTS)  # every fault comes once before one comes again
        known = {Case.fault(seed).name for seed in drawn[since:]}
        seeds = (SystemRandom().randrange(CASES) for _ in count())
        drawn.append(next(seed for seed in seeds if Case.fault(seed).name not in known))
        forget("what goes wrong")
        record(f"{EVENT} {drawn[-1]}")
    return Case(drawn[-1])


def cases() -> list[int]:
    """Return the seeds of the cases that were drawn in this folder, the last one last."""
    seeds = [event.removeprefix(EVENT).strip() for event in recorded() if event.startswith(EVENT)]
    return [int(seed) for seed in seeds if seed.isdigit()]


class Case:
    """A job with one fault. It prints as what is known about it. The same seed gives the same case.

    Attributes:
        schedule: The orders of its ranks.
        layers: The number of layers in each stage.
        room: A rank's GB for activations.
        hangs: Whether the job never finishes a step.
    """

    def __init__(self, seed: int):
        self.seed = require_count("the seed", seed, least=0)
        self._fault = self.fault(self.seed)
        self._job, self._where = planted(self._fault, Random(self.seed))
        self.schedule, self.layers = self._job.schedule, self._job.layers
        self.room, self.hangs = round(self._job.room, 6), self._job.hangs

    @staticmethod
    def fault(seed: int) -> Fault:
        """Return the fault of the case with this seed."""
        return Random(f"fault of {seed}").choice([*FAULTS.values()])

    @property
    def symptom(self) -> str:
        """One of SYMPTOMS; of two that the job has, the one that ends it."""
        return SYMPTOMS[next(iter(self._job.failing()))]

    @property
    def peaks(self) -> list[float]:
        """The most activations that each rank would hold in this schedule, in GB."""
        self._require_step("no step shows its peak")
        return [round(peak, 6) for peak in self._job.peaks]

    @cached_property
    def run(self) -> Run:
        """Three steps of two replicas, as recorded. With too little memory, they are from machines with more.

        Raises:
            SettingError: The job hangs, so no step was recorded.
        """
        self._require_step("no step was recorded")
        return self._job.measured(self.seed)

    @property
    def plan(self) -> Timeline:
        """The simulation with which this job was planned: the same schedule and layers, on sound machines.

        Raises:
            SettingError: The job hangs.
        """
        self._require_step("its schedule cannot be simulated")
        return simulate(self.schedule, self._job.plan.costs())

    def _require_step(self, lacks: str) -> None:
        if self.hangs:
            raise SettingError(f"this job hangs, so {lacks}; see what its ranks are waiting for: print(case)")

    @property
    def losses(self) -> list[float]:
        """The loss of each step of a small model, trained with this job's program."""
        self._require_step("it has no loss")
        return self._job.trained.losses

    @property
    def parity(self) -> list[Parity]:
        """How far the gradients of each rank are from those of one process, in the first step, to two digits."""
        self._require_step("it has no gradients")
        return [Parity(*(float(f"{each:.2g}") for each in pair)) for pair in self._job.trained.off]

    def times(self) -> Table:
        """Return the measured times of each stage and of the messages between each two ranks, by replica."""
        fitted = [self.run.only(replicas=[replica]).costs() for replica in self.run.replicas]
        kinds = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
        given = {letter: [getattr(costs, kind) for costs in fitted] for kind, letter in kinds.items()}
        links = [link for rank in range(1, self.schedule.ranks) for link in ((rank - 1, rank), (rank, rank - 1))]
        rows = {
            f"message, rank {one} to {other}": [costs.delay(one, other) for costs in fitted] for one, other in links
        }
        rows |= {
            f"{letter} of stage {stage}": [times[stage] for times in all_times]
            for stage in range(self.schedule.stages)
            for letter, all_times in given.items()
            if None not in all_times
        }
        head = ["", *(f"replica {replica}" for replica in self.run.replicas)]
        return Table([head, *([name, *(f"{1000 * each:.2f} ms" for each in row)] for name, row in rows.items())])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw a typical step of the slower replica; of a job that hangs, what its ranks had done."""
        if self.hangs:
            drawn = self._job.stuck()
        else:
            steps = [self.run.timeline(replica=replica) for replica in self.run.replicas]
            drawn = max(steps, key=lambda step: step.makespan)
        ax = drawn.plot(ax, title=f"{self.schedule.name}, {self.schedule.size}, recorded")
        ax.set_title("", loc="right")  # a job that hangs has no makespan; its title must not tell so
        return ax

    def answer(self, what: str, where: Any = None, **cure: Any) -> Answer:
        """Return a diagnosis for `check_answer`: the name of a fault, its place, and settings that cure it.

        The settings are schedule, layers, node, link, quiet, repack, and code with at; see `help(changed)` in
        `ppedu.course.exercises.faults`.
        """
        return Answer(self, what, where, cure)

    def after(self, **cure: Any) -> Timeline:
        """Return the simulation of this job with some settings changed, of its slower replica.

        Raises:
            SettingError: A setting is not possible.
            ScheduleError: The job still hangs.
        """
        job = changed(self._job, **cure)
        return max((simulate(job.schedule, job.costs(replica)) for replica in range(2)), key=lambda step: step.makespan)

    def reveal(self) -> Answer:
        """Return the right diagnosis, with a cure."""
        return self.answer(self._fault.name, self._where, **self._fault.cure(self._job, self._where))

    def __str__(self) -> str:
        job, schedule = self._job, self.schedule
        lines = [f"Case {self.seed}: {schedule.name}, {schedule.size}, {len(job.lengths)} sequences, 2 replicas"]
        if self.hangs:
            return "\n".join([*lines, "It starts, and never finishes its first step.", *job.waiting()])
        lines.append(f"GB for activations on a rank: {pretty(job.room)}; peaks: {', '.join(map(pretty, job.peaks))}")
        possible = f"Without the fault, it would take {pretty(job.goal, 's')}."
        if job.overflows:
            lines.append(f"It ran out of memory, and was recorded on larger machines. {possible}")
        elif job.late:
            lines.append(f"A step takes {pretty(job.step, 's')}. {possible}")
        else:
            lines.append(f"A step takes {pretty(job.step, 's')}, as it should, and the loss falls.")
        return "\n".join(lines)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and other.seed == self.seed

    def __hash__(self) -> int:
        return hash(self.seed)


class Table(list[Sequence[str]]):
    """Rows of text, the first of which is the head. It shows as a table."""

    def __repr__(self) -> str:
        return "\n".join(line for row in in_text(self, 40, LINE) for line in row)

    def _repr_html_(self) -> str:
        return in_html(self)


def choices() -> Table:
    """Return the faults to choose from, each with its place, and with an example of a setting that cures it."""
    rows = Table([("what", "where", "cure, such as")])
    for name, fault in FAULTS.items():
        cure = fault.cure(*planted(fault, Random(0)))
        rows.append((name, fault.where, described(cure)))
    return rows


def described(cure: Mapping[str, Any]) -> str:
    """Return a cure as it is written in Python."""
    settings = []
    for name, value in cure.items():
        if isinstance(value, Schedule):
            settings.append(f'{name}=pp.schedule("{value.name}", {value.ranks}, {value.microbatches})')
        elif name == "layers":
            settings.append(f"{name}={tuple(int(each) if each % 1 == 0 else each for each in value)}")
        else:
            settings.append(f"{name}={value!r}")
    return ", ".join(settings)


class Parity(NamedTuple):
    """How far a rank's gradients are from those of one process, before clipping and after; 0.5 is half their norm."""

    before: float
    after: float

    def __repr__(self) -> str:
        return f"before clipping {self.before:.1e}, after {self.after:.1e}"


@dataclass(frozen=True)
class Answer:
    """A diagnosis: the fault's name, its place, and the settings of `changed` that cure it."""

    case: Case
    what: Any
    where: Any
    cure: Mapping[str, Any] = field(default_factory=dict)


def not_the_fault(answer: Any) -> str | None:
    """Explain what speaks against a diagnosis; return None if it is right and its cure works."""
    if not isinstance(answer, Answer):
        return "give a diagnosis: `case.answer(what, where, …)`"
    case, what, where = answer.case, answer.what, place(answer.where)
    if what not in FAULTS:
        return f"choose what is wrong: one of {', '.join(FAULTS)}"
    fault, job = FAULTS[what], case._job
    places = fault.places(job)
    if fault is not case._fault:
        return _speaks_against(fault, job)
    if where not in places:
        wanted = repr(EVERYWHERE) if fault.where == EVERYWHERE else f"{fault.where}, such as {places[-1]!r}"
        return f"that is what happens. Where? Its place is {wanted}; yours is {where!r}"
    if where != case._where:
        remains = _remains(changed(job, **fault.cure(job, where)))
        return f"that is what happens, but not there: cured at {where!r}, {remains}"
    if not answer.cure:
        return "what and where are right. Now cure it: name a setting, and it is computed"
    try:
        still = _remains(changed(job, **answer.cure))
    except TypeError:
        return f"settings are schedule, layers, node, link, quiet, repack, code and at; got {', '.join(answer.cure)}"
    if still:
        return f"what and where are right; with your cure, {still}"
    if what == "too few microbatches" and answer.cure["schedule"].microbatches <= job.schedule.microbatches:
        return (
            "what and where are right; with your cure there are as few microbatches as before, and that is only hidden"
        )
    return None


def _remains(job: Setup) -> str:
    return "; ".join(job.failing().values())


def _speaks_against(fault: Fault, job: Setup) -> str:
    """Say what in the evidence speaks against a fault that is not the job's."""
    if not set(fault.breaks) & set(job.failing()):
        return f"{_signs(job)[fault.breaks[0]]} “{fault.name}” would mean that {fault.text}"
    cures = [cure for where in fault.places(job) if (cure := fault.cure(job, where))]
    if not cures:
        return f"“{fault.name}” would mean that {fault.text}. This job has nothing that could be cured of it"
    cured = [changed(job, **cure) for cure in cures]
    best = min([job, *(each for each in cured if each != job)], key=_distance)
    return (
        f"if it were “{fault.name}”, its cure would help. It was tried at every possible place. At best, "
        f"{_remains(best)}"
    )


def _distance(job: Setup) -> tuple[int, float]:
    """Return how far a job is from being right, for comparisons: the number of failing goals, and by how much."""
    failing = job.failing()
    if "gradients" in failing:
        return len(failing), sum(max(each) for each in job.trained.off)
    return len(failing), 0.0 if job.hangs else job.step


def _signs(job: Setup) -> dict[str, str]:
    """Return, by goal, a sentence for a job in which it does not fail."""
    if job.hangs:
        found = "pp.check finds a problem" if job.schedule.problems else "pp.check finds nothing wrong with its orders"
        sentence = f"The job hangs before any step has ended, and {found}."
        return dict.fromkeys(("order", "messages", "memory", "time", "gradients"), sentence)
    runs = "The job runs to its end in every step, and pp.check finds nothing wrong."
    return {
        "order": runs,
        "messages": runs,
        "memory": f"The fullest rank keeps {pretty(max(job.peaks))} GB, and has {pretty(job.room)}.",
        "time": f"A step takes {pretty(job.step, 's')}, and {pretty(job.goal, 's')} is possible.",
        "gradients": f"Gradients are those of one process, to {EXACT:.2%}.",
    }
