"""Orders written as text: ours, torch's and Megatron-LM's."""

from __future__ import annotations

import re
from collections import Counter

from ppedu.core import ParseError

# A rank's order in what `print(schedule.pipeline_order)` shows in PyTorch: 0: [0F0, None, 0B0]
TORCH = re.compile(r"(\d+)\s*:\s*\[([^\]]*)\]")


def rows(text: str) -> list[str]:
    """Return a line of CSV for each rank.

    text: A line for each rank, with actions between commas or spaces, or with Megatron-LM's numbers: 2 is the forward
        of the rank's second chunk for its next microbatch, and -2 the backward. Or torch's orders by rank.

    Raises:
        ParseError: torch's ranks are not 0, 1, 2 …, or Megatron-LM's numbers have a 0.
    """
    if text.lstrip().startswith(("{", "defaultdict")):
        found = {int(rank): order for rank, order in TORCH.findall(text)}
        if [*found] != [*range(len(found))]:
            raise ParseError(f"torch's orders are for ranks 0, 1, 2 …; got {', '.join(map(str, found))}")
        lines = [
            " ".join(each for each in order.replace(",", " ").split() if each != "None") for order in found.values()
        ]
    else:
        lines = [line for line in re.sub(r"[·,\[\]]", " ", text).splitlines() if line.strip()]
    orders = [line.split() for line in lines]
    if orders and all(re.fullmatch(r"-?\d+", each) for order in orders for each in order):
        orders = [_megatron(rank, len(orders), [int(each) for each in order]) for rank, order in enumerate(orders)]
    return [",".join(order) for order in orders]


def _megatron(rank: int, ranks: int, order: list[int]) -> list[str]:
    """Return the actions of a rank's order in Megatron-LM's numbers, which leave out the microbatches."""
    if 0 in order:
        raise ParseError("Megatron-LM's chunks are 1, 2 … forward and -1, -2 … backward; got 0")
    seen: Counter[int] = Counter()
    actions = []
    for number in order:
        actions.append(f"{(abs(number) - 1) * ranks + rank}{'F' if number > 0 else 'B'}{seen[number]}")
        seen[number] += 1
    return actions
