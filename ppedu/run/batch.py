"""A batch, cut into microbatches: every tensor in it along the dimension of its samples.

Batches nest: tuples, lists and dicts are cut tensor by tensor, as `TensorChunkSpec` of torch.distributed.pipelining
does, and each microbatch has the same form as the whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_structure, tree_unflatten

from ppedu.core.errors import SettingError

# The dimension to cut along, None to give all of a tensor to each microbatch; or these, nested as the batch is.
Dims = Any
ALONE = tree_structure(0)  # the form of a tensor that is not in a nest


@dataclass(frozen=True)
class Batch:
    """`inputs[m]` are microbatch m's positional arguments for the first stage, `keywords[m]` what every stage gets.

    counts: how much each microbatch's targets weigh in the mean loss. sizes: the samples in each microbatch, 0 where
    their number is unknown. What was not given here is empty: inputs and targets are needed on the ranks that hold the
    first stage and the last.
    """

    inputs: Sequence[tuple[Any, ...]]
    keywords: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    counts: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def cut(
        cls,
        inputs: Any,
        targets: Any,
        keywords: Mapping[str, Any],
        microbatches: int,
        dims: Mapping[int | str, Dims] | None = None,
        target_dim: Dims = 0,
        count: Callable[[Any], int] | None = None,
    ) -> Batch:
        """Cut a whole batch into microbatches, as evenly as possible and the larger ones first.

        inputs: one argument or a tuple of arguments. Arguments, keywords and targets are tensors, or tuples, lists and
        dicts that hold tensors at any depth. Each tensor is cut; everything else goes to every microbatch as it is.
        In place of the inputs, of one argument, of a keyword or of the targets, a list is a batch that is cut already:
        it has one entry for each microbatch.
        dims: by an argument's place or name, the dimension to cut along. It is 0 where not given; with None each
        microbatch gets the whole tensor. `dims={0: {"tokens": 1, "mask": None}}` is for an argument that is a dict.
        target_dim: the same for the targets.
        count: how much a microbatch's targets weigh in the mean loss, by default their size along `target_dim`. Where
        some are padding, count the others: `lambda targets: int((targets >= 0).sum())`.

        Raises:
            SettingError: a tensor cannot be cut like this, or a list does not have one entry for each microbatch.
        """
        dims = dims or {}

        def cut(value: Any, name: int | str, dim: Dims, samples: dict[str, int]) -> list[Any]:
            if not isinstance(value, list):
                return _pieces(value, name, dim, microbatches, samples)
            if len(value) != microbatches:
                raise SettingError(
                    f"{_named(name)}: {len(value)} microbatches were given; the schedule has {microbatches}"
                )
            return value

        samples: dict[str, int] = {}  # by tensor
        if inputs is None:
            arguments: list[tuple[Any, ...]] = []
        elif isinstance(inputs, list):
            arguments = [each if isinstance(each, tuple) else (each,) for each in cut(inputs, 0, 0, samples)]
        else:
            several = inputs if isinstance(inputs, tuple) else (inputs,)
            columns = [cut(value, place, dims.get(place, 0), samples) for place, value in enumerate(several)]
            arguments = [tuple(column[m] for column in columns) for m in range(microbatches)]
        named = {name: cut(value, name, dims.get(name, 0), samples) for name, value in keywords.items()}
        each = [{name: values[m] for name, values in named.items()} for m in range(microbatches)]
        if not any(isinstance(leaf, (torch.Tensor, list, type(None))) for leaf in [targets, *tree_leaves(targets)]):
            raise SettingError(
                "targets are a tensor, a tuple or dict of tensors, or a list with those of each microbatch; "
                f"got {type(targets).__name__}"
            )
        wanted = [] if targets is None else cut(targets, "targets", target_dim, {})
        found = [float(count(target)) if count else next(_sizes(target, target_dim), 1) for target in wanted]
        counts = [int(number) for number in found]
        if wanted and (min(counts) < 0 or not sum(counts) or found != counts):
            told = found if found != counts else counts
            raise SettingError(f"the microbatches' targets count {told}; it must be whole numbers, some above 0")
        sizes = []
        for positional, others in zip(arguments or [()] * microbatches, each, strict=True):
            given: list[tuple[int | str, Any]] = [*enumerate(positional), *others.items()]
            sizes.append(next((size for name, value in given for size in _sizes(value, dims.get(name, 0))), 0))
        return cls(arguments, each, wanted, counts, sizes)

    def kinds(self, microbatches: int) -> list[int]:
        """For each microbatch a number above 0 that stands for its shapes and dtypes; 0 where these are unknown."""
        if not self.inputs:
            return [0] * microbatches
        looks = [
            ([*map(_look, each)], {name: _look(named[name]) for name in sorted(named)})
            for each, named in zip(self.inputs, self.keywords, strict=True)
        ]
        return [zlib.crc32(repr(look).encode()) + 1 for look in looks]


def joined(outputs: Sequence[Any], dim: Dims = 0) -> Any:
    """The microbatches' outputs as one batch: each tensor concatenated along `dim`, numbers stacked.

    What is not a tensor comes as a list, with one entry for each microbatch.
    """
    (first, form), *others = (tree_flatten_with_path(each) for each in outputs)
    if any(other != form for _, other in others):
        return list(outputs)
    columns = zip(first, *(leaves for leaves, _ in others), strict=True)
    return tree_unflatten([_join([leaf for _, leaf in column], _dim(dim, column[0][0])) for column in columns], form)


def _join(values: list[Any], dim: int | None) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    return torch.cat(values, dim or 0) if all(value.dim() for value in values) else torch.stack(values)


def _pieces(value: Any, name: int | str, dims: Dims, microbatches: int, samples: dict[str, int]) -> list[Any]:
    """`value` for each microbatch. `samples`: the size of each tensor that was cut so far, all the same."""
    leaves, form = _flat(value)
    columns = []
    for path, leaf in leaves:
        tensor, dim = f"{_named(name)}{keystr(path)}", _dim(dims, path)
        if dim is not None and not isinstance(dim, int):
            raise SettingError(f"the dimension to cut {tensor} along must be a whole number or None; got {dim!r}")
        if dim is None or not isinstance(leaf, torch.Tensor):
            if dim is not None and _holds_tensors(leaf):
                raise SettingError(
                    f"{tensor} is a {type(leaf).__name__}, whose tensors cannot be cut; give them in a dict or tuple"
                    f"{_whole(name)}"
                )
            columns.append([leaf] * microbatches)
            continue
        size = leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else 0
        if size < microbatches:
            raise SettingError(
                f"{tensor} of shape {tuple(leaf.shape)} cannot be cut into {microbatches} microbatches along dimension "
                f"{dim}; give at least {microbatches} samples{_whole(name)}, or take fewer microbatches"
            )
        if leaf.layout != torch.strided:
            raise SettingError(f"{tensor} is sparse and cannot be cut; give to_dense(), or a list of microbatches")
        first, expected = next(iter(samples.items()), (tensor, size))
        if size != expected:
            raise SettingError(
                f"{tensor} has {size} samples along dimension {dim}, {first} has {expected}; give as many{_whole(name)}"
            )
        samples[tensor] = size
        columns.append(list(leaf.tensor_split(microbatches, dim)))
    return [tree_unflatten([column[m] for column in columns], form) for m in range(microbatches)]


def _dim(dims: Dims, path: Sequence[Any]) -> Any:
    """The dimension for the tensor at `path`, where `dims` is one for all or nested like the batch."""
    for step in path:
        place = next(getattr(step, word) for word in ("key", "idx", "name") if hasattr(step, word))
        if isinstance(dims, Mapping):
            dims = dims.get(place, 0)
        elif isinstance(dims, (tuple, list)):
            dims = dims[place] if isinstance(place, int) and place < len(dims) else 0
    return dims


def _sizes(value: Any, dims: Dims) -> Iterator[int]:
    """The size of each tensor in `value` along the dimension that it is cut along."""
    for path, leaf in _flat(value)[0]:
        dim = _dim(dims, path)
        if isinstance(leaf, torch.Tensor) and dim is not None and -leaf.dim() <= dim < leaf.dim():
            yield leaf.shape[dim]


def _flat(value: Any) -> tuple[Sequence[tuple[Any, Any]], Any]:
    """The leaves of `value`, each with its path, and what puts them together again. Fast for a tensor by itself."""
    return ([((), value)], ALONE) if isinstance(value, torch.Tensor) else tree_flatten_with_path(value)


def _holds_tensors(value: Any) -> bool:
    """Does an object that is not a tuple, list or dict hold tensors, which would reach every microbatch uncut?"""
    held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return any(isinstance(each, torch.Tensor) for each in held.values())


def _look(value: Any) -> Any:
    """Shapes, dtypes and types, nested as `value` is."""
    leaves, form = _flat(value)
    looks = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for _, x in leaves]
    return looks[0] if form is ALONE else (looks, form)


def _named(name: int | str) -> str:
    return f"input {name}" if isinstance(name, int) else str(name)


def _whole(name: int | str) -> str:
    return "" if name == "targets" else f", or with dims={{{name!r}: None}} all of it to each"
