"""Traces as torch.profiler writes them, of runs that are drawn."""

import gzip
import json
import random
from typing import Any

import ppedu as pp
from ppedu.course.drawn import DrawnJob, table_of

START = 1_700_000_000_000_000  # microseconds


def event(name, ts, dur, category="user_annotation", pid=1, tid=1, **arguments):
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def kineto(path, rank, events, text=None, groups=None):
    """Write a trace file, zipped if its name ends in .gz. rank: None if torch.distributed was not initialized."""
    about = {"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": events}
    if rank is not None:
        about["distributedInfo"] = {"rank": rank, **({"pg_config": groups} if groups else {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = (json.dumps(about) if text is None else text).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def drawn(name="1f1b", ranks=2, microbatches=4, **settings):
    """Return a job of few steps, in milliseconds that survive the rounding of a trace."""
    known: dict[str, Any] = {"replicas": 1, "steps": 3, "noise": 0.05, "latency": 0.002, "overhead": 0.0, "tail": ()}
    return DrawnJob(pp.schedule(name, ranks, microbatches), **(known | settings))


def by_rank(job):
    """Return, by replica and rank, the records of a job in the order of time."""
    found = {}
    for record in job.records():
        found.setdefault((record.replica, record.rank), []).append(record)
    return {key: sorted(each, key=lambda record: record.start) for key, each in sorted(found.items())}


def events_of(
    records, pid=1, called=lambda record: f"PP:{record.name}", device="", lead=1e-4, idle=lambda record: False
):
    """Yield the events of a rank. A range begins while the rank waits; its time is that of the work within.

    device: the category of launches; the work is then done by three kernels of one graph, `lead` seconds or more after
    their launch. idle: which actions launch nothing.
    """
    free, before, launched = None, None, 0.0
    for number, record in enumerate(records):
        step, _, _, action, _, start, end = record
        free, before = free if step == before else None, step
        first, last = (START + 1e6 * time for time in (start if free is None else free, end))
        begin, free = START + 1e6 * start, end
        name = called(record) if action else record.name
        if device:
            launched = max(launched + 1.0, begin - 1e6 * lead)
            yield event(name, launched, 0.8, pid=pid)
            if not idle(record):
                if action:  # what does not count: the range as the device sees it, and the message before
                    yield event(name, begin, last - begin, "gpu_user_annotation", 0, 7)
                    yield event("launch", launched + 0.1, 0.1, device, pid, correlation=-1 - number)
                    wait = max(0.0, begin - first)
                    yield event("ncclDevKernel_SendRecv", first, wait, "kernel", 0, 7, correlation=-1 - number)
                yield event("launch", launched + 0.2, 0.5, device, pid, correlation=number)
                part = (last - begin) / 3
                for kernel in (0, 2, 1):
                    kind = "gemm" if action else "ncclDevKernel_AllReduce"
                    yield event(kind, begin + kernel * part, part, "kernel", 0, 7, correlation=number)
            continue
        yield event(name, begin if not action else first, last - (begin if not action else first), pid=pid)
        if action:
            yield event("gloo:recv", first, begin - first, pid=pid)
            yield event("aten::mm", begin, (last - begin) / 2, "cpu_op", pid)
            yield event("aten::mm", (begin + last) / 2, (last - begin) / 2, "cpu_op", pid)


def shuffled(events, seed=0):
    events = list(events)
    random.Random(seed).shuffle(events)
    return events


def files_of(
    folder,
    job,
    keep=lambda rank, records: records,
    named="{}.rank{}.json",
    told=lambda replica, rank: rank,
    groups=lambda replica, rank: None,
    more=lambda rank, records: [],
    **how,
):
    """Write the trace of each rank, and return the files.

    named: their names, with the replica and the rank. told, groups: what torch notes in them. more: further events.
    """
    return [
        kineto(
            folder / named.format(replica, rank),
            told(replica, rank),
            shuffled([*events_of(keep(rank, records), **how), *more(rank, records)]),
            groups=groups(replica, rank),
        )
        for (replica, rank), records in by_rank(job).items()
    ]


def csv_of(path, records):
    """Write records, or those of a job, as a table, and return its file."""
    path.write_text(table_of(records.records() if isinstance(records, DrawnJob) else records))
    return path
