"""The lessons, the guide, the instructors' page and the reference as HTML, built by Sphinx from the project's files."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from html import escape
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from sphinx.cmd.build import build_main

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/ppedu/ppedu/blob/main"
PAGES = ["guide", "notions", "losses", "cluster", "instructors", "experts", "asynchronous", "optima", "published"]
PAGES += ["verdicts", "architecture"]
# The modules of the reference, each with its title. The names on their pages are those in `__all__`.
MODULES = {
    "ppedu": "ppedu: schedules, checks, simulations, plans, real runs",
    "ppedu.run": "ppedu.run: on real processes",
    "ppedu.search": "ppedu.search: proven best",
    "ppedu.zoo.theory": "ppedu.theory: closed forms",
    "ppedu.sim.partition": "ppedu.partition: cutting a model",
    "ppedu.core.export": "ppedu.export: for other libraries",
    "ppedu.view": "ppedu.view: pictures, pages, traces",
    "ppedu.notebook": "ppedu.notebook: cells on several ranks",
}
# The classes of results that are not public names of these modules.
RETURNED = {
    "ppedu.planning.plan": "Plan",
    "ppedu.planning.choice": "Choice",
    "ppedu.planning.divide": "Divisions",
    "ppedu.planning.pieces": "Pieces",
    "ppedu.trace.autopsy": "Autopsy",
    "ppedu.trace.predict": "Prediction",
    "ppedu.trace.calibrate": "Calibration",
    "ppedu.view.interactive": "Interactive",
}
ARTICLE = '<article role="main" id="furo-main-content">'
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'{hashes}; worker-src 'self' blob:; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; font-src 'self'; base-uri 'none'; form-action 'self'"
)
STYLE = '<link rel="stylesheet" href="{}">'
SCRIPT = '<script type="module" src="{}"></script>'


def write(folder: Path) -> None:
    """Write the pages into a folder."""
    with TemporaryDirectory() as temporary:
        sources = Path(temporary, "sources")
        _collect(sources)
        built = Path(temporary, "built", "html")  # MyST-NB puts files of its own beside it
        if build_main(["-q", "-b", "html", "-j", "auto", "-c", str(ROOT / "site"), str(sources), str(built)]):
            raise SystemExit("Sphinx could not build the pages; its messages are above.")
        shutil.copytree(
            built, folder, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo", "objects.inv", "_sources")
        )
    for path in folder.rglob("*.html"):
        lesson = path.stem if path.parent.name == "notebooks" else ""
        home = "../" * len(path.relative_to(folder).parts)
        path.write_text(_finished(path.read_text(encoding="utf-8"), home, lesson), encoding="utf-8")


def _collect(sources: Path) -> None:
    """Copy the pages and lessons into a folder that has the same relative links, and write the lists of them."""
    for name in ("docs", "notebooks", "reference"):
        (sources / name).mkdir(parents=True)
    for name in PAGES:
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        (sources / "docs" / f"{name}.md").write_text(_linked(text), encoding="utf-8")
    for picture in (ROOT / "docs").glob("*.png"):
        shutil.copy(picture, sources / "docs")
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in lessons:
        book = json.loads(path.read_text(encoding="utf-8"))
        del book["cells"][1]  # it installs ppedu in Colab and Kaggle
        for cell in book["cells"]:
            cell["source"] = _linked("".join(cell["source"]))
            tags = cell["metadata"].setdefault("tags", [])
            if "solution" in tags:
                tags.append("hide-cell")
            elif cell["metadata"].get("jupyter", {}).get("source_hidden"):
                tags.append("hide-input")
        (sources / "notebooks" / path.name).write_text(json.dumps(book), encoding="utf-8")
    for name, title in MODULES.items():
        parts = [f"{title}\n{'=' * len(title)}", f".. currentmodule:: {name}", *_directives(import_module(name))]
        (sources / "reference" / f"{name}.rst").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    title = "Results: plans, autopsies, predictions"
    parts = [f".. autoclass:: {module}.{name}\n   :members:" for module, name in RETURNED.items()]
    text = "\n\n".join([f"{title}\n{'=' * len(title)}", *parts]) + "\n"
    (sources / "reference" / "returned.rst").write_text(text, encoding="utf-8")
    tables = {
        "Lessons": [f"notebooks/{path.stem}" for path in lessons],
        "Using it": [f"docs/{name}" for name in PAGES],
        "Reference": [*(f"reference/{name}" for name in MODULES), "reference/returned"],
    }
    parts = ["# ppedu", "[The playground](../index.html) · [Published schedules](../schedules/index.html)"]
    for caption, names in tables.items():
        listed = "\n".join(names)
        parts.append(f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n{listed}\n```")
    (sources / "index.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _directives(module: ModuleType) -> Iterator[str]:
    """Yield what makes Sphinx print the docstring of each public name of a module."""
    own = [name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
        each = getattr(module, name)
        if isinstance(each, type):
            yield f".. autoclass:: {name}\n   :members:"
        elif callable(each):
            yield f".. autofunction:: {name}"


def _linked(text: str) -> str:
    """Return Markdown with links to the repository where a page's link leaves the pages."""
    return re.sub(rf"\]\(\.\./(?!notebooks/|docs/(?:{'|'.join(PAGES)})\.md)", f"]({SOURCE}/", text)


def _finished(page: str, home: str, lesson: str) -> str:
    """Return a page with the content security policy, the book's look, and what makes a lesson's cells run.

    Args:
        home: The site's folder, from the page.
        lesson: The name of a lesson's file without its ending; "" for another page.
    """
    styles, scripts = ["look.css", "book.css"], ["book.js"]
    if lesson:
        page = page.replace(ARTICLE, ARTICLE + _bars(lesson), 1)
        styles += ["widgets.css", "lesson.css"]
        scripts += ["lesson.js"]
    linked = [STYLE.format(home + name) for name in styles] + [SCRIPT.format(home + name) for name in scripts]
    page = page.replace("</head>", f"{''.join(linked)}</head>")
    page = page.replace("<span>Next</span>", "<span>Next:</span>").replace(
        "<span>Previous</span>", "<span>Before:</span>"
    )
    for name, label in {"sidebar-drawer": "all pages", "toc-drawer": "this page"}.items():
        page = page.replace(f'<aside class="{name}', f'<aside aria-label="{label}" class="{name}')
    # The theme leaves out the level of its headings, and code that scrolls cannot be reached by keyboard.
    page = page.replace('role="heading">', 'role="heading" aria-level="2">').replace("<pre>", '<pre tabindex="0">')
    inline = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = "".join(
        f" 'sha256-{base64.b64encode(sha256(each.encode()).digest()).decode()}'" for each in dict.fromkeys(inline)
    )
    policy = POLICY.format(hashes=hashes)
    head = f'<head><meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
    return page.replace("<head>", head, 1)


@cache
def _titles() -> dict[str, str]:
    """Return the titles of the numbered lessons, by the name of their file."""
    titles = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))[1:]:  # the first one is the overview
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        titles[path.stem] = "".join(first).splitlines()[0].removeprefix("# ")
    return titles


def _bars(lesson: str) -> str:
    """Return a row of links to the lessons. Its script marks those that were read."""
    items = []
    for name, title in _titles().items():
        current = ' aria-current="page"' if name == lesson else ""
        title = escape(title)
        items.append(f'<li><a href="{name}.html" title="{title}" aria-label="{title}"{current}></a></li>')
    return f'<nav class="lessons" aria-label="lessons"><ol>{"".join(items)}</ol><p></p></nav>'
