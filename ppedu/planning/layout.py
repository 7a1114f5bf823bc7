"""Partitions that the caller gives: numbers of pieces, or a layout as Megatron writes it, and what runs there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from ppedu.core import Schedule, SettingError
from ppedu.core.numeric import plural
from ppedu.core.validate import require_count, shown
from ppedu.planning.pieces import Piece
from ppedu.zoo import schedule

PREDICTION = "prediction"  # the name of a piece that predicts a further token
LETTERS = "EtmL|"
_RUN = re.compile(r"([EtmL|])\*([0-9]{1,6})(?![0-9])|\(([^()*]*)\)\*([0-9]{1,6})(?![0-9])")  # t*3, (tt|)*3
LONGEST, SHOWN = 100_000, 60  # letters: of a layout, and of one that is quoted


def letters_of(pieces: Sequence[Piece]) -> str:
    """Return a letter for each piece: E the embedding, t a layer, m a further prediction, L the head."""
    return "E" + "".join("m" if piece.name == PREDICTION else "t" for piece in pieces[1:-1]) + "L" * (len(pieces) > 1)


def cuts_of(partition: str | Sequence[int], pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Return where a partition cuts a row of pieces: stage s holds the pieces from cuts[s] to cuts[s + 1].

    Args:
        partition: The number of pieces of each stage; or a layout for Megatron's `--pipeline-model-parallel-layout`,
            such as "Et*3|(tttt|)*2tttL": E is the embedding, t a layer, m a further prediction, L the head with the
            loss, | separates stages.
        pieces: Of the model.

    Raises:
        SettingError: It is neither, or it does not have the model's pieces.
    """
    if isinstance(partition, str):
        letters = _unrolled(partition)
        wanted = letters_of(pieces)
        if (row := letters.replace("|", "")) != wanted:
            more = f", then {wanted.count('m')} times m" if "m" in wanted else ""
            raise SettingError(
                f"the layout must have an E, then {wanted.count('t')} times t{more}, then an L, with | between stages; "
                f"got {row.count('t')} times t in {partition[:SHOWN]!r}"
            )
        counts = [len(stage) for stage in letters.split("|")]
    elif isinstance(partition, (list, tuple)):
        counts = [require_count("a stage's number of pieces", each, least=0) for each in partition]
        if sum(counts) != len(pieces):
            raise SettingError(
                f"the partition has {plural(sum(counts), 'piece')} and the model {len(pieces)}: the embedding, each "
                "layer, the head"
            )
    else:
        raise SettingError(
            "partition must be the number of pieces of each stage, such as [5, 4, 4, 5], or a layout such as "
            f'"Ettt|tttt|tttt|tttL"; got {shown(partition)}'
        )
    return tuple(accumulate(counts, initial=0))


def schedule_of(layout: str, ranks: int | None, microbatches: int | None) -> Schedule:
    """Return the schedule that Megatron-LM runs with a layout: 1f1b, or interleaved if ranks hold several stages.

    Raises:
        SettingError: It is not a layout, a number is missing, or the ranks cannot share its stages.
    """
    letters = _unrolled(layout)
    if not re.fullmatch("Et*m*L", letters.replace("|", "")):
        raise SettingError(
            f"a layout has an E, the embedding, then each t and each m, then an L, the head; got {layout[:SHOWN]!r}"
        )
    stages = letters.count("|") + 1
    if ranks is None or microbatches is None:
        raise SettingError(
            f"the layout has {stages} stages, and does not say how many ranks and microbatches there are; give both, "
            f"such as ranks={stages}, microbatches={2 * stages}"
        )
    chunks, rest = divmod(stages, require_count("ranks", ranks))
    if rest or ranks == 1 < chunks:  # Megatron-LM interleaves on several ranks only
        fitting = ", ".join(str(each) for each in range(2, stages + 1) if stages % each == 0)
        raise SettingError(f"{plural(ranks, 'rank')} cannot share {stages} stages evenly; possible: {fitting}")
    options = {"chunks": chunks} if chunks > 1 else {}
    return schedule("interleaved" if options else "1f1b", ranks, microbatches, **options)


def _unrolled(layout: str) -> str:
    """Return a layout with its repetitions written out: "t*3|" as "ttt|", "(tt|)*2" as "tt|tt|"."""

    def repeated(run: re.Match[str]) -> str:
        what, count = run[1] or run[3] or "", int(run[2] or run[4])
        if len(what) * count > LONGEST:
            raise SettingError(f"a layout has at most {LONGEST:,} pieces and stages; {run[0][:SHOWN]!r} has more")
        return what * count

    text, before = re.sub(r"[\s,]", "", layout), ""
    while text != before and len(text) <= LONGEST:
        text, before = _RUN.sub(repeated, text), text
    if len(text) > LONGEST or set(text) - set(LETTERS):
        raise SettingError(
            f"a layout has the letters E, t, m, L and |, at most {LONGEST:,}, and repeats such as t*3 and (tt|)*2; "
            f"got {layout[:SHOWN]!r}"
        )
    return text
