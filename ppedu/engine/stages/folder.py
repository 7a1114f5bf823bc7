"""The folder of a training run, which holds one checkpoint, such as `step-40`, with the losses and settings of the run.

While the next one is written, it is called `step-50.part`. The file `lock` keeps a second run from using the folder
while the first one trains.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import reprlib
import shutil
import socket
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

from torch.distributed.checkpoint import CheckpointException

from ppedu.core import PipelineError
from ppedu.core.files import named

ABOUT = "about.json"  # in each checkpoint, beside torch's files: the settings of the run, its losses and its states
# Of torch, by release: one rank saves without others, torch's writer itself uses this, and ranks have different stages.
WARNINGS = "torch.distributed is disabled|TypedStorage is deprecated|Detected mismatched keys"
LOCK = "lock"  # in the folder, beside the checkpoint


class Folder:
    """The folder of a run with the settings `model`; see `Checkpoints` for both."""

    def __init__(self, path: str | os.PathLike[str], model: Mapping[str, Any]):
        self.path, self.model = named(path), dict(model)
        self._locked = False

    def lock(self) -> None:
        """Lock the folder unless this is done already; raise PipelineError if another run holds the lock."""
        if not self._locked:
            weakref.finalize(self, self._open_lock().close)
            self._locked = True

    def require_usable(self) -> None:
        """Raise PipelineError unless a run can use the folder and resume from what it holds."""
        with self.using(), self._open_lock():
            self.newest()

    def newest(self) -> tuple[Path, list[float], dict[str, Any]] | None:
        """Return the newest checkpoint, its losses and its states; None if the folder has no checkpoint."""
        if not (steps := self._steps()):
            return None
        path = self.path / f"step-{max(steps)}"
        with reading(path):
            about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
            made, losses = about["model"], about["losses"]
            pairs = ((name, made.get(name), self.model.get(name)) for name in {**made, **self.model})
            changed = [f"{name} {_only(old, new)}, not {_only(new, old)}" for name, old, new in pairs if old != new]
            if changed:
                raise PipelineError(
                    f"the checkpoint {str(path)!r} was made with {' and '.join(changed)}; "
                    "use the same settings, or save in another folder"
                )
            numbers = isinstance(losses, list) and all(isinstance(loss, (int, float)) for loss in losses)
            if not numbers or len(losses) != max(steps):
                raise ValueError(f"the losses in {ABOUT} are not {max(steps)} numbers")
        return path, losses, about.get("states", {})

    def begin(self, step: int, states: Mapping[str, Any]) -> None:
        """Prepare to write the checkpoint after `step`; raise PipelineError if it cannot be, or is not newer."""
        self.lock()
        for name, state in states.items():
            if json.loads(json.dumps(state)) != state:
                raise PipelineError(
                    f"the state of {name!r} cannot be saved; a checkpoint holds JSON values, such as numbers and "
                    f"lists; got {reprlib.repr(state)}"
                )
        if (newest := max(self._steps(), default=-1)) >= step:
            raise PipelineError(
                f"cannot save step {step} in {str(self.path)!r}, which holds a checkpoint of step "
                f"{newest}; load that one first, or save in another folder"
            )
        for left in self.path.glob("step-*.part"):
            shutil.rmtree(left)

    def finish(self, part: Path, losses: Sequence[float], states: Mapping[str, Any]) -> None:
        """Complete the checkpoint whose tensors are in `part`, and remove those before it."""
        about = {"model": self.model, "losses": list(losses), "states": states}
        (part / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        before = self._steps()
        part.rename(part.with_suffix(""))
        for step in before:
            shutil.rmtree(self.path / f"step-{step}")

    def using(self) -> AbstractContextManager[None]:
        return one_error(f"cannot use {str(self.path)!r} for checkpoints")

    def _steps(self) -> list[int]:
        """Return the steps of the complete checkpoints."""
        steps = (path.name.removeprefix("step-") for path in self.path.glob("step-*"))
        return [int(step) for step in steps if step.isdecimal()]

    def _open_lock(self) -> TextIO:
        """Lock the folder, creating it if necessary, and return an open file; closing it releases the lock."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+", encoding="utf-8", errors="replace")
        except OSError as error:
            raise PipelineError(
                f"cannot save in {str(self.path)!r}: {error.strerror}; name a folder you can write"
            ) from error
        try:
            # A lock of the process: a notebook cell that failed does not lock out the next cell.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                file.seek(0)
                owner = file.read()
            raise PipelineError(
                f"another run ({owner}) is saving in {str(self.path)!r}; wait until it ends, or save in another folder"
            ) from None
        except OSError:
            return file  # some network file systems do not support locks; train there without one
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
        return file


def reading(path: Path) -> AbstractContextManager[None]:
    """Context manager: report what goes wrong while the checkpoint `path` is read."""
    damaged = "if its files are damaged, remove it to start from the beginning"
    return one_error(f"cannot read the checkpoint {str(path)!r} ({damaged})")


@contextmanager
def one_error(what: str) -> Iterator[None]:
    """Context manager: turn an error of a file or of torch into a PipelineError, "<what>: <the original cause>"."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", WARNINGS)
            yield
    except PipelineError:
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException with all ranks' errors
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(first, OSError) and first.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PipelineError(f"{what}: the disk is full; free some space, or save in another folder") from error
        raise PipelineError(f"{what}: {type(first).__name__}: {first}") from error


def _only(value: Any, other: Any) -> str:
    """Return `value` as text for a message; if both are lists, only the items that `other` lacks."""
    if isinstance(value, list) and isinstance(other, list):
        value = [item for item in value if item not in other]
    return reprlib.repr(value)
