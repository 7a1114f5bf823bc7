"""Timelines as LaTeX: a TikZ picture for a paper, in which times are coordinates."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from math import ceil, floor, log10

from ppedu.core import Op
from ppedu.view.label import label
from ppedu.view.look import BARE_LANES, BARE_ROW, MARK, PALE, ends_of, ink_on, shade
from ppedu.view.model import Panel, Stack

WIDE = 98  # millimeters, of the time axis; with the names of ranks and of the axis, it fits LaTeX's article
TALL, TALLEST = 7, 200  # millimeters, of a rank's row, and of all rows of a timeline
LETTER, POINT = 1.45, 0.35  # millimeters, of a letter in \footnotesize, and of a point
MANY = 12_000  # boxes; of more, pdfLaTeX, which holds a whole picture in memory, has not enough
SIZES = {"number": 7, "small": 5}  # points, of microbatches in boxes; one that fits in neither size is left out

Fill = tuple[float, float, float]
Colors = dict[tuple[Op, Fill], str]

HEAD = r"""% In a paper with \usepackage{tikz}, \input this file where the picture should be. It also compiles alone.
\ifdefined\tikzpicture\else
\documentclass[tikz, border=2pt]{standalone}
\def\ppeduend{\end{document}}
\begin{document}
\fi"""
FOOT = r"""\csname ppeduend\endcsname % ends the document where this file is compiled alone"""
STYLES = rf"""
  box/.style={{draw=white, line width=.4pt}},
  number/.style={{midway, font=\sffamily\fontsize{{{SIZES["number"]}}}{{{SIZES["number"]}}}\selectfont}},
  small/.style={{midway, font=\sffamily\fontsize{{{SIZES["small"]}}}{{{SIZES["small"]}}}\selectfont}},
  second/.style={{draw=black, line width=.6pt}},
  differs/.style={{draw=mark, line width=1.2pt}},
  key/.style={{anchor=west, minimum width=2.5mm, minimum height=2mm}},
  words/.style={{anchor=west, text height=1.5ex, text depth=.25ex}}]"""

_SPECIAL = {each: f"\\{each}" for each in "#$%&_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': "''",
    "’": "'",
    "–": "--",
    "…": r"\dots{}",
    **{each: f"${each}$" for each in "<>|"},
    **dict.fromkeys("µμ", r"$\mu$"),
    "×": r"$\times$",
}
_ACCENTS = dict(zip("\u0300\u0301\u0302\u0303\u0308\u030a\u030c\u0327", "`'^~\"rvc", strict=True))


def tikz(stack: Stack) -> str:
    """Return a file with the panels of a stack under each other, without their memory.

    It needs pdfLaTeX, TikZ and, to compile alone, the class standalone. Colors and styles stay within the picture.
    """
    factor, unit = stack.readable
    end = stack.end * factor or 1
    shrunk = 10.0 ** min(0, 3 - floor(log10(end))) if end >= 1 else 10.0 ** -floor(log10(end))  # TeX ends at 16,383
    scale, wide = factor * shrunk, WIDE / (end * shrunk)
    tall = min(TALL, TALLEST / max(panel.timeline.schedule.ranks for panel in stack.panels))
    lines = [f"% {_one_line(panel.heading)}: {_one_line(', '.join(_numbers(panel)))}" for panel in stack.panels]
    scaled = "" if shrunk == 1 else f", multiplied by {shrunk:g}"
    lines.append(f"% x coordinates are times{scaled}, y coordinates ranks. Change x= and y= for another size.")
    if sum(len(panel.boxes) for panel in stack.panels) > MANY:
        lines.append("% pdfLaTeX has not enough memory for all these boxes; compile with lualatex.")
    lines.append(HEAD)
    lines.append(rf"\begin{{tikzpicture}}[x={wide:.5f}mm, y=-{tall:.5g}mm, font=\sffamily\footnotesize, inner sep=0pt,")
    colors = _colors(stack)
    lines += [f"  {key}/.style={{box, fill={key}, text={_ink(fill)}}}," for (_, fill), key in colors.items()]
    lines.append(STYLES[1:])
    lines += [rf"\definecolor{{{key}}}{{HTML}}{{{_hex(fill)}}}" for (_, fill), key in colors.items()]
    lines.append(rf"\definecolor{{mark}}{{HTML}}{{{MARK[1:].upper()}}}")
    down = 0.0
    for panel in stack.panels:
        ranks = panel.timeline.schedule.ranks
        lines.append(rf"\begin{{scope}}[yshift={0 - down:g}mm]")
        if len(stack.panels) > 1:
            words = f"{_escaped(label(panel.heading))}: {_escaped(label(', '.join(_numbers(panel))))}"
            lines.append(rf"\node[anchor=south west] at (0,0) {{\strut {words}}};")
        lines += _ranks(ranks, tall)
        lines += _boxes(panel, colors, stack.lanes, scale, wide, tall)
        lines += _axis(ranks, end, shrunk, f"time, {unit}" if unit else "time")
        lines.append(r"\end{scope}")
        down += tall * ranks + 12
    lines += _legend(stack, list(colors.values()), 9 - down)
    return "\n".join([*lines, r"\end{tikzpicture}", FOOT, ""])


def _colors(stack: Stack) -> Colors:
    """Return a name for each fill: those in the legend come first, and then those that only outlines have."""
    found = {op: dict.fromkeys(fills) for op, fills in stack.fills.items()}  # dicts as sets that keep their order
    for outline in (Panel(panel.outline) for panel in stack.panels if panel.outline):
        chunks = outline.timeline.schedule.chunks
        for box in outline.boxes:
            found.setdefault(box.op, {})[shade(box.op, box.microbatch, box.chunk, chunks)] = None
    return {(op, fill): f"{op}{k}" for op, fills in found.items() for k, fill in enumerate(fills)}


def _ranks(ranks: int, tall: float) -> Iterator[str]:
    """Yield the names of ranks; of very many, every second, third, …"""
    for rank in range(0, ranks, ceil(2.8 / tall)):
        yield rf"\node[anchor=east] at ([xshift=-1mm]0,{rank}.5) {{rank {rank}}};"


def _boxes(panel: Panel, colors: Colors, lanes: bool, scale: float, wide: float, tall: float) -> Iterator[str]:
    """Yield a path for each box of a panel, and for each of its outline.

    Args:
        lanes: Whether the outline has a lane of its own.
        scale: What makes a time a coordinate.
        wide, tall: The millimeters of a coordinate of 1.
    """
    outline = Panel(panel.outline) if panel.outline else None
    upper, lower = BARE_LANES if outline and lanes else (BARE_ROW, {**BARE_ROW, "bottom": BARE_ROW["lane"] - 0.04})
    if outline and not lanes:
        upper = {**upper, "top": upper["lane"]}
    for drawn, row in ((panel, upper), (outline, lower)):
        if drawn is None:
            continue
        chunks = drawn.timeline.schedule.chunks
        letters = len(
            str(drawn.timeline.schedule.microbatches - 1)
        )  # of boxes with one width, all have numbers or none
        ranks, copies = drawn.timeline.schedule.ranks, bool(drawn.timeline.schedule.offloaded)
        for box in sorted(drawn.boxes, key=lambda box: (box.mark, box.copy)):  # edges lie over their neighbors
            style = colors[box.op, shade(box.op, box.microbatch, box.chunk, chunks)]
            if drawn is outline:
                fill = f"{style}!{100 - 100 * PALE:g}, text=black" if lanes else "none"
                style += f", draw={style}, fill={fill}"
            style += ", second" * box.copy + ", differs" * box.mark
            top, bottom = ends_of(row["top"], row["bottom"], box.part, box.rank >= ranks, copies)
            left, right = (_number(time * scale) for time in (box.start, box.end))
            size = _size((box.end - box.start) * scale * wide, (bottom - top) * tall, letters)
            node = f" node[{size}] {{{box.microbatch}}}" if size else ""
            corners = (
                f"({left},{_number(box.rank % ranks + top)}) rectangle ({right},{_number(box.rank % ranks + bottom)})"
            )
            yield rf"\path[{style}] {corners}{node};"


def _axis(ranks: int, end: float, shrunk: float, words: str) -> Iterator[str]:
    """Yield the time axis, with about ten ticks, whose distance is 1, 2 or 5 times a power of ten."""
    yield rf"\draw[->] (0,{ranks}) -- ([xshift=2mm]{_number(end * shrunk)},{ranks})"
    yield rf"  node[anchor=west, xshift=1mm] {{{_escaped(label(words))}}};"
    power = 10.0 ** floor(log10(end / 10))
    step = next(each * power for each in (1, 2, 5, 10) if end / (each * power) <= 10)
    for k in range(floor(end / step + 1e-9) + 1):
        yield rf"\draw ({_number(k * step * shrunk)},{ranks}) -- +(0,-1mm) node[below=.5mm] {{{k * step:.10g}}};"


def _legend(stack: Stack, colors: list[str], y: float) -> Iterator[str]:
    """Yield the legend, in several lines where it is wider than the picture; `y` is its place in millimeters."""
    swatches = {
        "copy": ["box, fill=white, second"],
        "outline": ["F0, draw=F0, fill=F0!45" if stack.lanes else "F0, draw=F0, fill=none"],
        "mark": ["fill=white, differs"],
    }
    taken = 2.0 * WIDE
    for key, words in stack.legend.items():
        if key in ("memory", "cap"):
            continue
        keys = [each for each in colors if each[0] == key] or swatches.get(key, [])
        long = 5 + 2.5 * len(keys) + LETTER * len(words)
        if taken + long > WIDE + 20:
            taken, y = 0.0, y - 4
            yield rf"\coordinate (k) at (-4mm,{y:g}mm);"
        taken += long
        for k, each in enumerate(keys):
            yield rf"\node[key, {each}] (k) at ([xshift={0 if k else 4}mm]k.east) {{}};"
        yield rf"\node[words] (k) at ([xshift={1 if keys else 4}mm]k.east) {{{_escaped(label(words))}}};"


def _size(wide: float, tall: float, letters: int) -> str:
    """Return the style in which a number fits into a box of this size in millimeters, or nothing."""
    for style, size in SIZES.items():
        if (0.55 * letters + 0.25) * size * POINT <= wide and size * POINT <= tall:
            return style
    return ""


def _numbers(panel: Panel) -> list[str]:
    return [f"{name} {number}" for name, number in panel.numbers.items()]


def _number(value: float) -> str:
    """Return a coordinate, finer than TeX can tell two apart."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _hex(color: Fill) -> str:
    return "".join(f"{round(255 * channel):02X}" for channel in color)


def _ink(color: Fill) -> str:
    return "white" if ink_on(color) == "#ffffff" else "black"


def _one_line(text: str) -> str:
    """Return text for a comment, which a line break would end."""
    return " ".join(label(text).split())


def _escaped(text: str) -> str:
    """Return text as pdfLaTeX sets it, with ? for a character that its usual fonts lack."""
    written = []
    for each in " ".join(text.split()):
        base, accent = (*unicodedata.normalize("NFD", each), "")[:2]
        if each in _SPECIAL:
            written.append(_SPECIAL[each])
        elif base.isascii() and base.isprintable() and len(unicodedata.normalize("NFD", each)) <= 2:
            written.append(f"\\{_ACCENTS[accent]}{{{base}}}" if accent in _ACCENTS else "?" if accent else base)
        else:
            written.append("?")
    return "".join(written)
