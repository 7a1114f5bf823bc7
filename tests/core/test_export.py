"""Schedules in the formats of other programs. test_against_torch and test_lowered load the CSV into torch."""

import re
from collections import defaultdict, deque
from contextlib import suppress
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_schedules, often

import ppedu as pp
from ppedu import Schedule, SettingError
from ppedu.core.export import to_deepspeed, to_megatron, to_torch, to_zero_bubble

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (2, 5), (3, 7), (4, 3), (4, 8)]
TWO_COPIES = {"dualpipe", "gems", "chimera", "bitpipe"}
SLICED = {"terapipe", "seq1f1b", "slimpipe"}
OWN = {"mario", "pipedream", "pipedream-2bw", "po-h", "po-f"}  # with actions that no other program has
OWN |= {"1f1b-vocab", "v-half-vocab", "roundpipe"}
# The schedules of the zoo that each writer takes. It refuses the others on several ranks with several microbatches.
TAKEN = {
    to_torch: set(pp.schedules()) - TWO_COPIES - SLICED - OWN,
    to_megatron: {"naive", "gpipe", "1f1b", "interleaved"},
    to_zero_bubble: set(pp.schedules())
    - {"1f1b-overlap", "interleaved-overlap", "dualpipev", "stp"}
    - OWN
    - TWO_COPIES
    - SLICED,
    to_deepspeed: {"naive", "1f1b"},
}


ONE_BY_ONE = pp.schedule("naive", 2, 2)


def in_order(orders):
    """Return the orders with the actions of pairs in place of these, without sharding."""
    return [[each for action in order for each in action.singles if each.microbatch >= 0] for order in orders]


@pytest.mark.parametrize("name", pp.schedules())
def test_the_zoo_is_written_exactly_or_refused_with_the_reason(name):
    for size in SIZES:
        try:
            schedule = pp.schedule(name, *size)
        except SettingError:  # no such size
            continue
        lowered = [pp.lower(schedule), pp.lower(schedule, receive="late")]
        whole = [(writer, schedule) for writer in TAKEN]
        for writer, each in [*whole, *product((to_torch, to_deepspeed), lowered)]:
            try:
                found = Schedule.read(writer(each))
            except SettingError as error:
                assert name not in TAKEN[writer] or (each == lowered[0] and "overwrites in DeepSpeed" in str(error))
                assert " — " in str(error)
                continue
            assert name in TAKEN[writer] or min(size) == 1
            ours = found if each.lowered else pp.strip(found)
            assert in_order(ours.orders) == in_order(each.orders)
            assert found.microbatches == each.microbatches and pp.check(found) == []
            if size[0] > 1:
                assert found.placement == each.placement
            if writer is not to_torch:
                assert pp.strip(found).orders == pp.strip(each).orders  # pairs are not written as two


@pytest.mark.parametrize("writer", TAKEN)
def test_forwards_alone_are_written(writer):
    schedule = pp.schedule("gpipe", 3, 4).forwards
    found = Schedule.read(writer(schedule), forward_only=True)
    assert pp.strip(found).orders == schedule.orders and pp.check(found) == []


def test_the_texts_are_those_of_the_programs():
    assert to_megatron(pp.schedule("interleaved", 2, 2)) == "1 1 2 2 -2 -2 -1 -1\n1 1 2 -2 2 -2 -1 -1\n"
    assert to_deepspeed(pp.schedule("1f1b", 1, 1)) == (
        "[LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0), BackwardPass(buffer_id=0), ReduceTiedGrads(), "
        "ReduceGrads(), OptimizerStep()]\n"
    )
    nodes = to_zero_bubble(pp.schedule("zb-v", 2, 2))
    assert [tuple(node) for node in nodes[1][:2]] == [("F", 1, 0, 0, 0, 1), ("F", 1, 0, 1, 0, 2)]
    assert {node.type for node in nodes[0]} == {"F", "B", "W"} and to_zero_bubble(ONE_BY_ONE)[0][1].type == "BW"


@pytest.mark.parametrize(
    ("writer", "schedule", "problem"),
    [
        (to_megatron, pp.schedule("zb-h1", 2, 2), r"0I0; Megatron-LM's numbers have no halves of a backward"),
        (to_megatron, pp.schedule("hanayo", 2, 2), "has the placement 'v'; Megatron-LM's numbers are for 'loop'"),
        (to_megatron, pp.schedule("gpipe", 2, 2, lifo=True), "has 0B1 where microbatch 0 is next"),
        (to_megatron, pp.lower(pp.schedule("1f1b", 2, 2)), r"has 0SEND_F0; .* strip\(schedule\) has the computations"),
        (to_zero_bubble, pp.schedule("1f1b-overlap", 2, 4), "zero-bubble's nodes have no pairs"),
        (to_zero_bubble, pp.merge_backward(pp.schedule("zb-h1", 3, 4)), "whole backwards and halves for microbatch 0"),
        (to_zero_bubble, Schedule.read("1F0 1B0\n0F0 0B0", pp.Placement.custom([1, 0])), "are for 'loop' or 'v'"),
        (to_deepspeed, pp.schedule("interleaved", 2, 2), "several stages on a rank; DeepSpeed has one"),
        (
            to_deepspeed,
            pp.schedule("gpipe", 2, 2),
            "has 1F1 before the backward whose loss it overwrites",
        ),
        (to_deepspeed, pp.lower(pp.schedule("1f1b", 2, 2), fsdp=True), "has 0UNSHARD; to_deepspeed does not take it"),
        (to_deepspeed, Schedule.read("0F1 0B1 0F0 0B0"), "has 0F1 where microbatch 0 is next; DeepSpeed counts"),
        (to_deepspeed, pp.lower(pp.schedule("1f1b", 3, 3)), "has 1RECV_F2 before the backward whose gradient it overw"),
        (
            to_deepspeed,
            Schedule.read(
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0\n"
                "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0"
            ),
            "has 1F1 where microbatch 0 is next; DeepSpeed counts",
        ),
        (
            to_deepspeed,
            Schedule.read(
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1\n"
                "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"
            ),
            "has 0RECV_B1 before the backward whose gradient it overwrites",
        ),
    ],
)
def test_what_a_format_cannot_say_is_refused(writer, schedule, problem):
    with pytest.raises(SettingError, match=problem):
        writer(schedule)


def test_what_is_not_legal_is_refused_where_it_is_written():
    illegal = Schedule.read("0B0 0F0\n1F0 1B0")
    for writer in (to_megatron, to_zero_bubble, to_deepspeed):
        with pytest.raises(pp.ScheduleError, match="is not legal"):
            writer(illegal)
    both_send_first = Schedule.read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    with pytest.raises(pp.ScheduleError, match="hangs in DeepSpeed, where sends wait: deadlock"):
        to_deepspeed(both_send_first)


@often(300)
@given(legal_schedules(pairs=0.1), st.data())
def test_what_is_written_is_read_back(schedule, data):
    writer = data.draw(st.sampled_from([to_torch, to_megatron, to_zero_bubble]))
    with suppress(SettingError):
        found = Schedule.read(writer(schedule))
        assert in_order(found.orders) == in_order(schedule.orders) and found.placement == schedule.placement


@often(300)
@given(legal_schedules(most_chunks=1, split=0))
def test_what_deepspeeds_engine_is_given_it_runs_right(schedule):
    with suppress(SettingError):
        text = to_deepspeed(schedule)
        assert pp.strip(Schedule.read(text)).orders == schedule.orders
        own = [[each.microbatch for each in order if each.op == "B"] for order in schedule.orders]
        assert run_as_deepspeed(text) == own


def parts(line):
    return re.findall(r"(\w+)\((?:buffer_id=(\d+))?\)", line)


def run_as_deepspeed(text):
    """Run instructions as PipelineEngine does, with numbers of microbatches for tensors; return each rank's backwards.

    A buffer holds an input and an output. The engine has one loss. It receives into one place, from which it copies an
    activation, but not a gradient. A backward frees its output, and a send of a gradient its input.
    """
    lines = [deque(parts(line)) for line in text.splitlines()]
    inputs, outputs, kept, backwards = ([{} for _ in lines] for _ in range(4))
    sent = defaultdict(deque)
    loaded = [0] * len(lines)
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            last = rank == len(lines) - 1
            while line:
                name, buffer = line[0]
                source = {"RecvActivation": (rank - 1, rank), "RecvGrad": (rank + 1, rank)}.get(name)
                if source and not sent[source]:
                    break
                if name == "LoadMicroBatch":
                    if rank == 0:
                        inputs[rank][buffer] = loaded[rank]
                    else:
                        assert inputs[rank][buffer] == loaded[rank]  # targets of the same microbatch
                    loaded[rank] += 1
                elif name == "ForwardPass":
                    outputs[rank][buffer] = inputs[rank][buffer]
                    if last:
                        kept[rank] = outputs[rank][buffer]
                elif name == "BackwardPass":
                    assert kept[rank] == outputs[rank].pop(buffer) == inputs[rank][buffer]
                    backwards[rank][kept[rank]] = buffer
                elif name == "SendActivation":
                    sent[rank, rank + 1].append(outputs[rank][buffer])
                elif name == "SendGrad":
                    assert inputs[rank][buffer] in backwards[rank]
                    sent[rank, rank - 1].append(inputs[rank].pop(buffer))
                elif name == "RecvActivation":
                    assert buffer not in inputs[rank]
                    inputs[rank][buffer] = sent[source].popleft()
                    if not last:
                        kept[rank] = "an activation"
                elif name == "RecvGrad":
                    kept[rank] = sent[source].popleft()
                line.popleft()
                moved = True
    assert not any(lines) and not any(sent.values())
    return [list(each) for each in backwards]


def buffers(text):
    """Return the numbers of buffers of the ranks."""
    return [1 + max(int(buffer) for _, buffer in parts(line) if buffer) for line in text.splitlines()]


def test_deepspeeds_engine_takes_no_microbatch_for_another():
    for ranks in range(1, 6):
        for microbatches in range(1, 8):
            for name in ("1f1b", "naive"):
                schedule = pp.schedule(name, ranks, microbatches)
                text = to_deepspeed(schedule)
                assert run_as_deepspeed(text) == [[*range(microbatches)]] * ranks
                peaks = pp.simulate(schedule).peak_activations
                assert all(each <= peak + 1 for each, peak in zip(buffers(text), peaks, strict=True))


def test_deepspeeds_own_schedules_are_written_as_they_are_up_to_buffers():
    """Names of all instructions, in order, but for loads; and our text is instructions in their Python."""
    theirs = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for ranks in range(1, 7):
        for microbatches in range(1, 9):
            schedules = [theirs.TrainSchedule(microbatches, ranks, rank) for rank in range(ranks)]
            text = to_deepspeed(Schedule.read(schedules))
            ours = [eval(line, vars(theirs)) for line in text.splitlines()]
            for rank, (mine, schedule) in enumerate(zip(ours, schedules, strict=True)):
                own = [*chain.from_iterable(schedule.steps())]
                assert [each.name for each in mine] == [each.name for each in own]
                assert buffers(text)[rank] <= schedule.num_pipe_buffers()
            again = Schedule.read(ours)
            assert again.orders == Schedule.read(schedules).orders


def test_a_pair_unknown_to_torch_is_exported_as_two_actions(tmp_path):
    schedule = pp.schedule("interleaved-overlap", 2, 4, backward_first=True)
    assert "OVERLAP_B_F" in schedule.to_csv()
    text = to_torch(schedule, tmp_path / "s.csv")
    assert "OVERLAP" not in text and (tmp_path / "s.csv").read_text() == text
    assert in_order(Schedule.from_csv(tmp_path / "s.csv").orders) == in_order(schedule.orders)


def test_pairs_known_to_torch_are_exported_as_pairs():
    schedule = pp.schedule("dualpipev", 2, 4)
    assert to_torch(schedule) == schedule.to_csv()


@pytest.mark.parametrize("writer", TAKEN)
@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_two_copies_are_refused_with_the_reason(name, writer):
    with pytest.raises(SettingError, match="two copies of the model"):
        writer(pp.schedule(name, 4, 8))


@pytest.mark.parametrize("writer", TAKEN)
def test_a_schedule_without_actions_is_refused(writer):
    with pytest.raises(SettingError, match="has no actions; there is nothing to export"):
        writer(Schedule("mine", pp.Placement.make("loop", 2), 3, ((), ())))


@pytest.mark.parametrize(
    ("old", "new", "unknown"),
    [("0SEND_F0", "(0SEND_F0)BATCH_P2P", "BATCH_P2P"), ("0RECV_B0", "0RECV_B0 0WAIT_RECV_B0", "0WAIT_RECV_B0")],
)
def test_torch_has_no_batches_and_waits_for_no_receives(old, new, unknown):
    text = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0".replace(old, new)
    with pytest.raises(SettingError, match=f"torch has no .*{unknown}; .* export pp.strip"):
        to_torch(Schedule.read(text))
