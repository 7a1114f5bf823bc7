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

from ppedu.core import (
    Action,
    B,
    CommunicationError,
    F,
    I,
    L,
    O,
    Op,
    ParseError,
    PipelineError,
    Placement,
    Problem,
    R,
    RankError,
    S,
    Schedule,
    ScheduleError,
    SettingError,
    T,
    U,
    W,
    align,
    check,
    hooks,
    label,
    lower,
    merge_backward,
    offload,
    recompute,
    share_head,
    strip,
)
from ppedu.sim import Costs, Span, Timeline, simulate, versions
from ppedu.zoo import register, schedule, schedules

__version__ = "0.1.0"

__all__ = ["Action", "B", "Costs", "F", "I", "L", "O", "Op", "Placement", "Problem", "R", "S", "Schedule", "Span"]
__all__ += ["T", "Timeline", "U", "W"]
__all__ += ["CommunicationError", "ParseError", "PipelineError", "RankError", "ScheduleError", "SettingError"]
__all__ += ["align", "check", "label", "lower", "merge_backward", "offload", "recompute", "share_head", "shrink"]
__all__ += ["simulate", "strip", "verify"]
__all__ += ["register", "schedule", "schedules", "versions"]
__all__ += [
    "braid",
    "compare",
    "differences",
    "doctor",
    "dynamic_microbatches",
    "dynapipe",
    "equal_time_slices",
    "explore",
    "export",
    "give_back",
    "order_by_clusters",
    "partition",
    "puzzle",
    "show_live",
]
__all__ += ["Machine", "Model", "Run", "calibrate", "divide", "plan", "prefill", "theory"]

# Names that are imported when first used, each with the module that defines it or that it stands for.
LAZY = {
    "braid": "ppedu.sim.braid",
    "calibrate": "ppedu.planning.calibration",
    "divide": "ppedu.planning.divide",
    "compare": "ppedu.view.interactive",
    "differences": "ppedu.view.interactive",
    "doctor": "ppedu.cli.checkup",
    "dynamic_microbatches": "ppedu.sim.microbatches",
    "dynapipe": "ppedu.sim.microbatches",
    "equal_time_slices": "ppedu.sim.lengths",
    "explore": "ppedu.view.explore",
    "export": "ppedu.core.export",
    "give_back": "ppedu.launch.exchange",
    "Machine": "ppedu.planning.machine",
    "Model": "ppedu.planning.model",
    "notebook": "ppedu.notebook",
    "order_by_clusters": "ppedu.sim.microbatches",
    "partition": "ppedu.sim.partition",
    "plan": "ppedu.planning.planner",
    "prefill": "ppedu.sim.prefill",
    "puzzle": "ppedu.course.board.puzzle",
    "run": "ppedu.run",
    "Run": "ppedu.trace.run",
    "search": "ppedu.search",
    "show_live": "ppedu.launch.exchange",
    "shrink": "ppedu.sim.shrink",
    "testing": "ppedu.testing",
    "theory": "ppedu.zoo.theory",
    "verify": "ppedu.sim.verify",
    "view": "ppedu.view",
}


# The functions to which schedules, timelines and others hand over; see `ppedu.core.hooks`.
hooks.register(
    {
        "table": "ppedu.core.grid:table",
        "draw": "ppedu.sim.text:draw",
        "draw schedule": "ppedu.sim.text:draw_schedule",
        "reasons": "ppedu.sim.why:Reasons",
        "causes": "ppedu.sim.why:causes",
        "fit": "ppedu.sim.fit:fit",
        "load": "ppedu.trace.saved:load",
        "schedule of a layout": "ppedu.planning.layout:schedule_of",
        "schedule of a trace": "ppedu.trace.run:schedule_of",
        "save": "ppedu.view:save",
        "save report": "ppedu.view.html:save_report",
        "link": "ppedu.view.link:link",
        "display": "ppedu.view.interactive:mime_bundle",
        "draw problems": "ppedu.view.knot:figure",
        "display frontier": "ppedu.view.frontier:bundle",
        "show": "ppedu.view.interactive:display",
        "plot": "ppedu.view.plot:plot",
        "count": "ppedu.engine.stages.count:count",
    }
)


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'ppedu' has no attribute {name!r}")
    module = import_module(LAZY[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics `%%torchrun` and `%%my_pipeline`, when a notebook runs `%load_ext ppedu`.

    Where matplotlib's colors are its defaults, also make pictures legible on light and dark pages: no background, gray
    text and axes. Colors that a learner sets before or after it stay.
    """
    from ppedu.cells import magic
    from ppedu.course import part_cell

    with suppress(ImportError):  # matplotlib is optional
        from ppedu.view.theme import use_notebook_colors, without_white_behind

        use_notebook_colors()
        if hasattr(ipython.display_pub, "register_hook"):  # a kernel's, not a terminal's
            ipython.display_pub.register_hook(without_white_behind)

    magic.load(ipython)
    part_cell.load(ipython)
