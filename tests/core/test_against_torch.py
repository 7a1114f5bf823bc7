"""torch.distributed.pipelining as the oracle: its grammar, its CSV files, its validation and its own schedules."""

import csv
import io
from types import SimpleNamespace

import pytest
import strategies
from hypothesis import given
from strategies import often

import ppedu as pp
from ppedu import Action, Op, ParseError, Schedule, check, simulate
from ppedu.core.csv_format import csv_text

pytest.importorskip("torch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

from releases import needs  # noqa: E402 (it imports torch)

from ppedu.engine.ranks.versions import TORCHS_ORDERS  # noqa: E402


def to_torch(action):
    """Return the action as torch's. OVERLAP_B_F, which torch lacks, becomes OVERLAP_F_B, whose parts may be any."""
    return schedules._Action.from_str(str(action).replace("OVERLAP_B_F", "OVERLAP_F_B"))


def word(kind):
    """Return a kind of torch's actions as it is written; before 2.11, its value is a number."""
    return kind.value if isinstance(kind.value, str) else str(kind)


def same(ours, theirs):
    """Return whether torch's action and ours have equal fields."""
    if ours.parts:
        return word(theirs.computation_type) == ours.op and all(map(same, ours.parts, theirs.sub_actions))
    microbatch = -1 if theirs.microbatch_index is None else theirs.microbatch_index
    return (theirs.stage_index, word(theirs.computation_type), microbatch) == ours[:3] and not theirs.sub_actions


def read(text):
    """Return the orders in a CSV text, as torch's `_load_csv` reads them."""
    return {
        rank: [schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text, newline="")))
    }


def write(orders):
    """Return the CSV text of torch's orders, as torch's `_dump_csv` writes it."""
    out = io.StringIO(newline="")
    csv.writer(out).writerows(orders[rank] for rank in orders)
    return out.getvalue()


def load(tmp_path, text):
    path = tmp_path / "theirs.csv"
    path.write_bytes(text.encode())
    return Schedule.from_csv(path)


def with_messages(orders, schedule):
    """Return orders with torch's own messages. Torch modifies the orders that it is given."""
    copies = {rank: list(order) for rank, order in orders.items()}
    return schedules._add_send_recv(copies, schedule.placement.rank, schedule.stages)


def torch_accepts(schedule):
    """Return whether torch validates and lowers the orders."""
    idle = [None] * schedule.ranks  # with fewer steps than ranks torch 2.13 fails to print its findings
    orders = {rank: [*map(to_torch, order), *idle] for rank, order in enumerate(schedule.orders)}
    try:
        schedules._validate_schedule(orders, schedule.ranks, schedule.stages, schedule.microbatches)
        with_messages(orders, schedule)
    except AssertionError:
        return False
    return True


# --- grammar ----------------------------------------------------------------------------------------------------


@needs(TORCHS_ORDERS)
@given(strategies.actions.filter(lambda action: action.op not in (Op.OVERLAP_B_F, Op.R, Op.U, Op.S, Op.T)))
@often(300)
def test_torch_reads_every_action_that_is_written_here(action):
    theirs = to_torch(action)
    assert same(action, theirs)
    assert str(theirs) == str(action)
    assert Action.parse(str(theirs)) == action


@pytest.mark.parametrize("text", ["2F0x", "02F0", "2F00", "2F0 3F0"])
def test_text_that_torch_misreads_is_refused(text):
    assert str(schedules._Action.from_str(text)) != text
    with pytest.raises(ParseError):
        Action.parse(text)


@needs(TORCHS_ORDERS)
def test_every_op_of_torch_is_known():
    # Since 2.15, separate actions wait for a message that is sent and for gradients that are reduced.
    theirs = {word(kind) for kind in schedules._ComputationType if not word(kind).startswith("WAIT_")}
    ours = {op.value for op in Op if not op.startswith("WAIT_")}
    assert theirs - {"BATCH_P2P"} == ours - {"OVERLAP_B_F", "BATCH_P2P", "SEND_R", "RECV_R", *"ROLUST"}


# --- legality ---------------------------------------------------------------------------------------------------


@needs(TORCHS_ORDERS)
@given(strategies.shuffled_schedules())
@often(120)
def test_torch_agrees_about_shuffled_orders(schedule):
    assert (check(schedule) == []) == torch_accepts(schedule)


@needs(TORCHS_ORDERS)
@given(strategies.mutated_schedules("drop", "swap", "split"))
@often(120)
def test_torch_agrees_about_incomplete_orders(schedule):
    assert (check(schedule) == []) == torch_accepts(schedule)


# --- our schedules in torch -------------------------------------------------------------------------------------


@needs(TORCHS_ORDERS)
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 5), (4, 3), (4, 8), (8, 16)])
def test_torch_reads_validates_and_steps_through_every_schedule_of_the_zoo(name, ranks, microbatches):
    schedule = pp.schedule(name, ranks, microbatches)
    orders = read(schedule.to_csv())
    assert all(map(same, schedule.orders[rank], orders[rank]) for rank in range(ranks))
    found = schedules._validate_schedule(orders, ranks, schedule.stages, microbatches)
    assert found == {stage: schedule.placement.rank(stage) for stage in range(schedule.stages)}
    stepped = schedules._simulate_comms_compute(
        with_messages(orders, schedule), schedule.placement.rank, schedule.stages
    )
    compute = {rank: [str(a) for a in row if a is not None and a.is_compute_op] for rank, row in stepped.items()}
    assert compute == {rank: [str(action) for action in order] for rank, order in enumerate(schedule.orders)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
@pytest.mark.parametrize("ranks, microbatches", [(2, 2), (4, 3), (4, 8), (8, 20)])
def test_idle_steps_equal_those_that_torch_adds(name, ranks, microbatches):
    """torch adds them for its zero-bubble schedule. Its rules for split backwards differ."""
    schedule = pp.schedule(name, ranks, microbatches)
    bare = SimpleNamespace(pipeline_order=read(schedule.to_csv()), pp_group_size=ranks)
    theirs = schedules.ScheduleInterleavedZeroBubble._add_bubbles_to_actions(bare, schedule.stages)
    ours = read(csv_text(pp.align(schedule)))
    steps = max(map(len, theirs.values()))
    assert ours == {rank: order + [None] * (steps - len(order)) for rank, order in theirs.items()}
    schedules._validate_schedule(ours, ranks, schedule.stages, microbatches)


# --- torch's schedules here -------------------------------------------------------------------------------------

LOOPED = [
    (schedules.ScheduleLoopedBFS, 2, 2, 4),
    (schedules.ScheduleLoopedBFS, 4, 2, 3),
    (schedules.ScheduleInterleaved1F1B, 2, 2, 4),
    (schedules.ScheduleInterleaved1F1B, 4, 2, 8),
    (schedules.ScheduleInterleaved1F1B, 4, 3, 10),
    (schedules.ScheduleInterleavedZeroBubble, 2, 2, 4),
    (schedules.ScheduleInterleavedZeroBubble, 4, 1, 8),
    (schedules.ScheduleInterleavedZeroBubble, 4, 3, 10),
]


def looped(kind, ranks, chunks, microbatches):
    """Return the orders of one of torch's schedules, including idle steps, without a process group."""
    rounds = max(1, microbatches // ranks)
    settings = SimpleNamespace(
        _stages=[None] * chunks,
        n_local_stages=chunks,
        pp_group_size=ranks,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
    )
    return {rank: kind._calculate_single_rank_operations(settings, rank) for rank in range(ranks)}


@pytest.mark.parametrize("kind, ranks, chunks, microbatches", LOOPED)
def test_torchs_schedules_are_loaded_without_their_idle_steps_and_are_legal(
    tmp_path, kind, ranks, chunks, microbatches
):
    orders = looped(kind, ranks, chunks, microbatches)
    schedule = load(tmp_path, write(orders))
    assert (schedule.ranks, schedule.chunks, schedule.microbatches) == (ranks, chunks, microbatches)
    expected = [[str(action) for action in order if action is not None] for order in orders.values()]
    assert [[str(action) for action in order] for order in schedule.orders] == expected
    assert check(schedule) == []


def test_actions_that_wait_for_what_was_sent_are_read(tmp_path):
    """Torch writes them from 2.15 on, and also those that wait for reduced gradients, which are left out."""
    first = "0F0,0SEND_F0,0RECV_B0,0WAIT_SEND_F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    loaded = load(tmp_path, first + "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n")
    assert loaded.to_csv() == (
        "0F0,0SEND_F0,0RECV_B0,0WAIT_SEND_F0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"
    )
    assert [problem.action for problem in check(loaded)] == [Action.parse("1REDUCE_GRAD")]


@pytest.mark.parametrize("kind, ranks, chunks, microbatches", LOOPED)
def test_torchs_lowered_schedules_are_legal_and_take_as_long(tmp_path, kind, ranks, chunks, microbatches):
    schedule = load(tmp_path, write(looped(kind, ranks, chunks, microbatches)))
    lowered = load(tmp_path, write(with_messages(read(schedule.to_csv()), schedule)))
    assert sum(map(len, lowered.orders)) > sum(map(len, schedule.orders))
    assert check(lowered) == []
    assert simulate(lowered).makespan == simulate(schedule).makespan
