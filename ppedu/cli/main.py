"""The commands of `ppedu`, and the parser that reads them."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ppedu.cli.assignment import FOLDER as HOMEWORK
from ppedu.cli.assignment import assignment
from ppedu.cli.autopsy import autopsy, renamed
from ppedu.cli.grade import LIMIT, REPORTS, grade, leaderboard
from ppedu.cli.lessons import FOLDER, open_lessons
from ppedu.cli.plan import plan
from ppedu.cli.train import train_on_ranks
from ppedu.cli.verify import peaks, report
from ppedu.core import PipelineError, Schedule, SettingError, lower, suggest_placement
from ppedu.core.checking import TRANSPORTS
from ppedu.core.export import to_torch
from ppedu.core.files import named
from ppedu.core.numeric import pretty
from ppedu.sim import Costs, simulate
from ppedu.zoo import schedule, schedules
from ppedu.zoo.options import number, option

Options = argparse.Namespace

RANKS, MICROBATCHES = 4, 8  # the defaults
COSTS = {
    "forward": "time of F, the forward through a rank's share of the model (default: 1)",
    "backward": "time of B, the full backward (default: twice the forward)",
    "input": "time of I, the backward for the input (default: half the backward)",
    "weight": "time of W, the backward for the weights (default: the backward minus I)",
    "overlap": "time of an overlapped pair (default: the sum of its parts)",
    "latency": "time of a message from one rank to another (default: 0)",
    "transfer": "time for which a message occupies its link, on top of the latency (default: 0)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: the words after `ppedu`, by default those of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            if arguments[:1] == ["train"]:  # its parser is in a module that needs torch
                return train_on_ranks(arguments[1:])
            options = _parser().parse_args(arguments)
            return options.run(options)
        finally:  # also after --help, which exits
            print(end="", flush=True)  # raises BrokenPipeError here, if at all
    except PipelineError as error:
        print(f"ppedu: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python flushes stdout again when it exits: redirect it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppedu",
        description="Learn, design and check pipeline parallelism.",
        epilog="Example: ppedu draw interleaved -r 4 -m 8 -o chunks=3",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    of_schedule = argparse.ArgumentParser(add_help=False)
    of_schedule.add_argument("schedule", metavar="SCHEDULE", help="a name printed by `list`, or a .csv or .txt file")
    of_schedule.add_argument("-r", "--ranks", type=int, metavar="N", help=f"ranks (default: {RANKS}, or the file's)")
    of_schedule.add_argument(
        "-m", "--microbatches", type=int, metavar="N", help=f"microbatches (default: {MICROBATCHES}, or the file's)"
    )
    text = "an option of the schedule, such as -o chunks=3; `list` prints them; may be repeated"
    of_schedule.add_argument(
        "-o", "--option", type=option, action="append", default=[], metavar="NAME=VALUE", help=text
    )
    of_schedule.add_argument(
        "--placement", help="placement of a file: loop, v or bidirectional (default: loop; that which fits a .txt file)"
    )

    of_schedule.add_argument(
        "--forward-only", action="store_true", help="forwards alone, for inference; a .csv file must have no others"
    )

    costs = argparse.ArgumentParser(add_help=False)
    times = costs.add_argument_group("times", "whole numbers, decimals or fractions such as 1/3, all computed exactly")
    for name, meaning in COSTS.items():
        times.add_argument(f"--{name}", type=number, metavar="TIME", default=argparse.SUPPRESS, help=meaning)

    def add(
        name: str, run: Callable[..., int], *parents: argparse.ArgumentParser, among: Any = commands
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = among.add_parser(
            name, help=run.__doc__, description=run.__doc__, parents=parents
        )
        command.set_defaults(run=run)
        return command

    add("list", _list)
    draw = add("draw", _draw, of_schedule, costs)
    draw.add_argument("--save", metavar="FILE", help="write a .svg, .png, .pdf, .tex, .html or .json (trace) file")
    add("check", _check, of_schedule)
    verified = add("verify", _verify, of_schedule)
    text = "what messages wait for (default: buffered)"
    verified.add_argument("--transport", choices=TRANSPORTS, default="buffered", help=text)
    text = "each stage has N buffers, and keeps microbatch m in buffer m %% N (default: no limit)"
    verified.add_argument("--buffers", metavar="N", type=int, help=text)
    text = "the most activations that a rank may hold: a number, or one for each rank, such as 4,3,2,1"
    verified.add_argument("--peak", metavar="NUMBER", type=peaks, help=text)
    text = "an earlier version, a .csv file, than which this one may not need more memory or time"
    verified.add_argument("--baseline", metavar="FILE", help=text)
    add("simulate", _simulate, of_schedule, costs)
    export = add("export", _export, of_schedule, costs)
    export.add_argument("--lower", choices=["early", "late"], help="add sends, and receives posted early or late")
    export.add_argument(
        "--torch", action="store_true", help="use only the actions that torch.distributed.pipelining can load"
    )
    export.add_argument("--save", metavar="FILE", help="write a .csv or .json (trace of the simulation) file instead")
    lessons = add("lessons", open_lessons)
    text = f"where to copy them; existing files are kept (default: {FOLDER})"
    lessons.add_argument("folder", metavar="FOLDER", nargs="?", default=FOLDER, help=text)
    lessons.add_argument("--no-open", action="store_true", help="only copy them")
    text = 'options for JupyterLab, such as --lab="--port=9999"'
    lessons.add_argument("--lab", type=shlex.split, default=[], metavar="OPTIONS", help=text)
    hand_out = add("assignment", assignment)
    text = "numbers of lessons, such as 05; all; or tiny, an interpreter of schedules to complete"
    hand_out.add_argument("lesson", metavar="LESSON", nargs="+", help=text)
    hand_out.add_argument("--out", metavar="FOLDER", default=HOMEWORK, help=f"where to write (default: {HOMEWORK})")
    hand_out.add_argument("--otter", action="store_true", help="also write tests/, for otter-grader")
    hand_in = add("grade", grade)
    hand_in.add_argument("notebook", metavar="NOTEBOOK", nargs="+", help="learners' notebooks")
    hand_in.add_argument("--out", metavar="FOLDER", default=REPORTS, help=f"of the reports (default: {REPORTS})")
    text = f"for each exercise (default: {LIMIT})"
    hand_in.add_argument("--limit", metavar="SECONDS", type=float, default=LIMIT, help=text)
    ranking = add("leaderboard", leaderboard)
    text = f"the folder of the reports (default: {REPORTS})"
    ranking.add_argument("folder", metavar="FOLDER", nargs="?", default=REPORTS, help=text)
    ranking.add_argument("--save", metavar="FILE", help="also write a .csv file")
    read = add("autopsy", autopsy)
    text = "the files of torch.profiler, one a rank, or their folder; a CSV table of operations; or a trace of ppedu"
    read.add_argument("trace", metavar="TRACE", nargs="+", help=text)
    text = (
        "ranges whose name matches NAME, a regular expression, are this action, such as forward_step=F; may be repeated"
    )
    read.add_argument("--name", metavar="NAME=ACTION", type=renamed, action="append", default=[], help=text)
    text = "also predict a step with this schedule, such as zb-h1; may be repeated"
    read.add_argument("--predict", metavar="SCHEDULE", action="append", default=[], help=text)
    read.add_argument("--html", metavar="FILE", help="also write a page to send to a colleague")
    ask = add("plan", plan)
    text = "a TOML file with the tables model, machine and plan: the arguments of ppedu.plan"
    ask.add_argument("question", metavar="FILE", help=text)
    ask.add_argument("--save", metavar="FILE", help="also write the best schedule and partition for `train --plan`")
    ask.add_argument("--torch", metavar="FILE", help="also write the best schedule as CSV for torch")
    ask.add_argument("--html", metavar="FILE", help="also write its timeline as a page")
    add("doctor", _doctor)
    text = "write a certificate of the solved exercises, or check one"
    certificates = commands.add_parser("certificate", help=text, description=text)
    commands_of_it = certificates.add_subparsers(title="commands", metavar="COMMAND", required=True)
    written = add("write", _write_certificate, among=commands_of_it)
    written.add_argument("name", metavar="NAME", help="the learner's name")
    text = "a .json file; a picture goes next to it (default: certificate.json)"
    written.add_argument("--save", metavar="FILE", default="certificate.json", help=text)
    checked = add("check", _check_certificate, among=commands_of_it)
    checked.add_argument("file", metavar="FILE", help="a certificate, which contains programs that will be run")
    checked.add_argument("--seconds", type=float, default=60, help="time limit for an answer (default: 60)")
    commands.add_parser("train", help=train_on_ranks.__doc__, add_help=False)
    return parser


def _schedule(options: Options) -> Schedule:
    """Return the schedule that the command line names."""
    name, ranks, microbatches = options.schedule, options.ranks, options.microbatches
    if name.lower().endswith((".csv", ".txt")):
        if ranks is not None or options.option:
            raise SettingError(f"the ranks and options of {name!r} are those of the file; leave out -r and -o")
        if name.lower().endswith(".csv"):
            return Schedule.from_csv(name, options.placement or "loop", microbatches, forward_only=options.forward_only)
        where = named(name)
        return Schedule.read(where, options.placement, microbatches, where.stem, options.forward_only)
    if options.placement is not None:
        raise SettingError(f"the placement of {name!r} is fixed; leave out --placement, which is for files")
    ranks = RANKS if ranks is None else ranks
    microbatches = MICROBATCHES if microbatches is None else microbatches
    made = schedule(name, ranks, microbatches, **dict(options.option))
    return made.forwards if options.forward_only else made


def _costs(options: Options) -> Costs:
    return Costs(**{name: time for name, time in vars(options).items() if name in COSTS})


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
    """report everything that makes a schedule illegal"""
    chosen = _schedule(options)
    if suggestion := suggest_placement(chosen):
        print(suggestion)
    else:
        print(*chosen.problems or ["legal"], sep="\n")
    return int(bool(chosen.problems))


def _verify(options: Options) -> int:
    """for continuous integration: is a schedule legal for its transport, and no worse than before?"""
    return report(_schedule(options), options)


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
    """write a schedule as CSV, one line for each rank"""
    chosen = _schedule(options)
    chosen.validate()
    if options.lower is not None:
        chosen = lower(chosen, receive=options.lower)
    to_csv = to_torch if options.torch else Schedule.to_csv
    ending = None if options.save is None else named(options.save).suffix.lower()
    if ending == ".json" and options.torch:
        raise SettingError("--torch is about a CSV table, not about a trace; leave it out, or end --save in .csv")
    if ending != ".json" and (given := [name for name in COSTS if name in options]):
        raise SettingError(f"a CSV table has no times; leave out --{given[0]}, or end --save in .json")
    if ending is None:
        print(to_csv(chosen), end="")
    elif ending == ".csv":
        to_csv(chosen, options.save)
    elif ending == ".json":
        simulate(chosen, _costs(options)).save(options.save)
    else:
        raise SettingError(f"cannot export to {options.save!r}; end it in .csv or .json, or use draw for a picture")
    return 0


def _doctor(_: Options) -> int:
    """check whether this machine can run the lessons"""
    from ppedu.cli.checkup import doctor

    print("Imports torch and starts two ranks: some seconds, or half a minute if Python compiles torch.", flush=True)
    report = doctor()
    print(report)
    return int(not report.ok)


def _write_certificate(options: Options) -> int:
    """write a certificate of the exercises that are solved in this folder"""
    from ppedu.course.certificates import certificate

    certificate(options.name, options.save)
    return 0


def _check_certificate(options: Options) -> int:
    """run the answers in a certificate again, and print what holds"""
    from ppedu.course.certificates import check_certificate

    wrong = False
    for line in check_certificate(options.file, options.seconds):
        print(line, flush=True)
        wrong |= line.holds is False
    return int(wrong)
