"""`python -m ppedu autopsy`: why the steps of a measured run take as long as they do."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable

from ppedu.core.errors import PipelineError

BAR = 30  # characters


def autopsy(options: Namespace) -> int:
    """read the trace of a real run: what is its bubble, why, and what would be faster"""
    from ppedu.trace.run import Run

    run = Run.load(options.trace, bar("reading") if sys.stderr.isatty() else None)
    found = run.autopsy()
    print(found)
    for name in options.predict:
        try:
            print(f"\n{run.predict(name)}")
        except PipelineError as error:
            print(f"\n{name}: {error}")
    if options.html:
        found.save(options.html)
    return 0


def bar(doing: str) -> Callable[[float], None]:
    """Return a function that draws a progress bar."""

    def draw(part: float) -> None:
        done = round(BAR * part)
        end = "\r\033[K" if part >= 1 else ""
        print(f"\r{doing} [{'#' * done}{' ' * (BAR - done)}] {part:4.0%}{end}", end="", file=sys.stderr, flush=True)

    return draw
