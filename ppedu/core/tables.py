"""Tables as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap


def in_text(rows: Iterable[Sequence[str]], width: int) -> list[list[str]]:
    """Return the lines of each row. A cell that is wider than `width` is wrapped."""
    wrapped = [[wrap(cell, width, break_long_words=False, break_on_hyphens=False) for cell in row] for row in rows]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*wrapped, strict=True)]
    return [
        ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip_longest(*row, fillvalue="")]
        for row in wrapped
    ]


def in_html(rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return an HTML table whose first row is its head. The cells are HTML."""
    left = 'style="text-align: left"'  # Jupyter aligns cells to the right
    head, *body = rows

    def line(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag} {left}>{cell}</{tag}>' for cell in row)}</tr>"

    above = f"<caption>{caption}</caption>" if caption else ""
    lines = "".join(line("td", row) for row in body)
    return f"<table>{above}<thead>{line('th', head)}</thead><tbody>{lines}</tbody></table>"
