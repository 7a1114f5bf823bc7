"""Damaged traces: what they still hold is read, or an error of this package says what is wrong."""

import json
import random
from contextlib import suppress
from functools import cache

import pytest
from kineto import by_rank, drawn, event, events_of, kineto, shuffled
from strategies import sample, slow

import ppedu as pp
from ppedu.course.drawn import table_of

WRONG = [
    None,
    True,
    "",
    "x",
    -1,
    0,
    1.5,
    -1e9,
    1e300,
    2**80,
    10**400,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"a": []},
    "PP:1F0",
    "PP:999999999F999999999",
    "\0",
]
SEEDS = range(3000)


@cache
def originals():
    """Return traces as JSON values: of a CPU, of a GPU with CUDA graphs, merged, with steps and groups; and a table."""
    jobs = [drawn(steps=2), drawn("zb-v", 2, 4, steps=2), drawn("gpipe", 2, 2, steps=2, tail=(("optimizer", 0.01),))]
    found = []
    for job in jobs:
        ranks = by_rank(job)
        for device in ("", "cuda_runtime"):
            files = []
            for (_, rank), records in ranks.items():
                events = [
                    *events_of(records, device=device),
                    event("ProfilerStep#1", 1.7e15, 1e9),
                    event("loss", 1.7e15, 5),
                ]
                groups = [{"pg_desc": "mesh_pp", "ranks": [0, 1]}]
                files.append(
                    {
                        "distributedInfo": {"rank": rank, "pg_config": groups},
                        "baseTimeNanoseconds": 5,
                        "traceEvents": shuffled(events),
                    }
                )
            found.append(files)
        found.append(
            [{"traceEvents": [each for (_, rank), records in ranks.items() for each in events_of(records, rank)]}]
        )
    return found, table_of(jobs[1].records())


def places(value, depth=0):
    """Yield every container in a JSON value with its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def damage(value, chance):
    """Change some places of a JSON value: put something wrong there, remove it, or repeat it."""
    found = list(places(value))
    for _ in range(chance.choice([1, 1, 2, 5, 40])):
        container, key = chance.choice(found)
        try:
            if chance.random() < 0.7:
                container[key] = chance.choice(WRONG)
            elif chance.random() < 0.5 and isinstance(container, list):
                container.insert(key, json.loads(json.dumps(container[key])))
            else:
                del container[key]
        except (KeyError, IndexError):
            pass  # changed before


def spoil(text, chance):
    """Cut a text off, or change some of its characters."""
    if chance.random() < 0.3:
        return text[: chance.randrange(len(text))]
    letters = list(text)
    for _ in range(chance.choice([1, 3, 30])):
        letters[chance.randrange(len(letters))] = chance.choice('{}[]",:0-.eE\\ \n\0xF')
    return "".join(letters)


def questions(run):
    for ask in (lambda: str(run.autopsy()), lambda: run.predict("gpipe"), lambda: run.replay()):
        with suppress(pp.PipelineError):
            ask()


@pytest.mark.parametrize("part", [0, 1, *slow([2, 3])])
def test_a_damaged_trace_is_read_or_refused(tmp_path, part):
    traces, lines = originals()
    read = 0
    for seed in sample(SEEDS[part::4]):
        chance = random.Random(seed)
        if chance.random() < 0.2:
            (tmp_path / "x.csv").write_text(spoil(lines, chance))
            files = [tmp_path / "x.csv"]
        else:
            values = json.loads(json.dumps(chance.choice(traces)))
            broken = chance.random() < 0.2
            damage(values, chance) if not broken else None
            files = []
            for rank, value in enumerate(values):
                text = json.dumps(value)
                text = spoil(text, chance) if broken and chance.random() < 0.7 else text
                files.append(kineto(tmp_path / f"r{rank}.json", None, [], text))
        try:
            run = pp.Run.load(files)
        except pp.PipelineError:
            continue
        read += 1
        questions(run)
    assert read
