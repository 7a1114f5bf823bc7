"""A batch, cut into microbatches: each argument along the dimension that its samples lie in."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from ppedu.core.errors import SettingError

Dims = Mapping[int | str, int | None]


@dataclass(frozen=True)
class Batch:
    """`inputs[m]` are microbatch m's positional arguments for the first stage, `keywords[m]` what every stage gets.

    `shares[m]` is the part of the batch that microbatch m is. What was not given here is empty: inputs and targets
    are needed on the ranks that hold the first stage and the last.
    """

    inputs: Sequence[tuple[Any, ...]]
    keywords: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    shares: Sequence[Fraction]

    @classmethod
    def cut(
        cls,
        inputs: Any,
        targets: Any,
        keywords: Mapping[str, Any],
        microbatches: int,
        dims: Dims | None = None,
        target_dim: int = 0,
        count: Callable[[Any], int] | None = None,
    ) -> Batch:
        """Cut a whole batch as evenly as it goes, larger microbatches first; a list is taken to be cut already.

        inputs: a tensor, a tuple of arguments, or a list with one of these for each microbatch. targets: a tensor, or
        a list of anything, one for each. dims: by an argument's place or name, the dimension to cut along, 0 if it is
        not there; None gives all of it to each microbatch, as is anything that is no tensor.
        count: how much a microbatch's targets weigh in the mean loss, by default their size along `target_dim`. Where
        some are padding, count the others: `lambda targets: int((targets >= 0).sum())`.

        Raises:
            SettingError: the batch cannot be cut so, or the microbatches given are not as many.
        """
        dims = dims or {}
        samples: dict[int | str, int] = {}  # by argument

        def cut(value: Any, name: int | str, dim: int | None) -> list[Any]:
            if isinstance(value, list):
                if len(value) != microbatches:
                    raise SettingError(
                        f"{_named(name)}: {len(value)} microbatches were given; the schedule has {microbatches}"
                    )
                return value
            if dim is None or not isinstance(value, torch.Tensor):
                return [value] * microbatches
            size = value.shape[dim] if -value.dim() <= dim < value.dim() else 0
            whole = "" if name == "targets" else f", or with dims={{{name!r}: None}} all of it to each"
            if size < microbatches:
                raise SettingError(
                    f"{_named(name)} of shape {tuple(value.shape)} cannot be cut into {microbatches} microbatches "
                    f"along dimension {dim}; give at least {microbatches} samples{whole}, or take fewer microbatches"
                )
            if name != "targets":  # which may be tokens, where the inputs are sequences
                first, as_many = next(iter(samples.items()), (name, size))
                if size != as_many:
                    raise SettingError(
                        f"{_named(name)} has {size} samples along dimension {dim}, {_named(first)} has {as_many}; "
                        f"give as many{whole}"
                    )
                samples[name] = size
            return list(value.tensor_split(microbatches, dim))

        if inputs is None:
            arguments: list[tuple[Any, ...]] = []
        elif isinstance(inputs, list):
            arguments = [each if isinstance(each, tuple) else (each,) for each in cut(inputs, 0, None)]
        else:
            several = inputs if isinstance(inputs, tuple) else (inputs,)
            columns = [cut(value, place, dims.get(place, 0)) for place, value in enumerate(several)]
            arguments = list(zip(*columns, strict=True))
        named = {name: cut(value, name, dims.get(name, 0)) for name, value in keywords.items()}
        each = [{name: values[m] for name, values in named.items()} for m in range(microbatches)]
        if not isinstance(targets, (torch.Tensor, list, type(None))):
            raise SettingError(
                f"targets are a tensor, or a list with those of each microbatch; got {type(targets).__name__}"
            )
        wanted = [] if targets is None else cut(targets, "targets", target_dim)
        found = [float(count(target)) if count else _size(target, target_dim) for target in wanted]
        counts = [int(each) for each in found]
        if wanted and (min(counts) < 0 or not sum(counts) or found != counts):
            told = found if found != counts else counts
            raise SettingError(f"the microbatches' targets count {told}; it must be whole numbers, some above 0")
        return cls(arguments, each, wanted, [Fraction(number, sum(counts)) for number in counts])

    def kinds(self, microbatches: int) -> list[int]:
        """For each microbatch a number above 0 that says what it looks like; 0 where that is not known here."""
        if not self.inputs:
            return [0] * microbatches
        looks = [
            [*map(_look, each), *((name, _look(value)) for name, value in sorted(named.items()))]
            for each, named in zip(self.inputs, self.keywords, strict=True)
        ]
        return [zlib.crc32(repr(look).encode()) + 1 for look in looks]


def _look(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _size(target: Any, dim: int) -> int:
    return int(target.shape[dim]) if isinstance(target, torch.Tensor) and target.dim() else 1


def _named(name: int | str) -> str:
    return f"input {name}" if isinstance(name, int) else str(name)
