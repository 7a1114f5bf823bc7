"""Timelines as Chrome traces: what tracing tools expect, and that loading restores everything."""

import copy
import dataclasses
import json
import sys
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu import Action, Costs, ParseError, PipelineError, Placement, Schedule, SettingError, Span, Timeline, simulate
from ppedu.view.perfetto import chrome_trace

SMALL = simulate(pp.schedule("1f1b", 2, 2))


def by_hand(chunks, costs, *lines):
    orders = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    return simulate(Schedule("mine", Placement.make("loop", 2, chunks), 2, orders), costs)


TIMELINES = {
    "1f1b": simulate(pp.schedule("1f1b", 4, 8)),
    "thirds": simulate(pp.schedule("zb-v", 4, 8), Costs(forward=Fraction(1, 3), latency=Fraction(1, 7))),
    "floats": simulate(pp.schedule("gpipe", 3, 5), Costs(forward=0.1, backward=[0.2, 0.3, 0.4])),
    "chunked": by_hand(  # split backwards, a pair, and stages with different activations
        2,
        Costs(latency=Fraction(1, 3), activation=[1, 2, 3, 4], weight_memory=Fraction(1, 4), unit="s"),
        "0F0 2F0 0F1 (2I0;2F1)OVERLAP_B_F 2B1 0I0 0W0 2W0 0B1",
        "1F0 3F0 3B0 1F1 3F1 1B0 3B1 1B1",
    ),
    "recomputed": simulate(
        pp.schedule("zb-h1", 4, 8), Costs(activation=8, recompute=True, stage_input=2, memory_unit="GB")
    ),
    "lowered": by_hand(
        1,
        Costs(latency=Fraction(1, 3)),
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE_GRAD",
        "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ),
}


def read(timeline, tmp_path):
    timeline.save(tmp_path / "x.json")
    return json.loads((tmp_path / "x.json").read_text())


@pytest.mark.parametrize("name", TIMELINES)
def test_a_loaded_timeline_equals_the_saved_one(tmp_path, name):
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


def test_saving_a_loaded_timeline_again_changes_nothing(tmp_path):
    TIMELINES["chunked"].save(tmp_path / "x.json")
    once = Timeline.load(tmp_path / "x.json")
    once.save(tmp_path / "y.json")
    twice = Timeline.load(tmp_path / "y.json")
    assert twice.schedule == once.schedule and twice.costs == once.costs
    assert [span for row in twice.rows for span in row] == [
        (a, pytest.approx(start), pytest.approx(end)) for row in once.rows for a, start, end in row
    ]


def test_a_loaded_run_is_still_measured_and_counts_from_its_start(tmp_path):
    rows = tuple(tuple(Span(a, start + 50, end + 50) for a, start, end in row) for row in SMALL.rows)
    Timeline(SMALL.schedule, rows, Costs(unit="s"), "measured").save(tmp_path / "x.json")
    loaded = Timeline.load(tmp_path / "x.json")
    assert (loaded.source, loaded.start, loaded.end, loaded.costs.unit) == ("measured", 0, 9, "s")


# --- the events -------------------------------------------------------------------------------------------------


def slices(events):
    """Return the slices and marks of each track, in the order of the file."""
    found = {}
    for event in events:
        if event["ph"] in ("X", "i"):
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def names(events, what):
    return {(event["pid"], event.get("tid")): event["args"]["name"] for event in events if event["name"] == what}


@pytest.mark.parametrize("name", TIMELINES)
def test_every_span_is_on_a_track_of_its_rank_in_microseconds(tmp_path, name):
    timeline = TIMELINES[name]
    events = read(timeline, tmp_path)["traceEvents"]
    tracks = names(events, "thread_name")
    found = {
        event["name"]: (tracks[track], event["ts"], event["ts"] + event.get("dur", 0))
        for track, own in slices(events).items()
        for event in own
    }
    assert names(events, "process_name") == {(1, None): f"simulated {timeline.schedule.name}"}
    assert len(found) == sum(map(len, timeline.rows))
    for rank, row in enumerate(timeline.rows):
        for action, start, end in row:
            track, *times = found[f"PP:{action}"]
            computes = action.op in ("F", "B", "I", "W", "OVERLAP_F_B", "OVERLAP_B_F")
            assert track == (f"rank {rank}" if computes else f"rank {rank} communication")
            assert times == pytest.approx([float(start) * 1e6, float(end) * 1e6], rel=0, abs=0.0626)


@pytest.mark.parametrize("name", TIMELINES)
@pytest.mark.parametrize("whole", [int, round])
def test_slices_do_not_overlap_when_rounded_to_nanoseconds(tmp_path, name, whole):
    for own in slices(read(TIMELINES[name], tmp_path)["traceEvents"]).values():
        for event, following in pairwise(own):
            over = whole(event["ts"] * 1000) + whole(event.get("dur", 0) * 1000)
            assert over <= whole(following["ts"] * 1000), "viewers would drop the second"


@pytest.mark.parametrize("name", [*TIMELINES, "dualpipe", "1f1b-overlap"])
def test_an_arrow_leads_from_each_result_to_the_action_on_another_rank_that_requires_it(tmp_path, name):
    timeline = TIMELINES.get(name) or simulate(pp.schedule(name, 4, 8), Costs(latency=Fraction(1, 7)))
    events = read(timeline, tmp_path)["traceEvents"]
    tracks = slices(events)
    ends = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            own = tracks[event["pid"], event["tid"]]
            (holds,) = [each for each in own if each["ts"] <= event["ts"] < each["ts"] + each["dur"]]
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = holds["name"]
            if event["ph"] == "s":
                assert event["ts"] > holds["ts"] + holds["dur"] - 0.2
            else:
                assert event["ts"] == holds["ts"] and event["bp"] == "e"
    assert ends["s"].keys() == ends["f"].keys()

    holder = timeline.schedule.placement.rank
    where = {str(single): f"PP:{a}" for row in timeline.rows for a, *_ in row for single in a.singles}
    expected = []
    for m in range(timeline.schedule.microbatches):
        for stage in range(1, timeline.schedule.stages):
            if holder(stage - 1, m) != holder(stage, m):
                expected.append((where[f"{stage - 1}F{m}"], where[f"{stage}F{m}"]))
                after, before = (where.get(f"{s}B{m}") or where[f"{s}I{m}"] for s in (stage, stage - 1))
                expected.append((after, before))
    assert sorted((ends["s"][number], ends["f"][number]) for number in ends["s"]) == sorted(expected)


@pytest.mark.parametrize("name", ["1f1b", "thirds", "floats", "lowered"])
def test_the_counter_of_a_rank_follows_from_its_slices(tmp_path, name):
    events = read(TIMELINES[name], tmp_path)["traceEvents"]
    tracks = names(events, "thread_name")
    share = TIMELINES[name].schedule.ranks / TIMELINES[name].schedule.stages
    counted = [event for event in events if event["ph"] == "C"]
    for event in counted:
        rank = event["name"].removesuffix(" activations")
        (own,) = [own for track, own in slices(events).items() if tracks[track] == rank]
        taken = sum("F" in each["name"] and each["ts"] <= event["ts"] for each in own)
        back = "W" if any("W" in each["name"] for each in own) else "B"
        given = sum(back in each["name"] and each["ts"] + each["dur"] <= event["ts"] for each in own)
        assert event["args"] == {"held": pytest.approx((taken - given) * share)}
    assert {event["name"] for event in counted} == {
        f"{rank} activations" for rank in tracks.values() if " c" not in rank
    }
    assert len({(event["name"], event["ts"]) for event in counted}) == len(counted)


def test_messages_without_duration_are_marks_and_others_are_slices(tmp_path):
    lowered = TIMELINES["lowered"]
    longer = tuple(
        tuple(Span(a, start, end + Fraction(1, 9) * (a.op == "SEND_B")) for a, start, end in row)
        for row in lowered.rows
    )
    for rows, slow in ((lowered.rows, set()), (longer, {"PP:1SEND_B0", "PP:1SEND_B1"})):
        events = read(Timeline(lowered.schedule, rows, lowered.costs), tmp_path)["traceEvents"]
        assert {event["name"] for event in events if event["ph"] == "X" and len(event["name"]) > 6} == slow
        assert all(event["s"] == "t" and "dur" not in event for event in events if event["ph"] == "i")


def test_slices_are_named_as_torch_names_them_for_its_profiler(tmp_path):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    timeline = simulate(pp.schedule("1f1b-overlap", 2, 4))
    found = {event["name"] for event in read(timeline, tmp_path)["traceEvents"] if event["ph"] == "X"}
    actions = [schedules._Action.from_str(str(span.action)) for row in timeline.rows for span in row]
    assert found == {schedules._get_profiler_function_name(action) for action in actions}


# --- several timelines in one file ------------------------------------------------------------------------------


MEASURED = dataclasses.replace(SMALL, source="measured")


def test_a_measured_run_and_its_simulation_are_saved_in_one_file(tmp_path):
    pp.view.save([MEASURED, TIMELINES["lowered"]], tmp_path / "x.json")
    loaded = pp.view.load_all(tmp_path / "x.json")
    assert [each.schedule for each in loaded] == [SMALL.schedule, TIMELINES["lowered"].schedule]
    assert [each.source for each in loaded] == ["measured", "simulated"]
    assert loaded[0].rows == SMALL.rows
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert names(events, "process_name") == {(1, None): "measured 1f1b", (2, None): "simulated mine"}
    threads = names(events, "thread_name")
    assert {name for (pid, _), name in threads.items() if pid == 1 and " c" not in name} == {
        *["measured rank 0", "measured rank 1"]
    }
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(starts)) == len(starts) == 8


def test_loading_one_timeline_from_a_file_of_several_raises(tmp_path):
    pp.view.save((each for each in [SMALL, SMALL]), tmp_path / "x.json")
    with pytest.raises(ParseError, match=r"holds 2 timelines; ppedu.view.load_all returns all of them"):
        Timeline.load(tmp_path / "x.json")


@pytest.mark.parametrize(("timelines", "ending"), [([], ".json"), ([], ".png"), ([SMALL, SMALL], ".svg")])
def test_only_a_trace_can_hold_several_timelines(tmp_path, timelines, ending):
    with pytest.raises(SettingError, match=f"cannot hold {len(timelines)} timelines; save one, or several in a .json"):
        pp.view.save(timelines, tmp_path / f"x{ending}")
    assert list(tmp_path.iterdir()) == []


# --- broken files -----------------------------------------------------------------------------------------------


def broken(change):
    """Write the trace of SMALL with a change to a file."""

    def write(path):
        SMALL.save(path)
        data = json.loads(path.read_text())
        data = change(data) or data
        path.write_text(data if isinstance(data, str) else json.dumps(data))

    return write


def event(**changes):
    return lambda data: [event for event in data["traceEvents"] if event["ph"] == "X"][-1].update(changes)


def about(**changes):
    return lambda data: data["ppedu"][0].update(changes)


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
    "an event that is not an action": event(name="forward"),
    "an event of no rank": event(tid=30),
    "an event of no timeline": event(pid=2),
    "an event at no time": event(ts=None),
    "a name that is a number": event(name=5),
    "a rank below 0": event(tid=-1),
    "an end before its start": event(dur=-1e6),
    "a time that is not a number": event(ts=float("nan")),
    "weights of other stages": about(activation=[1]),
    "a link without a latency": about(latency=[]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_not_a_timeline_raises_an_error_with_its_name(tmp_path, what):
    path = tmp_path / "x.json"
    broken(BROKEN[what])(path)
    with pytest.raises(ParseError, match="is not a timeline saved by ppedu") as caught:
        Timeline.load(path)
    assert str(path) in str(caught.value)


@contextmanager
def little_memory(megabytes=400):
    """Limit the memory that the process may allocate, on systems that support it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + megabytes * 1_000_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def sized(**sizes):
    return json.dumps({"ppedu": [{"placement": "loop", "holders": [0], **sizes}], "traceEvents": []})


BOMBS = {
    "a thousand million ranks": '{"ppedu":[{"ranks": 1000000000}], "traceEvents": []}',
    "ranks, chunks and microbatches": sized(ranks=10**9, chunks=10**9, microbatches=10**9),
    "as many ranks as are allowed": sized(ranks=5_000_000, chunks=1, microbatches=1),
    "a text in place of a number of chunks": sized(ranks=10**9, chunks="loop", microbatches=1),
    "lists in lists": "[" * 100_000 + "]" * 100_000,
    "a number of many digits": '{"ppedu": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_small_file_does_not_fill_the_memory(tmp_path, what):
    (tmp_path / "x.json").write_text(BOMBS[what])
    with little_memory(), pytest.raises(ParseError, match="is not a timeline saved by ppedu"):
        pp.view.load_all(tmp_path / "x.json")


def places(data, path=()):
    """Yield the path of keys to each value in JSON data."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


NUMBERS = st.sampled_from([0, 1, 2, -1, 0.5, 10**9, 10**30, 10**400, 1e308, float("inf"), float("nan")])
TEXTS = st.sampled_from(
    ["", "x", "v", "custom", "bidirectional", "X", "PP:1B1", "PP:9F0", "PP:0W99", "PP:(0F0;1B0)OVERLAP_F_B"]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ranks", "ppedu", "ph"]), inner),
    max_leaves=5,
)
LOWERED = simulate(pp.lower(pp.schedule("1f1b", 2, 2)), Costs(latency={(0, 1): 1, (1, 0): 2}, transport="pair"))
SAVED = [json.loads(chrome_trace(*each)) for each in ([SMALL], [TIMELINES["chunked"], SMALL], [LOWERED])]

OF_ANY_SIZE = st.fixed_dictionaries({"ranks": NUMBERS, "chunks": NUMBERS, "microbatches": NUMBERS}).map(
    lambda sizes: {**SAVED[0], "ppedu": [{**SAVED[0]["ppedu"][0], **sizes}]}
)


@st.composite
def damaged(draw):
    """A saved trace in which some values are changed or missing."""
    data = copy.deepcopy(draw(st.sampled_from(SAVED)))
    for _ in range(draw(st.integers(1, 3))):
        # Most changes affect the key "ppedu" and not one of the many events.
        about = draw(st.integers(0, 3))
        every = [path for path in places(data) if not about or (path[0] == "ppedu" and len(path) == 3)]
        if every:
            *way, last = draw(st.sampled_from(every))
            holder = data
            for key in way:
                holder = holder[key]
            if draw(st.booleans()):
                holder[last] = draw(NUMBERS | TEXTS | JSON)
            else:
                del holder[last]
    return data


@often(300)
@given(data=damaged() | OF_ANY_SIZE | JSON)
def test_a_damaged_file_is_refused_or_gives_timelines_that_can_be_drawn(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps(data))
    with little_memory():
        try:
            loaded = pp.view.load_all(path)
        except ParseError:
            return
        for timeline in loaded:
            assert timeline.text() and timeline.show().state()


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
def test_chunks_pairs_copies_and_messages_are_loaded_unchanged(tmp_path, name):
    made = pp.schedule(name, 4, 8)
    for schedule in (made, pp.lower(made, fsdp=True)):
        simulate(schedule, Costs(latency=Fraction(1, 3))).save(tmp_path / "x.json")
        assert Timeline.load(tmp_path / "x.json").schedule == schedule


def test_a_custom_placement_is_loaded_unchanged(tmp_path):
    placement = pp.Placement.custom([0, 0, 1])
    order = [tuple(pp.Action.parse(a) for a in text.split()) for text in ("0F0 1F0 1B0 0B0", "2F0 2B0")]
    timeline = simulate(pp.Schedule("own", placement, 1, tuple(order)))
    timeline.save(tmp_path / "x.json")
    assert Timeline.load(tmp_path / "x.json").schedule == timeline.schedule
