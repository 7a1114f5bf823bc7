"""Search for the best schedules of small sizes, and prove them twice: `make atlas`. A later run goes on."""

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from operator import attrgetter
from pathlib import Path

import ppedu as pp
from ppedu.search.atlas import FILE, MOST_MICROBATCHES, MOST_RANKS, PLACEMENTS, Entry, parse, placement_of
from ppedu.search.bounds import least_ticks
from ppedu.search.instance import Instance, held
from ppedu.search.optimal import FORMULATIONS, race, search

ATLAS = Path(__file__).parents[1] / "ppedu" / "search" / FILE
HEADER = """\
# The best schedules for small sizes; written by `make atlas`, checked by tests/search/test_atlas.py.
# placement, ranks, microbatches, memory (activations of a stage or slice); makespan, least possible makespan, proofs;
# then for each rank its actions: F I W are those of its first stage or slice, f i w of its second, R is an F that runs
# again. The n-th F is that of microbatch n.
"""


def instance_of(name: str, ranks: int, microbatches: int, memory: int | None) -> Instance:
    placement = placement_of(name, ranks, microbatches)
    limit = None if memory is None else Fraction(memory)
    costs = Entry(name, ranks, microbatches, 0, 0, 0, (), ()).costs
    return Instance.of(placement, microbatches, costs, memory=limit, recompute=PLACEMENTS[name].recompute)


def rows_of(schedule: pp.Schedule) -> tuple[str, ...]:
    """Return the letters of a schedule with split backwards."""
    found = []
    for rank, order in enumerate(schedule.orders):
        place = schedule.placement
        parts, letters = held(place, rank), []
        for stage, op, microbatch, _ in order:
            part = stage * place.slices + microbatch % place.slices
            second = parts.index((place.copy(microbatch), part))
            letters.append(op.lower() if second else op.value)
        found.append("".join(letters))
    return tuple(found)


def written(found: Iterable[Entry]) -> str:
    """Return the text of a file with these entries."""
    order = [*PLACEMENTS]
    lines = sorted(found, key=lambda each: (order.index(each.placement), *each.key[1:]))
    return HEADER + "".join(f"{each}\n" for each in lines)


def joined(first: Entry, second: Entry, memory: int) -> Entry:
    """Return a schedule for the microbatches of two entries: the second begins as soon as it fits into the first."""
    rows = [pp.simulate(each.schedule, each.costs).rows for each in (first, second)]
    letters = [each.rows for each in (first, second)]
    for later in range(first.makespan + 1):
        merged = []
        for rank in range(first.ranks):
            events = [
                (span.start + later * index, letter)
                for index in (0, 1)
                for span, letter in zip(rows[index][rank], letters[index][rank], strict=True)
            ]
            changes = Counter({start: 0 for start, _ in events})
            for start, letter in events:  # an activation is freed at the end of W, which is the start of the next tick
                changes[start + (letter in "Ww")] += {"F": 1, "W": -1}.get(letter.upper(), 0)
            held = max(accumulate(change for _, change in sorted(changes.items())))
            if len({start for start, _ in events}) < len(events) or held > memory:
                break
            merged.append("".join(letter for _, letter in sorted(events)))
        else:
            count = first.microbatches + second.microbatches
            return replace(first, microbatches=count, memory=memory, rows=tuple(merged))
    raise AssertionError("one after the other always fits")


def shortened(entry: Entry) -> Entry:
    """Return a schedule for one microbatch less: without the last one, of the second copy if both have as many."""
    count = entry.microbatches - 1
    letters = "FRIWfiw" if entry.placement != "bidirectional" else "fiw" if count % 2 else "FIW"
    rows = []
    for row in entry.rows:
        for letter in letters:
            before, _, after = row.rpartition(letter)
            row = before + after
        rows.append(row)
    return replace(entry, microbatches=count, rows=tuple(rows))


def improved(
    entry: Entry | None,
    name: str,
    ranks: int,
    microbatches: int,
    memory: int,
    seconds: float,
    known: list[Entry],
    fewer: dict[int, Entry],
    more: Entry | None,
) -> Entry:
    """Return the entry after a search, with a second proof if there is one."""
    instance = instance_of(name, ranks, microbatches, memory)
    formula = least_ticks(instance)
    least = max([formula, *(each.bound for each in known if each.memory >= memory)])
    smaller = [each for each in known if each.memory < memory]
    starts = [each.schedule for each in ([entry] if entry else []) + smaller]
    if more:
        starts.append(shortened(more).schedule)
    for count, other in () if PLACEMENTS[name].recompute else fewer.items():
        if microbatches - count in fewer and (PLACEMENTS[name].placement != "bidirectional" or count % 2 == 0):
            starts.append(joined(other, fewer[microbatches - count], memory).schedule)
    bounds = {count: each.bound for count, each in fewer.items()}
    if not entry or entry.status != "optimal":
        found = search(instance, seconds, starts=starts, least=least, fewer=bounds)
        if found.interrupted:
            raise KeyboardInterrupt
        bound, proofs = int(found.bound), found.proofs
        if bound == least and least > formula:  # less memory cannot be faster
            proofs = next(each.proofs for each in known if each.memory >= memory and each.bound == bound)
        entry = Entry(name, ranks, microbatches, memory, int(found.makespan), bound, proofs, rows_of(found.schedule))
    for formulation in FORMULATIONS:
        if entry.status == "optimal" and len(entry.proofs) < 2 and formulation not in entry.proofs:
            schedule, how = race(instance, entry.bound - 1, seconds, 2, [formulation], bounds)
            assert schedule is None, f"{entry}: {formulation} finds a schedule below the proven bound"
            if how:
                entry = replace(entry, proofs=(*entry.proofs, how))
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each entry and formulation (default: 60)")
    parser.add_argument("--ranks", type=int, default=MOST_RANKS)
    parser.add_argument("--microbatches", type=int, default=MOST_MICROBATCHES)
    options = parser.parse_args()
    found = {each.key: each for each in parse(ATLAS.read_text())} if ATLAS.exists() else {}
    sizes = [
        (name, ranks, microbatches)
        for microbatches in range(2, options.microbatches + 1)
        for ranks in range(2, options.ranks + 1)
        for name, kind in PLACEMENTS.items()
        if microbatches <= kind.most
    ]
    for name, ranks, microbatches in sizes:
        free = least_ticks(instance_of(name, ranks, microbatches, None))
        for memory in range(PLACEMENTS[name].parts, 2 * microbatches + 1):
            key = name, ranks, microbatches, memory
            known = [each for other, each in found.items() if other[:3] == key[:3] and other != key]
            old = found.get(key)
            if not old or old.status != "optimal" or len(old.proofs) < 2:
                fewer = {}
                for count in range(2, microbatches):
                    smaller = [each for other, each in found.items() if other[:3] == (name, ranks, count)]
                    fewer[count] = max((each for each in smaller if each.memory <= memory), key=attrgetter("memory"))
                begin = time.monotonic()
                more = found.get((name, ranks, microbatches + 1, memory))
                found[key] = improved(old, *key, options.seconds, known, fewer, more)
                ATLAS.write_text(written(found.values()))
                each = found[key]
                gap = f"{each.makespan}" if each.status == "optimal" else f"{each.bound}–{each.makespan}"
                print(*key, gap, *each.proofs, f"{time.monotonic() - begin:.1f} s", flush=True)
            if found[key].makespan == free:
                break  # more memory does not help
    proven = [each for each in found.values() if each.status == "optimal"]
    twice = sum(len(each.proofs) > 1 for each in proven)
    print(f"{len(found)} entries, {len(proven) / len(found):.1%} optimal, {twice / len(found):.1%} proven twice")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # what was found is written after each entry
        main()
