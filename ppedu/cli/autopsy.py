"""`ppedu autopsy`: why the steps of a measured run take as long as they do."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace

from ppedu.core import PipelineError, SettingError
from ppedu.core.files import named, require_writable
from ppedu.core.tables import bar
from ppedu.zoo.registry import require_registered


def autopsy(options: Namespace) -> int:
    """read the trace of a real run: what is its bubble, why, and what would be faster"""
    from ppedu.trace.run import Run

    for name in options.predict:
        require_registered(name)
    require_page(options.html)
    run = Run.load(options.trace, bar("reading") if sys.stderr.isatty() else None, dict(options.name))
    found = run.autopsy()
    print(found)
    for name in options.predict:
        try:
            print(f"\n{run.predict(name)}")
        except PipelineError as error:
            print(f"\n{name}: {error}")
    if options.html:
        found.save(options.html)
    return 0


def renamed(text: str) -> tuple[str, str]:
    """Return ("forward_step", "F") for "forward_step=F"; raise ArgumentTypeError for other texts."""
    name, sign, action = text.rpartition("=")
    if not (name and sign and action):
        raise ArgumentTypeError(f"{text!r} is not a name and an action, such as forward_step=F")
    return name, action


def require_page(path: str | None) -> None:
    """Raise PipelineError unless a page can be written to the file of `--html`, if there is one."""
    if path is not None:
        require_writable(path)
        if named(path).suffix.lower() != ".html":
            raise SettingError(f"--html writes a page; end its name in .html; got {path!r}")
