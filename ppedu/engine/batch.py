"""Cutting a batch into microbatches, every tensor along the dimension of its samples, and joining their outputs.

Batches nest: tuples, lists and dicts are cut tensor by tensor, as by `TensorChunkSpec` of torch.distributed.pipelining,
and each microbatch has the same structure as the whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from types import NoneType
from typing import Any

import torch

from ppedu.core import SettingError
from ppedu.core.validate import require_count, require_instance
from ppedu.engine.ranks.versions import keystr, tree_flatten_with_path, tree_leaves, tree_structure, tree_unflatten

# The dimension to cut along, or None to give the whole tensor to each microbatch; or these, nested like the batch.
Dims = Any
ALONE = tree_structure(0)  # the structure of a single tensor
PADDING = -100  # the default of `ignore_index` in torch's losses


@dataclass(frozen=True)
class Batching:
    """How a batch is cut into microbatches, and how their losses and outputs are put together.

    Args:
        input_dims: the dimension to cut each input along, by the position of an argument or the name of a keyword; 0
            for those not named. None gives the whole tensor to every microbatch. A nested input takes nested
            dimensions: `input_dims={0: {"tokens": 1, "mask": None}}` is for a first argument that is a dict.
        target_dim: the same for the targets.
        output_dim: the dimension to concatenate outputs along.
        count: `count(targets)` → how much a microbatch counts in the mean loss, a whole number; by default the targets'
            size along `target_dim`. If some targets are padding, count the others: `lambda y: int((y >= 0).sum())`.
        reduction: "mean" if a microbatch's loss is the mean over its targets, "sum" if it is their sum. The batch's
            loss and gradients are then the mean or the sum over the batch, and over all replicas: those of one process.
            The page docs/losses.md says what to write for other losses, such as those of several heads.
        variable_shapes: state the shapes with every activation, because they depend on the data, as where a stage drops
            tokens. Without it, microbatches whose inputs have equal shapes must have equal shapes everywhere. It costs
            a small message more for each activation, and receives are posted when they are needed, not before.
        slices: if the schedule cuts sequences into slices, the tokens of each, such as (512, 256, 256); by default as
            equally long as possible, the longer ones first.

    Raises:
        SettingError: a setting has the wrong type.
    """

    input_dims: Mapping[int | str, Dims] | None = None
    target_dim: Dims = 0
    output_dim: Dims = 0
    count: Callable[[Any], int] | None = None
    reduction: str = "mean"
    variable_shapes: bool = False
    slices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        dims = (int, Mapping, tuple, list, NoneType)
        require_instance("input_dims", self.input_dims, (Mapping, NoneType), "a dict, such as {0: 1} or {'mask': None}")
        require_instance("target_dim", self.target_dim, dims, "a dimension, such as 1, or None")
        require_instance("output_dim", self.output_dim, dims, "a dimension, such as 1")
        require_instance("count", self.count, (Callable, NoneType), "a function of a microbatch's targets")
        require_instance("variable_shapes", self.variable_shapes, bool, "True or False")
        if self.slices is not None:
            require_instance("slices", self.slices, (tuple, list), "the tokens of each slice, such as (512, 256, 256)")
            for tokens in self.slices:
                require_count("the tokens of a slice", tokens)
        if self.reduction not in ["mean", "sum"]:
            raise SettingError(f"reduction must be 'mean' or 'sum'; got {self.reduction!r}")

    def ignores_unevenly(self, targets: Sequence[Any]) -> bool:
        """Return whether the microbatches' targets are padded in unlike parts, and nothing says that padding counts.

        Padding is -100 in whole numbers, which torch's losses ignore by default.
        """
        if self.count or self.reduction == "sum":
            return False
        shares = set()
        for each in targets:
            tensors = [leaf for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)]
            integers = [leaf for leaf in tensors if leaf.dtype in (torch.int64, torch.int32)]
            padding = sum(int((leaf == PADDING).sum()) for leaf in integers)
            numbers = sum(leaf.numel() for leaf in integers)
            shares.add(Fraction(padding, max(1, numbers)))
        return len(shares) > 1

    def input_dim(self, name: int | str) -> Dims:
        return 0 if self.input_dims is None else self.input_dims.get(name, 0)

    def join(self, outputs: Sequence[Any], slices: int = 1) -> Any:
        """Return the microbatches' outputs as one: each tensor concatenated along `output_dim`, scalars stacked.

        Before, each sequence's `slices`, which come in a row, are concatenated along dimension 1. What is not a tensor
        becomes a list with one entry for each microbatch.
        """
        if slices > 1:
            along = replace(self, output_dim=1)
            outputs = [along.join(outputs[first : first + slices]) for first in range(0, len(outputs), slices)]
        pieces = [tree_flatten_with_path(each) for each in outputs]
        first, form = pieces[0]
        if any(other != form for _, other in pieces):
            return list(outputs)
        joined: list[Any] = []
        for number, (path, _) in enumerate(first):
            values = [leaves[number][1] for leaves, _ in pieces]
            if not all(isinstance(value, torch.Tensor) for value in values):
                joined.append(values)
            elif all(value.dim() for value in values):
                joined.append(torch.cat(values, _dim(self.output_dim, path) or 0))
            else:
                joined.append(torch.stack(values))
        return tree_unflatten(joined, form)


@dataclass(frozen=True)
class Batch:
    """A batch, cut into microbatches.

    Args:
        inputs: each microbatch's positional arguments for the first stage; empty if not given here.
        keywords: each microbatch's keyword arguments, for every stage.
        targets: each microbatch's, for the loss; empty if not given here.
        counts: how much each microbatch counts in the mean loss.
        sizes: each microbatch's samples; 0 where unknown.
        stage_keywords: each microbatch's further keyword arguments for a stage, by stage.
    """

    inputs: Sequence[tuple[Any, ...]]
    keywords: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    counts: Sequence[int]
    sizes: Sequence[int]
    stage_keywords: Mapping[int, Sequence[Mapping[str, Any]]]

    @classmethod
    def cut(
        cls,
        inputs: Any,
        targets: Any,
        keywords: Mapping[str, Any],
        microbatches: int,
        batching: Batching = Batching(),
        stage_keywords: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> Batch:
        """Cut a whole batch into microbatches, as evenly as possible and the larger ones first.

        Arguments, keywords and targets are tensors, or tuples, lists and dicts that hold tensors at any depth. Each
        tensor is cut; anything else goes to every microbatch as it is. A list in place of the inputs, an argument, a
        keyword or the targets is already cut: it has one entry for each microbatch.

        Args:
            inputs: one argument, or a tuple of arguments.

        Raises:
            SettingError: a tensor cannot be cut like this, or a list does not have one entry for each microbatch.
        """

        samples: dict[str, int] = {}  # in each tensor that has been cut

        def cut(name: int | str, value: Any) -> list[Any]:
            return _pieces(value, name, batching.input_dim(name), microbatches, samples)

        def cut_named(keywords: Mapping[str, Any]) -> list[dict[str, Any]]:
            named = {name: cut(name, value) for name, value in keywords.items()}
            return [{name: values[m] for name, values in named.items()} for m in range(microbatches)]

        if inputs is None:
            arguments: list[tuple[Any, ...]] = []
        elif isinstance(inputs, list):
            arguments = [each if isinstance(each, tuple) else (each,) for each in cut(0, inputs)]
        else:
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            columns = [cut(position, value) for position, value in enumerate(given)]
            arguments = list(zip(*columns, strict=True)) if columns else [()] * microbatches
        named_pieces = cut_named(keywords)
        by_stage = {} if stage_keywords is None else stage_keywords
        if not isinstance(by_stage, Mapping) or not all(isinstance(each, Mapping) for each in by_stage.values()):
            raise SettingError(
                f"stage_kwargs must be a dict of keywords for each stage, {{3: {{…}}}}; got {stage_keywords!r}"
            )
        stage_pieces = {stage: cut_named(named) for stage, named in by_stage.items()}
        held = any(isinstance(leaf, (torch.Tensor, NoneType)) for leaf in tree_leaves(targets))
        if not (held or targets is None or isinstance(targets, list)):
            raise SettingError(
                "targets must be a tensor, a tuple or dict of tensors, or a list with those of each microbatch; "
                f"got {type(targets).__name__}"
            )
        pieces = [] if targets is None else _pieces(targets, "targets", batching.target_dim, microbatches, {})
        sizes = [_samples(arguments[m] if arguments else (), named_pieces[m], batching) for m in range(microbatches)]
        return cls(arguments, named_pieces, pieces, _counts(pieces, batching), sizes, stage_pieces)

    def sliced(self, slices: int, batching: Batching) -> Batch:
        """Return the batch with slices of its sequences in place of its microbatches, in their order.

        Tensors of inputs and targets with two dimensions or more are cut along dimension 1, their tokens. Keywords go
        to every slice as they are. By default, a slice counts as its targets' samples times its tokens.

        Raises:
            SettingError: the sequences cannot be cut like this, or a target has no tokens.
        """
        if batching.slices is not None and len(batching.slices) != slices:
            raise SettingError(
                f"Batching(slices=…) gives the tokens of {len(batching.slices)} slices, but the schedule has {slices}"
            )

        def each(values: Sequence[Any], name: str) -> list[Any]:
            return [part for value in values for part in _slices(value, name, slices, batching.slices)]

        def whole(values: Sequence[Any]) -> list[Any]:
            return [value for value in values for _ in range(slices)]

        inputs, targets = each(self.inputs, "inputs"), each(self.targets, "targets")
        counts = _counts(targets, batching)
        if batching.count is None:
            counts = [count * _size(target, 1, default=1) for count, target in zip(counts, targets, strict=True)]
        stage_keywords = {stage: whole(named) for stage, named in self.stage_keywords.items()}
        return Batch(inputs, whole(self.keywords), targets, counts, whole(self.sizes), stage_keywords)

    def kinds(self, microbatches: int) -> list[int]:
        """Return a number above 0 for each microbatch, which stands for its shapes and dtypes; 0 if unknown here."""
        if not self.inputs:
            return [0] * microbatches
        found = []
        for arguments, named in zip(self.inputs, self.keywords, strict=True):
            looks = [_look(value) for value in arguments]
            named_looks = [(name, _look(named[name])) for name in sorted(named)]
            found.append(_kind(*looks, *named_looks))
        return found


def _counts(targets: Sequence[Any], batching: Batching) -> list[int]:
    """Return how much each microbatch's targets count in the mean loss."""
    count = batching.count or (lambda target: _size(target, batching.target_dim, default=1))
    found = [float(count(target)) for target in targets]
    counts = [int(number) for number in found]
    if targets and (min(counts) < 0 or not sum(counts) or found != counts):
        raise SettingError(
            f"the microbatches' targets count {counts if found == counts else found}; Batching(count=…) must return "
            "whole numbers, at least one of them above 0; leave out a batch in which no target counts"
        )
    return counts


def _samples(arguments: Sequence[Any], keywords: Mapping[str, Any], batching: Batching) -> int:
    """Return the number of samples in a microbatch, taken from its first tensor, or 0 if it has no tensor."""
    inputs: list[tuple[int | str, Any]] = [*enumerate(arguments), *keywords.items()]
    for name, value in inputs:
        if size := _size(value, batching.input_dim(name)):
            return size
    return 0


def _pieces(value: Any, name: int | str, dims: Dims, microbatches: int, samples: dict[str, int]) -> list[Any]:
    """Return the piece of `value` for each microbatch.

    Args:
        samples: the size of each tensor that has been cut so far, by name. All are equal; the tensors in `value` are
            added.
    """
    named = f"input {name}" if isinstance(name, int) else name
    if isinstance(value, list):
        if len(value) != microbatches:
            raise SettingError(
                f"{named} is a list of {len(value)} microbatches, but the schedule has {microbatches}; give "
                "one entry for each, or a whole tensor to cut"
            )
        return value
    or_whole = f", or all of it to each microbatch with Batching(input_dims={{{name!r}: None}})"
    if name == "targets":
        or_whole = ""
    leaves, form = _flat(value)
    columns = []
    for path, leaf in leaves:
        tensor, dim = f"{named}{keystr(path)}", _dim(dims, path)
        if dim is not None and not isinstance(dim, int):
            raise SettingError(f"the dimension to cut {tensor} along must be a whole number or None; got {dim!r}")
        if dim is None or not isinstance(leaf, torch.Tensor):
            if dim is not None and _holds_tensors(leaf):
                raise SettingError(
                    f"{tensor} is a {type(leaf).__name__}, whose tensors cannot be cut; give them in a dict or tuple"
                    f"{or_whole}"
                )
            columns.append([leaf] * microbatches)
            continue
        size = leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else 0
        if size < microbatches:
            raise SettingError(
                f"{tensor} of shape {tuple(leaf.shape)} cannot be cut into {microbatches} microbatches along dimension "
                f"{dim}; give at least {microbatches} samples{or_whole}, or use fewer microbatches"
            )
        if leaf.layout != torch.strided:
            raise SettingError(f"{tensor} is sparse and cannot be cut; give to_dense(), or a list of microbatches")
        first, expected = next(iter(samples.items()), (tensor, size))  # the first tensor that was cut, or this one
        if size != expected:
            raise SettingError(
                f"{tensor} has {size} samples along dimension {dim}, but {first} has {expected}; "
                f"give the same number{or_whole}"
            )
        samples[tensor] = size
        columns.append(list(leaf.tensor_split(microbatches, dim)))
    if form is ALONE:
        return columns[0]
    return [tree_unflatten([column[m] for column in columns], form) for m in range(microbatches)]


def _slices(value: Any, name: str, slices: int, lengths: Sequence[int] | None) -> list[Any]:
    """Return a microbatch's inputs or targets for each slice of its sequences, of these lengths or about equal."""
    leaves, form = _flat(value)
    columns = []
    for path, leaf in leaves:
        tensor = f"{name}{keystr(path)}"
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
            if name == "targets" and isinstance(leaf, torch.Tensor):
                raise SettingError(
                    f"{tensor} of shape {tuple(leaf.shape)} has no tokens, but the schedule cuts sequences into "
                    "slices; give targets of shape (batch, tokens, …)"
                )
            columns.append([leaf] * slices)
            continue
        tokens = leaf.shape[1]
        if tokens < slices or (lengths is not None and tokens != sum(lengths)):
            wanted = f"slices of {', '.join(map(str, lengths))}" if lengths else f"{slices} slices"
            raise SettingError(f"{tensor} has {tokens} tokens, in dimension 1, which cannot be cut into {wanted}")
        columns.append([*(leaf.split(list(lengths), 1) if lengths else leaf.tensor_split(slices, 1))])
    return [tree_unflatten([column[position] for column in columns], form) for position in range(slices)]


def _dim(dims: Dims, path: Sequence[Any]) -> Any:
    """Return the dimension for the tensor at `path`; `dims` is one for all tensors, or nested like the batch.

    With dims {"tokens": 1, "masks": (None, 2)}, it is 1 at ["tokens"], 2 at ["masks"][1], and 0 at ["other"].
    """
    for step in path:  # torch's MappingKey, SequenceKey or GetAttrKey
        place = next(getattr(step, word) for word in ("key", "idx", "name") if hasattr(step, word))
        if isinstance(dims, Mapping):
            dims = dims.get(place, 0)
        elif isinstance(dims, (tuple, list)):
            dims = dims[place] if isinstance(place, int) and place < len(dims) else 0
    return dims


def _size(value: Any, dims: Dims, default: int = 0) -> int:
    """Return the size of the first tensor in `value` along the dimension that it is cut along."""
    for path, leaf in _flat(value)[0]:
        dim = _dim(dims, path)
        if isinstance(leaf, torch.Tensor) and dim is not None and -leaf.dim() <= dim < leaf.dim():
            return int(leaf.shape[dim])
    return default


def _flat(value: Any) -> tuple[Sequence[tuple[Any, Any]], Any]:
    """Return the leaves of `value`, each with its path, and its structure. Fast for a single tensor."""
    return ([((), value)], ALONE) if isinstance(value, torch.Tensor) else tree_flatten_with_path(value)


def _holds_tensors(value: Any) -> bool:
    """Return whether an object other than a tuple, list or dict holds tensors, which could not be cut."""
    held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return any(isinstance(each, torch.Tensor) for each in held.values())


def _look(value: Any) -> Any:
    """Return a hashable value that stands for the shapes, dtypes and types in `value`, and for its structure."""
    leaves, form = _flat(value)
    looks = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x) for _, x in leaves]
    return looks[0] if form is ALONE else repr((looks, form))


@cache  # a training run has few different looks, and a step needs one for each microbatch
def _kind(*looks: Any) -> int:
    """Return a number above 0 for the looks of a microbatch's inputs, the same on all ranks."""
    return zlib.crc32(repr(looks).encode()) + 1
