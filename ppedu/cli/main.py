"""The commands of `python -m ppedu`, and the parser that reads them."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence

from ppedu.cli.lessons import FOLDER, open_lessons
from ppedu.cli.train import train_on_ranks
from ppedu.core.costs import Costs
from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.export import to_torch
from ppedu.core.files import named
from ppedu.core.lower import lower
from ppedu.core.numeric import pretty
from ppedu.core.schedule import Schedule, suggest_placement
from ppedu.core.simulate import simulate
from ppedu.zoo import schedule, schedules
from ppedu.zoo.options import number, option

Options = argparse.Namespace

RANKS, MICROBATCHES = 4, 8  # where the command line does not say
COSTS = {
    "forward": "time of a forward through a rank's share of the model (default: 1)",
    "backward": "of a backward (default: twice the forward)",
    "input": "of a backward for the input (default: half the backward)",
    "weight": "of a backward for the weights (default: what is left of the backward)",
    "overlap": "of an overlapped pair (default: the sum of its parts)",
    "latency": "from the end of an action to the start of one on another rank that needs it (default: 0)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["train"]:  # its options are those of a module that needs torch
            return train_on_ranks(arguments[1:])
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        print(end="", flush=True)  # while a closed pipe can still be met
        return code
    except PipelineError as error:
        print(f"ppedu: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, has had enough. At its end Python would try once more to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    every = argparse.ArgumentParser(
        prog="python -m ppedu",
        description="Learn, design and check pipeline parallelism.",
        epilog="Example: python -m ppedu draw interleaved -r 4 -m 8 -o chunks=3",
    )
    commands = every.add_subparsers(title="commands", metavar="COMMAND", required=True)

    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("schedule", metavar="SCHEDULE", help="a name that `list` shows, or a .csv file")
    which.add_argument("-r", "--ranks", type=int, metavar="N", help=f"ranks (default: {RANKS}, or those of the file)")
    which.add_argument(
        "-m", "--microbatches", type=int, metavar="N", help=f"microbatches (default: {MICROBATCHES}, or the file's)"
    )
    which.add_argument(
        "-o",
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the schedule, as `list` shows them: -o chunks=3; may be repeated",
    )
    which.add_argument("--placement", help="of a .csv file's stages: loop, v or bidirectional (default: loop)")

    costs = argparse.ArgumentParser(add_help=False)
    times = costs.add_argument_group("times", "whole numbers, decimals or fractions, such as 1/3; all are exact")
    for name, meaning in COSTS.items():
        times.add_argument(f"--{name}", type=number, metavar="TIME", help=meaning)

    def add(name: str, run: Callable[..., int], *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=run.__doc__, description=run.__doc__, parents=parents)
        made.set_defaults(run=run)
        return made

    add("list", _list)
    draw = add("draw", _draw, which, costs)
    draw.add_argument("--save", metavar="FILE", help="write a .svg, .png, .pdf, .html or .json (a trace) instead")
    add("check", _check, which)
    add("simulate", _simulate, which, costs)
    export = add("export", _export, which, costs)
    export.add_argument(
        "--lower", choices=["early", "late"], help="with sends and receives, the receives posted early or late"
    )
    export.add_argument("--torch", action="store_true", help="in the words that torch.distributed.pipelining knows")
    export.add_argument("--save", metavar="FILE", help="write a .csv or .json (a trace of the simulation) instead")
    lessons = add("lessons", open_lessons)
    lessons.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default=FOLDER,
        help=f"where to copy them; files of these names stay as they are (default: {FOLDER})",
    )
    lessons.add_argument("--no-open", action="store_true", help="copy them only")
    lessons.add_argument(
        "--lab", type=shlex.split, default=[], metavar="OPTIONS", help='for JupyterLab, such as --lab="--port=9999"'
    )
    add("doctor", _doctor)
    commands.add_parser("train", help=train_on_ranks.__doc__, add_help=False)
    return every


def _schedule(options: Options) -> Schedule:
    """The schedule that the command line names."""
    name, ranks, microbatches = options.schedule, options.ranks, options.microbatches
    if name.lower().endswith(".csv"):
        if ranks is not None or options.option:
            raise SettingError(f"{name!r} itself says what each rank does; leave out -r and -o")
        return Schedule.from_csv(name, options.placement or "loop", microbatches)
    if options.placement is not None:
        raise SettingError(f"{name!r} has a placement of its own; --placement is for .csv files")
    ranks = RANKS if ranks is None else ranks
    microbatches = MICROBATCHES if microbatches is None else microbatches
    return schedule(name, ranks, microbatches, **dict(options.option))


def _costs(options: Options) -> Costs:
    given = {name: getattr(options, name) for name in COSTS}
    return Costs(**{name: time for name, time in given.items() if time is not None})


def _list(_: Options) -> int:
    """list the published schedules"""
    print(schedules())
    return 0


def _draw(options: Options) -> int:
    """draw a schedule's timeline"""
    timeline = simulate(_schedule(options), _costs(options))
    if options.save is None:
        print(timeline.text(shutil.get_terminal_size((128, 24)).columns))
    else:
        timeline.save(options.save)
    return 0


def _check(options: Options) -> int:
    """list everything that makes a schedule illegal"""
    made = _schedule(options)
    if elsewhere := suggest_placement(made):
        print(elsewhere)
    else:
        print(*made.problems or ["legal"], sep="\n")
    return int(bool(made.problems))


def _simulate(options: Options) -> int:
    """compute a schedule's makespan, bubble and memory"""
    timeline = simulate(_schedule(options), _costs(options))
    print(f"{timeline.schedule.name}, {timeline.schedule.size}")
    print(f"makespan  {pretty(timeline.makespan)}")
    print(f"bubble    {timeline.bubble:.1%}")
    print(f"overhead  {timeline.overhead:.1%}")
    print(f"span      {pretty(timeline.span)}")
    print("\nrank      idle  peak activations")
    for rank, (idle, peak) in enumerate(zip(timeline.idle, timeline.peak_activations, strict=True)):
        print(f"{rank:4}{pretty(idle):>10}{pretty(peak):>18}")
    return 0


def _export(options: Options) -> int:
    """write a schedule as CSV, a line for each rank"""
    made = _schedule(options)
    made.validate()
    if options.lower is not None:
        made = lower(made, receive=options.lower)
    to_csv = to_torch if options.torch else Schedule.to_csv
    ending = None if options.save is None else named(options.save).suffix.lower()
    if ending is None:
        print(to_csv(made), end="")
    elif ending == ".csv":
        to_csv(made, options.save)
    elif ending == ".json":
        simulate(made, _costs(options)).save(options.save)
    else:
        raise SettingError(f"cannot export to {options.save!r}; end it in .csv or .json (draw --save makes pictures)")
    return 0


def _doctor(_: Options) -> int:
    """look whether this machine is ready for the lessons"""
    from ppedu.cli.checkup import doctor

    found = doctor()
    print(found)
    return int(not found.ok)
