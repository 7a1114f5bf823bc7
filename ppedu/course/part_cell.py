"""The magic `%%my_pipeline 02.3`: a cell with a part of the learner's own file, `my_pipeline.py`."""

from __future__ import annotations

from difflib import unified_diff
from html import escape
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class

from ppedu.cells.magic import CellError
from ppedu.core import PipelineError, SettingError
from ppedu.core.files import replace_bytes
from ppedu.course.board.results import KEEPER
from ppedu.course.exercises import judge
from ppedu.course.exercises.feedback import has_page, publish, say, show
from ppedu.course.exercises.parts import FILE, filled, gap, join, own, part_of, with_part


def run_part(line: str, cell: str | None = None) -> None:
    """Check the part in a cell and, if it is right, put it into the file; with `--solution`, show the course's version.

    A wrong part stays in the cell. A file without that part gets the course's version, so that the rest of the lesson
    runs. A cell with `...` in it stands for the learner's part in the file, if there is one: perhaps from an editor.

    Raises:
        SettingError: the line is not the number of an exercise that adds a part, with a cell or with `--solution`; the
            file cannot be read or written.
    """
    number, *options = line.split() or [""]
    part = part_of(number)
    if cell is None and options == ["--solution"]:
        solution = part.text.strip()
        say(f"Solution {number}, a part of {FILE}:", "right")
        if has_page():
            publish({"text/markdown": f"```python\n{solution}\n```", "text/plain": solution})
        else:
            print(solution)
        return
    if cell is None or options:
        raise SettingError(f"write %%my_pipeline {number} above your part; %my_pipeline {number} --solution shows ours")
    parts = own()
    before = next((each for each in parts if each.title == part.title and not each.given), None)
    if before and before.number >= number and gap(cell):
        text = FILE.read_text(encoding="utf-8")
        lines_before = text.count("\n", 0, text.index(before.text))
        judge(number, "\n" * (lines_before - 1) + before.text)
        print(f"(Checked is the part in {FILE}, because the cell still has ... in it.)")
        return
    right = judge(number, cell)
    parts = filled(parts, number)
    if right and before and before.number > number:
        print(f"({FILE} keeps your part of exercise {before.number}, which has taken the place of this one.)")
    elif right:
        parts = with_part(parts, part._replace(text=cell))
        if before and before.text.strip() != cell.strip():
            _show_difference(before.text.strip(), cell.strip())
    elif not before:
        print(f"({FILE} has the course's version until yours is right.)")
    try:
        replace_bytes(FILE, join(parts).encode())
    except OSError as error:
        raise SettingError(f"{FILE} cannot be written: {error.strerror}") from None


def _show_difference(before: str, after: str) -> None:
    """Show the lines that the file has lost and won."""
    title = f"{FILE} had another version of this part. Replaced:"
    lines = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]
    text = "\n".join(lines)
    show(f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>", f"{title}\n{text}")


@magics_class
class PartMagic(Magics):
    """The magic of the learner's own pipeline."""

    @line_cell_magic  # type: ignore[untyped-decorator]  # IPython has few types
    def my_pipeline(self, line: str, cell: str | None = None) -> None:
        """Check a part of your own pipeline on real ranks, and put it into `my_pipeline.py`: `%%my_pipeline 02.3`.

        `%my_pipeline 02.3 --solution` shows the course's version.
        """
        try:
            run_part(line, cell)
        except KeyboardInterrupt as interrupt:
            raise CellError(f"interrupted\n{interrupt}".rstrip()) from None
        except PipelineError as error:
            raise CellError(str(error)) from None


def load(ipython: Any) -> None:
    """Register the magic with IPython, and record results on the puzzle's levels in the progress file from now on."""
    KEEPER.in_file = True
    ipython.register_magics(PartMagic)
