"""The playground's Python: it runs in a worker of the page, and answers what the page asks."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples import EXAMPLES
from reasons import Paragraph, of_entry, of_plan, summary
from said import OWN_CODE, said

import ppedu as pp
from ppedu.core import ParseError, PipelineError, Placement, Schedule, SettingError
from ppedu.core.garbage import without_gc
from ppedu.core.numeric import plural
from ppedu.course.board.puzzle import Puzzle, puzzle
from ppedu.course.board.recognition import recognize
from ppedu.planning.question import EXAMPLE, read
from ppedu.search.atlas import PLACEMENTS, atlas
from ppedu.sim import Costs, simulate_partial
from ppedu.view.explore import Explore, explore
from ppedu.view.interactive import Interactive, compare, differences
from ppedu.view.knot import picture
from ppedu.view.link import decode, encode
from ppedu.view.model import Data, Panel

Inputs = dict[str, str]
MOST_SHOWN = 12  # problems
OWN = "yours"  # the module's name of a reader's code
EFFORT = 0.2  # of a plan: some 5 seconds; seconds themselves would make answers depend on the machine
LARGE = 10_000  # actions
MOST_COMPARED = 2_000  # actions; all published schedules of a size are made to recognize one
SHORTER = "This is a fifth of pp.plan's usual search; all of it, effort = 1 in [plan], may find better partitions."
PLAN = '''import ppedu as pp
from pathlib import Path
from ppedu.planning.question import read

Path("model.toml").write_text("""\
{}
""")
print(pp.plan(**read("model.toml")))'''
MINE = """def mine(rank, ranks, microbatches):
    for m in range(microbatches):
        yield pp.F(rank, m)
    for m in range(microbatches):
        yield pp.B(rank, m)
"""


@dataclass
class Answer:
    """The answer of a view: a widget, sentences, and the same in Python."""

    widget: Interactive | None = None
    report: list[Paragraph] = field(default_factory=list)
    code: str = ""
    picture: str = ""  # HTML, below the sentences
    legal: bool | None = None  # the schedule that a reader has written
    verdict: str = ""  # on it


class Stuck(Interactive):
    """The actions that ranks can run of an illegal schedule, without makespan and bubble."""

    def state(self) -> Data:
        state = super().state()
        for panel in state["panels"]:
            panel |= {"numbers": [], "summary": panel["heading"]}
        return state


@dataclass(frozen=True)
class Input:
    """A field of a view's form. kind: "number", "text", "area", "choice", or "hidden" if the widget itself sets it."""

    name: str
    label: str
    kind: str
    value: str
    choices: tuple[str, ...] = ()


def whole(inputs: Inputs, name: str) -> int:
    """Return an input that is a whole number."""
    try:
        return int(inputs[name])
    except ValueError:
        raise SettingError(f"{name} must be a whole number; got {inputs[name]!r}") from None


def costs_of(text: str) -> Costs:
    """Return the costs that are written as in Python: "forward=1, backward=[2, 2, 3, 2], latency=0.1"."""
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return Costs(**given)
    except PipelineError:
        raise
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise SettingError(f'costs are written as "forward=1, backward=2, latency=0.1"; got {text!r}') from None


def show_explore(inputs: Inputs) -> Answer:
    settings: dict[str, Any] = {key: value for key, value in inputs.items() if key != "schedule"}
    return Answer(explore(inputs.get("schedule", "1f1b"), **settings))


def show_write(inputs: Inputs) -> Answer:
    made, code = written(inputs)
    costs, problems = costs_of(inputs["costs"]), pp.check(made)
    code += f"\nprint(pp.check(s))\nt = pp.simulate(s, pp.Costs({inputs['costs']}))\nt.show()"
    typed = "" if "def " in inputs["text"] else _typed(made, inputs)
    report: list[Paragraph]
    if not problems:
        timeline, verdict = pp.simulate(made, costs), f"The schedule is legal.{_named(made)}{typed}"
        report = ["The schedule is legal.", *summary(timeline)]
        return Answer(Interactive(Panel(timeline)), report, code, legal=True, verdict=verdict)
    first, more = str(problems[0]), len(problems) - MOST_SHOWN
    report = [f"The schedule is not legal: {plural(len(problems), 'problem')}."]
    report += [str(each) for each in problems[:MOST_SHOWN]] + ([f"… and {more} more."] if more > 0 else [])
    verdict = f"The schedule is not legal. {first[0].upper()}{first[1:]}.{typed}"
    stuck = Stuck(Panel(simulate_partial(made, costs)))
    return Answer(stuck, report, code, picture(made), legal=False, verdict=verdict)


def _named(made: Schedule) -> str:
    """Return a sentence with the name of the published schedule that has these orders, if there is one."""
    built = recognize(made) if sum(map(len, made.orders)) <= MOST_COMPARED else None
    return f" This is {built}." if built else ""


def _typed(made: Schedule, inputs: Inputs) -> str:
    """Return a sentence with the size of typed orders, if it is not the one in the form."""
    sizes = made.ranks, made.microbatches // made.slices
    if [*map(str, sizes)] == [inputs["ranks"], inputs["microbatches"]]:
        return ""
    return f" {plural(sizes[0], 'rank')} and {plural(sizes[1], 'microbatch')}, as typed."


def written(inputs: Inputs) -> tuple[Schedule, str]:
    """Return the schedule that a text describes, and Python code that makes it.

    The text is a generator of a rank's order, or the orders themselves; see `Schedule.read`.
    """
    text, placement = inputs["text"], inputs["placement"].strip()
    place = Placement.custom(_ranks(placement)) if placement.startswith("[") else placement
    if "def " in text:
        scope: dict[str, Any] = {"__name__": OWN, "pp": pp, "F": pp.F, "B": pp.B, "I": pp.I, "W": pp.W}
        try:
            exec(compile(text, OWN_CODE, "exec"), scope)
        except PipelineError:
            raise
        except Exception as error:
            raise ParseError(said(error)) from None
        functions = [
            each for each in scope.values() if getattr(each, "__module__", 0) == OWN and inspect.isfunction(each)
        ]
        ranks, microbatches = whole(inputs, "ranks"), whole(inputs, "microbatches")
        chunks = whole(inputs, "chunks")
        name = functions[-1].__name__ if functions else ""
        if not functions:
            raise ParseError("the code defines no function; write a generator(rank, ranks, microbatches)")
        try:
            if not isinstance(place, str):
                raise SettingError("a generator's placement is loop, v or bidirectional; write the orders as text")
            pp.register(name, place, chunks)(functions[-1])
            made = pp.schedule(name, ranks, microbatches)
        except PipelineError:
            raise
        except Exception as error:
            raise ParseError(said(error)) from None
        code = f"import ppedu as pp\n\n@pp.register({name!r}, {placement!r}, {chunks})\n{text.strip()}\n\n"
        return made, f"{code}s = pp.schedule({name!r}, {ranks}, {microbatches})"
    infers = bool(inputs.get("forwards"))
    try:
        made = Schedule.read(text, place, forward_only=infers, name="yours")
    except PipelineError as error:
        raise ParseError(str(error)) from None
    where = repr(placement) if isinstance(place, str) else f"pp.Placement.custom({placement})"
    where += ", forward_only=True" if infers else ""
    code = f'import ppedu as pp\n\ns = pp.Schedule.read("""\\\n{text.strip()}\n""", {where})'
    if (slices := whole(inputs, "slices")) > 1:
        made = replace(made, placement=replace(made.placement, slices=slices))
        cut = f"s = replace(s, placement=replace(s.placement, slices={slices}))"
        code = f"from dataclasses import replace\n\n{code}\n{cut}"
    return made, code


def _ranks(text: str) -> list[int]:
    """Return the rank of each stage: "[0, 1, 1, 0]"."""
    try:
        return list(ast.literal_eval(text))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise SettingError(
            f"a placement is a name, or the rank of each stage, such as [0, 1, 1, 0]; got {text}"
        ) from None


def show_compare(inputs: Inputs) -> Answer:
    names = inputs["schedules"].replace(",", " ").split()
    ranks, microbatches = whole(inputs, "ranks"), whole(inputs, "microbatches")
    shown = compare(*names, ranks=ranks, microbatches=microbatches, costs=costs_of(inputs["costs"]))
    listed = ", ".join(map(repr, names))
    code = f"import ppedu as pp\npp.compare({listed}, ranks={ranks}, microbatches={microbatches}, "
    return Answer(shown, code=f"{code}costs=pp.Costs({inputs['costs']}))")


def show_differences(inputs: Inputs) -> Answer:
    ranks, microbatches = whole(inputs, "ranks"), whole(inputs, "microbatches")
    one, other = (pp.schedule(inputs[name], ranks, microbatches) for name in ("one", "other"))
    code = "import ppedu as pp\npp.differences(" + ", ".join(
        f"pp.schedule({inputs[name]!r}, {ranks}, {microbatches})" for name in ("one", "other")
    )
    return Answer(differences(one, other, costs_of(inputs["costs"])), code=f"{code}, pp.Costs({inputs['costs']}))")


def show_puzzle(inputs: Inputs) -> Answer:
    return Answer(puzzle(inputs["level"], inputs["placed"]))


def show_atlas(inputs: Inputs) -> Answer:
    sizes = whole(inputs, "ranks"), whole(inputs, "microbatches")
    memory = inputs["memory"].strip()
    entry = atlas(*sizes, int(memory) if memory.isdigit() else None, inputs["placement"])
    timeline = pp.simulate(entry.schedule, entry.costs)
    given = f"{sizes[0]}, {sizes[1]}, {memory or None}, {inputs['placement']!r}"
    code = f"import ppedu as pp\nfound = pp.search.atlas({given})"
    report = of_entry(entry, timeline)
    return Answer(Interactive(Panel(timeline)), report, f"{code}\npp.simulate(found.schedule, found.costs).show()")


def show_plan(inputs: Inputs) -> Answer:
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.toml")
        path.write_text(inputs["question"], encoding="utf-8")
        try:
            asked = read(path)
        except PipelineError as error:
            raise ParseError(str(error).replace(repr(str(path)), "the question")) from None
    shorter = {} if {"effort", "seconds"} & asked.keys() else {"effort": EFFORT}
    found = pp.plan(**asked, **shorter)
    report = [*of_plan(found), *[SHORTER] * bool(shorter)]
    return Answer(Interactive(Panel(found.best.timeline())), report, code_of_plan(inputs))


def code_of_plan(inputs: Inputs) -> str:
    """Return the question as Python."""
    return PLAN.format(inputs["question"].strip())


NAMES = tuple(pp.schedules())
SIZES = (Input("ranks", "ranks", "number", "4"), Input("microbatches", "microbatches", "number", "8"))
COSTS = Input("costs", "costs", "text", "forward=1, backward=2")
VIEWS: dict[str, tuple[Callable[[Inputs], Answer], tuple[Input, ...]]] = {
    "explore": (show_explore, ()),
    "write": (
        show_write,
        (
            Input("text", "a generator, or a line of actions for each rank; F0-2 is F0 F1 F2", "area", MINE),
            Input("placement", "placement: loop, v, bidirectional, or the ranks of the stages", "text", "loop"),
            *SIZES,
            Input("chunks", "chunks", "number", "1"),
            Input("slices", "slices", "hidden", "1"),
            Input("forwards", "forwards alone", "hidden", ""),
            COSTS,
        ),
    ),
    "compare": (show_compare, (Input("schedules", "schedules", "text", "gpipe, 1f1b, zb-h1"), *SIZES, COSTS)),
    "differences": (
        show_differences,
        (
            Input("one", "one", "choice", "1f1b", NAMES),
            Input("other", "the other", "choice", "zb-h1", NAMES),
            *SIZES,
            COSTS,
        ),
    ),
    "puzzle": (show_puzzle, (Input("level", "level", "hidden", "first"), Input("placed", "placed", "hidden", ""))),
    "plan": (show_plan, (Input("question", "a model, a machine and a question, as TOML", "area", f"{EXAMPLE}\n"),)),
    "atlas": (
        show_atlas,
        (
            Input("placement", "placement", "choice", "v", tuple(PLACEMENTS)),
            *SIZES,
            Input("memory", "memory, in stages' activations", "text", "5"),
        ),
    ),
}


class Playground:
    """The open view, its inputs, and the widget that shows them."""

    def __init__(self) -> None:
        self.view = "explore"
        self.inputs: Inputs = {}
        self.widget: Interactive | None = None

    @without_gc()
    def ask(self, question: str) -> str:
        """Return the answer to a question of the page; both are JSON."""
        return json.dumps(self.answer(json.loads(question)), separators=(",", ":"))

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return what to show, or a sentence about what is wrong.

        A question is a link to open, a view with its inputs, a message of the widget, or the reasons that the state of
        a large widget lacks, so that it is drawn early.
        """
        wrong = "The page asked for something unknown."
        try:
            match question:
                case {"open": str(fragment)}:
                    return self._show(*(decode(fragment) if fragment.strip("#") else ("explore", {})))
                case {"view": str(view), "inputs": dict(inputs)}:
                    return self._show(view, inputs)
                case {"more": True} if self.widget:
                    self.widget.brief = False
                    return {"more": self.widget.state()}
                case {"widget": dict(message)} if self.widget:
                    received = self.widget.handle(message)
                    if received:
                        return {"received": received}
                    if isinstance(self.widget, Explore):
                        shown = self.widget.shown
                        self.inputs = {key: str(value) for key, value in shown.items() if value is not None}
                    return self._answer(Answer(self.widget))
        except (PipelineError, RecursionError, MemoryError) as error:
            wrong = f"{str(error)[:1000] or type(error).__name__}."
        return {"wrong": wrong, "view": self.view, "inputs": self._form()}

    def _show(self, view: str, inputs: Inputs) -> dict[str, Any]:
        if view not in VIEWS:
            raise ParseError("the link is from another version of the playground")
        show, fields = VIEWS[view]
        known = {each.name: inputs.get(each.name, each.value) for each in fields} if fields else inputs
        opened = view != self.view
        self.view, self.inputs, self.widget = view, known, None
        if opened and view == "plan":  # the search takes seconds; meanwhile, the page shows what is asked
            return self._answer(Answer(code=code_of_plan(known)), {"view": view, "inputs": known})
        made = show(known)
        self.widget = made.widget
        return self._answer(made)

    def _answer(self, made: Answer, again: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what to show. again: The question that the page asks next, if a reader does not ask another one."""
        code = made.code
        if isinstance(made.widget, Explore):
            code = f"import ppedu as pp\n{made.widget.code()}"
        elif isinstance(made.widget, Puzzle):
            self.inputs = made.widget.inputs
            given = ", ".join(repr(value) for value in self.inputs.values() if value)
            code = f"import ppedu as pp\npp.puzzle({given})"
        if made.widget and not isinstance(made.widget, Explore):
            made.widget.brief = made.widget.stack.actions > LARGE
            again = {"more": True} if made.widget.brief else None
        return {
            "view": self.view,
            "inputs": self._form(),
            "state": made.widget.state() if made.widget else None,
            "again": again,
            "report": made.report,
            "picture": made.picture,
            "legal": made.legal,
            "verdict": made.verdict,
            "code": code,
            "link": encode(self.view, self._changed()),
            "examples": [[text, encode(self.view, inputs)] for text, inputs in EXAMPLES[self.view].items()],
        }

    def _form(self) -> list[dict[str, Any]]:
        """Return the fields of the open view's form, with their values."""
        return [
            {**vars(each), "choices": list(each.choices), "value": self.inputs.get(each.name, each.value)}
            for each in VIEWS[self.view][1]
            if each.kind != "hidden"
        ]

    def _changed(self) -> Inputs:
        """Return the inputs that are not as they were at first, which keeps links short."""
        usual = {each.name: each.value for each in VIEWS[self.view][1]}
        return {name: value for name, value in self.inputs.items() if usual.get(name) != value}


start = Playground  # what the worker calls
