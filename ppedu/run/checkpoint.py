"""Training that stops and goes on: weights and the optimizer's state on disk, by their names in the whole model.

Nothing there knows of ranks or stages: what four ranks have saved, two can load, with another schedule. A folder holds
one checkpoint, such as `step-40`, and while the next is written, that as `step-50.part`.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
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
from ppedu.core.schedule import named
from ppedu.run.comm import PipelineGroup

Answer = TypeVar("Answer")
ABOUT = "about.json"  # in a checkpoint, beside torch's files: what model it is of, and the losses so far


class Checkpoints:
    """The checkpoints of a training run.

    folder: one that all ranks see.
    modules: of this rank, with the names that their weights have in the whole model. What several ranks hold is
        written by one of them.
    optimizer: its state is saved, not its settings, such as the learning rate.
    model: what is trained, such as its sizes, in what JSON can say; a checkpoint of another is refused.
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
        self.group = group or PipelineGroup.world()

    def save(self, losses: Sequence[float]) -> None:
        """Write a checkpoint after as many steps as there are losses. All ranks must call it.

        The one before is removed once this one is whole, so that a kill at any time leaves one to load.

        Raises:
            PipelineError: it cannot be written, or there is one of as many steps already.
        """
        whole = self.folder / f"step-{len(losses)}"
        part = whole.with_name(f"{whole.name}.part")

        def begin() -> None:
            require_folder(self.folder)
            if (newest := max(self._steps(), default=-1)) >= len(losses):
                raise PipelineError(
                    f"{str(self.folder)!r} holds a checkpoint of {newest} steps, and this would be one of "
                    f"{len(losses)}; load that one first, or save in another folder"
                )
            for left in self.folder.glob("step-*.part"):
                shutil.rmtree(left)

        def finish() -> None:
            about = {"model": self.model, "losses": list(losses)}
            (part / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            before = self._steps()
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
            PipelineError: it cannot be read, or is of another model.
        """

        def unreadable(path: Path) -> str:
            return f"cannot read the checkpoint {str(path)!r} (remove it to start anew)"

        def look() -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
            if not (steps := self._steps()):
                return None
            path = self.folder / f"step-{max(steps)}"
            with _troubles(unreadable(path)):
                about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
                self._require_same(path, about["model"])
                return path, about, checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata

        found = self._once(look)
        if found is None:
            return []
        path, about, listed = found
        self._make_room(listed)
        with _troubles(unreadable(path)):
            checkpoint.load(self._tensors(), checkpoint_id=path, **self._ranks())
        losses: list[float] = about["losses"]
        return losses

    def _steps(self) -> list[int]:
        """Those of which there is a whole checkpoint."""
        steps = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return [int(step) for step in steps if step.isdecimal()]

    def _require_same(self, path: Path, model: Mapping[str, Any]) -> None:
        other = [name for name in {**model, **self.model} if model.get(name) != self.model.get(name)]
        if other:
            told = " and ".join(f"{name} {model.get(name)}, not {self.model.get(name)}" for name in other)
            raise PipelineError(
                f"the checkpoint {str(path)!r} is of a model with {told}; train that one, or save in another folder"
            )

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


def require_folder(folder: str | os.PathLike[str]) -> None:
    """Return if there can be files in `folder`, which is made if it is not there.

    Raises:
        PipelineError: there cannot.
    """
    try:
        named(folder).mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise PipelineError(f"cannot save in {str(folder)!r}: {error.strerror}; name a folder of yours") from error
    if not writable:
        raise PipelineError(f"cannot save in {str(folder)!r}: permission denied; name a folder of yours")


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
