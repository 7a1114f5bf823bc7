"""The browser's part of the widgets: one script and one style sheet, without a build step."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FILES = ("model", "painting", "controls", "play")  # each imports only from those before it
_IMPORTS = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
_JSDOC = re.compile(r"^ */\*\*(?:(?!\*/).)*\*/\n", re.MULTILINE | re.DOTALL)


@cache
def script() -> str:
    """Return the files in `js` as one ES module: joined, without their JSDoc and their imports from each other."""
    return "\n".join(_IMPORTS.sub("", file(name)) for name in FILES)


def file(name: str) -> str:
    """Return a file in `js` without its JSDoc."""
    return _JSDOC.sub("", (HERE / "js" / f"{name}.js").read_text(encoding="utf-8"))


@cache
def style(name: str) -> str:
    """Return a style sheet: "widgets", or the "page" around a widget."""
    return (HERE / f"{name}.css").read_text(encoding="utf-8")
