"""A plan's schedule and partition in a file, and in the words of other libraries."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ppedu.core import ParseError, PipelineError, Schedule, SettingError
from ppedu.core.files import named, write_text
from ppedu.zoo.registry import require_registered

KEYS = {"schedule": str, "options": dict, "ranks": int, "microbatches": int, "recompute": bool, "cut": list}


def save(path: str | os.PathLike[str], schedule: Schedule, partition: Sequence[range], recompute: bool) -> None:
    """Write a choice to a file, which `ppedu train --plan` reads: JSON, with the pieces of each stage.

    Raises:
        PipelineError: The file cannot be written.
    """
    takes_chunks = "chunks" in inspect.signature(require_registered(schedule.name).generator).parameters
    values = (
        schedule.name,
        {"chunks": schedule.chunks} if takes_chunks else {},
        schedule.ranks,
        schedule.microbatches,
        recompute,
        [len(each) for each in partition],
    )
    write_text(path, json.dumps(dict(zip(KEYS, values, strict=True))) + "\n")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `save` wrote.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: It is not such a file.
    """
    try:
        found = json.loads(named(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or {key: type(value) for key, value in found.items()} != KEYS:
        raise ParseError(f"{str(path)!r} is not a plan that `ppedu plan QUESTION.toml --save FILE` has written")
    return found


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
