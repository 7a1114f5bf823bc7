"""A plan's partition in the words of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ppedu.core.errors import SettingError
from ppedu.core.schedule import Schedule


def torchtitan(partition: Sequence[range]) -> list[list[str]]:
    """Return the names of the modules of each stage, as torchtitan's `module_fqns_per_model_part` has them."""
    last = max(piece.stop for piece in partition) - 1

    def names(piece: int) -> list[str]:
        if piece == 0:
            return ["tok_embeddings"]
        return ["norm", "output"] if piece == last else [f"layers.{piece - 1}"]

    return [[name for piece in pieces for name in names(piece)] for pieces in partition]


def megatron(schedule: Schedule, partition: Sequence[range]) -> str:
    """Return the layout of the stages for Megatron's `--pipeline-model-parallel-layout`.

    E is the embedding, t a layer, L the loss with the head; | separates stages.

    Raises:
        SettingError: The stages are not placed in a loop, which is all that Megatron does.
    """
    if schedule.placement.name != "loop":
        raise SettingError(
            f"Megatron places stages in a loop, and {schedule.name} in the placement {schedule.placement.name!r}; plan "
            'with schedules=["1f1b", "interleaved"]'
        )
    last = max(piece.stop for piece in partition) - 1
    stages = []
    for pieces in partition:
        letters = ["E" if piece == 0 else "L" if piece == last else "t" for piece in pieces]
        runs = ((letter, len([*run])) for letter, run in groupby(letters))
        stages.append("".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs))
    return "|".join(stages)
