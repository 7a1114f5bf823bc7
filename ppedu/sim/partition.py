"""Which layers belong to which stage."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from numbers import Rational

from ppedu.core import SettingError
from ppedu.core.numeric import Number
from ppedu.core.validate import require_count, require_number

MOST_STAGES, MOST_WORK = 100_000, 2_000_000  # work: layers times stages; a few seconds at worst


def evenly(layers: int, stages: int) -> list[range]:
    """Cut `layers` into `stages` consecutive pieces whose lengths differ by at most one, longer ones first.

    Raises:
        SettingError: There are more stages than layers, or more than MOST_STAGES.
    """
    layers, stages = require_count("layers", layers), require_count("stages", stages)
    if stages > layers:
        raise SettingError(
            f"{layers} layers cannot be cut into {stages} stages; take at most {layers} stages, or more layers"
        )
    if stages > MOST_STAGES:
        raise SettingError(f"stages must be at most {MOST_STAGES}; got {stages}")
    short, more = divmod(layers, stages)
    starts = [stage * short + min(stage, more) for stage in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def by_cost(costs: Sequence[Number], stages: int, first: Number = 0, last: Number = 0) -> list[range]:
    """Cut layers with these costs into `stages` consecutive pieces, the heaviest of them as light as possible.

    Of several such cuts, return the one with the least sum of squared weights; of several such, the one with the
    longest first piece, then second piece, and so on. Layers of equal costs are cut as by `evenly`. Costs of 3, 1, 1
    and 1 make 2 pieces of weight 3: range(0, 1) and range(1, 4).

    Args:
        first, last: The additional costs of the first and the last stage, such as those of the embedding and the head.

    Raises:
        SettingError: A cost is negative or not a number, there are more stages than layers, or layers times stages
            are more than MOST_WORK.
    """
    weights = _weights(costs, first, last)
    layers = len(weights)
    stages = len(evenly(layers, stages))  # raises SettingError if there are too many
    if layers * stages > MOST_WORK:
        raise SettingError(f"layers times stages must be at most {MOST_WORK}; got {layers} layers and {stages} stages")
    before = [0, *accumulate(weights)]  # before[layer]: the weight of all layers before it

    def farthest(limit: int) -> list[int]:
        """Return how many layers 0, 1, …, `stages` pieces of at most `limit` hold if each is filled before the next."""
        ends = [0]
        for _ in range(stages):
            ends.append(bisect_right(before, before[ends[-1]] + limit) - 1)
        return ends

    # Find by bisection the least limit with which the pieces hold all layers. It is at least the mean, rounded up.
    limit = max(max(weights), -(-before[-1] // stages))
    enough = limit + max(weights)  # pieces filled up to here weigh at least the mean, all but the last
    while limit < enough:
        middle = (limit + enough) // 2
        if farthest(middle)[-1] == layers:
            enough = middle
        else:
            limit = middle + 1

    # From the last piece to the first: `squares[begin]` is the least sum of squares of the pieces from `begin` on. A
    # piece can begin only where the pieces before it can hold all layers before it.
    squares = {layers: 0}
    ends_of_pieces = []  # for each piece, from its begin to its best end
    for pieces, most in zip(reversed(range(stages)), reversed(farthest(limit)[:-1]), strict=True):
        begins = range(min(most, max(squares) - 1), pieces - 1, -1)
        best = _best_ends(begins, squares, before, limit)
        squares = {begin: (before[end] - before[begin]) ** 2 + squares[end] for begin, end in best.items()}
        ends_of_pieces.append(best)
    starts = [0]
    for end_of in reversed(ends_of_pieces):
        starts.append(end_of[starts[-1]])
    return [range(begin, end) for begin, end in pairwise(starts)]


def _best_ends(begins: range, squares: dict[int, int], before: Sequence[int], limit: int) -> dict[int, int]:
    """Return, for pieces that begin at each of `begins`, the end with the least sum of squares, the last of several.

    The search is a queue of candidates (the convex hull trick): once an end is better than a later one, it stays better
    for all earlier begins, because the square is convex. So each end enters and leaves the queue once.

    Args:
        begins: In descending order.
        squares: For each possible end, the least sum of squares of the pieces after it.
        before: For each layer, the weight of all layers before it.
        limit: The largest weight of a piece.
    """

    def turn(late: int, early: int) -> int:
        """Return the largest `before[begin]` for which the end `early` is better than the end `late`."""
        too_heavy = before[late] - limit - 1  # for a piece that ends at `late`
        apart = before[late] - before[early]
        more = before[late] ** 2 + squares[late] - before[early] ** 2 - squares[early]
        # With x for before[begin], `early` is better if
        # (before[early] - x)² + squares[early] < (before[late] - x)² + squares[late], which is 2 · apart · x < more.
        if not apart:
            return before[late] if more > 0 else too_heavy
        return max(too_heavy, (more - 1) // (2 * apart))

    best: dict[int, int] = {}
    queue: deque[int] = deque()
    turns: deque[int] = deque()  # the turn between each two neighbors in the queue
    upcoming = max(squares)
    for begin in begins:
        while upcoming > begin:
            if upcoming in squares:
                while turns and turns[-1] <= turn(queue[-1], upcoming):
                    queue.pop()
                    turns.pop()
                if queue:
                    turns.append(turn(queue[-1], upcoming))
                queue.append(upcoming)
            upcoming -= 1
        while turns and before[begin] <= turns[0]:
            queue.popleft()
            turns.popleft()
        if before[queue[0]] - before[begin] > limit:
            break  # a piece from here, or from any earlier begin, is too heavy
        best[begin] = queue[0]
    return best


def imbalance(costs: Sequence[Number], pieces: Sequence[range], first: Number = 0, last: Number = 0) -> float:
    """Return by what fraction the heaviest piece exceeds the mean weight: 0 if all are equal, 0.25 if by a quarter.

    Raises:
        SettingError: A cost is negative or not a number, or the pieces are not consecutive or not all layers.
    """
    weights = _weights(costs, first, last)
    require_count("layers", len(weights))
    ranges = isinstance(pieces, Sequence) and all(isinstance(piece, range) and piece for piece in pieces)
    if not ranges or [*chain(*pieces)] != [*range(len(weights))]:
        raise SettingError(f"the pieces must be all of the layers 0 to {len(weights) - 1} in order; got {pieces!r}")
    heaviest = max(sum(weights[layer] for layer in piece) for piece in pieces)
    return float(Fraction(heaviest * len(pieces), sum(weights)) - 1) if heaviest else 0.0


def _weights(costs: Iterable[Number], first: Number, last: Number) -> list[int]:
    """Return the costs as whole multiples of one unit, so that sums are exact.

    `first` and `last` are added to the first and the last layer.
    """
    try:
        each = [first, last, *costs]
    except TypeError:
        raise SettingError(f"costs must be numbers, one for each layer; got {costs!r}") from None
    exact = []
    for cost in each:
        require_number("a cost", cost, lambda cost: 0 <= cost < math.inf, "a number of at least 0")
        exact.append(Fraction(cost if isinstance(cost, Rational) else float(cost)))
    unit = math.lcm(*(cost.denominator for cost in exact))
    begin, end, *weights = [int(cost * unit) for cost in exact]
    if weights:
        weights[0] += begin
        weights[-1] += end
    return weights
