"""`ppedu autopsy`: why the steps of a measured run take as long as they do."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable

from ppedu.core import PipelineError
from ppedu.zoo.registry import require_registered

BAR = 30  # characters


def autopsy(options: Namespace) -> int:
    """read the trace of a real run: what is its bubble, why, and what would be faster"""
    from ppedu.trace.run import Run

    for name in options.predict:
        require_registered(name)
    run = Run.load(options.trace, bar("reading") if sys.stderr.isatty() else None, dict(options.name))
    print(run.autopsy())
    for name in options.predict:
        try:
            print(f"\n{run.predict(name)}")
        except PipelineError as error:
            print(f"\n{name}: {error}")
    return 0


def renamed(text: str) -> tuple[str, str]:
    """Return ("forward_step", "F") for "forward_step=F"; raise ArgumentTypeError for other texts."""
    name, sign, action = text.rpartition("=")
    if not (name and sign and action):
        raise ArgumentTypeError(f"{text!r} is not a name and an action, such as forward_step=F")
    return name, action


def bar(doing: str) -> Callable[[float], None]:
    """Return a function that draws a progress bar."""

    def draw(part: float) -> None:
        done = round(BAR * part)
        end = "\r\033[K" if part >= 1 else ""
        print(f"\r{doing} [{'#' * done}{' ' * (BAR - done)}] {part:4.0%}{end}", end="", file=sys.stderr, flush=True)

    return draw
