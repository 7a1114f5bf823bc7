"""`python -m ppedu plan`: which schedule, partition and number of microbatches for a model on machines."""

from __future__ import annotations

import sys
from argparse import Namespace

from ppedu.cli.autopsy import bar
from ppedu.core.errors import SettingError
from ppedu.core.export import to_torch


def plan(options: Namespace) -> int:
    """find the schedule and the partition that make a model's step fastest"""
    from ppedu.planning.plan import plan
    from ppedu.planning.question import read

    draw = bar("searching") if sys.stderr.isatty() else None
    question = read(options.question)
    try:
        found = plan(**question, progress=draw and (lambda what, part: draw(part)))
    except TypeError as error:
        raise SettingError(f"{options.question!r}: {str(error).replace('plan()', 'the table plan')}") from None
    if draw:
        draw(1)
    print(found)
    if options.save:
        found.best.save(options.save)
    if options.torch:
        to_torch(found.best.schedule, options.torch)
    if options.html:
        found.best.timeline().save(options.html)
    return 0
