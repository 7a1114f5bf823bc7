"""`%%torchrun -n 4`: the cell's source, run on 4 ranks as torchrun would run it. `%ranks`: what runs."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import time
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.display import DisplayHandle, Image, display

from ppedu.core.errors import PipelineError, SettingError
from ppedu.notebook.exchange import (
    FOLDER,
    INPUTS,
    WATCHED,
    given_back,
    input_names,
    new_folder,
    packed_inputs,
    require_name,
    with_inputs,
    write_private,
)
from ppedu.notebook.live import LiveRun
from ppedu.notebook.output import Output
from ppedu.notebook.pool import LAUNCHERS, RankPool
from ppedu.notebook.resources import memory, require_run

MOST_CHARACTERS = 100_000  # of an error that are shown
SAVED = "# Saved from a notebook by ppedu."  # the first line of a saved script


class CellError(PipelineError):
    """What went wrong with a `%%torchrun` cell. It is shown as it is, without the way it took through here.

    Jupyter shows nothing of an error whose text is not valid Unicode, and all of one that is endless.
    """

    def __init__(self, text: str):
        text = text.encode("utf-8", "backslashreplace").decode()
        if left := max(0, len(text) - MOST_CHARACTERS):
            half = MOST_CHARACTERS // 2
            text = f"{text[:half]}\n… {left} characters are left out here …\n{text[-half:]}"
        super().__init__(text)

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"%%torchrun: {message}\n%torchrun lists all options")


def _parser() -> _Parser:
    parser = _Parser(
        prog="%%torchrun",
        add_help=False,
        allow_abbrev=False,
        description="Run the cell on several ranks, each a process of its own.",
        epilog="Other options are torchrun's own, such as --nnodes; they need --launcher torchrun.",
    )
    add = parser.add_argument
    add("-n", "--nproc-per-node", "--nproc_per_node", type=int, default=1, metavar="RANKS", help="how many ranks")
    add("--in", dest="inputs", metavar="A,B", help="variables of the notebook that the ranks get")
    add("--out", default="results", metavar="NAME", help="the variable for what ranks give back (default: results)")
    add("--save", metavar="FILE.py", help="write a script, too, that torchrun can run elsewhere")
    add("--live", action="store_true", help="show output as it comes, not rank after rank")
    add("--timeout", type=float, default=60, metavar="SECONDS", help="end the ranks after so long (default: 60)")
    add("--launcher", choices=["auto", *LAUNCHERS], default="auto", help="fork ranks (zygote, auto) or start torchrun")
    add("--standalone", action="store_true", help="as is usual for one machine; changes nothing")
    add("-h", "--help", action="store_true", help="show this")
    return parser


class _Screen:
    """A notebook's cell, or a terminal."""

    def __init__(self, shell: Any):
        self._terminal = type(shell).__name__ == "TerminalInteractiveShell"
        self._handle: DisplayHandle | None = None
        self._training: LiveRun | None = None

    def text(self, text: str) -> None:
        print(text, end="", flush=True)

    def bar(self, line: str, done: bool) -> None:
        if self._terminal:
            print(f"\r{line}", end="\n" if done else "", flush=True)
            return
        bundle = {"text/plain": line}
        if self._handle:
            self._handle.update(bundle, raw=True)
        else:
            self._handle = DisplayHandle()
            self._handle.display(bundle, raw=True)
        if done:
            self._handle = None

    def picture(self, file: Path) -> None:
        if file.exists():
            display(Image(data=file.read_bytes()))

    def live(self, folder: Path) -> None:
        if self._terminal or not all((folder / name).exists() for name in WATCHED):
            return
        if self._training is None:
            self._training = LiveRun(folder)
        else:
            self._training.update()

    def close(self) -> None:
        if self._training:
            self._training.close()


@magics_class
class TorchrunMagic(Magics):
    """The magics, and the pools of ranks that belong to this kernel."""

    def __init__(self, shell: Any):
        super().__init__(shell)
        self._shell = shell
        self.pools = {launcher: RankPool(launcher) for launcher in LAUNCHERS}
        self.pools["zygote"].start()
        self._folder: Path | None = None  # of the last run, if it holds something to be read later

    @line_cell_magic
    def torchrun(self, line: str, cell: str | None = None) -> None:
        """Run the cell on several ranks: `%%torchrun -n 4`.

        Each rank is a process of its own that runs the cell from the top, like a file that torchrun was given; nothing
        of the notebook is in it but what `--in a,b` names. RANK, WORLD_SIZE, MASTER_ADDR and the others are set as
        torchrun sets them. What rank k prints is shown after `[k]`, rank after rank. `pp.give_back(value)` on a rank
        makes it `results[k]` in the notebook; `plt.show()` shows a figure here.

        `%torchrun` lists all options; `%ranks` tells what runs.
        """
        try:
            options, flags = _parser().parse_known_args(shlex.split(line))
            if options.help or cell is None:
                print(_parser().format_help())
                return
            if flags and options.launcher != "torchrun":
                _parser().error(f"unrecognized arguments: {' '.join(flags)} (torchrun's own need --launcher torchrun)")
            self._run(options, flags, line, cell)
        except SyntaxError as error:
            self._refuse(error, cell or "")
        except KeyboardInterrupt as interrupt:
            raise CellError(f"interrupted\n{interrupt}".rstrip()) from None
        except (PipelineError, ValueError, OSError) as error:
            raise CellError(str(error)) from None

    @line_magic
    def ranks(self, line: str) -> None:
        """What runs: `%ranks`. `%ranks stop` ends it; the next `%%torchrun` cell starts afresh."""
        if line.strip() == "stop":
            for pool in self.pools.values():
                pool.stop()
        elif line.strip():
            raise CellError(f"%ranks: there is no {line.strip()!r}; there is: %ranks, %ranks stop")
        running = [(pool, *each) for pool in self.pools.values() for each in sorted(pool.processes.items())]
        for pool, rank, process in running:
            seconds = time.monotonic() - pool.started_at
            print(f"rank {rank}: process {process}, since {seconds:.0f} s, {_told(process)}")
        if not running:
            print("no rank runs")
        for pool in self.pools.values():
            if pool.server:
                print(f"{pool.launcher}, which starts them: process {pool.server}, {_told(pool.server)}")

    def _run(self, options: argparse.Namespace, flags: list[str], line: str, cell: str) -> None:
        ranks, pool = options.nproc_per_node, self.pools[options.launcher.replace("auto", "zygote")]
        require_run(ranks, options.timeout)
        require_name("--out", options.out)
        # The cell's lines keep their numbers: its first one, which is not Python, gives way to a comment. As it names
        # the encoding, Python does not look for one in the cell's own first line.
        program = f"# -*- coding: utf-8 -*- %%torchrun {line}\n{cell}"
        compile(program, "cell", "exec", dont_inherit=True)
        names = [] if options.inputs is None else input_names(options.inputs)
        values = packed_inputs(names, self._shell.user_ns)
        if options.save is not None:
            self._save(options, cell, names, values)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        folder, screen = new_folder(), _Screen(self._shell)
        self._folder = folder
        try:
            pool.make_folder(folder)
            file = folder / "cell.py"
            write_private(file, program.encode())
            write_private(folder / INPUTS, values)
            output = Output(ranks, screen, folder, options.live)
            environment = {FOLDER: str(folder), "MPLBACKEND": "module://ppedu.notebook.figures"}
            try:
                pool.run(
                    str(file),
                    ranks,
                    timeout=options.timeout,
                    flags=flags,
                    folder=folder,
                    environment=environment,
                    write=output.write,
                )
            except BaseException:
                output.close()
                with contextlib.suppress(PipelineError):  # this error comes first
                    self._take_back(options, folder)
                raise
            output.close()
            self._take_back(options, folder)
        finally:
            screen.close()
            if not (folder / "output.txt").exists():
                shutil.rmtree(folder, ignore_errors=True)
                self._folder = None

    def _take_back(self, options: argparse.Namespace, folder: Path) -> None:
        if (results := given_back(folder, options.nproc_per_node)) is not None:
            self._shell.user_ns[options.out] = results

    def _save(self, options: argparse.Namespace, cell: str, names: list[str], values: bytes) -> None:
        """Write a script that runs without this package's magics, and beside it the values of the notebook."""
        script = Path(options.save)
        if script.suffix != ".py":
            raise SettingError(f"--save wants a name that ends in .py; got {options.save!r}")
        if script.exists() and not script.read_bytes().startswith(SAVED.encode()):
            raise SettingError(f"{script} is there already and was not saved from a notebook; choose another name")
        if names:
            beside = script.with_suffix(".inputs")
            write_private(beside, values)
            cell = with_inputs(cell, names, beside.name)
        header = f"{SAVED}\n# torchrun --standalone --nproc-per-node {options.nproc_per_node} {script.name}\n\n"
        script.write_text(header + cell, encoding="utf-8")

    def _refuse(self, error: SyntaxError, cell: str) -> NoReturn:
        lines = ["", *cell.splitlines()]
        number = error.lineno or 1
        source = lines[number - 1] if number <= len(lines) else ""
        marker = " " * ((error.offset or 1) - 1) + "^"
        raise CellError(f"line {number} of the cell: {error.msg}\n{source}\n{marker}") from None


def _told(process: int | None) -> str:
    own = memory(process)
    return f"{own >> 20} MB" if own is not None else "memory unknown"


def load(ipython: Any) -> None:
    """Make `%%torchrun` known to IPython and start the pool, whose imports take a few seconds."""
    ipython.register_magics(TorchrunMagic)
