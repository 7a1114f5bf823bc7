"""Checkpoints, from which training resumes: weights and optimizer state, by their names in the whole model.

A checkpoint does not depend on ranks: two ranks can load what four have saved, with another schedule. Each name stands
for one weight: different weights with the same name are refused before anything is written.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from ppedu.core import PipelineError, SettingError
from ppedu.engine.ranks.comm import PipelineGroup
from ppedu.engine.ranks.messages import checksum
from ppedu.engine.ranks.versions import checkpoint_function, offset_of
from ppedu.engine.stages.folder import Folder, one_error, reading
from ppedu.engine.stages.stage import Stage

Values = dict[str, Any]  # tensors, and an optimizer's numbers, by their names in a checkpoint
Answer = TypeVar("Answer")
NUMBERS = (int, float, complex, NoneType)
BY_STAGE = "give Checkpoints the stages as Pipeline takes them, {stage: module}, and names differ by stage"


class _Writer(checkpoint.FileSystemWriter):
    """Writes the file of a rank. An error of the file system is raised as such: torch raises one of its own for it."""

    def write_data(self, *given: Any) -> Any:
        try:
            return super().write_data(*given)
        except Exception as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class Checkpoints:
    """The checkpoints of a training run.

    Random numbers such as dropout's are those of a training without interruption if `Pipeline` has a seed and learns
    the number of the next step: set `pipe.steps = len(losses)` after `load`.

    Args:
        folder: a folder that all ranks can access. The first `load` or `save` locks it, until this object is freed or
            its process ends.
        modules: this rank's stages by number, as `Pipeline` takes them. If two stages have a name in common, all names
            in the checkpoint begin with the stage, as in `stages.3.linear.weight`, and training resumes with the same
            stages, on any ranks. If not, names are those of the whole model, as in the stages that `cut` makes, and
            training resumes with other stages, too. Or modules without numbers, whose names are those of the whole
            model. If several ranks hold a weight, it must be equal on all of them; one of them writes it.
        optimizer: its state is saved, tensors and numbers of each weight; the settings in its `param_groups`, such as
            the learning rate, are not.
        model: the settings that must stay the same when training resumes, such as the model's sizes, as JSON values.
        group: all ranks that train; by default all ranks of the program.
        states: what else training needs to resume, by name, such as {"loss scale": LossScale()}: objects with
            `state_dict` and `load_state_dict`, whose state consists of JSON values and is the same on all ranks.

    Raises:
        SettingError: the optimizer steps a weight that is in none of the modules' state dicts, or a module has state
            that is not a tensor.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        modules: Mapping[int, nn.Module | Stage] | Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        model: Mapping[str, Any],
        group: PipelineGroup | None = None,
        states: Mapping[str, Stateful] | None = None,
    ):
        self.folder, self.optimizer, self.states = Folder(folder, model), optimizer, dict(states or {})
        pairs = modules.items() if isinstance(modules, Mapping) else ((None, module) for module in modules)
        self._modules: list[tuple[int | None, nn.Module]] = [
            (stage, each.module if isinstance(each, Stage) else each) for stage, each in pairs
        ]
        self._prefixes: list[str] = []  # of the names of each module; see `_find_prefixes`
        self.group = PipelineGroup.of(group)
        self._ranks: Any = None if self.group.size == 1 else self.group.channel  # that save and load together
        dicts = [module.state_dict(keep_vars=True) for _, module in self._modules]
        held = {id(value) for each in dicts for value in each.values()}
        # A state dict may hold copies, whose weights are known by their names.
        for (_, module), each in zip(self._modules, dicts, strict=True):
            held |= {id(weight) for name, weight in module.named_parameters(remove_duplicate=False) if name in each}
        for weight in chain(*(each["params"] for each in optimizer.param_groups)):
            if id(weight) not in held:
                raise SettingError(
                    f"the optimizer steps a weight of shape {tuple(weight.shape)} that is in none of the modules' "
                    "state dicts, so a checkpoint would not hold it; give Checkpoints all modules whose weights the "
                    "optimizer steps"
                )
        for name, value in chain(*(each.items() for each in dicts)):
            if not torch.is_tensor(value):
                kind = type(value).__name__
                raise SettingError(f"{name!r} is a {kind}, and a checkpoint holds tensors only; use a buffer for it")

    def save(self, losses: Sequence[float]) -> None:
        """Write the checkpoint after step number `len(losses)`. All ranks must call it.

        The checkpoint before is removed once this one is complete, so that one can be loaded after a kill at any time.

        Raises:
            PipelineError: different weights have the same name, the optimizer has state that a checkpoint cannot hold,
                the checkpoint cannot be written, the folder holds one of this step or a later one, or another run is
                using the folder. On all ranks, and the checkpoint before stays.
        """
        part = self.folder.path / f"step-{len(losses)}.part"
        states = {name: each.state_dict() for name, each in self.states.items()}
        self._on_first(lambda: self.folder.begin(len(losses), states))
        self._find_prefixes()
        values = self._values()
        self._require_complete(values)
        self._require_different_names(values)
        with one_error(f"cannot write the checkpoint {str(part.with_suffix(''))!r}"):
            checkpoint_function("save", self._ranks)(values, storage_writer=_Writer(part))
        self._on_first(lambda: self.folder.finish(part, losses, states))

    def load(self) -> list[float]:
        """Load the newest checkpoint and return its losses; return [] if the folder is empty. All ranks must call it.

        Only load checkpoints that you trust: torch writes a pickle into each, and a pickle can run any code.

        Raises:
            PipelineError: the checkpoint cannot be read, was made with another `model`, or holds other weights than the
                modules; another run is using the folder; or the folder is empty, and `save` would refuse the names of
                the weights. On all ranks.
        """

        def look() -> tuple[Path, list[float], dict[str, Any], dict[str, Any]] | None:
            self.folder.lock()
            if not (found := self.folder.newest()):
                return None
            with reading(found[0]):
                return *found, checkpoint.FileSystemReader(found[0]).read_metadata().state_dict_metadata

        newest = self._on_first(look)
        self._find_prefixes()
        if newest is None:
            self._require_different_names(self._values())
            return []
        path, losses, states, listed = newest
        dicts = [module.state_dict() for _, module in self._modules]
        state = self._empty_state(listed)
        values = self._values(dicts) | {name: value for name, (_, _, value) in state.items()}
        self._require_listed(path, listed, values)
        with reading(path):
            checkpoint_function("load", self._ranks)(values, storage_reader=checkpoint.FileSystemReader(path))
        for (_, module), each in zip(self._modules, dicts, strict=True):
            own = {id(value) for value in chain(module.parameters(), module.buffers())}
            if any(id(value) not in own for value in module.state_dict(keep_vars=True).values()):
                module.load_state_dict(each)  # of copies, or of extra state
        for key, (weight, part, _) in state.items():
            self.optimizer.state[weight][part] = values[key]
        for name in self.states.keys() & states.keys():
            self.states[name].load_state_dict(states[name])
        for name in self.states.keys() ^ states.keys() if self.group.is_first else ():
            holder = f"the checkpoint {str(path)!r}" if name in states else "this run"
            warnings.warn(f"only {holder} has a state of {name!r}, so training resumes without it", stacklevel=2)
        return losses

    def _find_prefixes(self) -> None:
        """Let all names begin with their stage if two stages have a name in common. All ranks must call it.

        Raises:
            PipelineError: two weights of a rank have the same name, or a weight has the name of optimizer state. On all
                ranks.
        """
        states = [(stage, module.state_dict(keep_vars=True)) for stage, module in self._modules]
        own = [(stage, name, id(value)) for stage, state in states for name, value in state.items()]
        stages: defaultdict[str, set[int]] = defaultdict(set)
        names: set[str] = set()
        for rank, rows in enumerate(self._gather(own)):
            values: dict[tuple[int | None, str], int] = {}
            for stage, name, value in rows:
                names.add(name)
                if stage is not None:
                    stages[name].add(stage)
                if values.setdefault((stage, name), value) != value:
                    raise PipelineError(f"rank {rank} holds two weights with the name {name!r}; {BY_STAGE}")
        by_stage = any(len(each) > 1 for each in stages.values())
        for name in () if by_stage else names:  # "optimizer.head.weight.exp_avg" is also state of "head.weight"
            weight, _, part = name.removeprefix("optimizer.").rpartition(".")
            if name.startswith("optimizer.") and weight in names:
                raise PipelineError(
                    f"a checkpoint holds one value with the name {name!r}, which is that of a weight and also that of "
                    f"the {part!r} that an optimizer keeps for {weight!r}; rename the module 'optimizer'"
                )
        self._prefixes = [f"stages.{stage}." if by_stage and stage is not None else "" for stage, _ in self._modules]

    def _weights(self) -> dict[str, nn.Parameter]:
        return {
            prefix + name: weight
            for prefix, (_, module) in zip(self._prefixes, self._modules, strict=True)
            for name, weight in module.named_parameters(remove_duplicate=False)
        }

    def _values(self, dicts: Sequence[Values] | None = None) -> Values:
        """Return the values of a checkpoint by name: weights, buffers and optimizer state. torch loads in place.

        Args:
            dicts: the modules' state dicts, if the caller needs them, too.
        """
        dicts = dicts or [module.state_dict() for _, module in self._modules]
        pairs = zip(self._prefixes, dicts, strict=True)
        values = {prefix + name: value for prefix, each in pairs for name, value in each.items()}
        for name, weight in self._weights().items():
            state = self.optimizer.state.get(weight, {})
            values |= {f"optimizer.{name}.{part}": value for part, value in state.items()}
        return values

    def _empty_state(self, listed: Mapping[str, Any]) -> dict[str, tuple[nn.Parameter, str, Any]]:
        """Return values for the optimizer state in `listed`, which an optimizer does not have before its first step.

        Each comes with its weight and the name of the part, such as "exp_avg".
        """
        weights = {f"optimizer.{name}": weight for name, weight in self._weights().items()}
        state = {}
        for key, entry in listed.items():
            name, _, part = key.rpartition(".")
            if name not in weights:
                continue
            weight = weights[name]
            if not isinstance(entry, TensorStorageMetadata):
                empty: Any = 0
            elif part != "step" and entry.size == weight.shape:  # sharded like its weight
                empty = torch.empty_like(weight, dtype=entry.properties.dtype)
            else:
                device = "cpu" if part == "step" else weight.device  # as in torch's optimizers
                empty = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
            state[key] = weight, part, empty
        return state

    def _require_complete(self, values: Values) -> None:
        """Raise PipelineError on all ranks unless `values` is all state of all ranks. All ranks must call it."""
        kept, weights = (torch.Tensor, *NUMBERS), set(self._weights().values())
        wrong = [
            f"{name!r} is a {type(value).__name__}" for name, value in values.items() if not isinstance(value, kept)
        ]
        wrong += [f"state of {key!r:.60}, not of a weight" for key in self.optimizer.state if key not in weights]
        for rank, sentences in enumerate(self._gather(wrong[:1])):
            for sentence in sentences:
                raise PipelineError(
                    f"the optimizer of rank {rank} holds what a checkpoint cannot: {sentence}; a checkpoint holds a "
                    "weight's tensors and numbers; train with another optimizer, or without checkpoints"
                )

    def _require_different_names(self, values: Values) -> None:
        """Raise PipelineError on all ranks if two ranks hold different values with one name. All ranks must call it.

        Equal tensors with one name may be one weight or several. Saved as one, all of them can be loaded.
        """
        count = Counter(chain(*self._gather([*values])))
        looks = self._gather({name: _look(value) for name, value in values.items() if count[name] > 1})
        first: dict[tuple[str, Any], tuple[int, Any]] = {}  # by name and offset, a rank that holds it, and its look
        for rank, mine in enumerate(looks):
            for name, (offset, look) in mine.items():
                other, expected = first.setdefault((name, offset), (rank, look))
                if look != expected:
                    raise PipelineError(
                        f"rank {other} and rank {rank} hold different tensors with the name {name!r}, and a checkpoint "
                        f"holds one; if they are weights of two stages, {BY_STAGE}; if they are copies of one weight, "
                        "build them from one seed; slices of one must be DTensors"
                    )

    def _require_listed(self, path: Path, listed: Mapping[str, Any], values: Values) -> None:
        """Raise PipelineError on all ranks unless a checkpoint holds exactly their values. All ranks must call it.

        Args:
            listed: the values in the checkpoint.
        """
        wrong = []
        for name, value in values.items():
            form = _form(value)
            found = _form(listed[name]) if name in listed else None
            if found != form:
                has = f"has {name!r} {found}, not" if found else f"does not have {name!r}"
                wrong.append(f"{has} {form} as on rank {self.group.rank}")
        held: set[str] = set()
        sentences: list[str] = []
        for names, wrong_there in self._gather(([*values], wrong[:1])):
            held.update(names)
            sentences += wrong_there
        sentences += [f"also has {name!r}, which is on none of the ranks" for name in listed if name not in held]
        for sentence in sentences:
            raise PipelineError(
                f"the checkpoint {str(path)!r} {sentence}; resume with the stages and the optimizer with which it was "
                "saved, or save in another folder"
            )

    def _gather(self, value: Answer) -> list[Answer]:
        """Return the value of each rank, on all ranks."""
        values = [value] * self.group.size
        if self.group.size > 1:
            dist.all_gather_object(values, value, self.group.process_group)
        return values

    def _on_first(self, do: Callable[[], Answer]) -> Answer:
        """Call `do` on the first rank only, and return its result, or raise its error, on all ranks."""
        answer: list[Any] = [None]
        if self.group.is_first:
            try:
                with self.folder.using():
                    answer = [do()]
            except PipelineError as error:
                answer = [error]
        if self.group.size > 1:
            dist.broadcast_object_list(answer, self.group.peer(0), self.group.process_group)
        if isinstance(answer[0], PipelineError):
            raise answer[0]
        return cast(Answer, answer[0])


def _form(value: Any) -> str:
    """Describe what a value, or an entry of a checkpoint, must have in common with the other."""
    if isinstance(value, TensorStorageMetadata):
        return f"of shape {tuple(value.size)} in {value.properties.dtype}"
    return f"of shape {tuple(value.shape)} in {value.dtype}" if torch.is_tensor(value) else "as a number"


def _look(tensor: Any) -> tuple[Any, Any]:
    """Return where in the whole tensor this rank's part begins, and what must be equal if two ranks hold that part."""
    if isinstance(tensor, NUMBERS):
        return (), repr(tensor)
    offset, here = (0,) * tensor.ndim, tensor
    if hasattr(tensor, "to_local"):
        offset, here = offset_of(tensor), tensor.to_local()
    return offset, (tensor.dtype, tuple(tensor.shape), tuple(here.shape), checksum(here))
