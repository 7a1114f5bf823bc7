"""Pictures, inspected through matplotlib's objects: the positions of boxes, numbers, strips and text."""

import dataclasses
import io
import re

import pytest
from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from PIL import Image
from strategies import slow

import ppedu as pp
from ppedu import Action, Costs, Placement, Schedule, SettingError, Span, Timeline, simulate
from ppedu.view.look import PATH
from ppedu.view.plot import png
from ppedu.view.theme import GREY, use_notebook_colors

SMALL = simulate(pp.schedule("1f1b", 4, 8))


def simulated(*lines, microbatches=1, chunks=1, **costs):
    orders = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    schedule = Schedule("mine", Placement.make("loop", len(lines), chunks), microbatches, orders)
    return simulate(schedule, Costs(**costs))


def moved(timeline, by, **changes):
    rows = tuple(tuple(Span(a, start + by, end + by) for a, start, end in row) for row in timeline.rows)
    return dataclasses.replace(timeline, rows=rows, **changes)


def rectangles(collection):
    """Return (left, right, top, bottom) of every path of a collection; the y axis points down."""
    boxes = (path.get_extents() for path in collection.get_paths())
    return [(box.x0, box.x1, box.y0, box.y1) for box in boxes]


def drawn(ax):
    """Return the boxes of the actions as (rank, left, right), sorted. A box ends just before the next one begins."""
    return near(ax.collections[0], ax)


def near(collection, ax):
    gap = ax.get_xlim()[1] / 500
    boxes = sorted((int(top), left, right) for left, right, top, _ in rectangles(collection))
    return [(rank, pytest.approx(left, abs=gap), pytest.approx(right, abs=gap)) for rank, left, right in boxes]


def spans(timeline):
    first = min(row[0].start for row in timeline.rows)
    return sorted(
        (rank, span.start - first, span.end - first) for rank, row in enumerate(timeline.rows) for span in row
    )


def numbers(ax):
    """Return the texts in the boxes: names such as 2B0, or numbers."""
    return [text for text in ax.texts if re.fullmatch(r"(\d+[FBIW])?\d+", text.get_text())]


def strips(ax, ranks):
    """Return the memory strip of each rank."""
    return ax.collections[-ranks:]


# --- boxes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, ranks, microbatches", [("1f1b", 4, 8), ("gpipe", 3, 5), ("naive", 1, 1), *slow([("1f1b", 16, 32)])]
)
def test_each_action_has_a_box_at_its_time_in_its_row(name, ranks, microbatches):
    timeline = simulate(pp.schedule(name, ranks, microbatches), Costs(backward=1.5, latency=0.25))
    ax = timeline.plot()
    assert len(ax.collections[0].get_paths()) == 2 * ranks * microbatches
    assert drawn(ax) == spans(timeline)


def test_boxes_stay_in_their_rows_above_the_memory_strip():
    ax = SMALL.plot()
    floors = [max(y for path in strip.get_paths() for y in path.vertices[:, 1]) for strip in strips(ax, 4)]
    for _, _, top, bottom in rectangles(ax.collections[0]):
        rank = int(top)
        assert rank < top < bottom < floors[rank] < rank + 1


def test_rank_0_is_on_top_and_the_rows_are_labelled():
    ax = SMALL.plot()
    assert ax.get_ylim() == (4, 0)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [int(y) for y in ax.get_yticks()] == [0, 1, 2, 3]


def test_the_time_axis_ends_with_the_run():
    assert SMALL.plot().get_xlim() == (0, 33)


def test_a_run_is_drawn_from_its_own_start():
    assert drawn(moved(SMALL, 1000).plot()) == spans(SMALL)


def test_messages_have_no_box():
    timeline = simulated("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    assert drawn(timeline.plot()) == [(0, 0, 1), (0, 4, 6), (1, 1, 2), (1, 2, 4)]


def test_the_parts_of_a_pair_share_its_time_and_its_height():
    timeline = simulated("0F0 0F1 1F0 (1F1;1B0)OVERLAP_F_B 1B1 0B0 0B1", microbatches=2, chunks=2, overlap=2)
    pair = timeline.spans(0)[3]
    boxes = rectangles(timeline.plot().collections[0])
    (_, _, top, bottom), *_ = boxes
    upper, lower = [box for box in boxes if box[:2] == pytest.approx((pair.start, pair.end), abs=0.02)]
    assert upper[2:] == pytest.approx((top, (top + bottom) / 2))
    assert lower[2:] == pytest.approx(((top + bottom) / 2, bottom))


def test_ops_are_told_apart_by_colour_and_neighbours_of_a_kind_by_shade():
    timeline = simulated("0F0 0F1 0F2 0B0 0I1 0W1 0B2", microbatches=3)
    colours = [to_hex(colour) for colour in timeline.plot().collections[0].get_facecolors()]
    f0, f1, f2, b0, i1, w1, b2 = colours
    assert f0 == f2 != f1 and b0 == b2
    assert len({f0, f1, b0, i1, w1}) == 5


def test_the_legend_can_be_left_out():
    assert simulate(pp.schedule("1f1b", 2, 2)).plot(legend=False).get_legend() is None


def test_the_legend_names_what_is_drawn():
    def legend(timeline, **options):
        return [text.get_text() for text in timeline.plot(**options).get_legend().get_texts()]

    assert legend(SMALL) == ["F: forward", "B: backward", "activations held, 0 to 4"]
    assert legend(SMALL, memory=False) == ["F: forward", "B: backward"]
    assert legend(SMALL, memory=False, outline=SMALL) == ["F: forward", "B: backward", "outlined: simulated"]
    assert legend(simulated("0F0 0I0 0W0"), memory=False) == [
        *["F: forward", "I: backward for the input", "W: backward for the weights"]
    ]


def test_a_long_legend_fits_beside_the_name_of_the_axis():
    ax = simulate(pp.schedule("zb-v", 4, 8)).plot(memory=8, critical_path=True)
    ax.figure.draw_without_rendering()
    legend, name = ax.get_legend().get_window_extent(), ax.xaxis.label.get_window_extent()
    assert legend.x1 <= ax.figure.bbox.x1 and not legend.overlaps(name)


# --- numbers ----------------------------------------------------------------------------------------------------


def test_each_box_of_four_ranks_and_eight_microbatches_carries_its_name():
    ax = SMALL.plot()
    found = sorted((int(text.get_position()[1]), text.get_position()[0], text.get_text()) for text in numbers(ax))
    expected = sorted(
        (rank, float(start + end) / 2, str(action)) for rank, row in enumerate(SMALL.rows) for action, start, end in row
    )
    assert found == expected


def test_a_box_carries_its_name_or_its_microbatch_or_nothing_depending_on_its_own_width():
    def texts(ranks, microbatches, **costs):
        drawn = numbers(simulate(pp.schedule("1f1b", ranks, microbatches), Costs(**costs)).plot())
        return sorted(text.get_text() for text in drawn)

    forwards = sorted(4 * list(map(str, range(16))))
    backwards = [f"{stage}B{m}" for stage in range(4) for m in range(16)]
    assert texts(4, 16) == sorted([*forwards, *backwards])
    assert texts(4, 16, backward=1) == sorted(2 * forwards)
    assert texts(4, 16, backward=9) == sorted(backwards), "a forward's microbatch would be too small to read"
    assert texts(32, 128) == []


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (8, 12), *slow([(4, 16), (8, 24), (16, 16)])])
def test_a_number_fits_into_its_box(ranks, microbatches):
    ax = simulate(pp.schedule("1f1b", ranks, microbatches)).plot()
    ax.figure.draw_without_rendering()
    boxes = [path.get_extents(ax.transData) for path in ax.collections[0].get_paths()]
    for text in numbers(ax):
        x, y = ax.transData.transform(text.get_position())
        (box,) = [box for box in boxes if box.contains(x, y)]
        extent = text.get_window_extent()
        assert box.x0 < extent.x0 and extent.x1 < box.x1 and extent.height < 1.2 * box.height
        assert text.get_fontsize() >= 5


# --- text -------------------------------------------------------------------------------------------------------


def test_the_title_holds_name_size_makespan_bubble_and_peak():
    ax = SMALL.plot()
    assert ax.get_title("left") == "1f1b, 4 ranks, 8 microbatches"
    assert ax.get_title("right").split("    ") == ["makespan 33", "bubble 27.3%", "peak activations 4"]


def test_a_given_title_replaces_the_name_and_keeps_the_numbers():
    ax = SMALL.plot(title="My first pipeline")
    assert ax.get_title("left") == "My first pipeline"
    assert "bubble 27.3%" in ax.get_title("right")


def test_the_title_of_a_measured_run_ends_with_measured():
    assert moved(SMALL, 5, source="measured").plot().get_title("left") == "1f1b, 4 ranks, 8 microbatches, measured"


@pytest.mark.parametrize(
    "forward, unit, label, last",
    [
        (1, "", "time", "30"),
        (1, "s", "time, s", "30"),
        (0.001, "s", "time, ms", "30"),
        (1, "hours", "time, hours", "30"),
    ],
)
def test_the_time_axis_names_its_unit(forward, unit, label, last):
    timeline = simulate(pp.schedule("1f1b", 4, 8), Costs(forward=forward, backward=2 * forward, unit=unit))
    ax = timeline.plot()
    ax.figure.draw_without_rendering()
    shown = [
        tick.get_text() for tick, x in zip(ax.get_xticklabels(), ax.get_xticks(), strict=True) if x <= 33 * forward
    ]
    assert ax.get_xlabel() == label
    assert shown[0] == "0" and shown[-1] == last


# --- memory -----------------------------------------------------------------------------------------------------


def height(strip, time):
    """Return the height of the strip at a time, in rows, to a thousandth."""
    (path,) = strip.get_paths()
    floor = path.vertices[:, 1].max()
    column = [(time, floor - step / 1000) for step in range(1, 400)]
    return sum(path.contains_points(column)) / 1000


@pytest.mark.parametrize("timeline", [SMALL, moved(SMALL, 77)], ids=["from 0", "from 77"])
def test_the_height_of_the_memory_strip_shows_the_activations_held(timeline):
    ax = timeline.plot()
    unit = height(strips(ax, 4)[0], 3.5) / 4  # after four forwards rank 0 holds four
    assert unit > 0.03
    for strip, row in zip(strips(ax, 4), SMALL.rows, strict=True):
        for time in (tick + 0.5 for tick in range(33)):
            started = sum(action.op == "F" and start <= time for action, start, _ in row)
            ended = sum(action.op == "B" and end <= time for action, _, end in row)
            assert height(strip, time) == pytest.approx((started - ended) * unit, abs=0.002)


def test_what_a_rank_still_holds_is_drawn_to_the_end():
    hangs = dataclasses.replace(SMALL, rows=tuple(row[:1] for row in SMALL.rows))  # a forward on each rank
    ax = hangs.plot(memory=1)
    after = [[height(strip, time) > 0.03 for time in (0.5, 1.5, 2.5, 3.5)] for strip in strips(ax, 4)]
    assert after == [[time >= rank for time in range(4)] for rank in range(4)]


def test_a_given_memory_scale_makes_pictures_comparable():
    own, common = (height(strips(SMALL.plot(memory=memory), 4)[0], 3.5) for memory in (True, 8))
    assert common == pytest.approx(own / 2, abs=0.002)


def test_the_scale_of_the_memory_strips_is_labelled_at_their_left():
    for memory, most in ((True, "4"), (8, "8")):
        axis = [text for text in SMALL.plot(memory=memory).texts if text.get_position()[0] == 0]
        assert [text.get_text().strip() for text in axis] == [most, "0"] * 4


def test_a_picture_in_a_notebook_has_no_background_and_a_saved_one_has(tmp_path):
    shown = Image.open(io.BytesIO(png(SMALL.show().stack)))
    assert shown.getpixel((2, 2))[3] == 0
    with pyplot.rc_context():
        use_notebook_colors()
        SMALL.save(tmp_path / "x.png")
        SMALL.save(tmp_path / "x.svg")
    assert Image.open(tmp_path / "x.png").convert("RGBA").getpixel((2, 2)) == (255, 255, 255, 255)
    assert GREY not in (tmp_path / "x.svg").read_text()


def test_colours_that_a_learner_has_set_stay():
    with pyplot.rc_context({"text.color": "red"}):
        use_notebook_colors()
        assert pyplot.rcParams["text.color"] == "red" and pyplot.rcParams["axes.labelcolor"] == GREY


def test_the_peaks_stand_at_the_right():
    texts = [text for text in SMALL.plot().texts if "peak" in text.get_text()]
    assert [text.get_text().strip() for text in texts] == ["peak 4", "peak 3", "peak 2", "peak 1"]
    assert [int(text.get_position()[1]) for text in texts] == [0, 1, 2, 3]


def test_without_memory_there_is_no_strip_and_the_boxes_are_higher():
    with_strip, without = SMALL.plot(), SMALL.plot(memory=False)
    assert len(with_strip.collections) == 1 + 1 + 4 and len(without.collections) == 1
    (_, _, top, bottom), *_ = rectangles(with_strip.collections[0])
    (_, _, high, low), *_ = rectangles(without.collections[0])
    assert low - high > bottom - top
    assert not [text for text in without.texts if "peak" in text.get_text()]


# --- outline ----------------------------------------------------------------------------------------------------


def test_an_outline_is_drawn_above_the_boxes():
    slow = simulate(SMALL.schedule, Costs(forward=1.25, backward=2.5))
    ax = slow.plot(outline=SMALL)
    boxes, outline = ax.collections[:2]
    assert near(outline, ax) == spans(SMALL)
    assert len(outline.get_facecolors()) == 0
    tops, bottoms = [box[2] % 1 for box in rectangles(boxes)], [box[3] % 1 for box in rectangles(outline)]
    assert max(bottoms) < min(tops)
    assert len(boxes.get_facecolors()) == 64
    assert ax.get_xlim()[1] == pytest.approx(slow.makespan)


def test_an_outline_may_be_longer_and_may_run_another_schedule():
    longer = simulate(pp.schedule("naive", 4, 8))
    assert SMALL.plot(outline=longer).get_xlim() == (0, longer.makespan)


@pytest.mark.parametrize("wrong", [simulate(pp.schedule("1f1b", 3, 8)), SMALL.schedule, "1f1b", 3])
@pytest.mark.parametrize("way", [SMALL.plot, SMALL.show])
def test_an_outline_that_is_not_a_timeline_with_this_number_of_ranks_raises(way, wrong):
    with pytest.raises(
        SettingError, match=r"outline must be a timeline of 4 ranks, such as simulate.*; got "
    ) as caught:
        way(outline=wrong)
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("wrong", [3, "ax", pyplot, [None]])
def test_an_ax_that_is_not_axes_raises(wrong):
    with pytest.raises(SettingError, match=r"ax must be one matplotlib Axes, .*; got "):
        SMALL.plot(wrong)


# --- two lanes --------------------------------------------------------------------------------------------------

RUN = moved(simulate(SMALL.schedule, Costs(forward=1.25, backward=2.5, latency=0.1)), 50, source="measured")


@pytest.mark.parametrize("memory", [True, False])
def test_two_lanes_show_both_timelines_from_their_starts(memory):
    ax = RUN.plot(outline=SMALL, lanes=True, memory=memory)
    upper, lower = ax.collections[:2]
    assert near(upper, ax) == spans(RUN) and near(lower, ax) == spans(SMALL)
    for one, other in zip(rectangles(upper), rectangles(lower), strict=True):
        assert int(one[2]) == int(other[2]), "the boxes are in the same order, rank by rank"
        assert one[3] < other[2] and other[3] < int(other[2]) + 1
        assert one[3] - one[2] == pytest.approx(other[3] - other[2], abs=0.03), "both can be read"
    names = [text.get_text() for text in numbers(ax)]
    assert names.count("2B3") == 2 and len(names) == 128


def test_two_lanes_are_named_and_their_makespans_stand_where_they_end():
    ax = RUN.plot(outline=SMALL, lanes=True)
    texts = [text.get_text().strip() for text in ax.texts]
    assert texts.count("measured") == texts.count("simulated") == 4
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    for timeline in (RUN, SMALL):
        (end,) = [text for text in ax.texts if text.get_text().strip() == pp.core.numeric.pretty(timeline.makespan)]
        assert end.get_position()[0] == pytest.approx(timeline.makespan)
    assert ax.get_title("left") == "1f1b, 4 ranks, 8 microbatches\n"
    one, other = ax.get_title("right").split("\n")
    shorter = 1 - 33 / RUN.makespan
    assert one.split("    ")[:2] == ["measured", f"makespan {RUN.makespan:g}"]
    assert other.split("    ") == [
        f"simulated, {shorter:.1%} shorter",
        "makespan 33",
        "bubble 27.3%",
        "peak activations 4",
    ]


def test_the_names_of_lanes_do_not_cover_those_of_ranks():
    ax = RUN.plot(outline=SMALL, lanes=True)
    ax.figure.draw_without_rendering()
    names = [text.get_window_extent() for text in ax.texts if text.get_text().strip() in ("measured", "simulated")]
    assert max(tick.get_window_extent().x1 for tick in ax.get_yticklabels()) < min(box.x0 for box in names)
    assert min(tick.get_window_extent().x0 for tick in ax.get_yticklabels()) >= 0


@pytest.mark.parametrize("way", [RUN.plot, RUN.show])
def test_lanes_need_an_outline(way):
    with pytest.raises(SettingError, match=r"^lanes=True shows two timelines; pass the other one, as in outline="):
        way(lanes=True)
    with pytest.raises(SettingError, match=r"^lanes must be True or False; got 2"):
        way(outline=SMALL, lanes=2)


# --- critical path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, paths", [({}, [RUN]), ({"outline": SMALL, "lanes": True}, [RUN, SMALL])])
def test_the_critical_path_has_edges_of_its_own_colour(options, paths):
    plain, ax = RUN.plot(memory=False, **options), RUN.plot(memory=False, critical_path=True, **options)
    assert "critical path" not in [text.get_text() for text in plain.get_legend().get_texts()]
    assert ax.get_legend().get_texts()[-1].get_text() == "critical path"
    boxes = [each for each in ax.collections if isinstance(each, PolyCollection)]
    rings = [each for each in boxes if {to_hex(color) for color in each.get_edgecolors()} == {PATH}]
    for ring, timeline in zip(rings, paths, strict=True):
        start = timeline.start
        expected = sorted((rank, span.start - start, span.end - start) for rank, span in timeline.critical_path())
        assert near(ring, ax) == expected


# --- axes and options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"title": 3}, {"memory": "x"}, {"until": "x"}, {"marks": 3}])
def test_an_option_of_a_wrong_type_raises(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(SettingError, match=f"^{name} must be .*; got {value!r}$"):
        SMALL.plot(**wrong)
    assert pyplot.get_fignums() == []


def test_without_an_ax_a_figure_is_made():
    ax = SMALL.plot()
    assert pyplot.get_fignums() == [ax.figure.number]


@pytest.mark.parametrize("first", [0.01, 0.1])
def test_timelines_on_one_axis_have_one_unit(first):
    _, both = pyplot.subplots(2, sharex=True)
    for ax, forward in zip(both, (first, 0.11 - first), strict=True):  # 0.33 s and 3.3 s
        simulate(SMALL.schedule, Costs(forward=forward, backward=2 * forward, unit="s")).plot(ax)
    assert [ax.get_xlabel() for ax in both] == ["", "time, s"], "only one of them has its ticks labeled"
    assert both[1].xaxis.get_major_formatter()(0.5) == "0.5"


def test_a_given_ax_is_drawn_into_and_returned():
    figure, (above, below) = pyplot.subplots(2, sharex=True)
    assert SMALL.plot(below) is below
    assert simulate(pp.schedule("naive", 4, 8)).plot(ax=above) is above
    assert pyplot.get_fignums() == [figure.number]
    assert drawn(below) == spans(SMALL)
    assert above.get_xlim() == below.get_xlim() == (0, 96), "a shared axis shows the longer of the two"


@pytest.mark.parametrize("timeline", [
    simulated("0F0 0B0", forward=0, backward=0),
    Timeline(SMALL.schedule, ((),) * 4, Costs()),
], ids=["no time", "no spans"])  # fmt: skip
def test_an_empty_run_is_drawn(timeline):
    assert timeline.plot().get_title("right").startswith("makespan 0")


def test_a_picture_of_very_many_ranks_is_as_high_as_a_page():
    timeline = pp.simulate(pp.schedule("gpipe", 256, 2))
    assert timeline.plot().figure.get_figheight() < 10
    assert timeline.plot(outline=timeline, lanes=True).figure.get_figheight() < 13
