"""Published closed forms and tables, against the simulation. F, B: times of a rank's share of the model."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ppedu as pp
from ppedu import Costs

many = settings(max_examples=25, deadline=None)
sizes = given(
    p=st.integers(1, 10),
    m=st.integers(1, 24),
    f=st.fractions(Fraction(1, 8), 4, max_denominator=8),
    b=st.fractions(Fraction(1, 8), 4, max_denominator=8),
)


def run(name, p, m, f=1, b=2, latency=0):
    return pp.simulate(pp.schedule(name, p, m), Costs(forward=f, backward=b, latency=latency))


# --- idle time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@sizes
@many
def test_gpipe_and_1f1b_wait_for_p_minus_1_microbatches(name, p, m, f, b):
    """GPipe, arXiv 1811.06965; 1F1B, arXiv 2006.09503 and 2104.04473, §2.2: idle (p-1)(F+B) on every rank."""
    timeline = run(name, p, m, f, b)
    assert timeline.idle == ((p - 1) * (f + b),) * p
    assert timeline.makespan == (m + p - 1) * (f + b)


@sizes
@many
def test_one_microbatch_at_a_time_waits_for_all_the_others_every_time(p, m, f, b):
    timeline = run("naive", p, m, f, b)
    assert timeline.idle == ((p - 1) * m * (f + b),) * p


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@sizes
@many
def test_two_bubbles_are_in_use_and_differ(name, p, m, f, b):
    """A share of the makespan, (p-1)/(m+p-1), and an overhead over the ideal, (p-1)/m (arXiv 2104.04473, §2.2)."""
    timeline = run(name, p, m, f, b)
    assert timeline.bubble == float(Fraction(p - 1, m + p - 1))
    assert timeline.overhead == float(Fraction(p - 1, m))


@pytest.mark.parametrize("p, makespan, idle", [(4, 57, 9), (8, 117, 21), (16, 237, 45), (32, 477, 93), (64, 957, 189)])
def test_1f1b_with_four_microbatches_a_rank(p, makespan, idle):
    timeline = run("1f1b", p, 4 * p)
    assert timeline.makespan == makespan
    assert set(timeline.idle) == {idle}


def test_1f1b_of_four_ranks_and_eight_microbatches():
    timeline = run("1f1b", 4, 8, 1, 1)
    assert (timeline.makespan, timeline.peak_activations) == (22, (4, 3, 2, 1))
    assert timeline.bubble == pytest.approx(3 / 11)
    assert run("1f1b", 4, 8).makespan == 33


@sizes
@many
def test_no_schedule_beats_the_first_microbatchs_way_and_the_last_ranks_work(p, m, f, b):
    """With one stage a rank: makespan ≥ (p-1)(F+c) + m(F+B)."""
    for name in ("naive", "gpipe", "1f1b"):
        assert run(name, p, m, f, b, latency=Fraction(1, 3)).makespan >= (p - 1) * (f + Fraction(1, 3)) + m * (f + b)


@sizes
@many
def test_1f1b_pays_the_latency_of_the_way_down_and_back_at_least(p, m, f, b):
    c = Fraction(1, 3)
    extra = run("1f1b", p, m, f, b, c).makespan - run("1f1b", p, m, f, b).makespan
    assert extra >= 2 * (p - 1) * c


@sizes
@many
def test_gpipe_pays_the_latency_of_the_way_down_and_back_and_no_more(p, m, f, b):
    c = Fraction(1, 3)
    assert run("gpipe", p, m, f, b, c).makespan == (m + p - 1) * (f + b) + 2 * (p - 1) * c


# --- memory -----------------------------------------------------------------------------------------------------


@sizes
@many
def test_peak_activations(p, m, f, b):
    assert run("naive", p, m, f, b).peak_activations == (1,) * p
    assert run("gpipe", p, m, f, b).peak_activations == (m,) * p
    assert run("1f1b", p, m, f, b).peak_activations == tuple(min(p - rank, m) for rank in range(p))


@sizes
@many
def test_1f1b_takes_as_long_as_gpipe_and_holds_no_more(p, m, f, b):
    gpipe, one = run("gpipe", p, m, f, b), run("1f1b", p, m, f, b)
    assert one.makespan == gpipe.makespan
    assert all(mine <= theirs for mine, theirs in zip(one.peak_activations, gpipe.peak_activations, strict=True))


@sizes
@many
def test_peak_memory_is_at_most_a_microbatchs_lifespan_over_the_interval(p, m, f, b):
    """arXiv 2405.15362: a rank holds at most ⌈lifespan / interval⌉, for a schedule that repeats itself."""
    assume(m >= 2 * p)
    timeline = run("1f1b", p, m, f, b)
    for rank in range(p):
        spans = {str(span.action): span for span in timeline.spans(rank)}
        lifespan = max(spans[f"{rank}B{i}"].end - spans[f"{rank}F{i}"].start for i in range(m))
        assert timeline.peak_activations[rank] <= -(-lifespan // (f + b))
