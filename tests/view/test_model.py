"""The model of a panel, against its timeline and against dependencies written down here a second time."""

import base64
import struct
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

import ppedu as pp
from ppedu.view.label import packed
from ppedu.view.model import Panel, Stack
from ppedu.view.perfetto import sources

CASES = [
    pp.simulate(pp.schedule("1f1b", 4, 6)),
    pp.simulate(pp.schedule("zb-v", 3, 6), pp.Costs(latency=Fraction(1, 3))),
    pp.simulate(pp.schedule("dualpipe", 4, 8), pp.Costs(overlap=Fraction(5, 2))),
    pp.simulate(pp.lower(pp.schedule("interleaved", 2, 4))),
    pp.simulate(pp.schedule("pipedream", 3, 5), pp.Costs(update=1)),
    pp.simulate(pp.schedule("1f1b-vocab", 3, 5)),
]
each_case = pytest.mark.parametrize("timeline", CASES, ids=lambda t: t.schedule.name)


def state(timeline, **options):
    """Return the data that the browser gets for one timeline."""
    (data,) = Stack([Panel(timeline, **options)]).state()["panels"]
    return data


def texts(parts):
    """Return the text of each part: of a number without the reasons for it."""
    return [part if isinstance(part, str) else part.text for part in parts]


def unpacked(text, count):
    """Return the numbers that a text in the browser's data holds; an empty text stands for zeros."""
    data = base64.b64decode(text)
    kind = {0: "B", 1: "B", 2: "H", 4: "I", 8: "d"}[len(data) // count]
    return struct.unpack(f"<{count}{kind}", data or bytes(count))


def label(box):
    return f"{box.stage}{box.op}{box.microbatch}"


@each_case
def test_every_action_is_a_box_at_its_time(timeline):
    expected = [
        (rank, str(single), float(start), float(end))
        for rank in range(timeline.schedule.ranks)
        for action, start, end in timeline.spans(rank)
        for single in action.singles
        if single.op in ("F", "B", "I", "W", "U", "S", "T")
    ]
    found = [(box.rank, label(box), box.start, box.end) for box in Panel(timeline).boxes]
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert all(a[2:] == pytest.approx(b[2:]) for a, b in zip(found, expected, strict=True))


@each_case
def test_a_box_has_the_chunk_the_copy_and_the_half_of_its_action(timeline):
    placement = timeline.schedule.placement
    halves = {
        str(single): half if action.parts else 0
        for order in timeline.schedule.orders
        for action in order
        for half, single in enumerate(action.singles, 1)
    }
    for box in Panel(timeline).boxes:
        assert (box.chunk, box.copy) == (placement.chunk(box.stage, box.microbatch), placement.copy(box.microbatch))
        assert box.part == halves[label(box)]


@each_case
def test_a_box_names_the_boxes_that_it_requires(timeline):
    panel = Panel(timeline)
    last = timeline.schedule.stages - 1
    gradient = {(box.stage, box.microbatch): label(box) for box in panel.boxes if box.op in "BI"}
    for box, found in zip(panel.boxes, sources(panel), strict=True):
        stage, op, m = box.stage, box.op, box.microbatch
        expected = {
            "F": {f"{stage - 1}F{m}"} if stage else set(),
            "W": {f"{stage}I{m}"},
            "U": {f"{stage}B{m}"},
            "S": {f"{last}F{m}"},
            "T": {f"{first}S{m}" for first in range(3)},
        }.get(op, {f"{stage}F{m}"} | ({gradient[stage + 1, m]} if stage < last else set()))
        if op == "B" and stage == last and timeline.schedule.placement.barriers:
            expected |= {f"{first}S{m}" for first in range(3)}
        assert {label(panel.boxes[source]) for source in found} == expected


@each_case
def test_boxes_and_gaps_together_fill_the_time_of_a_rank(timeline):
    panel = Panel(timeline)
    for rank in range(timeline.schedule.ranks):
        own = {(box.start, box.end) for box in panel.boxes if box.rank == rank}
        gaps = {(start, end) for at, start, end, _ in panel.gaps if at == rank}
        pieces = sorted(own | gaps)
        assert pieces[0][0] == 0 and pieces[-1][1] == pytest.approx(float(timeline.makespan))
        assert all(left[1] == right[0] for left, right in pairwise(pieces))


@each_case
def test_a_gap_has_the_reason_that_why_idle_gives(timeline):
    gaps = state(timeline)["gaps"]
    assert gaps
    for rank, start, end, why in gaps:
        assert why == timeline.why_idle(rank, (start + end) / 2)


@each_case
def test_path_memory_and_numbers_are_those_of_the_timeline(timeline):
    panel = Panel(timeline, cap=3)
    path = [[str(single) for single in span.action.singles] for _, span in timeline.critical_path()]
    assert [label(panel.boxes[i]) for i in panel.path] == [first for first, *_ in path]
    for rank, (times, values) in enumerate(panel.memory):
        steps = zip(*timeline.memory(rank), strict=True)
        assert [times, values] == [pytest.approx(list(map(float, each))) for each in steps]
    data = state(timeline, cap=3)
    assert data["makespan"] == pytest.approx(float(timeline.makespan)) and data["cap"] == 3
    assert panel.numbers["bubble"] == f"{timeline.bubble:.1%}" and f"bubble {timeline.bubble:.1%}" in texts(
        data["numbers"]
    )


@each_case
def test_the_browser_is_sent_the_boxes_in_columns(timeline):
    boxes = Panel(timeline).boxes
    columns = {
        name: column if name == "op" else unpacked(column, len(boxes))
        for name, column in state(timeline)["boxes"].items()
    }
    for box, row in zip(boxes, zip(*columns.values(), strict=True), strict=True):
        assert row[:3] == pytest.approx(box[:3]) and row[3:] == box[3:]


@pytest.mark.parametrize(
    ("numbers", "size"),
    [((0, 0), 0), ((0, 255), 1), ((256, 1), 2), ((65536, 0), 4), ((1 << 32, 1), 8), ((0.5, 1), 8), ((-1, 2), 8)],
)
def test_numbers_are_sent_in_few_bytes(numbers, size):
    text = packed(numbers)
    assert unpacked(text, 2) == numbers and len(base64.b64decode(text)) == 2 * size


def test_memory_is_shown_in_its_unit():
    timeline = pp.simulate(pp.schedule("gpipe", 4, 8), pp.Costs(activation=2.5, memory_unit="GB"))
    data = state(timeline)
    assert texts(data["numbers"])[-1] == "peak activations 20 GB" and data["memory_unit"] == "GB"
    assert timeline.summary().endswith("peak activations 20 GB")
    assert Stack([Panel(timeline)]).legend["memory"] == "activations held, 0 to 20 GB"


def test_times_below_one_second_are_sent_in_milliseconds():
    data = state(pp.simulate(pp.schedule("gpipe", 2, 2), pp.Costs(forward=0.01, unit="s")))
    assert data["unit"] == "ms" and unpacked(data["boxes"]["end"], 8)[0] == pytest.approx(10) and data["makespan"] == 90
    assert "makespan 90 ms" in texts(data["numbers"]) and "ms" in data["gaps"][0][3] and data["axis"] == "time, ms"


def test_two_lanes_are_named_by_what_tells_them_apart():
    one, other = (pp.simulate(pp.schedule(name, 4, 8)) for name in ("gpipe", "1f1b"))
    assert Panel(one).pair is None and state(one)["pair"] is None
    measured = replace(one, source="measured")
    for first, second, names in (
        (measured, one, ("measured", "simulated")),
        (measured, other, ("measured", "simulated")),
        (one, other, ("gpipe", "1f1b")),
        (one, one, ("filled", "outlined")),
    ):
        assert Panel(first, outline=second).pair.names == names
    pair = state(one, outline=other)["pair"]
    assert pair["heading"] == "gpipe above 1f1b, 4 ranks, 8 microbatches"
    assert [*map(texts, pair["lines"])] == [
        ["gpipe", "makespan 33", "bubble 27.3%", "peak activations 8"],
        ["1f1b", "makespan 33", "bubble 27.3%", "peak activations 4"],
    ]
    slow = pp.simulate(other.schedule, pp.Costs(forward=2))
    assert Panel(one, outline=slow).pair.lines[1][0] == "1f1b, 100.0% longer"


def test_marked_boxes_are_those_at_the_given_places():
    panel = Panel(pp.simulate(pp.schedule("gpipe", 2, 2)), marks=[(0, 1), (1, 2)])
    assert [label(box) for box in panel.boxes if box.mark] == ["0F1", "1B0"]


def test_the_legend_names_what_any_of_the_panels_contains():
    one, other = (Panel(pp.simulate(pp.schedule(name, 4, 8))) for name in ("zb-h1", "1f1b"))
    assert list(Stack([one, other]).legend) == ["F", "B", "I", "W", "memory"]
    assert list(Stack([other]).legend) == ["F", "B", "memory"]
    marked = Panel(other.timeline, outline=other.timeline, cap=3, marks=[(0, 0)])
    assert list(Stack([marked]).legend) == ["F", "B", "memory", "outline", "cap", "mark"]
    assert {"chunk", "copy"} <= Stack([Panel(CASES[2]), Panel(CASES[3])]).legend.keys()


@pytest.mark.parametrize("ranks", [(1,), (4,), (8,), (4, 4), (8, 8), (4, 4, 4), (16,)])
def test_timelines_that_are_shown_together_fit_on_a_laptops_screen(ranks):
    stack = Stack([Panel(pp.simulate(pp.schedule("gpipe", each, 2))) for each in ranks])
    margins = 52 * len(ranks)  # of each panel, above and below its rows
    assert 26 <= stack.tall <= 64 and sum(ranks) * stack.tall + margins <= 560
