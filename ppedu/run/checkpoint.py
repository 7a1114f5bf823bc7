"""Checkpoints, from which training resumes: weights and optimizer state, by their names in the whole model.

A checkpoint does not depend on ranks or stages: two ranks can load what four have saved, with another schedule. A
folder holds one checkpoint, such as `step-40`; while the next one is written, it is called `step-50.part`. The file
`lock` keeps a second run from using the folder while the first one trains.
"""

from __future__ import annotations

import fcntl
import json
import os
import reprlib
import shutil
import socket
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from ppedu.core.errors import PipelineError
from ppedu.core.files import named
from ppedu.run.comm import PipelineGroup

Answer = TypeVar("Answer")
ABOUT = "about.json"  # in each checkpoint, beside torch's files: the settings of the run, and its losses so far
LOCK = "lock"  # in the folder, beside the checkpoint


class Checkpoints:
    """The checkpoints of a training run.

    folder: a folder that all ranks can access. The first `load` or `save` locks it, until this object is freed or its
        process ends.
    modules: this rank's modules, whose weights have the names they have in the whole model. If several ranks hold a
        weight, one of them writes it.
    optimizer: its state is saved; its settings, such as the learning rate, are not.
    model: the settings that must stay the same when training resumes, such as the model's sizes, as JSON values.
    group: all ranks that train; by default all ranks of the program.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        model: Mapping[str, Any],
        group: PipelineGroup | None = None,
    ):
        self.folder, self.modules, self.optimizer, self.model = named(folder), list(modules), optimizer, dict(model)
        self.group = PipelineGroup.of(group)
        self._locked = False

    def save(self, losses: Sequence[float]) -> None:
        """Write the checkpoint after step number `len(losses)`. All ranks must call it.

        The checkpoint before is removed once this one is complete, so that one can be loaded after a kill at any time.

        Raises:
            PipelineError: the checkpoint cannot be written, the folder holds one of this step or a later one, or
                another run is using the folder.
        """
        complete = self.folder / f"step-{len(losses)}"
        part = complete.with_name(f"{complete.name}.part")

        def begin() -> None:
            self._require_lock()
            if (newest := max(_steps(self.folder), default=-1)) >= len(losses):
                raise PipelineError(
                    f"cannot save step {len(losses)} in {str(self.folder)!r}, which holds a checkpoint of step "
                    f"{newest}; load that one first, or save in another folder"
                )
            for left in self.folder.glob("step-*.part"):
                shutil.rmtree(left)

        def finish() -> None:
            about = {"model": self.model, "losses": list(losses)}
            (part / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            before = _steps(self.folder)
            part.rename(complete)
            for step in before:
                shutil.rmtree(self.folder / f"step-{step}")

        self._on_first(begin)
        with _one_error(f"cannot write the checkpoint {str(complete)!r}"):
            checkpoint.save(self._tensors(), checkpoint_id=part, **self._torch_options())
        self._on_first(finish)

    def load(self) -> list[float]:
        """Load the newest checkpoint and return its losses; return [] if the folder is empty. All ranks must call it.

        Only load checkpoints that you trust: torch writes a pickle into each, and a pickle can run any code.

        Raises:
            PipelineError: the checkpoint cannot be read, was made with another `model`, or another run is using the
                folder.
        """

        def look() -> tuple[Path, list[float], dict[str, Any]] | None:
            self._require_lock()
            if (found := _newest(self.folder, self.model)) is None:
                return None
            with _one_error(_unreadable(found[0])):
                return *found, checkpoint.FileSystemReader(found[0]).read_metadata().state_dict_metadata

        newest = self._on_first(look)
        if newest is None:
            return []
        path, losses, listed = newest
        self._allocate(listed)
        with _one_error(_unreadable(path)):
            checkpoint.load(self._tensors(), checkpoint_id=path, **self._torch_options())
        return losses

    def _require_lock(self) -> None:
        """Lock the folder unless this is done already; raise PipelineError if another run holds the lock."""
        if not self._locked:
            weakref.finalize(self, _lock_folder(self.folder).close)
            self._locked = True

    def _weights(self) -> dict[str, nn.Parameter]:
        return {name: weight for each in self.modules for name, weight in each.named_parameters(remove_duplicate=False)}

    def _allocate(self, listed: Mapping[str, Any]) -> None:
        """Allocate the optimizer state in `listed`: before its first step, an optimizer has no tensors to load into."""
        weights = {f"optimizer.{name}": weight for name, weight in self._weights().items()}
        for key, entry in listed.items():
            name, _, part = key.rpartition(".")
            if name in weights:
                weight, dtype = weights[name], entry.properties.dtype
                if part != "step" and entry.size == weight.shape:  # sharded like its weight
                    empty = torch.empty_like(weight, dtype=dtype)
                else:
                    device = "cpu" if part == "step" else weight.device  # as in torch's optimizers
                    empty = torch.empty(entry.size, dtype=dtype, device=device)
                self.optimizer.state[weight][part] = empty

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint by name: weights, buffers and optimizer state. torch loads in place."""
        tensors = {name: value for module in self.modules for name, value in module.state_dict().items()}
        for name, weight in self._weights().items():
            state = self.optimizer.state.get(weight, {})
            tensors |= {f"optimizer.{name}.{part}": value for part, value in state.items() if torch.is_tensor(value)}
        return tensors

    def _torch_options(self) -> dict[str, Any]:
        return {"process_group": self.group.process_group, "no_dist": self.group.size == 1}

    def _on_first(self, do: Callable[[], Answer]) -> Answer:
        """Call `do` on the first rank only, and return its result, or raise its error, on all ranks."""
        answer: list[Any] = [None]
        if self.group.is_first:
            try:
                with _one_error(f"cannot use {str(self.folder)!r} for checkpoints"):
                    answer = [do()]
            except PipelineError as error:
                answer = [error]
        if self.group.size > 1:
            dist.broadcast_object_list(answer, self.group.peer(0), self.group.process_group)
        if isinstance(answer[0], PipelineError):
            raise answer[0]
        return cast(Answer, answer[0])


def require_usable(folder: str | os.PathLike[str], model: Mapping[str, Any]) -> None:
    """Raise PipelineError unless a run with the settings `model` can use `folder` and resume from what it holds."""
    path = named(folder)
    with _one_error(f"cannot use {str(path)!r} for checkpoints"), _lock_folder(path):
        _newest(path, model)


def _lock_folder(folder: Path) -> TextIO:
    """Lock `folder`, creating it if necessary, and return an open file; closing it releases the lock.

    Raises:
        PipelineError: another process holds the lock, or no file can be created in the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise PipelineError(f"cannot save in {str(folder)!r}: {error.strerror}; name a folder you can write") from error
    try:
        # A lock of the process: a notebook cell that failed does not lock out the next cell.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        with file:
            file.seek(0)
            owner = file.read()
        raise PipelineError(
            f"another run ({owner}) is saving in {str(folder)!r}; wait until it ends, or save in another folder"
        ) from None
    except OSError:
        return file  # some network file systems do not support locks; train there without one
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
    return file


def _steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`."""
    steps = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return [int(step) for step in steps if step.isdecimal()]


def _newest(folder: Path, model: Mapping[str, Any]) -> tuple[Path, list[float]] | None:
    """Return the newest checkpoint and its losses; None if the folder has no checkpoint.

    Raises:
        PipelineError: the checkpoint cannot be read, or was made with other settings than `model`.
    """
    if not (steps := _steps(folder)):
        return None
    path = folder / f"step-{max(steps)}"
    with _one_error(_unreadable(path)):
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        made, losses = about["model"], about["losses"]
        pairs = ((name, made.get(name), model.get(name)) for name in {**made, **model})
        changed = [f"{name} {_only(old, new)}, not {_only(new, old)}" for name, old, new in pairs if old != new]
        if changed:
            raise PipelineError(
                f"the checkpoint {str(path)!r} was made with {' and '.join(changed)}; "
                "use the same settings, or save in another folder"
            )
        numbers = isinstance(losses, list) and all(isinstance(loss, (int, float)) for loss in losses)
        if not numbers or len(losses) != max(steps):
            raise ValueError(f"the losses in {ABOUT} are not {max(steps)} numbers")
    return path, losses


def _unreadable(path: Path) -> str:
    return f"cannot read the checkpoint {str(path)!r} (remove it to start from the beginning)"


def _only(value: Any, other: Any) -> str:
    """Return `value` as text for a message; if both are lists, only the items that `other` lacks."""
    if isinstance(value, list) and isinstance(other, list):
        value = [item for item in value if item not in other]
    return reprlib.repr(value)


@contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Context manager: turn an error of a file or of torch into a PipelineError, "<what>: <the original cause>"."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # true, and fine, for one rank
            yield
    except PipelineError:
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException with all ranks' errors
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise PipelineError(f"{what}: {type(first).__name__}: {first}") from error
