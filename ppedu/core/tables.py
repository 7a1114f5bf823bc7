"""Tables as text and as HTML, and how far something is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from ppedu.core.errors import SettingError
from ppedu.core.validate import shown

Progress = Callable[[str, float], None]  # of a task and the part of it that is done

LINE = 100  # characters that fit on a narrow page
HEAD = 10  # characters of a cell of the head, where lines are too long otherwise
BAR = 30  # characters
NUMBER = "+-0123456789"  # begin a cell of HTML that stays on one line, as names in the first column do


def in_text(rows: Iterable[Sequence[str]], width: int, most: int | None = None) -> list[list[str]]:
    """Return the lines of each row. A cell that is wider than `width` is wrapped.

    Args:
        most: The characters of a line, if its words allow that: the first row, the head, is wrapped further, then all
            rows.
    """
    rows = [*rows]
    # Widths of the rows and of the head; for 24: 24 and 24, 24 and 10, 23 and 10, … 9 and 9, …
    attempts = [(width, width), *((body, min(body, HEAD)) for body in range(width, 0, -1))]
    for body, head in attempts:
        lines = _wrapped(rows, body, head)
        if not most or max(len(line) for row in lines for line in row) <= most:
            break
    return lines


def _wrapped(rows: Sequence[Sequence[str]], width: int, head: int) -> list[list[str]]:
    """Return the lines of each row, with cells wrapped to `width`, those of the first row to `head`."""
    wrapped = []  # the lines of each cell
    for place, row in enumerate(rows):
        most = width if place else head
        wrapped.append([wrap(cell, most, break_long_words=False, break_on_hyphens=False) for cell in row])
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*wrapped, strict=True)]
    lines = []
    for cells in wrapped:
        side_by_side = zip_longest(*cells, fillvalue="")
        lines.append(["  ".join(map(str.ljust, line, widths)).rstrip() for line in side_by_side])
    return lines


def in_html(rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return an HTML table whose first row is its head. The cells are HTML.

    A table that is wider than the page scrolls, because a number or a name in two lines is hard to read.
    """
    head, *body = rows

    def line(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, content, column) for column, content in enumerate(row))}</tr>"

    def cell(tag: str, content: str, column: int) -> str:
        style = "text-align: left;"  # Jupyter aligns cells to the right
        if tag == "td" and (column == 0 or content[:1] in NUMBER):
            style += " white-space: nowrap;"
        return f'<{tag} style="{style}">{content}</{tag}>'

    above = f"<caption>{caption}</caption>" if caption else ""
    lines = "".join(line("td", row) for row in body)
    table = f"<table>{above}<thead>{line('th', head)}</thead><tbody>{lines}</tbody></table>"
    return f'<div style="overflow-x: auto;">{table}</div>'


def bar(doing: str) -> Callable[[float], None]:
    """Return a function that draws how large a part is done, as a bar on the standard error output."""

    def draw(part: float) -> None:
        done = round(BAR * part)
        end = "\r\033[K" if part >= 1 else ""
        print(f"\r{doing} [{'#' * done}{' ' * (BAR - done)}] {part:4.0%}{end}", end="", file=sys.stderr, flush=True)

    return draw


def reporter(progress: Any) -> Progress:
    """Return a function to call with what is being done and the part that is done: the given one; True draws a bar.

    Raises:
        SettingError: `progress` is neither a function, nor True, False or None.
    """
    if progress is True:
        draw = bar("searching")
        return lambda what, part: draw(part)
    if progress is None or progress is False:
        return lambda what, part: None
    if not callable(progress):
        raise SettingError(f"progress must be True or a function of a name and a number; got {shown(progress)}")
    return progress
