"""Schedules: their actions, placement and orders; whether they are legal; the messages that they need.

Orders come in, as objects or as CSV, and a checked and lowered schedule goes out. The lowest layer: it imports the
standard library only, so that it loads in milliseconds and runs wherever Python runs. Read it in this order: actions,
placement, dependencies, problems, schedule, checking, lowering, grid, streams.
"""

from ppedu.core.actions import (
    COMMUNICATION,
    COMPUTE,
    COPIES,
    OVERLAP,
    RECEIVE,
    SEND,
    TRAFFIC,
    WAITS,
    Action,
    B,
    F,
    I,
    L,
    O,
    Op,
    R,
    S,
    T,
    U,
    W,
    overlap,
)
from ppedu.core.checking import check
from ppedu.core.dependencies import Result, produces, replay, requires
from ppedu.core.errors import (
    CommunicationError,
    ParseError,
    PipelineError,
    Problem,
    RankError,
    ScheduleError,
    SettingError,
)
from ppedu.core.grid import align, strip, table, without_waits
from ppedu.core.lowering import label, lower, merge_backward, offload, recompute, share_head
from ppedu.core.placement import TOWARDS, Placement
from ppedu.core.schedule import Schedule, require_schedule, suggest_placement

__all__ = ["COMMUNICATION", "COMPUTE", "COPIES", "OVERLAP", "RECEIVE", "SEND", "TOWARDS", "TRAFFIC", "WAITS"]
__all__ += ["Action", "B", "CommunicationError", "F", "I", "L", "O", "Op", "ParseError", "PipelineError", "Placement"]
__all__ += ["Problem", "R", "RankError", "Result", "S", "Schedule", "ScheduleError", "SettingError", "T", "U", "W"]
__all__ += ["align", "check", "label", "lower", "merge_backward", "offload", "overlap", "produces", "recompute"]
__all__ += ["replay", "require_schedule", "requires", "share_head", "strip", "suggest_placement", "table"]
__all__ += ["without_waits"]
