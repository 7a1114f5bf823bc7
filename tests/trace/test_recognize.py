"""A run is recognized by its orders: as the published schedule that it is, or as none."""

import pytest

import ppedu as pp
from ppedu.trace.assemble import assemble
from ppedu.trace.recognize import recognize
from ppedu.trace.records import Record

OPTIONS = {"interleaved": [{"chunks": 3}], "looped-bfs": [{"chunks": 4}], "v-adaptive": [{"memory": 3}]}


def loaded(schedule):
    """Return the run of a schedule, as a reader makes it of the times alone."""
    timeline = pp.simulate(schedule, pp.Costs(1.0, 2.0))
    return assemble(
        [
            Record(0, None, rank + 7, action, str(action), float(start), float(end))
            for rank, row in enumerate(timeline.rows)
            for action, start, end in row
        ],
        [],
        "drawn",
    )[0][0, 0].timeline.schedule


@pytest.mark.parametrize("name", pp.schedules()[:19])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (2, 4)])
def test_every_published_schedule(name, ranks, microbatches):
    for options in ({}, *OPTIONS.get(name, [])):
        try:
            schedule = pp.schedule(name, ranks, microbatches, **options)
        except pp.PipelineError:
            continue
        found = loaded(schedule)
        assert found.orders == schedule.orders
        assert found.placement.holders == schedule.placement.holders
        assert found.name != "measured"
        rebuilt, *shown = found.name.split(", ")
        again = pp.schedule(rebuilt, ranks, microbatches, **{"chunks": found.chunks} if "chunks" in str(shown) else {})
        if "memory" not in found.name and "group" not in found.name:
            assert again.orders == schedule.orders or "first" in found.name


def test_another_order_is_called_measured():
    schedule = pp.schedule("1f1b", 3, 4)
    orders = [list(order) for order in schedule.orders]
    orders[2][0:4] = [pp.F(2, 0), pp.F(2, 1), pp.B(2, 0), pp.B(2, 1)]
    other = pp.Schedule("x", schedule.placement, 4, orders)
    found = loaded(other)
    assert (found.name, found.problems) == ("measured", ())
    assert recognize(other) is other


def test_a_forward_only_run():
    schedule = pp.schedule("1f1b", 3, 4).forwards
    found = loaded(schedule)
    assert found.forward_only and found.orders == schedule.orders and not found.problems
