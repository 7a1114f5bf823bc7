"""Slices of sequences: when a plan tries them, how many and how long, and the pieces of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ppedu.core import SettingError
from ppedu.planning.machine import Machine
from ppedu.planning.model import Model
from ppedu.planning.pieces import SIZES, TIMES, Pieces
from ppedu.sim.lengths import part_of_time

COUNTS = 2, 4, 8, 16
LONG = 32_768  # tokens of a sequence; in shorter ones, attention and activations are a small part of a microbatch
# Tokens of a slice on each GPU: at least, on average, for it would be idle between the kernels of fewer; and a multiple
# of these.
SHORTEST, STEP = 1024, 128


def sliced(
    model: Model | Pieces,
    machine: Machine,
    pieces: Pieces,
    sequence: int | None,
    batch: int,
    split: dict[str, Any],
    asked: Sequence[str],
) -> dict[int, list[Pieces]]:
    """Return the pieces of each slice of a sequence, by the numbers of slices that a plan tries.

    It tries them if sequences are long, or if the caller has asked for schedules with slices.

    Args:
        pieces: Those of whole sequences, timed.

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
    counts = [count for count in COUNTS if sequence >= count * SHORTEST * pieces.context]
    if asked and not counts:
        raise SettingError(
            f"{asked[0]!r} cuts sequences into slices of at least {SHORTEST} tokens on each GPU, and a GPU has "
            f"{sequence // pieces.context} tokens of a sequence; leave it out"
        )
    if not counts or (not asked and sequence < LONG):
        return {}
    half = model.pieces(sequence // 2, batch, **split).timed(machine)
    return {
        count: [
            model.pieces(end - begin, batch, past=begin, **split).timed(machine)
            for begin, end in pairwise(_even(pieces, half, sequence, count))
        ]
        for count in counts
    }


def _even(whole: Pieces, half: Pieces, sequence: int, count: int) -> list[int]:
    """Return where slices begin and end that take about equally long, as in Seq1F1B (arXiv 2406.03488).

    The first x tokens take a·x + b·x², because they attend to those before them. Layers of whole sequences, and of
    their first halves, say which a and b.
    """
    long, short = (float(sum(each.forward + each.backward for each in row.pieces[1:-1])) for row in (whole, half))
    bent = max(0, 2 - 4 * short / long)  # the part of b·x² in whole sequences
    step = STEP * whole.context
    parts = (part_of_time(number / count, bent) for number in range(count))
    return [*(round(part * sequence / step) * step for part in parts), sequence]


def mean(slices: Sequence[Pieces]) -> Pieces:
    """Return the pieces of the mean of slices."""
    if len(slices) == 1:
        return slices[0]
    names = (*TIMES, *SIZES, "keys")
    rows = [
        replace(of_slices[0], **{name: _mean(getattr(piece, name) for piece in of_slices) for name in names})
        for of_slices in zip(*(each.pieces for each in slices), strict=True)
    ]
    message, restored = _mean(each.message for each in slices), max(each.restored for each in slices)
    return replace(slices[0], pieces=tuple(rows), message=message, restored=restored)


def _mean(numbers: Iterable[Any]) -> Any:
    every = [*numbers]
    return sum(every) / len(every)
