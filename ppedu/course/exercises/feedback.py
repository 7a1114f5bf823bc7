"""Sentences in a cell's output: as HTML with an icon and a color in a notebook, as plain text everywhere else."""

from __future__ import annotations

import re
import sys
from html import escape
from typing import Any

# By tone: the color and the icon. Both differ, and the sentence begins with words that differ.
TONES = {"right": ("#2f8f6b", "✓"), "wrong": ("#c2701c", "!"), "hint": ("#3b76b8", "?")}

CLICK = "A click shows the answer in JupyterLab."  # for a page that shows plain text only

CODE = re.compile(r"`([^`\n]+)`")
EMPHASIS = re.compile(r"(?<![\w*])\*(\w[^*\n]*?)\*(?![\w*])")


def has_page() -> bool:
    """Return whether the output is a cell's, which can show HTML."""
    ipython = sys.modules.get("IPython")  # every kernel has imported it
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def show(html: str, text: str) -> None:
    """Show HTML in a notebook, with `text` for pages that cannot show it; print the text everywhere else."""
    if has_page():
        publish({"text/html": html, "text/plain": text})
    else:
        print(text)


def fold(summary: str, text: str) -> None:
    """Show a sentence that opens `text` at a click; print both where there is no page.

    A saved notebook shows what it was saved with, so a page that shows plain text only must not show `text`.
    """
    if has_page():
        html = (
            f"<details><summary>{escape(summary)} <em>Show the answer</em></summary><div>{escape(text)}</div></details>"
        )
        publish({"text/html": html, "text/plain": f"{summary} {CLICK}"})
    else:
        print(summary, text)


def publish(bundle: dict[str, Any]) -> None:
    """Add an output, by MIME type, to the cell that is running."""
    from IPython.display import display

    display(bundle, raw=True)


def show_pictures() -> None:
    """Show the pictures drawn so far at this place of the cell's output; otherwise they would come at its end."""
    if has_page():
        from matplotlib import pyplot

        pyplot.show()


def say(text: str, tone: str) -> None:
    """Show a sentence in one of TONES; `code` and *emphasis* in it are rendered.

    Its first words, up to a full stop or a colon, are bold.
    """
    color, icon = TONES[tone]
    badge = (
        f"display: inline-block; width: 1.5em; line-height: 1.5em; margin-right: 0.5em; border-radius: 50%; "
        f"text-align: center; font-weight: bold; color: white; background: {color};"
    )
    box = (
        f"padding: 0.5em 0.8em; max-width: 50em; line-height: 1.5; overflow-wrap: break-word; "
        f"border-left: 4px solid {color}; background: color-mix(in srgb, {color} 10%, transparent);"
        f"{' white-space: pre-wrap;' if len(text.splitlines()) > 1 else ''}"
    )
    start = re.match(r"[^`]*?[.:](?=\s|$)|", text)[0]  # type: ignore[index]
    html = f"<b>{rendered(start)}</b>{rendered(text.removeprefix(start))}"
    icon = f'<span style="{badge}" aria-hidden="true">{icon}</span>'
    show(f'<div style="{box}">{icon}{html}</div>', EMPHASIS.sub(r"\1", text))


def rendered(text: str) -> str:
    """Return a sentence as HTML, with `code` and *emphasis*."""
    parts = CODE.split(text)  # text and code alternate
    parts[::2] = [EMPHASIS.sub(r"<em>\1</em>", escape(part, quote=False)) for part in parts[::2]]
    parts[1::2] = [f"<code>{escape(part, quote=False)}</code>" for part in parts[1::2]]
    return "".join(parts)


def table(rows: list[list[str]], head: bool = False) -> tuple[str, str]:
    """Return a table as HTML and as text. `head`: whether the first row is a heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in rows)
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines)
    style = 'style="text-align: left; padding: 0.2em 1.6em 0.2em 0; white-space: nowrap;"'
    html = ""
    for place, row in enumerate(rows):
        kind = "th" if head and place == 0 else "td"
        html += f"<tr>{''.join(f'<{kind} {style}>{escape(cell)}</{kind}>' for cell in row)}</tr>"
    return f"<table>{html}</table>", text
