"""`ppedu lessons`: copy the lessons into a folder and open them in JupyterLab."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from ppedu.core import SettingError
from ppedu.core.files import replace_bytes

FOLDER = "ppedu-lessons"  # the default target
# The lessons; what an assistant should know about them; a run and a model to try `autopsy` and `plan` on.
FILES = ("*.ipynb", "AGENTS.md", "cluster.csv", "model.toml")
PACKAGE = Path(__file__).parents[1]


def open_lessons(options: argparse.Namespace) -> int:
    """copy the lessons into a folder, keeping those already there, and open them in JupyterLab"""
    if options.no_open and options.lab:
        raise SettingError("--lab is for JupyterLab, which --no-open does not start; leave out one of them")
    folder = Path(options.folder)
    first = copy_lessons(folder)
    if options.no_open:
        print(f"To open them: cd {shlex.quote(str(folder))} && jupyter lab {first}")
    elif find_spec("jupyterlab") is None:
        raise SettingError("JupyterLab is not installed; pip install 'ppedu[lab]', then run this command again")
    else:
        sys.stdout.flush()
        command = [sys.executable, "-m", "jupyterlab", *lab_options(first), *options.lab]
        os.chdir(folder)
        os.execv(sys.executable, command)  # replaces this process, so that Ctrl-C reaches JupyterLab alone
    return 0


def lab_options(notebook: str) -> list[str]:
    """Return the options with which JupyterLab opens `notebook`, a file in its working directory.

    JupyterLab refuses to run as root, the user of most containers, unless allowed. Without a display it cannot open a
    browser, and prints the address of the notebook instead.
    """
    options = [f"--LabApp.default_url=/lab/tree/{notebook}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))):
        options.append("--no-browser")
    return options


def lessons_folder() -> Path:
    """Return the folder that holds the lessons of this installation.

    Raises:
        SettingError: this installation contains no lessons.
    """
    installed, cloned = PACKAGE / "lessons", PACKAGE.parent / "notebooks"
    for folder in (installed, cloned):
        if any(folder.glob("*.ipynb")):
            return folder
    raise SettingError(f"there are no lessons in {installed} or {cloned}; reinstall ppedu")


def copy_lessons(folder: Path) -> str:
    """Copy the lessons and their files that do not exist in `folder` yet, and return the name of the first lesson.

    Raises:
        SettingError: this installation contains no lessons, or the folder cannot be written to.
    """
    source = lessons_folder()
    lessons = sorted(path for pattern in FILES for path in source.glob(pattern))
    changed = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for lesson in lessons:
            copy = folder / lesson.name
            if not copy.exists():
                replace_bytes(copy, _content(lesson))  # a partial copy would later be kept, as if it had been changed
            elif copy.read_bytes() != _content(lesson):
                changed.append(lesson.name)
    except OSError as error:
        raise SettingError(f"cannot copy the lessons to {folder}: {error.strerror}; choose another folder") from None
    print(f"The lessons are in {folder}{os.sep}")
    if changed:
        print(f"Kept, because you have changed them: {', '.join(changed)}")
        print("For fresh copies choose another folder: ppedu lessons FOLDER")
    return lessons[0].name


def _content(source: Path) -> bytes:
    """Return the content of a file's copy: that of a notebook names this Python.

    JupyterLab would otherwise write the name when it opens the notebook, and so mark it as changed.
    """
    content = source.read_bytes()
    if source.suffix == ".ipynb":
        notebook = json.loads(content)
        notebook["metadata"]["language_info"]["version"] = platform.python_version()
        content = (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
    return content
