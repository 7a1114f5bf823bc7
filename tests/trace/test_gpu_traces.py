"""Traces that torch.profiler wrote on one H200, with torch 2.11: of the engine, and of torch's own runtime.

The engine ran "zb-v" on one rank, and "zb-h1" on two ranks that share the GPU and send through gloo. The folder
"engine" has its timelines of the same steps, measured by marks in the GPU's queue. torch's runtime ran "zb-v" with the
same stages, of two matrix products each.
"""

from pathlib import Path
from statistics import median

import pytest

import ppedu as pp

FOLDER = Path(__file__).with_name("h200")


def spans(timeline):
    return {span.action: span for rank in range(timeline.schedule.ranks) for span in timeline.spans(rank)}


def seconds(span):
    return span.end - span.start


@pytest.fixture(scope="module", params=["zb-v", "zb-h1"])
def steps(request):
    """Return by step, for each action, its span in the trace and its span by the engine."""
    run = pp.Run.load(FOLDER / f"{request.param}-ours")
    assert not run.remarks
    found = []
    for step in range(3):
        ours = spans(pp.Timeline.load(FOLDER / "engine" / f"{request.param}.step{step}.json"))
        theirs = spans(run.timeline(step=step))
        assert theirs.keys() == ours.keys()
        found.append({action: (theirs[action], ours[action]) for action in ours})
    return request.param, found


def test_kernels_take_less_time_than_the_engine_measures_but_not_much(steps):
    """The engine's marks are around the kernels. With two ranks, the queue is often empty, and waits for launches."""
    name, found = steps
    for each in found:
        for theirs, ours in each.values():
            assert seconds(theirs) <= seconds(ours) + 20e-6, (theirs, ours)
        ratio = sum(seconds(theirs) for theirs, _ in each.values()) / sum(seconds(ours) for _, ours in each.values())
        assert ratio > (0.98 if name == "zb-v" else 0.5), ratio


def test_actions_begin_when_the_engine_says_that_they_do(steps):
    _, found = steps
    for each in found:
        (theirs, ours) = each[pp.F(0, 0)]
        origin = theirs.end - ours.end
        for theirs, ours in each.values():
            if seconds(theirs):  # the first stage's I has no kernels
                assert ours.start - 1e-4 < theirs.start - origin < ours.end, (theirs, ours, origin)


def test_torchs_runtime_takes_the_same_time_for_the_same_kernels():
    of = {by: pp.Run.load(FOLDER / f"zb-v-{by}") for by in ("ours", "torch")}
    both = [spans(run.timeline(step=1)) for run in of.values()]
    ours, theirs = both
    assert theirs.keys() == ours.keys() == set(pp.schedule("zb-v", 1, 4).order(0))
    for op in "FIW":
        one, other = (median(seconds(span) for action, span in each.items() if action.op == op) for each in both)
        assert one == pytest.approx(other, rel=0.02)
