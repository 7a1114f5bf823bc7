"""`python -m ppedu train …`: what the package can do from a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from ppedu.core.errors import PipelineError, require_count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ppedu", description="Learn, design and check pipeline parallelism."
    )
    parser.add_argument(
        "command",
        choices=COMMANDS,
        help="; ".join(f"{name}: {run.__doc__}" for name, run in COMMANDS.items()),
    )
    parser.add_argument("settings", nargs=argparse.REMAINDER, help="settings of the command; --help lists them")
    options = parser.parse_args(arguments)
    try:
        COMMANDS[options.command](options.settings)
    except PipelineError as error:
        print(f"ppedu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _train(arguments: Sequence[str]) -> None:
    """train a toy GPT on several ranks of this machine"""
    from ppedu.notebook.pool import RankPool
    from ppedu.run import train

    own = argparse.ArgumentParser(prog="python -m ppedu train", add_help=False)
    own.add_argument("-n", "--nproc-per-node", type=int, default=1, help="ranks, each with a stage (default: 1)")
    known, settings = own.parse_known_args(arguments)
    every = train.parser(prog="python -m ppedu train", parents=[own])
    require_count("the number of ranks", known.nproc_per_node)
    train.prepare(every.parse_args(arguments), known.nproc_per_node)  # what cannot work is said before anything starts

    def write(_: int, piece: bytes) -> None:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    pool = RankPool()
    try:
        pool.run("ppedu.run.train", known.nproc_per_node, settings, module=True, write=write)
    finally:
        pool.close()


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"train": _train}

if __name__ == "__main__":
    sys.exit(main())
