"""Slices of sequences: when a plan tries them, how many, and the pieces of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ppedu.core import SettingError
from ppedu.core.numeric import ratio
from ppedu.planning.machine import Machine
from ppedu.planning.model import Model
from ppedu.planning.pieces import TIMES, Pieces

COUNTS = 2, 4, 8, 16
LONG = 32_768  # tokens of a sequence; in shorter ones, attention and activations are a small part of a microbatch
SHORTEST = 1024  # tokens of a slice on each GPU, which would be idle between the kernels of fewer


def sliced(
    model: Model | Pieces,
    machine: Machine,
    sequence: int | None,
    batch: int,
    context: int,
    split: dict[str, Any],
    asked: Sequence[str],
) -> dict[int, list[Pieces]]:
    """Return the pieces of each slice of a sequence, by the numbers of equal slices that a plan tries.

    It tries them if sequences are long, or if the caller has asked for schedules with slices.

    Raises:
        SettingError: The caller has asked, and the model or its sequences cannot be cut.
    """
    if not isinstance(model, Model) or not model.flash or sequence is None:
        if asked:
            raise SettingError(
                f"{asked[0]!r} cuts sequences into slices, and pieces do not say how much of them is attention, which "
                "takes longer in later slices; give the model by its sizes, with flash=True"
            )
        return {}
    counts = [count for count in COUNTS if sequence % count == 0 and sequence // count >= SHORTEST * context]
    if asked and not counts:
        raise SettingError(
            f"{asked[0]!r} cuts sequences into {', '.join(map(str, COUNTS))} equal slices of at least {SHORTEST} "
            f"tokens on each GPU, and a GPU has {sequence // context} tokens of a sequence; leave it out"
        )
    if not asked and sequence < LONG:
        return {}
    return {
        count: [
            model.pieces(sequence // count, batch, past=past, **split).timed(machine)
            for past in range(0, sequence, sequence // count)
        ]
        for count in counts
    }


def mean(slices: Sequence[Pieces]) -> Pieces:
    """Return the pieces of slices that all take the mean of these times. They differ in their times alone."""
    if len(slices) == 1:
        return slices[0]
    of_slices = zip(*(each.pieces for each in slices), strict=True)
    rows = [
        replace(row[0], **{name: sum(getattr(piece, name) for piece in row) / len(row) for name in TIMES})
        for row in of_slices
    ]
    return replace(slices[0], pieces=tuple(rows))


def equal(pieces: Pieces, count: int) -> Pieces:
    """Return the pieces of one of `count` slices that all take the same part of a microbatch's times and bytes."""
    if count == 1:
        return pieces
    names = (*TIMES, "activation", "logits", "freed")
    rows = [replace(each, **{name: ratio(getattr(each, name), count) for name in names}) for each in pieces.pieces]
    return replace(pieces, pieces=tuple(rows), message=ratio(pieces.message, count))
