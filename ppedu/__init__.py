"""ppedu: learn, design and check pipeline parallelism.

    import ppedu as pp
    s = pp.schedule("1f1b", ranks=4, microbatches=8)
    print(s)

These are the names a notebook uses. Importing them loads the standard library alone; torch, matplotlib
and Jupyter are loaded by the packages that need them (`pp.run`, `pp.view`, `pp.notebook`), when first used.
"""

from importlib import import_module
from typing import Any

from ppedu.core.actions import Action, B, F, I, Op, W
from ppedu.core.check import check
from ppedu.core.costs import Costs
from ppedu.core.errors import (
    CommunicationError,
    ParseError,
    PipelineError,
    RankError,
    ScheduleError,
    SettingError,
)
from ppedu.core.lower import align, label, lower, merge_backward, strip
from ppedu.core.placement import Placement
from ppedu.core.problems import Problem
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Span, Timeline
from ppedu.zoo import register, schedule, schedules

__version__ = "0.1.0"

__all__ = [
    "Action",
    "B",
    "CommunicationError",
    "Costs",
    "F",
    "I",
    "Op",
    "ParseError",
    "PipelineError",
    "Placement",
    "Problem",
    "RankError",
    "Schedule",
    "ScheduleError",
    "SettingError",
    "Span",
    "Timeline",
    "W",
    "align",
    "check",
    "compare",
    "differences",
    "doctor",
    "explore",
    "export",
    "give_back",
    "label",
    "lower",
    "merge_backward",
    "partition",
    "puzzle",
    "register",
    "schedule",
    "schedules",
    "show_live",
    "simulate",
    "strip",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name in ("run", "view", "notebook"):
        return import_module(f"ppedu.{name}")
    if name in ("export", "partition"):
        return import_module(f"ppedu.core.{name}")
    if name == "theory":
        return import_module("ppedu.zoo.theory")
    if name == "doctor":
        return import_module("ppedu.cli.checkup").doctor
    if name in ("compare", "differences"):
        return getattr(import_module("ppedu.view.interactive"), name)
    if name in ("explore", "puzzle"):
        return getattr(import_module(f"ppedu.view.{name}"), name)
    if name in ("give_back", "show_live"):
        return getattr(import_module("ppedu.notebook.exchange"), name)
    raise AttributeError(f"module 'ppedu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "notebook", "run", "view"})


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext ppedu` makes `%%torchrun` known."""
    from ppedu.notebook.magic import load

    load(ipython)
