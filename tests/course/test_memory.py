"""The chart of a rank's memory over time."""

import matplotlib
import pytest

import ppedu as pp
from ppedu.course.memory import draw_memory, draw_phases
from ppedu.view.look import MARK


def timeline(name):
    return pp.simulate(pp.schedule(name, ranks=4, microbatches=8), pp.Costs(forward=1, backward=1, activation=2.5))


def texts(ax):
    return [text.get_text() for text in ax.texts]


def highest(area):
    return max(y for path in area.get_paths() for _, y in path.vertices)


def test_each_area_reaches_its_peak_above_the_state():
    ax = draw_memory(timeline("gpipe"), timeline("1f1b"), state=10)
    assert [highest(area) for area in ax.collections] == [10 + 8 * 2.5, 10 + 4 * 2.5, 10]
    assert texts(ax) == ["gpipe: 30.0 GB", "1f1b: 20.0 GB", "weights, gradients, Adam: 10.0 GB"]
    assert ax.get_xlim() == (0, 22)


def test_memory_over_the_limit_is_red():
    ax = draw_memory(timeline("gpipe"), state=10, limit=25)
    red = [area for area in ax.collections if area.get_facecolor()[0].tolist() == list(matplotlib.colors.to_rgba(MARK))]
    assert [highest(area) for area in red] == [30]
    assert "25 GB: all that a GPU has" in texts(ax)


def test_another_rank_holds_less():
    assert texts(draw_memory(timeline("1f1b"), rank=3)) == ["1f1b: 2.5 GB"]
    with pytest.raises(pp.SettingError, match="rank"):
        draw_memory(timeline("1f1b"), rank=4)


def test_each_phase_shows_what_a_rank_has_run_and_held_until_its_end():
    from matplotlib import pyplot

    draw_phases(timeline("gpipe"), timeline("1f1b"), ends={"first": 4, "second": 16})
    shown = [(len(ax.patches), *(highest(area) for area in ax.collections)) for ax in pyplot.gcf().axes]
    # Boxes, all that was held, and what was held in this phase; two forwards take 2.5 each, and so on.
    assert shown == [(4, 10, 10), (10, 20, 20), (4, 10, 10), (13, 10, 10)]
    assert [ax.get_title("right") for ax in pyplot.gcf().axes] == ["most held: 10", "most held: 20"] + 2 * [
        "most held: 10"
    ]
