"""ppedu: learn, design and check pipeline parallelism.

    import ppedu as pp
    s = pp.schedule("1f1b", ranks=4, microbatches=8)
    print(s)

`import ppedu` needs only the standard library. The packages that need torch, matplotlib or Jupyter (`pp.run`,
`pp.view`, `pp.notebook`) are imported when they are first used.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

from ppedu.core.actions import Action, B, F, I, Op, W
from ppedu.core.check import check
from ppedu.core.costs import Costs
from ppedu.core.errors import CommunicationError, ParseError, PipelineError, RankError, ScheduleError, SettingError
from ppedu.core.lower import align, label, lower, merge_backward, strip
from ppedu.core.placement import Placement
from ppedu.core.problems import Problem
from ppedu.core.schedule import Schedule
from ppedu.core.simulate import simulate
from ppedu.core.timeline import Span, Timeline
from ppedu.zoo import register, schedule, schedules

__version__ = "0.1.0"

__all__ = ["Action", "B", "Costs", "F", "I", "Op", "Placement", "Problem", "Schedule", "Span", "Timeline", "W"]
__all__ += ["CommunicationError", "ParseError", "PipelineError", "RankError", "ScheduleError", "SettingError"]
__all__ += ["align", "check", "label", "lower", "merge_backward", "simulate", "strip"]
__all__ += ["register", "schedule", "schedules"]
__all__ += ["compare", "differences", "doctor", "explore", "export", "give_back", "partition", "puzzle", "show_live"]
__all__ += ["Machine", "Model", "Run", "plan", "theory"]

# Names that are imported when first used, each with the module that defines it or that it stands for.
LAZY = {
    "compare": "ppedu.view.interactive",
    "differences": "ppedu.view.interactive",
    "doctor": "ppedu.cli.checkup",
    "explore": "ppedu.view.explore",
    "export": "ppedu.core.export",
    "give_back": "ppedu.notebook.exchange",
    "Machine": "ppedu.planning.machine",
    "Model": "ppedu.planning.model",
    "notebook": "ppedu.notebook",
    "partition": "ppedu.core.partition",
    "plan": "ppedu.planning.plan",
    "puzzle": "ppedu.view.puzzle",
    "run": "ppedu.run",
    "Run": "ppedu.trace.run",
    "search": "ppedu.search",
    "show_live": "ppedu.notebook.exchange",
    "theory": "ppedu.zoo.theory",
    "view": "ppedu.view",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'ppedu' has no attribute {name!r}")
    module = import_module(LAZY[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})


def load_ipython_extension(ipython: Any) -> None:
    """Register the `%%torchrun` magic, when a notebook runs `%load_ext ppedu`.

    Where matplotlib's colors are its defaults, also make pictures legible on light and dark pages: no background, gray
    text and axes. Colors that a learner sets before or after it stay.
    """
    from ppedu.notebook.magic import load

    with suppress(ImportError):  # matplotlib is optional
        from ppedu.view.theme import use_notebook_colors, without_white_behind

        use_notebook_colors()
        if hasattr(ipython.display_pub, "register_hook"):  # a kernel's, not a terminal's
            ipython.display_pub.register_hook(without_white_behind)

    load(ipython)
