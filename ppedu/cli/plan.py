"""`ppedu plan`: which schedule, partition and number of microbatches for a model on machines."""

from __future__ import annotations

import sys
from argparse import Namespace

from ppedu.cli.autopsy import require_page
from ppedu.core import SettingError
from ppedu.core.export import to_torch
from ppedu.core.files import named, require_writable


def plan(options: Namespace) -> int:
    """find the schedule and the partition that make a model's step fastest"""
    from ppedu.planning.planner import plan
    from ppedu.planning.question import read

    files = [named(each) for each in (options.save, options.torch, options.html) if each is not None]
    for each in files:
        require_writable(each)
    if len(set(files)) < len(files):
        raise SettingError("--save, --torch and --html write different things; give each a file of its own")
    require_page(options.html)
    question = read(options.question)
    found = plan(**question, progress=sys.stderr.isatty())
    print(found)
    if options.save:
        found.best.save(options.save)
    if options.torch:
        to_torch(found.best.schedule, options.torch)
    if options.html:
        found.best.timeline().save(options.html)
    return 0
