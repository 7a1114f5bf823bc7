"""`python -m ppedu train`: train a toy GPT on several ranks of this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing

from ppedu.core.validate import require_count


def train_on_ranks(arguments: Sequence[str]) -> int:
    """train a toy GPT on several ranks of this machine"""
    from ppedu.notebook.pool import RankPool

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell ignores interrupts in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # torch's import can swallow a KeyboardInterrupt
    try:
        from ppedu.run import train
    finally:
        signal.signal(signal.SIGINT, before)

    launcher = argparse.ArgumentParser(prog="python -m ppedu train", add_help=False)
    launcher.add_argument("-n", "--nproc-per-node", type=int, metavar="N", default=1, help="ranks (default: 1)")
    known, settings = launcher.parse_known_args(arguments)
    parser = train.parser(prog="python -m ppedu train", parents=[launcher])
    require_count("the number of ranks", known.nproc_per_node)
    # Validate before any rank starts, so that an error is reported once and in one line.
    train.require_saved(train.prepare(parser.parse_args(arguments), known.nproc_per_node))

    def write(_: int, piece: bytes) -> None:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    with closing(RankPool()) as pool:
        pool.run("ppedu.run.train", known.nproc_per_node, settings, module=True, write=write)
    return 0
