"""Training that stops and goes on: weights and the optimizer's state on disk, by their names in the whole model.

Nothing there knows of ranks or stages: what four ranks have saved, two can load, with another schedule. A folder holds
one checkpoint, such as `step-40`, and while the next is written, that as `step-50.part`. Its file `lock` keeps a second
run out while the first one trains.
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from ppedu.core.errors import PipelineError
from ppedu.core.files import named
from ppedu.run.comm import PipelineGroup

Answer = TypeVar("Answer")
ABOUT = "about.json"  # in a checkpoint, beside torch's files: the settings it was trained with, and the losses so far
LOCK = "lock"  # in the folder, beside the checkpoint


class Checkpoints:
    """The checkpoints of a training run.

    folder: one that all ranks see. The first `load` or `save` locks it, until this object or its process ends.
    modules: of this rank, with the names that their weights have in the whole model. What several ranks hold is
        written by one of them.
    optimizer: its state is saved, not its settings, such as the learning rate.
    model: the settings that must not change from one run to the next, such as the model's sizes, as JSON values; a
        checkpoint with other settings is refused.
    group: all ranks that train; by default the whole world.
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
        """Write a checkpoint after as many steps as there are losses. All ranks must call it.

        The one before is removed once this one is whole, so that a kill at any time leaves one to load.

        Raises:
            PipelineError: it cannot be written, there is one of as many steps already, or another run uses the folder.
        """
        whole = self.folder / f"step-{len(losses)}"
        part = whole.with_name(f"{whole.name}.part")

        def begin() -> None:
            self._keep_others_out()
            if (newest := max(_steps(self.folder), default=-1)) >= len(losses):
                raise PipelineError(
                    f"{str(self.folder)!r} holds a checkpoint of {newest} steps, and this would be one of "
                    f"{len(losses)}; load that one first, or save in another folder"
                )
            for left in self.folder.glob("step-*.part"):
                shutil.rmtree(left)

        def finish() -> None:
            about = {"model": self.model, "losses": list(losses)}
            (part / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            before = _steps(self.folder)
            part.rename(whole)
            for step in before:
                shutil.rmtree(self.folder / f"step-{step}")

        self._once(begin)
        with _troubles(f"cannot write the checkpoint {str(whole)!r}"):
            checkpoint.save(self._tensors(), checkpoint_id=part, **self._ranks())
        self._once(finish)

    def load(self) -> list[float]:
        """Read the newest checkpoint, if there is one; returns its losses, or none. All ranks must call it.

        Load only what you trust: torch lists what is in a checkpoint in a pickle, and a pickle can run any code.

        Raises:
            PipelineError: it cannot be read, has other settings in its `model`, or another run uses the folder.
        """

        def look() -> tuple[Path, list[float], dict[str, Any]] | None:
            self._keep_others_out()
            if (found := _newest(self.folder, self.model)) is None:
                return None
            with _troubles(_unreadable(found[0])):
                return *found, checkpoint.FileSystemReader(found[0]).read_metadata().state_dict_metadata

        newest = self._once(look)
        if newest is None:
            return []
        path, losses, listed = newest
        self._make_room(listed)
        with _troubles(_unreadable(path)):
            checkpoint.load(self._tensors(), checkpoint_id=path, **self._ranks())
        return losses

    def _keep_others_out(self) -> None:
        """Lock the folder, if this is not done yet; raise PipelineError if another run holds the lock."""
        if not self._locked:
            weakref.finalize(self, os.close, _lock(self.folder))
            self._locked = True

    def _weights(self) -> dict[str, nn.Parameter]:
        return {
            name: weight for module in self.modules for name, weight in module.named_parameters(remove_duplicate=False)
        }

    def _make_room(self, listed: Mapping[str, Any]) -> None:
        """Have the optimizer hold what is listed of its state, empty: one that has done no step holds nothing."""
        names = {f"optimizer.{name}": weight for name, weight in self._weights().items()}
        for key, entry in listed.items():
            name, _, part = key.rpartition(".")
            if name in names:
                device = "cpu" if part == "step" else names[name].device  # where torch's optimizers have it
                dtype = entry.properties.dtype
                if part != "step" and entry.size == names[name].shape:  # sharded, if the weight is
                    empty = torch.empty_like(names[name], dtype=dtype)
                else:
                    empty = torch.empty(entry.size, dtype=dtype, device=device)
                self.optimizer.state[names[name]][part] = empty

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is on disk, by name; torch reads in place."""
        state = {f"optimizer.{name}": self.optimizer.state.get(weight, {}) for name, weight in self._weights().items()}
        return {name: value for module in self.modules for name, value in module.state_dict().items()} | {
            f"{name}.{part}": value
            for name, parts in state.items()
            for part, value in parts.items()
            if isinstance(value, torch.Tensor)
        }

    def _ranks(self) -> dict[str, Any]:
        return {"process_group": self.group.process_group, "no_dist": self.group.size == 1}

    def _once(self, do: Callable[[], Answer]) -> Answer:
        """What the first rank gets, on all of them, or its error."""
        answer: list[Any] = [None]
        if self.group.is_first:
            try:
                with _troubles(f"cannot use {str(self.folder)!r} for checkpoints"):
                    answer = [do()]
            except PipelineError as error:
                answer = [error]
        if self.group.size > 1:
            dist.broadcast_object_list(answer, self.group.peer(0), self.group.process_group)
        if isinstance(answer[0], PipelineError):
            raise answer[0]
        found: Answer = answer[0]
        return found


def require_usable(folder: str | os.PathLike[str], model: Mapping[str, Any]) -> None:
    """Raise PipelineError unless a run with the settings `model` can save in `folder` and go on from what it holds."""
    path = named(folder)
    with _troubles(f"cannot use {str(path)!r} for checkpoints"):
        lock = _lock(path)
        try:
            _newest(path, model)
        finally:
            os.close(lock)


def _lock(folder: Path) -> int:
    """Return a file descriptor that locks `folder`, made if need be, until it is closed or this process ends.

    Raises:
        PipelineError: another process holds the lock, or there can be no files in the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise PipelineError(f"cannot save in {str(folder)!r}: {error.strerror}; name a folder of yours") from error
    try:
        # A lock of the process: a cell that failed in a notebook does not lock out the next one there.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(file, 1000).decode(errors="replace")
        os.close(file)
        raise PipelineError(
            f"another run ({owner}) is saving in {str(folder)!r}; wait until it ends, or save in another folder"
        ) from None
    except OSError:
        return file  # some network file systems know no locks; training there is better than none
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    os.truncate(file, os.write(file, owner.encode()))
    return file


def _steps(folder: Path) -> list[int]:
    """The steps after which there is a whole checkpoint."""
    steps = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return [int(step) for step in steps if step.isdecimal()]


def _newest(folder: Path, model: Mapping[str, Any]) -> tuple[Path, list[float]] | None:
    """Return the newest checkpoint and its losses, or None if there is none yet.

    Raises:
        PipelineError: it cannot be read, or was made with settings other than `model`.
    """
    if not (steps := _steps(folder)):
        return None
    path = folder / f"step-{max(steps)}"
    with _troubles(_unreadable(path)):
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        made, losses = about["model"], about["losses"]
        pairs = [(name, made.get(name), model.get(name)) for name in {**made, **model}]
        told = [f"{name} {_unlike(old, new)}, not {_unlike(new, old)}" for name, old, new in pairs if old != new]
        if told:
            raise PipelineError(
                f"the checkpoint {str(path)!r} was made with {' and '.join(told)}; "
                "use the same settings, or save in another folder"
            )
        numbers = isinstance(losses, list) and all(isinstance(loss, (int, float)) for loss in losses)
        if not numbers or len(losses) != max(steps):
            raise ValueError(f"the losses in {ABOUT} are not {max(steps)} numbers")
    return path, losses


def _unreadable(path: Path) -> str:
    return f"cannot read the checkpoint {str(path)!r} (remove it to start anew)"


def _unlike(value: Any, other: Any) -> str:
    """Return `value` for a message; of two lists only the items that `other` lacks."""
    if isinstance(value, list) and isinstance(other, list):
        value = [item for item in value if item not in other]
    return reprlib.repr(value)


@contextmanager
def _troubles(what: str) -> Iterator[None]:
    """Errors of files and of torch, which has one that is no Exception and holds those of all ranks, told in short."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is, for one rank
            yield
    except PipelineError:
        raise
    except (Exception, CheckpointException) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise PipelineError(f"{what}: {type(first).__name__}: {first}") from error
