"""The chart of a frontier: its points, its bounds, and what a click shows."""

import pytest

import ppedu as pp
from ppedu.search.optimal import Found
from ppedu.view.frontier import Chart


@pytest.fixture(scope="module")
def frontier():
    told = []
    found = pp.search.frontier(2, 3, pp.Costs(2, 4), placement="v", time_limit=60, progress=told.append)
    assert told == list(found.found) and all(isinstance(each, Found) for each in told)
    return found


def test_the_best_for_each_memory(frontier):
    assert [each.instance.memory for each in frontier.found] == [1, 1.5, 2]
    assert [each.makespan for each in frontier.found] == [25, 21, 19]
    for each in frontier.found:
        assert (
            each.status == "optimal" and each.makespan == pp.search.atlas(2, 3, 2 * each.instance.memory, "v").makespan
        )
    names = {timeline.schedule.name for timeline in frontier.published}
    assert {"1f1b", "zb-v", "v-min"} <= names


def test_a_published_schedule_as_slow_as_the_slowest_is_a_point():
    """A single rank is never idle, so that all orders take the same time."""
    alone = pp.search.frontier(1, 2, placement="loop", time_limit=9)
    assert [each.makespan for each in alone.found] == [6]
    points = {name: (memory, makespan) for name, memory, makespan, _ in alone.points}
    assert points["1f1b"] == (1, 6) and points["gpipe"] == (2, 6)


def test_the_table_shows_the_best_published_beside(frontier):
    lines = str(frontier).splitlines()
    assert lines[0].split()[:4] == ["memory", "makespan", "at", "least"]
    assert lines[-1].split() == ["2", "19", "19", "bound", "zb-v:", "19"]


def test_a_point_that_is_chosen_is_shown(frontier):
    chart = Chart(frontier)
    state = chart.state()
    assert [point[3] for point in state["points"][:3]] == ["optimal chosen", "optimal", "optimal"]
    place = [point[0] for point in state["points"]].index("zb-v")
    chart.handle({"point": place})
    assert chart.panels()[0].timeline.schedule.name == "zb-v"
    assert chart.state()["points"][place][3] == "published chosen"
    for wrong in ({"point": 99}, {"point": -1}, {"point": "0"}, {}):
        chart.handle(wrong)
        assert chart.chosen == place
    assert chart.text() == str(frontier)


def test_a_frontier_is_displayed_as_its_table(frontier):
    data, _ = frontier._repr_mimebundle_()
    assert data["text/plain"] == str(frontier)


def test_bounds_for_more_memory_hold_for_less():
    found = pp.search.frontier(4, 6, pp.Costs(2, 4), placement="v", time_limit=0).found
    bounds = [each.bound for each in found]
    assert bounds == sorted(bounds, reverse=True) and found[0].status == "feasible"
