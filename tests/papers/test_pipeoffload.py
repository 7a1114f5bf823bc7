"""PipeOffload (Wan et al., arXiv 2503.01328): its table 1, its figures 2, 3, 5, 6 and 7, and what it says of memory."""

from dataclasses import replace
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu import Costs, simulate
from ppedu.core import COPIES
from ppedu.core.lowering import offloaded

# The microbatches of each rank, counted from 1, as read in the figures; the order of F, I and W follows from them.
GIS = [
    "1 2 3 4 1 2 3 4 1 1 5 2 2 6 3 3 7 4 4 8 1 1 5 2 2 6 3 3 7 4 4 8 5 5 6 6 7 7 8 8 5 5 6 6 7 7 8 8",
    "1 2 3 4 1 2 3 1 1 4 2 2 5 3 3 6 4 4 7 1 1 8 2 2 5 3 3 6 4 4 7 5 5 8 6 6 7 7 8 8 5 5 6 6 7 7 8 8",
    "1 2 3 4 1 2 1 1 3 2 2 4 3 3 5 4 4 6 1 1 7 2 2 8 3 3 5 4 4 6 5 5 7 6 6 8 7 7 8 8 5 5 6 6 7 7 8 8",
    "1 2 3 4 1 1 1 2 2 2 3 3 3 4 4 4 5 1 1 6 2 2 7 3 3 8 4 4 5 5 5 6 6 6 7 7 7 8 8 8 5 5 6 6 7 7 8 8",
]
GIS_H = [
    "1 2 1 2 3 4 1 1 3 2 2 4 1 1 5 2 2 6 3 3 5 4 4 6 3 3 7 4 4 8 5 5 7 6 6 8 5 5 6 6 7 7 8 8 7 7 8 8",
    "1 2 1 2 3 1 1 4 2 2 3 1 1 4 2 2 5 3 3 6 4 4 5 3 3 6 4 4 7 5 5 8 6 6 7 5 5 8 6 6 7 7 8 8 7 7 8 8",
    "1 2 1 2 1 1 3 2 2 4 1 1 3 2 2 4 3 3 5 4 4 6 3 3 5 4 4 6 5 5 7 6 6 8 5 5 7 6 6 8 7 7 8 8 7 7 8 8",
    "1 2 1 1 1 2 2 2 3 1 1 4 2 2 3 3 3 4 4 4 5 3 3 6 4 4 5 5 5 6 6 6 7 5 5 8 6 6 7 7 7 8 8 8 7 7 8 8",
]
UNIFORM = ["1 1 2 1 1 2 1 1 3 2 2 3 2 2 3 3 3 3", "1 1 1 1 2 1 1 2 2 2 3 2 2 3 3 3 3 3"]
COPIED = ["O1 O2 L1 O3 L2 L3", "O1 L1 O2 L2 O3 L3"]


def stages(v, k=1):
    """Return costs in which F, I and W of one of the v stages on a rank take 1, and O and L together 3 k."""
    return Costs(forward=v, input=v, weight=v, activation=v, offload=Fraction(3 * v * k, 2))


def numbers(order):
    return " ".join(str(action.microbatch + 1) for action in order if action.computes)


def uniform(ranks, microbatches, chunks):
    """Return PipeOffload without its copies."""
    schedule = pp.schedule("po-f", ranks, microbatches, chunks=chunks)
    return replace(schedule, orders=[[each for each in order if each.computes] for order in schedule.orders])


def highest(schedule, chunks, k=1):
    return max(simulate(schedule, stages(chunks, k)).peak_activations)


def test_figures_5_6_and_7():
    assert [*map(numbers, pp.schedule("gis", 4, 8).orders)] == GIS
    assert [*map(numbers, pp.schedule("gis-h", 4, 8).orders)] == GIS_H
    offloads = pp.schedule("po-h", 2, 3)
    assert [*map(numbers, offloads.orders)] == UNIFORM
    copies = [[each for each in order if each.op in COPIES] for order in offloads.orders]
    assert [" ".join(f"{each.op}{each.microbatch + 1}" for each in order) for order in copies] == COPIED
    assert {each.stage for order in copies for each in order} == {0, 1}  # the first chunk


@pytest.mark.parametrize(("d", "v"), [(4, 2), (4, 3), (8, 4), (6, 3)])
def test_table_1(d, v):
    """M is the activations of the whole model, and times are those of one stage: TF = TB = TW = 1."""
    names = {"1f1b": {}, "interleaved": {"chunks": v}, "gis": {"chunks": v}, "gis-h": {"chunks": v}}
    runs = {name: simulate(pp.schedule(name, d, 2 * d, **options), stages(v)) for name, options in names.items()}
    idle = {name: max(run.idle) for name, run in runs.items()}
    whole = d * v
    extra = Fraction((v - 1) * d, 2)
    assert idle == {
        "1f1b": v * (d - 1) * 3,
        "interleaved": (d - 1) * 3,
        "gis": 2 * (d - 1),
        "gis-h": 2 * (d - 1) + extra,
    }
    peaks = {name: max(run.peak_activations) for name, run in runs.items()}
    # Section 3.1: from dv + d - 1 to dv; section 3.2: g (v - 1) + d, about half of vanilla interleaved 1F1B.
    assert peaks == {"1f1b": whole, "interleaved": whole + d - 1, "gis": whole, "gis-h": d * (v - 1) // 2 + d}
    for name in ("po-h", "po-f"):
        run = simulate(pp.schedule(name, d, 2 * d, chunks=v), stages(v))
        assert max(run.idle) < idle["1f1b"]


@pytest.mark.parametrize(("d", "v"), [(4, 4), (8, 4), (8, 8)])
def test_memory_of_po_h_and_po_f(d, v):
    """About (v + 2) / 8v of M, and "a small constant number (approximately 4 in our experiments)" of stages."""
    half = highest(pp.schedule("po-h", d, 2 * d, chunks=v), v)
    assert 0 <= half - Fraction((v + 2) * d * v, 8 * v) <= 3  # those that are on their way
    assert highest(pp.schedule("po-f", d, 2 * d, chunks=v), v) <= 4


def test_offload_is_better_than_linear():
    """Figure 3: 8 devices with 16 stages each; with half of them offloaded, peak memory is about one quarter."""
    schedule, v = uniform(8, 16, 16), 16
    whole, k = highest(schedule, v), Fraction(1, 100)  # the figure is "theoretical": nothing is on its way
    curve = []
    for moved in range(0, v + 1, 8):
        first = [[(stage, m) for stage in range(rank, 8 * moved, 8) for m in range(16)] for rank in range(8)]
        orders = tuple(tuple(offloaded(order, each)) for order, each in zip(schedule.orders, first, strict=True))
        curve.append(highest(replace(schedule, orders=orders), v, k) / whole)
    assert curve == sorted(curve, reverse=True)
    assert curve[1] < 0.5
    assert 0.2 <= curve[1] <= 0.3


def test_stage_0_is_three_quarters_of_the_memory():
    """Figure 2: offloading stage 0 saves at most half in interleaved 1F1B, and 3/4 in PipeOffload, on 8 devices."""
    schedule, vanilla = uniform(8, 48, 2), pp.schedule("interleaved", 8, 48)
    k = Fraction(1, 100)  # what is on its way is not in the figure
    assert highest(pp.schedule("po-h", 8, 48), 2, k) <= Fraction(2, 5) * highest(schedule, 2)
    saved = pp.offload(vanilla, Fraction(1, 2))
    assert highest(saved, 2, k) >= Fraction(2, 5) * highest(vanilla, 2)


def test_a_free_lunch_ends_at_k_1():
    plain = simulate(uniform(8, 32, 4), stages(4)).makespan
    offloaded = pp.schedule("po-f", 8, 32, chunks=4)
    found = {k: simulate(offloaded, stages(4, k)).makespan / plain for k in (Fraction(1, 2), 1, Fraction(4, 3))}
    assert found[Fraction(1, 2)] == 1 and found[1] < 1.01 and found[Fraction(4, 3)] > 1.25
