"""`ppedu train`: train a toy GPT on several ranks, on this machine, on others, or as a job of a scheduler."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ppedu.core import SettingError
from ppedu.core.validate import require_count


def train_on_ranks(arguments: Sequence[str]) -> int:
    """train a toy GPT on several ranks"""
    from ppedu.launch.hosts.place import Place
    from ppedu.launch.jobs import Job, divide, save
    from ppedu.launch.pool import RankPool

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell ignores interrupts in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # torch's import can swallow a KeyboardInterrupt
    try:
        from ppedu.course.training import train
    finally:
        signal.signal(signal.SIGINT, before)

    launcher = argparse.ArgumentParser(prog="ppedu train", add_help=False)
    launcher.add_argument("-n", "--nproc-per-node", type=int, metavar="N", default=1, help="ranks (default: 1)")
    text = "where: ssh:alpha,beta, or slurm: and options of salloc (default: this machine)"
    launcher.add_argument("--on", metavar="PLACE", default="local", help=text)
    launcher.add_argument("--python", metavar="PATH", help="with --on: Python on the hosts (default: the same path)")
    launcher.add_argument("--interface", metavar="NAME", help="with --on: the hosts' network interface for ranks")
    text = "do not train, but write this job: .sbatch for Slurm, .yaml for SkyPilot, .k8s.yaml for Kubernetes"
    launcher.add_argument("--job", metavar="FILE", help=text)
    text = "nodes of the job; 2:4 asks for 4 and goes on with 2, from the last checkpoint in --save (default: 1)"
    launcher.add_argument("--nodes", type=_nodes, metavar="N", help=text)
    known, settings = launcher.parse_known_args(arguments)
    parser = train.parser(prog="ppedu train", parents=[launcher])
    require_count("the number of ranks", known.nproc_per_node)
    # Validate before any rank starts, so that an error is reported once and in one line.
    config = train.prepare(parser.parse_args(arguments), known.nproc_per_node)
    place = Place.of(known.on, known.python, known.interface)
    if known.job is not None:
        if known.job.endswith(".py"):
            raise SettingError(
                "--job writes .sbatch, .yaml or .k8s.yaml; to train with torchrun, use --on or no option"
            )
        _require_in_job(known)
        least, nodes = known.nodes or (1, 1)
        if least < nodes and config.save is None:
            raise SettingError(f"--nodes {least}:{nodes} goes on from a checkpoint; add --save and a shared folder")
        ranks = divide(known.nproc_per_node, nodes)
        train.prepare(parser.parse_args(arguments), least * ranks)
        own = (place.options or ()) if place else ()
        save(Path(known.job), Job(["-m", "ppedu.course.training.train", *settings], ranks, nodes, least, options=own))
        print(f"{known.job} written")
        return 0
    if known.nodes is not None:
        raise SettingError("--nodes is for --job; add --job train.sbatch, or name the hosts: --on ssh:alpha,beta")
    train.require_saved(config)

    def write(_: int, piece: bytes) -> None:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    with closing(RankPool("zygote", known.on, known.python, known.interface)) as pool:
        pool.run("ppedu.course.training.train", known.nproc_per_node, settings, module=True, write=write)
    return 0


def _require_in_job(options: argparse.Namespace) -> None:
    """Raise SettingError if an option cannot be written into the job."""
    if options.python or options.interface or options.on.startswith("ssh:"):
        raise SettingError(
            "--job writes a file for a scheduler, which chooses the hosts; leave out --on ssh:…, --python and "
            "--interface"
        )
    if options.on != "local" and not options.job.endswith(".sbatch"):
        raise SettingError(f"--on {options.on!r} is for Slurm; leave it out, or end --job in .sbatch")


def _nodes(text: str) -> tuple[int, int]:
    """Return (2, 4) for "2:4", and (4, 4) for "4"."""
    least, _, most = text.partition(":")
    most = most or least
    if not (least.isdigit() and most.isdigit() and 0 < int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes; write 4, or 2:4")
    return int(least), int(most)
