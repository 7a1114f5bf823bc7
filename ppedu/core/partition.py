"""Which layers belong to which stage."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, chain, combinations, pairwise
from numbers import Rational, Real

from ppedu.core.errors import SettingError, require_count
from ppedu.core.timeline import Number


def evenly(layers: int, stages: int) -> list[range]:
    """`layers` cut into `stages` consecutive pieces whose lengths differ by at most one, longer ones first.

    Raises:
        SettingError: there are more stages than layers.
    """
    require_count("layers", layers)
    require_count("stages", stages)
    if stages > layers:
        raise SettingError(
            f"{layers} layers cannot be cut into {stages} stages; take at most {layers} stages, or more layers"
        )
    short, more = divmod(layers, stages)
    starts = [stage * short + min(stage, more) for stage in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def by_cost(costs: Sequence[Number], stages: int, first: Number = 0, last: Number = 0) -> list[range]:
    """Layers with these costs cut into `stages` consecutive pieces, the heaviest of them as light as can be.

    Among such cuts it is the most even one (the least sum of squares), and among these the one whose first
    piece is longest, then whose second, and so on. Layers of equal costs are cut as by `evenly`.

    first, last: what the first and the last stage do besides, such as the embedding and the head.

    Raises:
        SettingError: a cost is negative or not a number, or there are more stages than layers.
    """
    weights = _weights(costs, first, last)
    layers = len(weights)
    evenly(layers, stages)  # refuses what does not fit
    before = [0, *accumulate(weights)]  # before[layer]: the weight of all layers before it

    def enough(limit: int) -> bool:
        """Whether pieces of at most `limit`, filled one after the other, hold all layers."""
        end = 0
        for _ in range(stages):
            end = bisect_right(before, before[end] + limit) - 1
        return end == layers

    weighs = sorted({before[end] - before[begin] for begin, end in combinations(range(layers + 1), 2)})
    limit = weighs[bisect_left(weighs, True, key=enough)]

    # From the last piece to the first: the least sum of squares if the layers from `begin` on are so many pieces.
    squares, ends = {layers: 0}, []
    for _ in range(stages):
        best: dict[int, tuple[int, int]] = {}
        for begin in range(layers):
            for end in range(begin + 1, layers + 1):
                weight = before[end] - before[begin]
                if weight > limit:
                    break
                if end in squares:
                    choice = weight**2 + squares[end], -end
                    best[begin] = min(best.get(begin, choice), choice)
        squares = {begin: least for begin, (least, _) in best.items()}
        ends.append({begin: -end for begin, (_, end) in best.items()})
    starts = [0]
    for end_of in reversed(ends):
        starts.append(end_of[starts[-1]])
    return [range(begin, end) for begin, end in pairwise(starts)]


def imbalance(costs: Sequence[Number], pieces: Sequence[range], first: Number = 0, last: Number = 0) -> float:
    """How much heavier the heaviest piece is than the mean: 0 when all are alike, 0.25 when it is a quarter more.

    Raises:
        SettingError: a cost is negative or not a number, or the pieces are not all layers in their order.
    """
    weights = _weights(costs, first, last)
    require_count("layers", len(weights))
    ranges = isinstance(pieces, Sequence) and all(isinstance(piece, range) and piece for piece in pieces)
    if not ranges or [*chain(*pieces)] != [*range(len(weights))]:
        raise SettingError(f"the pieces must be all of the layers 0 to {len(weights) - 1} in order; got {pieces!r}")
    heaviest = max(sum(weights[layer] for layer in piece) for piece in pieces)
    return float(Fraction(heaviest * len(pieces), sum(weights)) - 1) if heaviest else 0.0


def _weights(costs: Iterable[Number], first: Number, last: Number) -> list[int]:
    """The costs as whole numbers in one unit, so that sums are exact; `first` and `last` are added to their layers."""
    if not isinstance(costs, Iterable):
        raise SettingError(f"costs must be numbers, one for each layer; got {costs!r}")
    exact = []
    for cost in [first, last, *costs]:
        if isinstance(cost, bool) or not isinstance(cost, Real) or not 0 <= cost < math.inf:
            raise SettingError(f"a cost must be a number of at least 0; got {cost!r}")
        exact.append(Fraction(cost if isinstance(cost, Rational) else float(cost)))
    unit = math.lcm(*(cost.denominator for cost in exact))
    begin, end, *weights = [int(cost * unit) for cost in exact]
    if weights:
        weights[0] += begin
        weights[-1] += end
    return weights
