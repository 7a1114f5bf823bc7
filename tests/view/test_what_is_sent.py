"""What the browser is sent, against the timeline it was made of and against rules written down here once more."""

from fractions import Fraction
from itertools import pairwise

import pytest

import ppedu as pp
from ppedu.view.data import panel

CASES = [
    pp.simulate(pp.schedule("1f1b", 4, 6)),
    pp.simulate(pp.schedule("zb-v", 3, 6), pp.Costs(latency=Fraction(1, 3))),
    pp.simulate(pp.schedule("dualpipe", 4, 8), pp.Costs(overlap=Fraction(5, 2))),
    pp.simulate(pp.lower(pp.schedule("interleaved", 2, 4))),
]
each_case = pytest.mark.parametrize("timeline", CASES, ids=lambda t: t.schedule.name)


def boxes(data):
    return [dict(zip(data["boxes"], row, strict=True)) for row in zip(*data["boxes"].values(), strict=True)]


def label(box):
    return f"{box['stage']}{box['op']}{box['microbatch']}"


@each_case
def test_every_action_is_a_box_at_its_time(timeline):
    expected = [
        (rank, str(single), float(start), float(end))
        for rank in range(timeline.schedule.ranks)
        for action, start, end in timeline.spans(rank)
        for single in action.singles
        if single.op in ("F", "B", "I", "W")
    ]
    found = [(box["rank"], label(box), box["start"], box["end"]) for box in boxes(panel(timeline))]
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert all(a[2:] == pytest.approx(b[2:]) for a, b in zip(found, expected, strict=True))


@each_case
def test_a_box_says_where_its_action_stands(timeline):
    for box in boxes(panel(timeline)):
        action = timeline.schedule.orders[box["rank"]][box["step"]]
        assert label(box) in map(str, action.singles)
        assert box["part"] == (1 + list(map(str, action.singles)).index(label(box)) if action.parts else 0)


@each_case
def test_a_box_names_what_it_needs(timeline):
    data = panel(timeline)
    every = boxes(data)
    last = timeline.schedule.stages - 1
    gradient = {(b["stage"], b["microbatch"]): label(b) for b in every if b["op"] in "BI"}
    for box, found in zip(every, data["needs"], strict=True):
        stage, op, m = box["stage"], box["op"], box["microbatch"]
        expected = {
            "F": {f"{stage - 1}F{m}"} if stage else set(),
            "W": {f"{stage}I{m}"},
        }.get(op, {f"{stage}F{m}"} | ({gradient[stage + 1, m]} if stage < last else set()))
        assert {label(every[need]) for need in found} == expected


@each_case
def test_boxes_and_gaps_together_fill_a_ranks_time(timeline):
    data = panel(timeline)
    for rank in range(timeline.schedule.ranks):
        own = {(box["start"], box["end"]) for box in boxes(data) if box["rank"] == rank}
        gaps = {(start, end) for at, start, end, _ in data["gaps"] if at == rank}
        pieces = sorted(own | gaps)
        assert pieces[0][0] == 0 and pieces[-1][1] == pytest.approx(float(timeline.makespan))
        assert all(left[1] == right[0] for left, right in pairwise(pieces))


@each_case
def test_a_gap_has_the_reason_that_why_idle_gives(timeline):
    data = panel(timeline)
    assert data["gaps"]
    for rank, start, end, why in data["gaps"]:
        assert why == timeline.why_idle(rank, (start + end) / 2)


@each_case
def test_path_memory_and_numbers_are_the_timelines(timeline):
    data = panel(timeline, cap=3)
    every = boxes(data)
    path = [[str(single) for single in span.action.singles] for _, span in timeline.critical_path()]
    assert [label(every[i]) for i in data["path"]] == [first for first, *_ in path]
    for rank, (times, values) in enumerate(data["memory"]):
        steps = zip(*timeline.memory(rank), strict=True)
        assert [times, values] == [pytest.approx(list(map(float, each))) for each in steps]
    assert data["makespan"] == pytest.approx(float(timeline.makespan)) and data["cap"] == 3
    assert dict(data["numbers"])["bubble"] == f"{timeline.bubble:.1%}"


def test_seconds_below_one_are_milliseconds():
    data = panel(pp.simulate(pp.schedule("gpipe", 2, 2), pp.Costs(forward=0.01, unit="s")))
    assert data["unit"] == "ms" and data["boxes"]["end"][0] == 10 and data["makespan"] == 90
    assert dict(data["numbers"])["makespan"] == "90 ms" and "ms" in data["gaps"][0][3]


def test_marked_boxes_are_those_at_the_places_given():
    data = panel(pp.simulate(pp.schedule("gpipe", 2, 2)), marks=[(0, 1), (1, 2)])
    assert [label(box) for box in boxes(data) if box["mark"]] == ["0F1", "1B0"]
