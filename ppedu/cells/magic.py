"""The magics: `%%torchrun -n 4` runs a cell on 4 ranks, as torchrun would run it; `%ranks` lists the processes."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import time
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from ppedu.cells.output import Output
from ppedu.cells.screen import Screen
from ppedu.core import PipelineError, SettingError
from ppedu.launch import exchange
from ppedu.launch.hang import named
from ppedu.launch.hosts.place import Place
from ppedu.launch.jobs import SAVED, Job, divide, save
from ppedu.launch.pool import LAUNCHERS, RankPool, local_pool
from ppedu.launch.resources import memory, require_run

MAX_CHARACTERS = 100_000  # shown of an error


class CellError(PipelineError):
    """The error of a `%%torchrun` cell, which Jupyter shows without a traceback through this package.

    The text is made valid Unicode, which Jupyter requires, and its middle is cut out if it is too long.
    """

    def __init__(self, text: str):
        text = text.encode("utf-8", "backslashreplace").decode()
        if left := max(0, len(text) - MAX_CHARACTERS):
            half = MAX_CHARACTERS // 2
            text = f"{text[:half]}\n… {left} characters omitted …\n{text[-half:]}"
        super().__init__(text)

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class _Parser(argparse.ArgumentParser):
    """A parser that raises SettingError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"%%torchrun: {message}\n%torchrun lists all options")


def _parser() -> _Parser:
    """Return the parser of the options of `%%torchrun`."""
    parser = _Parser(
        prog="%%torchrun",
        add_help=False,
        allow_abbrev=False,
        description="Run the cell on several ranks, each of them a separate process.",
        epilog="With --launcher torchrun, all other options of torchrun work, too, such as --nnodes.",
    )
    add = parser.add_argument
    add("-n", "--nproc-per-node", "--nproc_per_node", type=int, default=1, metavar="RANKS", help="number of ranks")
    add("--in", dest="inputs", metavar="A,B", help="variables of the notebook to pass to the ranks")
    add("--out", default="results", metavar="NAME", help="the variable for values given back (default: results)")
    text = "also save a script for torchrun (.py) or a job: .sbatch (Slurm), .yaml (SkyPilot), .k8s.yaml (Kubernetes)"
    add("--save", metavar="FILE", help=text)
    add("--nodes", type=int, metavar="N", help="with --save: the nodes of the job (default: the hosts of --on, or 1)")
    add("--live", action="store_true", help="show output as it arrives, not rank by rank")
    add("--timeout", type=float, default=60, metavar="SECONDS", help="kill the ranks after this time (default: 60)")
    add("--launcher", choices=["auto", *LAUNCHERS], default="auto", help="fork the ranks (zygote) or start torchrun")
    add("--on", metavar="PLACE", help="local (the default), ssh:alpha,beta or slurm:OPTIONS OF SALLOC")
    add("--python", metavar="PATH", help="with --on: Python on the other machines (default: the same path as here)")
    add("--interface", metavar="NAME", help="with --on: the network interface for ranks (default: that of ssh)")
    add("--standalone", action="store_true", help="accepted for compatibility; has no effect")
    add("-h", "--help", action="store_true", help="show this message")
    return parser


@magics_class
class TorchrunMagic(Magics):
    """The magics, and the rank pools of this kernel."""

    def __init__(self, shell: Any):
        super().__init__(shell)  # type: ignore[no-untyped-call]
        self._shell = shell
        self.pools: dict[tuple[str | None, ...], RankPool] = {}  # by the arguments of each
        self._on: list[str] = []  # the options of the last `%torchrun --on …`, which hold for the cells after it
        self._pool("zygote", "local", None, None).start()
        self._folder = exchange.new_folder()  # of the last run; it still exists if it holds output that was not shown

    @line_cell_magic  # type: ignore[untyped-decorator]  # IPython has few types
    def torchrun(self, line: str, cell: str | None = None) -> None:
        """Run the cell on several ranks: `%%torchrun -n 4`.

        Each rank is a separate process that runs the cell from the top, like a script under torchrun: RANK, WORLD_SIZE,
        MASTER_ADDR and the other variables are set. Of the notebook's variables, ranks see only those named in
        `--in a,b`. Lines that start with `[k]` are the output of rank k. `pp.give_back(value)` on rank k sets
        `results[k]` in the notebook; `plt.show()` shows a figure below the cell.

        `--on ssh:alpha,beta` divides the ranks among other machines; `%torchrun --on ssh:alpha,beta`, in a cell of its
        own, does so for all cells after it.

        `%torchrun` lists all options; `%ranks` lists the processes.
        """
        try:
            words = shlex.split(line)
            options, flags = _parser().parse_known_args(words)
            if options.on is None:  # run where the last `%torchrun --on …` said
                options, flags = _parser().parse_known_args([*self._on, *words])
            elif cell is None and not options.help:
                self._set_place(options)
                return
            if options.help or cell is None:
                print(_parser().format_help())
                return
            if flags and options.launcher != "torchrun":
                _parser().error(f"unrecognized arguments: {' '.join(flags)} (torchrun's need --launcher torchrun)")
            self._run(options, flags, line, cell)
        except SyntaxError as error:
            self._raise_syntax_error(error, cell or "")
        except KeyboardInterrupt as interrupt:
            raise CellError(f"interrupted\n{interrupt}".rstrip()) from None
        except (PipelineError, ValueError, OSError) as error:
            raise CellError(str(error)) from None

    @line_magic  # type: ignore[untyped-decorator]
    def ranks(self, line: str) -> None:
        """List the processes: `%ranks`. `%ranks stop` kills them; the next `%%torchrun` cell starts new ones."""
        if line.strip() == "stop":
            for pool in self.pools.values():
                pool.stop()
        elif line.strip():
            raise CellError(f"unknown command {line.strip()!r}; available: %ranks, %ranks stop")
        running = [(pool, *each) for pool in self.pools.values() for each in sorted(pool.processes.items())]
        for pool, rank, process in running:
            seconds = time.monotonic() - pool.started_at
            there = rank in pool.hosts
            took = "" if there else f", {_megabytes(process)}"
            print(f"{named(rank, pool.hosts)}: process {process}, running for {seconds:.0f} s{took}")
        if not running:
            print("no ranks are running")
        for pool in self.pools.values():
            if pool.server:
                name = f"of {pool.on}" if pool.place else pool.launcher
                print(f"launcher {name}: process {pool.server}, {_megabytes(pool.server)}")

    def _run(self, options: argparse.Namespace, flags: list[str], line: str, cell: str) -> None:
        """Run the cell. flags: options of torchrun itself. line: the text after `%%torchrun`."""
        pool = self._pool(
            options.launcher.replace("auto", "zygote"), options.on or "local", options.python, options.interface
        )
        ranks = options.nproc_per_node
        require_run(ranks, options.timeout, here=pool.place is None)
        exchange.require_name("--out", options.out)
        # A comment replaces the first line, which is not Python, so that the others keep their numbers. It declares the
        # encoding, so that Python ignores any declaration in the cell itself.
        program = f"# -*- coding: utf-8 -*- %%torchrun {line}\n{cell}"
        compile(program, "cell", "exec", dont_inherit=True)
        names = [] if options.inputs is None else exchange.input_names(options.inputs)
        values = exchange.pickled_inputs(names, self._shell.user_ns)
        if options.nodes is not None and options.save is None:
            raise SettingError("--nodes is for a job; add --save job.sbatch, or name hosts with --on")
        if options.save is not None:
            self._save(options, pool.place, cell, names, values)
        shutil.rmtree(self._folder, ignore_errors=True)
        folder = self._folder = exchange.new_folder()
        screen = Screen(self._shell)
        try:
            pool.make_folder(folder)
            file = folder / "cell.py"
            exchange.write_private(file, program.encode())
            exchange.write_private(folder / exchange.INPUTS, values)
            environment = {exchange.FOLDER: str(folder), "MPLBACKEND": "module://ppedu.cells.figures"}
            with contextlib.closing(Output(ranks, screen, folder, options.live)) as output:
                try:
                    pool.run(
                        file,
                        ranks,
                        timeout=options.timeout,
                        flags=flags,
                        folder=folder,
                        environment=environment,
                        write=output.write,
                        tick=lambda running, seconds: screen.waiting(running, seconds, options.timeout),
                    )
                except BaseException:
                    with contextlib.suppress(PipelineError):  # the error of the run is the one to show
                        self._set_results(options, folder)
                    raise
            self._set_results(options, folder)
        finally:
            screen.close()
            if not (folder / "output.txt").exists():
                shutil.rmtree(folder, ignore_errors=True)

    def _pool(self, *arguments: str | None) -> RankPool:
        """Return the pool with these arguments, the same one each time."""
        if arguments not in self.pools:
            local = arguments == ("zygote", "local", None, None)
            self.pools[arguments] = local_pool() if local else RankPool(*arguments)  # type: ignore[arg-type]
            self.pools[arguments].note = print
        return self.pools[arguments]

    def _set_place(self, options: argparse.Namespace) -> None:
        """Let the cells after this one run where `options` say, and start to connect to the hosts."""
        pool = self._pool("zygote", options.on, options.python, options.interface)
        pool.start()
        given = {"--on": options.on, "--python": options.python, "--interface": options.interface}
        self._on = []
        for name, value in given.items():
            if value is not None:
                self._on += [name, value]
        print(f"%%torchrun now runs cells on {options.on if pool.place else 'this machine'}")

    def _set_results(self, options: argparse.Namespace, folder: Path) -> None:
        """Set the notebook's variable `options.out` to the values given back, if a rank has given one back."""
        if (results := exchange.read_results(folder, options.nproc_per_node)) is not None:
            self._shell.user_ns[options.out] = results

    def _save(
        self, options: argparse.Namespace, place: Place | None, cell: str, names: list[str], values: bytes
    ) -> None:
        """Save the cell as a script or a job, and the pickled variables of `--in` in a file beside it."""
        path = Path(options.save)
        if not path.name:
            raise SettingError("--save needs the name of a file, such as lesson.py or job.sbatch")
        script = path if path.suffix == ".py" else path.with_name(f"{path.name.split('.')[0]}.py")
        files = {}
        if names:
            files[script.with_suffix(".inputs").name] = values
            cell = exchange.with_inputs(cell, names, script.with_suffix(".inputs").name)
        ranks, nodes = options.nproc_per_node, options.nodes
        if nodes is None:
            nodes = place.nodes if place else 1
        header = f"{SAVED}\n# torchrun --standalone --nproc-per-node {ranks} {script.name}\n\n"
        files[script.name] = (header + cell).encode()
        own = (place.options or ()) if place else ()
        save(path, Job([script.name], divide(ranks, nodes), nodes, files=files, options=own))

    def _raise_syntax_error(self, error: SyntaxError, cell: str) -> NoReturn:
        """Raise a CellError that shows the line of the cell and marks the position of the error."""
        lines = ["", *cell.splitlines()]
        number = error.lineno or 1
        source = lines[number - 1] if number <= len(lines) else ""
        marker = " " * ((error.offset or 1) - 1) + "^"
        raise CellError(f"line {number} of the cell: {error.msg}\n{source}\n{marker}") from None


def _megabytes(process: int | None) -> str:
    """Return the memory of a process as text."""
    own = memory(process)
    return f"{own >> 20} MB" if own is not None else "memory unknown"


def load(ipython: Any) -> None:
    """Register the magics with IPython and start the launcher, which takes a few seconds to import torch."""
    ipython.register_magics(TorchrunMagic)
