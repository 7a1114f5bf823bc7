"""Partitions that the caller gives: numbers of pieces, or a layout as Megatron writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from ppedu.core import SettingError
from ppedu.core.numeric import plural
from ppedu.core.validate import require_count, shown

_RUN = re.compile(r"([EtL])(?:\*([0-9]+))?|\(([^()]*)\)\*([0-9]+)")


def cuts_of(partition: str | Sequence[int], pieces: int) -> tuple[int, ...]:
    """Return where a partition cuts a row of pieces: stage s holds the pieces from cuts[s] to cuts[s + 1].

    Args:
        partition: The number of pieces of each stage; or a layout for Megatron's `--pipeline-model-parallel-layout`,
            such as "Et*3|(tttt|)*2tttL": E is the embedding, t a layer, L the head with the loss, | separates stages.
        pieces: Of the model.

    Raises:
        SettingError: It is neither, or it does not have the model's pieces.
    """
    if isinstance(partition, str):
        letters = _unrolled(partition)
        if (row := letters.replace("|", "")) != "E" + "t" * (pieces - 2) + "L":
            raise SettingError(
                f"the layout must have an E, {plural(pieces - 2, 't')} and an L in this order, with | between stages; "
                f"got {plural(row.count('t'), 't')} in {shown(partition)}"
            )
        counts = [len(stage) for stage in letters.split("|")]
    elif isinstance(partition, (list, tuple)):
        counts = [require_count("a stage's number of pieces", each, least=0) for each in partition]
        if sum(counts) != pieces:
            raise SettingError(
                f"the partition has {plural(sum(counts), 'piece')} and the model {pieces}: the embedding, each layer, "
                "the head"
            )
    else:
        raise SettingError(
            "partition must be the number of pieces of each stage, such as [5, 4, 4, 5], or a layout such as "
            f'"Ettt|tttt|tttt|tttL"; got {shown(partition)}'
        )
    return tuple(accumulate(counts, initial=0))


def _unrolled(layout: str) -> str:
    """Return a layout with its repetitions written out: "t*3|" as "ttt|", "(tt|)*2" as "tt|tt|"."""
    text = layout.replace(" ", "").replace(",", "")
    while "*" in text:
        changed = _RUN.sub(lambda run: (run[1] or run[3]) * int(run[2] or run[4] or 1), text, count=0)
        if changed == text or len(changed) > 100_000:
            break
        text = changed
    if set(text) - set("EtL|"):
        raise SettingError(
            f'a layout has the letters E, t, L and |, and repeats such as "t*3" and "(tt|)*2"; got {shown(layout)}'
        )
    return text
