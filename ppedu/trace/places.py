"""Places: which rank of which pipeline wrote a trace."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppedu.core.errors import ParseError
from ppedu.core.numeric import plural
from ppedu.trace.records import MOST

LABELLED = re.compile(r"(?:^|[^0-9A-Za-z])(?:rank|worker|r)[-_]?([0-9]{1,9})(?![0-9A-Za-z])", re.IGNORECASE)
NUMBER = re.compile(r"[0-9]+")
PIPELINE = re.compile(r"(?:^|_)(?:pp|pipe\w*)(?:_|$)", re.IGNORECASE)  # in the description of a process group
CURE = "give a dict of files, such as {0: 'a.json', 1: 'b.json'}, or {(replica, rank): file}"


class Place(NamedTuple):
    """The place of a trace. rank: a number that orders the ranks of a replica. replica: None if it is unknown.

    stage: the place in the pipeline, which is the stage of ranges that name none; None if it is unknown.
    """

    rank: int
    replica: int | None = None
    stage: int | None = None


class Source(NamedTuple):
    """A trace file. about: its "distributedInfo". processes: the ids of those that ran actions, in pipeline order.

    given: its place, if the caller knows it.
    """

    path: Path
    about: Mapping[str, Any]
    processes: Sequence[Hashable]
    given: Place | None = None


def find_places(sources: Sequence[Source]) -> list[list[Place]]:
    """Return the place of each process of each file.

    What the caller says counts first, then what torch wrote into the trace, and then the numbers in the files' names.
    The processes of one merged file are the ranks of one pipeline.

    Raises:
        ParseError: it is unknown of which rank a file is, or two files are of one rank.
    """
    merged = next((source for source in sources if len(source.processes) > 1), None)
    if merged and (len(sources) > 1 or merged.given):
        held = plural(len(merged.processes), "process")
        raise ParseError(f"{str(merged.path)!r} holds {held}, other files hold more; give a file for each rank")
    if merged:
        return [[Place(rank, None, rank) for rank in range(len(merged.processes))]]
    places = [source.given for source in sources if source.given] or _from_metadata(sources) or _from_names(sources)
    owners: dict[tuple[int | None, int], Path] = {}
    for source, place in zip(sources, places, strict=True):
        key = place.replica, place.rank
        if key in owners:
            raise ParseError(
                f"{str(source.path)!r} and {str(owners[key])!r} are both of rank {place.rank}; give one file of each "
                f"rank, from the same cycle of the profiler, or {CURE}"
            )
        owners[key] = source.path
    return [[place] for place in places]


def _from_metadata(sources: Sequence[Source]) -> list[Place]:
    """Return the places that torch wrote into the traces; [] unless all have one."""
    ranks: list[Any] = [source.about.get("rank") for source in sources]
    if not all(type(rank) is int and 0 <= rank < MOST for rank in ranks):
        return []
    groups = [_pipeline_group(source.about, rank) for source, rank in zip(sources, ranks, strict=True)]
    if not all(groups):
        several = any(len(_groups(source.about, rank)) > 1 for source, rank in zip(sources, ranks, strict=True))
        order = sorted(ranks)
        return [Place(rank, None, None if several else order.index(rank)) for rank in ranks]
    replicas = sorted(set(groups))
    return [
        Place(group.index(rank), replicas.index(group), group.index(rank))
        for rank, group in zip(ranks, groups, strict=True)
    ]


def _groups(about: Mapping[str, Any], rank: Any) -> dict[tuple[int, ...], str]:
    """Return the process groups of several ranks that a rank is in, each with its description."""
    found = {}
    listed = about.get("pg_config")
    for each in listed if isinstance(listed, list) else []:
        ranks = each.get("ranks") if isinstance(each, dict) else None
        if isinstance(ranks, list) and len(ranks) > 1 and all(type(each) is int for each in ranks) and rank in ranks:
            found[tuple(ranks)] = str(each.get("pg_desc"))
    return found


def _pipeline_group(about: Mapping[str, Any], rank: Any) -> tuple[int, ...]:
    """Return the ranks of the pipeline that a rank is in; () if its groups do not say which they are."""
    return next((ranks for ranks, description in _groups(about, rank).items() if PIPELINE.search(description)), ())


def _from_names(sources: Sequence[Source]) -> list[Place]:
    """Return the places by the files' names: the number after "rank", or the only one that tells the files apart."""
    paths = [source.path for source in sources]
    if len(paths) == 1:
        return [Place(0, None, 0)]
    labels = [LABELLED.search(path.name) or LABELLED.search(path.parent.name) for path in paths]
    rows = [[label[1]] for label in labels if label]
    if len(rows) < len(paths):
        rows = [NUMBER.findall(str(path)) for path in paths]
    alike = len(set(map(len, rows))) == 1
    apart = [ranks for column in zip(*rows, strict=alike) if len(set(ranks := [*map(int, column)])) == len(paths)]
    counted = [ranks for ranks in apart if sorted(ranks) == list(range(len(paths)))]
    if not alike or len(counted or apart) != 1:
        raise ParseError(f"{str(paths[0])!r} does not say of which rank it is, and nor does its name; {CURE}")
    (ranks,) = counted or apart
    order = sorted(ranks)
    return [Place(rank, None, order.index(rank)) for rank in ranks]
