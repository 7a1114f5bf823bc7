"""How long a forward and a backward take together, where one of them computes while the other's messages travel.

`Costs(overlap=…)` is the time of such a pair: a braided block (STP, arXiv 2510.27257), overlapped chunks (DeepSeek-V3,
arXiv 2412.19437, §3.2.1) or Megatron-LM's combined 1F1B. `braid` computes it from their parts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter, le
from typing import Any, NamedTuple

from ppedu.core import SettingError
from ppedu.core.validate import require_count, require_number, require_one_of

Part = tuple[Any, ...]  # a name, a time and where it runs; in the search, all starts, then the ends of both resources


class Braid(NamedTuple):
    """A pair in the order that ends first. Printed, it has a line for what computes and one for what travels.

    Attributes:
        spans: By half, "F" or "B": the name of each part, "compute" or "network", its start and its end.
        times: By the names that they have in `Costs`: the times of the pair, and of F, B, I and W alone on the rank. A
            B hides messages behind its W, an I cannot. They are exact if those of the parts are.
    """

    spans: dict[str, list[tuple[str, str, Any, Any]]]
    times: dict[str, Any]

    def costs(self, layers: int = 1) -> dict[str, Any]:
        """Return times to simulate with: `Costs(**braid.costs())`. `layers`: How many such a rank holds, in turn."""
        return {name: require_count("layers", layers) * time for name, time in self.times.items()}

    def __str__(self) -> str:
        lines = {"compute": [" "] * 98, "network": [" "] * 98}
        for half, spans in self.spans.items():
            for name, where, *span in spans:
                first, last = (int(96 * float(time) / float(self.times["overlap"] or 1) + 0.5) for time in span)
                space = max(0, last - first - 1)
                lines[where][first : first + space] = f"{half} {name}"[:space].ljust(space, "─")
        return "\n".join(f"{where} │{''.join(cells).rstrip()}" for where, cells in lines.items())


def braid(forward: Sequence[Part], backward: Sequence[Part]) -> Braid:
    """Return how long a forward and a backward of different microbatches take as a pair, in the best order of all.

        forward = [("attention", 1), ("dispatch", 1, "network"), ("experts", 1), ("combine", 1, "network")]
        backward = [("combine", 1, "network"), ("experts", 2), ("dispatch", 1, "network"), ("attention", 2)]
        braid(forward, backward).times  # {"forward": 4, "backward": 6, "overlap": 6}

    A rank computes one part at a time, and one at a time is on its network. No part is interrupted.

    Args:
        forward, backward: Their parts in order, each (name, time) or (name, time, where). A part runs on "compute" or
            on the "network". One on "weight" computes the gradients of weights, at any time after the parts before it;
            the other parts of the backward are I. Times are in one unit.

    Raises:
        SettingError: A part is none of these, or there are more than 24 of them.
    """
    f, b = _checked("forward", forward), _checked("backward", backward)
    require_count("the number of parts, such as those of a layer,", len(f) + len(b), 0, 24)  # seconds at most
    spans, time = _best(f, b)
    times = {"forward": _best(f, [])[1], "backward": _best([], b)[1], "overlap": time}
    i = [part for part in b if part[2] != "weight"]
    if i != b:
        times |= {"input": _best([], i)[1], "overlap_input": _best(f, i)[1]}
        times["weight"] = sum(time for _, time, where in b if where == "weight")
    return Braid(spans, times)


def _checked(half: str, parts: Sequence[Part]) -> list[Part]:
    such_as = f'{half} must be a list of parts, such as [("attention", 2), ("all-reduce", 1, "network")]'
    if not isinstance(parts, (list, tuple)) or {*map(type, parts)} - {tuple} or {*map(len, parts)} - {2, 3}:
        raise SettingError(f"{such_as}; got {parts!r}")
    full = [(*part, "compute")[:3] for part in parts]
    for name, time, where in full:
        require_number(f"the time of {name!r}", time, lambda time: 0 <= time < math.inf, "a number of at least 0")
        require_one_of(f"the place of {name!r}", where, ("compute", "network", "weight"))
    return full


def _best(forward: list[Part], backward: list[Part]) -> tuple[dict[str, list[tuple[str, str, Any, Any]]], Any]:
    """Return the spans of the order that ends first, and its end. Parts start as soon as they can, in their order."""
    parts = [*(("F", *part) for part in forward), *(("B", *part) for part in backward)]
    needs: list[int | None] = []  # the part that each waits for
    last: dict[str, int] = {}
    for each, (half, _, _, where) in enumerate(parts):
        needs.append(last.get(half))
        if where != "weight":
            last[half] = each
    fronts: dict[int, list[Part]] = {0: [(0,) * (len(parts) + 2)]}  # by the parts that are done, a bit each
    for _ in parts:
        grown: defaultdict[int, list[Part]] = defaultdict(list)
        for done, orders in fronts.items():
            for each, (need, (*_, time, where)) in enumerate(zip(needs, parts, strict=True)):
                if done >> each & 1 or (need is not None and not done >> need & 1):
                    continue
                resource = -1 if where == "network" else -2
                for order in orders:
                    start = max(order[resource], 0 if need is None else order[need] + parts[need][2])
                    more = [*order]
                    more[each], more[resource] = start, start + time
                    grown[done | 1 << each].append(tuple(more))
        fronts = {done: _earliest(orders, done, needs) for done, orders in grown.items()}
    *starts, computed, sent = min(*fronts.values(), key=lambda order: max(order[-2:]))
    spans: dict[str, list[tuple[str, str, Any, Any]]] = {"F": [], "B": []}
    for start, (half, name, time, where) in zip(starts, parts, strict=True):
        spans[half].append((name, "network" if where == "network" else "compute", start, start + time))
    return spans, max(computed, sent)


def _earliest(orders: list[Part], done: int, needs: list[int | None]) -> list[Part]:
    """Return the orders for which no other is as early in everything that the other parts wait for."""
    awaited = {need for each, need in enumerate(needs) if need is not None and done >> need & ~done >> each & 1}
    times = itemgetter(-2, -1, *awaited)
    kept: list[Part] = []
    for order in sorted(orders, key=times):
        if not any(all(map(le, times(other), times(order))) for other in kept):
            kept.append(order)
    return kept
