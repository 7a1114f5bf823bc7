"""`ppedu plan`: which schedule, partition and number of microbatches for a model on machines."""

from __future__ import annotations

import sys
from argparse import Namespace

from ppedu.cli.autopsy import bar
from ppedu.core.files import require_writable


def plan(options: Namespace) -> int:
    """find the schedule and the partition that make a model's step fastest"""
    from ppedu.planning.planner import plan
    from ppedu.planning.question import read

    if options.save is not None:
        require_writable(options.save)
    draw = bar("searching") if sys.stderr.isatty() else None
    found = plan(**read(options.question), progress=draw and (lambda what, part: draw(part)))
    if draw:
        draw(1)
    print(found)
    if options.save is not None:
        found.best.save(options.save)
    return 0
