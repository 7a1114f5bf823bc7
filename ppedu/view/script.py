"""The browser's part of the widgets: one script and one style sheet, without a build step."""

from __future__ import annotations

import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

HERE = Path(__file__).parent
ALONE = ("named",)  # a script of its own
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_JSDOC = re.compile(r"^ */\*\*(?:(?!\*/).)*\*/\n", re.MULTILINE | re.DOTALL)


@cache
def script() -> str:
    """Return the files in `js` as one ES module: joined, without their JSDoc and their imports from each other.

    Each file stands after those that it imports from. They share their names, so no two may define the same one.
    """
    files = {name: file(name) for name in sorted(path.stem for path in (HERE / "js").glob("*.js")) if name not in ALONE}
    order = TopologicalSorter({name: _IMPORT.findall(text) for name, text in files.items()}).static_order()
    return "\n".join(_IMPORT.sub("", files[name]) for name in order)


def file(name: str) -> str:
    """Return a file in `js` without its JSDoc."""
    return _JSDOC.sub("", (HERE / "js" / f"{name}.js").read_text(encoding="utf-8"))


@cache
def style(name: str) -> str:
    """Return a style sheet: "widgets", or the "page" around a widget."""
    return (HERE / f"{name}.css").read_text(encoding="utf-8")
