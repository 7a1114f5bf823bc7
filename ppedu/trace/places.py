"""Places: which rank of which pipeline wrote a trace."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppedu.core import ParseError
from ppedu.core.numeric import plural
from ppedu.trace.records import MOST, Record

LABELLED = re.compile(r"(?:^|[^0-9A-Za-z])(?:rank|worker|r)[-_]?([0-9]{1,9})(?![0-9A-Za-z])", re.IGNORECASE).findall
NUMBER = re.compile(r"[0-9]+").findall
OTHERS = {"dp", "tp", "ep", "cp", "data", "tensor", "expert", "context"}  # that make a group more than a pipeline
MOST_RANKS = 1 << 20  # of a job; more is damaged
CURE = "give a dict of files, such as {0: 'a.json', 1: 'b.json'}, or {(replica, rank): file}"


class TracePlace(NamedTuple):
    """The place of a trace.

    Attributes:
        rank: A number that orders the ranks of a replica.
        replica: None if it is unknown.
        stage: The place in the pipeline, which is the stage of ranges that name none; None if it is unknown.
    """

    rank: int
    replica: int | None = None
    stage: int | None = None


class Source(NamedTuple):
    """A trace file.

    Attributes:
        about: Its "distributedInfo".
        base: The seconds from which its times count.
        records: By the id of a process that ran actions, its records, first ones first.
        given: Its place, if the caller knows it.
    """

    path: Path
    about: Mapping[str, Any]
    base: float
    records: Mapping[Any, Sequence[Record]]
    given: TracePlace | None = None


def find_places(sources: Sequence[Source]) -> list[list[TracePlace]]:
    """Return the place of each process of each file.

    What the caller says counts first, then what torch wrote into the trace, and then the numbers in the files' names.
    The processes of one merged file are in the order of their ids, as far as their stages do not tell.

    Raises:
        ParseError: it is unknown of which rank a file is, or two files are of one rank.
    """
    merged = next((source for source in sources if len(source.records) > 1), None)
    if merged and (len(sources) > 1 or merged.given):
        held = plural(len(merged.records), "process")
        raise ParseError(f"{str(merged.path)!r} holds {held}, other files hold more; give a file for each rank")
    if merged:
        # The records list the processes in the order in which they began, which is that of the stages.
        by_id = sorted(merged.records, key=lambda process: (type(process).__name__, process))
        return [[TracePlace(by_id.index(process), None, stage) for stage, process in enumerate(merged.records)]]
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


def _from_metadata(sources: Sequence[Source]) -> list[TracePlace]:
    """Return the places that torch wrote into the traces; [] unless all have one."""
    ranks: list[Any] = [source.about.get("rank") for source in sources]
    if not all(type(rank) is int and 0 <= rank < MOST for rank in ranks):
        return []
    groups = [_groups(source.about, rank) for source, rank in zip(sources, ranks, strict=True)]
    pipelines = [next((members for name, members in mine if _is_pipeline(name)), ()) for mine in groups]
    if not all(pipelines):
        one_group = all(len(set(mine)) <= 1 for mine in groups)  # then it is the pipeline
        return _in_order(ranks, stages=one_group)
    replicas = sorted(set(pipelines))  # the pipeline of ranks 0 and 2 is replica 0, that of ranks 1 and 3 replica 1
    found = []
    for rank, pipeline in zip(ranks, pipelines, strict=True):
        stage = pipeline.index(rank)
        found.append(TracePlace(stage, replicas.index(pipeline), stage))
    return found


def _groups(about: Mapping[str, Any], rank: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the descriptions and the ranks of the process groups of several ranks that a rank is in."""
    found = []
    listed, world = about.get("pg_config"), about.get("world_size")
    for each in listed if isinstance(listed, list) else []:
        ranks = each.get("ranks") if isinstance(each, dict) else None
        if ranks == [] and type(world) is int and each.get("pg_size") == world < MOST_RANKS:
            ranks = [*range(world)]  # as torch shortens it
        if isinstance(ranks, list) and len(ranks) > 1 and all(type(each) is int for each in ranks) and rank in ranks:
            found.append((str(each.get("pg_desc")), tuple(ranks)))
    return found


def _is_pipeline(description: str) -> bool:
    words = re.findall("[a-z]+", description.lower())
    return any(word == "pp" or word.startswith("pipe") for word in words) and OTHERS.isdisjoint(words)


def _in_order(ranks: Sequence[int], stages: bool = True) -> list[TracePlace]:
    """Return the places of ranks of unknown replicas. stages: whether each is the stage that its number says."""
    order = sorted(ranks)
    return [TracePlace(rank, None, order.index(rank) if stages else None) for rank in ranks]


def _from_names(sources: Sequence[Source]) -> list[TracePlace]:
    """Return the places by the files' names: the number after "rank", or the only one that tells the files apart.

    Of "run7-0.json" and "run7-1.json", the first numbers are both 7, and the second ones are the ranks.
    """
    paths = [source.path for source in sources]
    if len(paths) == 1:
        return [TracePlace(0, None, 0)]
    looks = (
        [LABELLED(path.name) for path in paths],
        [LABELLED(path.parent.name) for path in paths],
        [NUMBER(path.name) for path in paths],
        [NUMBER(str(path)) for path in paths],
    )
    for numbers in looks:  # the numbers in each name
        if len({len(row) for row in numbers}) > 1:
            continue
        columns = [[int(number) for number in column] for column in zip(*numbers, strict=True)]
        distinct = [column for column in columns if len(set(column)) == len(paths)]
        from_0 = [column for column in distinct if sorted(column) == list(range(len(paths)))]
        candidates = from_0 or distinct
        if len(candidates) == 1:
            return _in_order(candidates[0])
    raise ParseError(f"{str(paths[0])!r} does not say of which rank it is, and nor does its name; {CURE}")
