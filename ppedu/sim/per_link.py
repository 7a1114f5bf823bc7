"""Costs of messages: one number for every link, or one for each link between two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

from ppedu.core import SettingError
from ppedu.core.numeric import Number

Link = tuple[int, int]  # from a rank, to a rank
LinkCost = Number | Mapping[Link, Number] | Sequence[Sequence[Number]]


class PerLink(dict[Link, Number]):
    """A dict from links to numbers that never changes, so that costs can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def of_links(name: str, cost: Any) -> Any:
    """Return a dict or a square matrix as a PerLink, any other value unchanged. A rank has no link to itself."""
    if isinstance(cost, Mapping):
        for link in cost:
            if not (isinstance(link, tuple) and len(link) == 2 and all(map(_is_rank, link))):
                raise SettingError(
                    f"{name} must have a link as each key, (from_rank, to_rank), such as {{(0, 1): 0.5}}; got {link!r}"
                )
        return PerLink({link: cost[link] for link in sorted(cost) if link[0] != link[1]})
    if isinstance(cost, tuple):
        if not cost or not all(isinstance(row, tuple) and len(row) == len(cost) for row in cost):
            raise SettingError(
                f"{name} must be a number, a dict such as {{(0, 1): 0.5}}, or a square matrix with a row and a column "
                f"for each rank; got {cost!r}"
            )
        links = permutations(range(len(cost)), 2)
        return PerLink({(sender, receiver): cost[sender][receiver] for sender, receiver in links})
    return cost


def of_link(name: str, cost: LinkCost, sender: int, receiver: int) -> Any:
    """Return the cost of a message: 0 from a rank to itself. Raise SettingError if a dict lacks this link."""
    if sender == receiver:
        return 0
    if not isinstance(cost, PerLink):
        return cost
    if (sender, receiver) not in cost:
        raise SettingError(
            f"the {name} has no entry for the link from rank {sender} to rank {receiver}; the schedule uses this link: "
            f"give it a time, such as {{({sender}, {receiver}): 0.5}}, or give one number for all links"
        )
    return cost[sender, receiver]


def each_link(function: Callable[[Any], Any], cost: LinkCost) -> Any:
    """Return the cost with `function` applied to its number, or to the number of each link."""
    if isinstance(cost, PerLink):
        return PerLink({link: function(number) for link, number in cost.items()})
    return function(cost)


def _is_rank(rank: Any) -> bool:
    return isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
