"""A lesson's cells, run in a worker of the page: Python and ppedu, without processes, PyTorch and matplotlib."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import math
import os
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from absent import Absent, Nothing, package_of
from record import FILE, key, results_name, results_of
from said import OWN_CODE, said

from ppedu.core import PipelineError, Schedule, hooks
from ppedu.course.exercises import EXERCISES, prediction, stars_by_exercise
from ppedu.course.exercises.feedback import CLICK
from ppedu.course.exercises.prediction import Guess
from ppedu.course.progress_file import recorded
from ppedu.search.frontier import Frontier
from ppedu.sim import Timeline, simulate
from ppedu.view.frontier import Chart
from ppedu.view.interactive import Interactive, display
from ppedu.view.model import Panel

Output = dict[str, Any]
RANKS = "This cell runs on several processes. Its output was recorded."
ELSEWHERE = "This cell needs {}, which this page does not have. Its output was recorded."
EARLIER = "This cell needs {!r} of a cell that was recorded. So was its output."
FRAME = {"pyplot", "subplots", "show", "rcParams"}  # what a picture of timelines uses of matplotlib
RECORDED = json.loads(Path(__file__).with_name(FILE).read_text(encoding="utf-8"))
CONTROL = "application/x-ppedu-prediction"  # a MIME type
MOST_TEXT = 100_000  # characters of a cell's output


class Printed(io.TextIOBase):
    """Adds what is printed to the outputs of a cell."""

    def __init__(self, outputs: list[Output]) -> None:
        self.outputs = outputs

    def write(self, text: str) -> int:
        last = self.outputs[-1] if self.outputs and self.outputs[-1].keys() == {"text"} else None
        if last is None:
            self.outputs.append({"text": text})
        elif len(last["text"]) < MOST_TEXT:
            last["text"] += text
        return len(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _solved() -> bool:
    """Return whether all exercises of a lesson are solved."""
    with contextlib.suppress(OSError):
        solved = stars_by_exercise(recorded())
        lessons = groupby(EXERCISES, key=lambda name: name[:2])
        return any(all(name in solved for name in names) for _, names in lessons)
    return False


def _control(name: str, asked: Guess) -> dict[str, Any]:
    """Return, in place of a prediction's widget, what the page needs for a control of its own, by MIME type."""
    control: dict[str, Any] = {"name": name, "choices": [] if asked.step else asked.options}
    if asked.step:
        numbers = {"min": asked.options[0], "max": asked.options[-1], "step": asked.step}
        control |= {each: f"{number:g}" for each, number in numbers.items()}
    return {CONTROL: control}


class Cells:
    """The cells of a lesson, their names and the widgets that they have shown."""

    def __init__(self) -> None:
        sys.meta_path.insert(0, Absent())
        hooks.register({"plot": self._plot})
        self.shell = SimpleNamespace(kernel=None)  # what ppedu asks IPython for
        ipython, shows = ModuleType("IPython"), ModuleType("IPython.display")
        vars(ipython).update(get_ipython=lambda: self.shell, display=shows)
        vars(shows).update(display=self._show)
        sys.modules.update({"IPython": ipython, "IPython.display": shows})
        os.environ["PPEDU_STILL"] = "1"
        vars(prediction).update(in_notebook=lambda: True, _control=_control, fold=self._fold)
        self.scope: dict[str, Any] = {"__name__": "__main__", "display": self._show}
        self.widgets: list[Interactive] = []
        self.outputs: list[Output] = []
        self.drawn: list[Timeline] = []
        self.recorded = ""  # the source of the cells that did not run
        self.missing: dict[str, str] = {}  # by name that could not be imported: the package that it needs
        self.runs = 0

    def ask(self, question: str) -> str:
        """Return the answer to a question of the page; both are JSON."""
        return json.dumps(self.answer(json.loads(question)))

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Run a cell, or hand a message to a widget."""
        match question:
            case {"cell": int(cell), "source": str(source), "first": bool(first)}:
                self.shell.kernel = first or None  # as in a notebook, running all cells shows no hints
                return {"cell": cell, "outputs": self.run(source), "solved": _solved()}
            case {"predict": str(name), "value": str(value)} if name in prediction._predictions:
                asked = prediction._predictions[name]
                near = min(asked.options, key=lambda each: abs(each - _number(value))) if asked.step else value
                asked.value = near if near in asked.options else None
                return {"predicted": asked.value is not None}
            case {"widget": int(number), "message": dict(message)} if 0 <= number < len(self.widgets):
                widget = self.widgets[number]
                try:
                    received = widget.handle(message)
                except PipelineError as error:
                    return {"wrong": str(error)}
                return {"widget": number, **({"received": received} if received else {"state": widget.state()})}
        return {"wrong": "The page asked for something unknown."}

    def run(self, source: str) -> list[Output]:
        """Run a cell and return its outputs: text, widgets, an error, or a note why the recorded ones stay."""
        self.outputs, self.drawn = [], []
        Nothing.used.clear()
        if source.startswith("%%torchrun"):
            name = results_name(source)
            if found := RECORDED.get(key(source)):
                self.scope[name] = results_of(found)
                return [{"recorded": f"{RANKS} So was what the ranks gave back, {name}."}]
            return self._keep(f"{source} {name}", RANKS)
        if "%my_pipeline " in source or "subprocess" in source:
            return self._keep("", RANKS)
        text = "\n".join("" if line.startswith("%") else line for line in source.splitlines())
        printed = Printed(self.outputs)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                self._execute(text)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if package := package_of(error) or self.missing.get(getattr(error, "name", "")):
                return self._keep(source, ELSEWHERE.format(package))
            if isinstance(error, RuntimeError) and "start new thread" in str(error):
                return self._keep(source, ELSEWHERE.format("threads"))
            if isinstance(error, AttributeError) and error.obj is os:
                return self._keep(source, ELSEWHERE.format(f"os.{error.name}"))
            if isinstance(error, NameError) and str(error.name) in self.recorded:
                return self._keep(source, EARLIER.format(error.name))
            self.outputs.append({"error": said(error)})
        if self.drawn:
            self._widget(Interactive(*map(Panel, self.drawn)), drawn=True, more=bool(Nothing.used - FRAME))
        return self.outputs

    def _keep(self, source: str, why: str) -> list[Output]:
        self.recorded += source
        return [{"recorded": why}]

    def _execute(self, text: str) -> None:
        self.runs += 1
        name = f"{OWN_CODE} {self.runs}"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        statements = ast.parse(text, name).body
        last = statements[-1] if statements and isinstance(statements[-1], ast.Expr) else None
        for each in statements[:-1] if last else statements:
            try:
                exec(compile(ast.Module([each], []), name, "exec"), self.scope)
            except (ModuleNotFoundError, PipelineError) as error:
                package = package_of(error)
                if not package or not isinstance(each, (ast.Import, ast.ImportFrom)):
                    raise
                if not self.shell.kernel:
                    self.outputs.append({"error": f"This page does not have {package}."})
                for given in each.names:  # a cell that imports it for later cells goes on
                    self.missing[(given.asname or given.name).partition(".")[0]] = package
        if last:
            value = eval(compile(ast.Expression(last.value), name, "eval"), self.scope)
            self._show(None if text.rstrip().endswith(";") else value)

    def _show(self, shown: Any, raw: bool = False) -> None:
        """Add what a notebook would display. raw: it is given by MIME type."""
        if shown is None or isinstance(shown, Nothing):
            return
        if raw:
            asked = {"asked": shown[CONTROL]} if CONTROL in shown else {}
            self.outputs.append({"text": shown["text/plain"] + "\n", **asked})
            return
        if isinstance(shown, (Schedule, Timeline)):
            try:
                shown = display(shown if isinstance(shown, Timeline) else simulate(shown))
            except PipelineError as error:
                shown = str(error)
        if isinstance(shown, Frontier):
            shown = Chart(shown)
        if isinstance(shown, Interactive):
            self._widget(shown)
        else:
            self.outputs.append({"text": f"{shown!r}\n"})

    def _fold(self, summary: str, text: str) -> None:
        self.outputs.append({"folded": summary, "answer": text, "text": f"{summary} {CLICK}\n"})

    def _widget(self, widget: Interactive, **more: Any) -> None:
        self.widgets.append(widget)
        self.outputs.append({"widget": len(self.widgets) - 1, "state": widget.state(), "text": widget.text(), **more})

    def _plot(self, timeline: Timeline, ax: Any = None, **_: Any) -> Any:
        self.drawn.append(timeline)
        return ax or Nothing()


start = Cells  # what the worker calls
