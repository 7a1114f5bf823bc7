"""Files of timelines, in the format of their ending."""

from __future__ import annotations

import os
from pathlib import Path

from ppedu.core import SettingError
from ppedu.core.files import require_writable, write_bytes
from ppedu.view.interactive import Interactive
from ppedu.view.perfetto import chrome_trace

ENDINGS = (".json", ".html", ".svg", ".png", ".pdf")


def require_savable(path: str | os.PathLike[str]) -> str:
    """Check that a timeline can be saved at `path`, and return the ending of `path`, such as ".svg".

    Raises:
        SettingError: a timeline cannot be saved with this ending.
        PipelineError: the file cannot be written.
    """
    require_writable(path)
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise SettingError(f"cannot save a timeline as {str(path)!r}; end it in {', '.join(ENDINGS)}")
    return ending


def write(shown: Interactive, path: str | os.PathLike[str]) -> None:
    """See `Interactive.save`."""
    ending = require_savable(path)
    if ending == ".json":
        content = chrome_trace(*(panel.timeline for panel in shown.panels())).encode()
    elif ending == ".html":
        from ppedu.view.html import page

        content = page(shown if shown.kind in ("show", "compare") else Interactive(*shown.panels())).encode()
    else:
        from ppedu.view.plot import picture

        content = picture(shown.stack, ending[1:])
    write_bytes(path, content)
