"""Timelines as Chrome traces: what tracing tools expect to find, and that nothing is lost on the way back."""

import json
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu import Action, Costs, ParseError, PipelineError, Placement, Schedule, Span, Timeline, simulate

SMALL = simulate(pp.schedule("1f1b", 2, 2))


def chunked():
    """Two stages on each rank, split backwards, a pair, a message, and stages that weigh differently."""
    lines = (
        "0F0 2F0 0F1 2F1 2I0 (2B1;0I0)OVERLAP_B_F 0W0 2W0 0B1",
        "1F0 3F0 3B0 1F1 1SEND_F1 3F1 1B0 3B1 1B1",
    )
    orders = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    costs = Costs(latency=Fraction(1, 3), activation=[1, 2, 3, 4], weight_memory=Fraction(1, 4), unit="s")
    return simulate(Schedule("mine", Placement.make("loop", 2, 2), 2, orders), costs)


TIMELINES = {
    "1f1b": simulate(pp.schedule("1f1b", 4, 8)),
    "floats": simulate(pp.schedule("gpipe", 3, 5), Costs(forward=0.1, backward=[0.2, 0.3, 0.4])),
    "chunked": chunked(),
}


def read(timeline, tmp_path):
    timeline.save(tmp_path / "x.json")
    return json.loads((tmp_path / "x.json").read_text())


@pytest.mark.parametrize("name", TIMELINES)
def test_what_is_saved_is_loaded(tmp_path, name):
    timeline = TIMELINES[name]
    timeline.save(tmp_path / "x.json")
    loaded = Timeline.load(tmp_path / "x.json")
    assert loaded.schedule == timeline.schedule
    assert loaded.source == timeline.source and loaded.costs.unit == timeline.costs.unit
    for row, expected in zip(loaded.rows, timeline.rows, strict=True):
        assert [span.action for span in row] == [span.action for span in expected]
        times = [float(time) for _, *times in expected for time in times]
        assert [time for _, *times in row for time in times] == pytest.approx(times)
    assert loaded.makespan == pytest.approx(float(timeline.makespan))
    assert loaded.peak_activations == pytest.approx([float(peak) for peak in timeline.peak_activations])
    assert loaded.bubble == pytest.approx(timeline.bubble)
    for rank in range(timeline.schedule.ranks):
        held = [float(value) for _, value in timeline.memory(rank)]
        assert [value for _, value in loaded.memory(rank)] == pytest.approx(held)


def test_what_is_loaded_can_be_saved_again_and_is_the_same(tmp_path):
    TIMELINES["chunked"].save(tmp_path / "x.json")
    once = Timeline.load(tmp_path / "x.json")
    once.save(tmp_path / "y.json")
    twice = Timeline.load(tmp_path / "y.json")
    assert twice.schedule == once.schedule and twice.costs == once.costs
    assert [span for row in twice.rows for span in row] == [
        (a, pytest.approx(start), pytest.approx(end)) for row in once.rows for a, start, end in row
    ]


def test_a_measured_run_is_loaded_as_one_and_counted_from_its_start(tmp_path):
    rows = tuple(tuple(Span(a, start + 50, end + 50) for a, start, end in row) for row in SMALL.rows)
    Timeline(SMALL.schedule, rows, Costs(unit="s"), "measured").save(tmp_path / "x.json")
    loaded = Timeline.load(tmp_path / "x.json")
    assert (loaded.source, loaded.start, loaded.end, loaded.costs.unit) == ("measured", 0, 9, "s")


@pytest.mark.parametrize("name", TIMELINES)
def test_the_file_is_a_trace_of_complete_events_in_microseconds(tmp_path, name):
    timeline = TIMELINES[name]
    data = read(timeline, tmp_path)
    assert data["displayTimeUnit"] in ("ms", "ns")
    complete = [event for event in data["traceEvents"] if event["ph"] == "X"]
    spans = [(rank, span) for rank, row in enumerate(timeline.rows) for span in row]
    assert [(event["tid"], event["name"]) for event in complete] == [(rank, str(span.action)) for rank, span in spans]
    for event, (_, span) in zip(complete, spans, strict=True):
        assert event["ts"] == pytest.approx(float(span.start) * 1e6)
        assert event["dur"] == pytest.approx(float(span.end - span.start) * 1e6)
        assert isinstance(event["pid"], int) and isinstance(event["cat"], str)


def test_the_ranks_are_the_threads_of_one_process(tmp_path):
    events = read(TIMELINES["1f1b"], tmp_path)["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {rank: f"rank {rank}" for rank in range(4)}
    assert {event["pid"] for event in events} == {0}
    assert {event["ph"] for event in events} == {"M", "X"}


# --- broken files -----------------------------------------------------------------------------------------------


def broken(change):
    """A test's file: the trace of SMALL, changed."""

    def write(path):
        SMALL.save(path)
        data = json.loads(path.read_text())
        data = change(data) or data
        path.write_text(data if isinstance(data, str) else json.dumps(data))

    return write


def event(**changes):
    return lambda data: data["traceEvents"][-1].update(changes)


def about(**changes):
    return lambda data: data["ppedu"].update(changes)


BROKEN = {
    "empty": lambda data: " ",
    "not JSON": lambda data: "{",
    "a list": lambda data: "[]",
    "a number": lambda data: "1",
    "of another tool": lambda data: {"traceEvents": data["traceEvents"]},
    "without events": lambda data: {"ppedu": data["ppedu"]},
    "events of another kind": lambda data: {**data, "traceEvents": 5},
    "about nothing": lambda data: {**data, "ppedu": None},
    "no ranks": about(ranks=0),
    "ranks in words": about(ranks="two"),
    "too few ranks": about(ranks=1),
    "no microbatches": about(microbatches=0),
    "an unknown placement": about(placement="ring"),
    "a negative weight": about(activation=[-1, 1]),
    "an event that is no action": event(name="forward"),
    "an event of no rank": event(tid=2),
    "an event at no time": event(ts=None),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_no_timeline_is_refused_by_name(tmp_path, what):
    path = tmp_path / "x.json"
    broken(BROKEN[what])(path)
    with pytest.raises(ParseError, match="is not a timeline saved by ppedu") as caught:
        Timeline.load(path)
    assert str(path) in str(caught.value)


BUGS = {
    "a name that is a number": event(name=5),
    "a rank below 0": event(tid=-1),
    "an end before its start": event(dur=-1e6),
    "a time that is no number": event(ts=float("nan")),
    "weights of other stages": about(activation=[1]),
}


@pytest.mark.parametrize("what", BUGS)
def test_a_file_that_is_no_timeline_is_refused_as_well(tmp_path, what):
    path = tmp_path / "x.json"
    broken(BUGS[what])(path)
    with pytest.raises(ParseError):
        Timeline.load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nowhere.json", tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(PipelineError, match="cannot read") as caught:
            Timeline.load(path)
        assert str(path) in str(caught.value)


def test_a_schedule_of_numpy_counts_is_saved(tmp_path):
    numpy = pytest.importorskip("numpy")
    timeline = simulate(pp.schedule("1f1b", numpy.int64(2), numpy.int64(3)))
    timeline.save(tmp_path / "x.json")
    assert Timeline.load(tmp_path / "x.json").schedule == timeline.schedule


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe", "chimera"])
def test_chunks_pairs_and_copies_are_loaded_as_they_were(tmp_path, name):
    timeline = simulate(pp.schedule(name, 4, 8))
    timeline.save(tmp_path / "x.json")
    assert Timeline.load(tmp_path / "x.json").schedule == timeline.schedule


def test_a_placement_of_ones_own_is_loaded_as_it_was(tmp_path):
    placement = pp.Placement.custom([0, 0, 1])
    order = [tuple(pp.Action.parse(a) for a in text.split()) for text in ("0F0 1F0 1B0 0B0", "2F0 2B0")]
    timeline = simulate(pp.Schedule("own", placement, 1, tuple(order)))
    timeline.save(tmp_path / "x.json")
    assert Timeline.load(tmp_path / "x.json").schedule == timeline.schedule
