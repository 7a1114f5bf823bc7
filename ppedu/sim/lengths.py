"""Lengths of slices: the part of a sequence's time that each takes, and slices that take equally long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt
from typing import NamedTuple

from ppedu.core import SettingError
from ppedu.core.numeric import Number, plural, ratio
from ppedu.core.validate import require_count, require_number


class Share(NamedTuple):
    """The part of a sequence's tokens that is in a slice, and the part of its attention: all slices add up to 1."""

    tokens: Number
    attention: Number


def shares_of(lengths: Sequence[Number], slices: int) -> list[Share]:
    """Return the share of each slice; without `lengths`, of equally long ones.

    A token attends to those before it, so the first part c of a sequence has c² of its attention.

    Raises:
        SettingError: There is not one length for each slice.
    """
    if lengths and len(lengths) != slices:
        raise SettingError(
            f"{plural(len(lengths), 'length')} for sequences of {plural(slices, 'slice')}; give {slices}, one for "
            "each, or leave out lengths"
        )
    lengths = lengths or (1,) * slices
    total = sum(lengths)
    ends = [ratio(end, total) for end in accumulate(lengths, initial=0)]
    return [Share(end - start, end**2 - start**2) for start, end in pairwise(ends)]


def part_of_time(time: Number, attention: Number) -> float:
    """Return the part of a sequence, from its beginning, that takes the part `time` of its time, both 0 to 1.

    The first part c takes (1 - attention)·c + attention·c², which is solved for c.
    """
    linear = 1 - attention
    return 2 * time / (linear + sqrt(linear**2 + 4 * attention * time)) if time else 0.0


def equal_time_slices(tokens: int, slices: int, attention: Number) -> tuple[int, ...]:
    """Return lengths of slices, in whole tokens, that take as equally long as these can: later ones are shorter.

        equal_time_slices(131072, 4, attention=0.5)  # (47976, 33031, 26849, 23216)

    Seq1F1B (arXiv 2406.03488) and SGLang cut in this way; see `part_of_time`. Pass them to `Costs(lengths=…)`.

    Args:
        tokens: In the whole sequence.
        attention: The part of a whole sequence's time that is attention, 0 to 1, as in `Costs`.

    Raises:
        SettingError: There are fewer tokens than slices, or a number is not suitable.
    """
    tokens, slices = require_count("tokens", tokens), require_count("slices", slices)
    require_number("attention", attention, lambda part: 0 <= part <= 1, "a part of the time, 0 to 1")
    if slices > tokens:
        raise SettingError(f"{plural(tokens, 'token')} cannot be cut into {slices} slices; take at most {tokens}")
    cuts = [0]
    for cut in range(1, slices):
        place = round(tokens * part_of_time(cut / slices, attention))
        cuts.append(min(max(place, cuts[-1] + 1), tokens - (slices - cut)))  # no slice is empty
    return tuple(end - start for start, end in pairwise([*cuts, tokens]))
