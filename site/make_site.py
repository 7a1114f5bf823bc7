"""Build the site, a folder of static files: `make site`."""

import argparse
import gzip
import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import book
import classroom
import gallery
import story
from record import FILE

import ppedu as pp
from ppedu.core import Op
from ppedu.view.interactive import display
from ppedu.view.look import paler, shade
from ppedu.view.plot import picture
from ppedu.view.script import script, style

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "ppedu"
# Packages and files of ppedu that the playground uses.
NO_RANKS = ("__init__.py", "core", "planning", "search", "sim", "trace", "view", "zoo")
BOARD = ("course/__init__.py", "course/board", "course/progress_file.py")
# Files that need OR-tools, torch or a real run, or write what the page saves without Python.
OF_RUNS = tuple(f"trace/{name}.py" for name in ("autopsy", "findings", "predict", "profiler", "stragglers"))
SAVING = tuple(f"view/{name}.py" for name in ("html", "perfetto", "plot", "tex"))
UNUSED = ("search/counters.py", "search/intervals.py", *OF_RUNS, *SAVING)
# The programs that run in the worker, each with its modules, the packages and files of ppedu, and what it reads.
PROGRAMS = {
    "playground": (("playground", "examples", "reasons", "said"), (*NO_RANKS, *BOARD), ()),
    "cells": (
        ("cells", "absent", "record", "said"),
        (*NO_RANKS, "cells", "cli", "course", "engine", "launch", "notebook.py", "run.py"),
        ("cluster.csv", "model.toml"),
    ),
}
COPIED = (
    *("icon.svg", "manifest.json", "site.css", "app.js", "early.js", "story.css", "story.js", "python.js", "worker.js"),
    *("book.css", "book.js", "lesson.css", "lesson.js", "gallery.css", "gallery.js"),
)
FONT = "source-serif-4"
TEXT = (".html", ".css", ".js")
SHARED = ("look.css", "python.js", "widgets.css", "widgets.js")  # what the lessons' scripts and styles use
FACES = ("400-normal", "400-italic", "600-normal")
PYODIDE = HERE.parent / "node_modules" / "pyodide"
PYTHON = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
LOCK = "pyodide-lock.json"  # names packages to download, of which the page may not have any


def build(target: Path) -> None:
    """Write the site's files into a folder, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "pyodide").mkdir(parents=True)
    for name in PYTHON:
        shutil.copy(PYODIDE / name, target / "pyodide" / name)
    lock = json.loads((PYODIDE / LOCK).read_text(encoding="utf-8")) | {"packages": {}}
    (target / "pyodide" / LOCK).write_text(json.dumps(lock), encoding="utf-8")
    for program in PROGRAMS:
        with zipfile.ZipFile(target / f"{program}.zip", "w") as archive:
            for name, path in _contents(program):
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    compiling = subprocess.Popen(["node", HERE / "compiled.mjs", target.resolve()])  # meanwhile:
    for name in COPIED:
        shutil.copy(HERE / name, target / name)
    (target / "index.html").write_text(story.page((HERE / "index.html").read_text(encoding="utf-8")), encoding="utf-8")
    (target / "story.json").write_text(story.written(), encoding="utf-8")
    _write_look(target)
    (target / "widgets.js").write_text(script(), encoding="utf-8")
    for name in ("page", "widgets"):
        (target / f"{name}.css").write_text(style(name), encoding="utf-8")
    first = pp.simulate(pp.schedule("1f1b", 4, 8))
    (target / "first.svg").write_bytes(picture(display(first).stack, "svg"))
    gallery.write(target / "schedules")
    book.write(target / "book")
    if compiling.wait():
        raise SystemExit("The Python of the site cannot be compiled.")
    version = sha256()
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        version.update(path.read_bytes())
    worker = (HERE / "sw.js").read_text(encoding="utf-8").replace("%VERSION%", f"ppedu-{version.hexdigest()[:16]}")
    (target / "sw.js").write_text(worker.replace("%BOOK%", json.dumps(_kept(target))), encoding="utf-8")
    classroom.write(target)


def _contents(program: str) -> Iterator[tuple[str, Path]]:
    """Yield the name of each file in a program's archive, and the file."""
    names, packages, files = PROGRAMS[program]
    yield from ((f"{name}.py", HERE / f"{name}.py") for name in names)
    if "record" in names:
        yield FILE, HERE / FILE
    yield from ((name, HERE.parent / "notebooks" / name) for name in files)
    for given in (PACKAGE / each for each in packages):
        for path in [given] if given.is_file() else sorted(given.rglob("*")):
            unused = program == "playground" and path.relative_to(PACKAGE).as_posix() in UNUSED
            if path.suffix in (".py", ".txt") and not unused:
                yield path.relative_to(PACKAGE.parent).as_posix(), path


def _write_look(target: Path) -> None:
    """Write the style that all pages share: the font, its license, and the color of a forward, paler on dark pages."""
    (target / "fonts").mkdir()
    source = HERE.parent / "node_modules" / "@fontsource" / FONT
    for face in FACES:
        shutil.copy(source / "files" / f"{FONT}-latin-{face}.woff2", target / "fonts")
    shutil.copy(source / "LICENSE", target / "fonts" / "LICENSE.txt")
    color = shade(Op.F, 0, 0, 1)
    look = (HERE / "look.css").read_text(encoding="utf-8")
    for name, channels in {"%FORWARD%": color, "%PALE%": paler(color)}.items():
        look = look.replace(name, "#" + "".join(f"{round(255 * each):02x}" for each in channels))
    (target / "look.css").write_text(look, encoding="utf-8")


def _kept(target: Path) -> list[str]:
    """Return the files without which a page of the book does not open, or is not found, without a network."""
    book = (path.relative_to(target).as_posix() for path in (target / "book").rglob("*") if path.suffix in TEXT)
    fonts = (f"fonts/{FONT}-latin-{face}.woff2" for face in FACES)
    return sorted(
        [*book, *fonts, *(f"{name}.{kind}" for name in ("book", "lesson") for kind in ("css", "js")), *SHARED]
    )


def sizes(folder: Path) -> tuple[int, int]:
    """Return the bytes of all files but the zip, as they are and compressed as a web server sends them."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != classroom.NAME]
    return sum(map(len, files)), sum(min(len(gzip.compress(each)), len(each)) for each in files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", default=HERE.parent / "build" / "site")
    target = parser.parse_args().target
    build(target)
    plain, compressed = sizes(target)
    print(f"{target}: {plain / 1e6:.1f} MB, {compressed / 1e6:.1f} MB compressed")
