"""`%%torchrun -n 4`: the cell's source, run on 4 ranks as torchrun would run it."""

from __future__ import annotations

import argparse
import codecs
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.magic import Magics, cell_magic, magics_class

from ppedu.core.errors import PipelineError, SettingError
from ppedu.notebook.pool import RankPool


class CellError(PipelineError):
    """What went wrong with a `%%torchrun` cell. It is shown as it is, without the way it took through here."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"%%torchrun: {message}\n{self.format_usage().strip()}")


def _parser() -> _Parser:
    parser = _Parser(prog="%%torchrun", add_help=False)
    parser.add_argument("-n", "--nproc-per-node", type=int, default=1, metavar="RANKS", help="how many ranks")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="end them after so long")
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    return parser


class InOrder:
    """Shows whole lines, each with its rank, in the order of the ranks: rank k after all those below it."""

    def __init__(self, ranks: int, show: Callable[[str], None]):
        self._show = show
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(ranks)]
        self._texts = [""] * ranks
        self._ended = [False] * ranks
        self._turn = 0

    def write(self, rank: int, piece: bytes) -> None:
        """Take what `rank` has written; b"" when it will write no more."""
        self._texts[rank] += self._decoders[rank].decode(piece, final=not piece)
        self._ended[rank] = not piece
        self._flush()

    def close(self) -> None:
        """Show all that is left."""
        self._ended = [True] * len(self._ended)
        self._flush()

    def _flush(self) -> None:
        while self._turn < len(self._texts):
            rank = self._turn
            *lines, rest = self._texts[rank].split("\n")
            if self._ended[rank] and rest:
                lines, rest = [*lines, rest], ""
            self._texts[rank] = rest
            if lines:
                # Of a line that was written over and over, such as a progress bar, the last state.
                self._show("".join(f"[{rank}] {line.rstrip().rpartition(chr(13))[2]}\n" for line in lines))
            if not self._ended[rank]:
                break
            self._turn += 1


@magics_class
class TorchrunMagic(Magics):
    """The cell magic, and the pool of ranks that belongs to this kernel."""

    def __init__(self, shell: Any):
        super().__init__(shell)
        self.pool = RankPool()
        self.pool.start()

    @cell_magic
    def torchrun(self, line: str, cell: str) -> None:
        """Run the cell on several ranks: `%%torchrun -n 4 [--timeout 60]`.

        Each rank is a process of its own that runs the cell from the top, like a file that torchrun was
        given; nothing of the notebook is in it. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are
        set as torchrun sets them. What rank k prints is shown after `[k]`, in the order of the ranks.
        """
        try:
            options = _parser().parse_args(shlex.split(line))
            if options.help:
                print(_parser().format_help())
                return
            with tempfile.TemporaryDirectory(prefix="ppedu-") as folder:
                program = Path(folder, "cell.py")
                program.write_text(cell, encoding="utf-8")
                compile(cell, "cell", "exec")
                output = InOrder(max(1, options.nproc_per_node), lambda text: print(text, end="", flush=True))
                try:
                    self.pool.run(str(program), options.nproc_per_node, timeout=options.timeout, write=output.write)
                finally:
                    output.close()
        except SyntaxError as error:
            line = cell.splitlines()[(error.lineno or 1) - 1]
            marker = " " * ((error.offset or 1) - 1) + "^"
            raise CellError(f"line {error.lineno} of the cell: {error.msg}\n{line}\n{marker}") from None
        except KeyboardInterrupt as interrupt:
            raise CellError(f"interrupted\n{interrupt}".rstrip()) from None
        except (PipelineError, ValueError) as error:
            raise CellError(str(error)) from None


def load(ipython: Any) -> None:
    """Make `%%torchrun` known to IPython and start the pool, whose imports take a few seconds."""
    ipython.register_magics(TorchrunMagic)
