"""The endings of files of timelines."""

from __future__ import annotations

import os
from pathlib import Path

from ppedu.core import SettingError
from ppedu.core.files import require_writable

ENDINGS = (".json", ".html", ".svg", ".png", ".pdf", ".tex")


def require_savable(path: str | os.PathLike[str]) -> str:
    """Check that a timeline can be saved at `path`, and return the ending of `path`, such as ".svg".

    Raises:
        SettingError: A timeline cannot be saved with this ending.
        PipelineError: The file cannot be written.
    """
    require_writable(path)
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise SettingError(f"cannot save a timeline as {str(path)!r}; end it in {', '.join(ENDINGS)}")
    return ending
