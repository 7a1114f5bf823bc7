"""`pp.run.record` and `pp.run.verified`: what torch's own schedules do, and classes derived from them."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import BEGIN
from torch import nn
from torch.distributed.pipelining import schedules

import ppedu as pp
from ppedu.core.actions import SHARDING, WAITS
from ppedu.core.checking import TRANSPORTS
from ppedu.engine.ranks.versions import TORCHS_RECORDED, lack

if lack(TORCHS_RECORDED):  # old releases do not have all the classes
    pytest.skip(lack(TORCHS_RECORDED), allow_module_level=True)

SINGLE = {schedules.ScheduleGPipe: "gpipe", schedules.Schedule1F1B: "1f1b"}
LOOPS = [schedules.ScheduleInterleaved1F1B, schedules.ScheduleLoopedBFS, schedules.ScheduleInterleavedZeroBubble]
VS = [schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV]
SIZES = [(ranks, microbatches) for ranks in (1, 2, 4) for microbatches in sorted({ranks, 2 * ranks, 8})]


def kept(pipe, made):
    """Return a class that does the same as `pipe`, and adds its instances to `made`."""

    class Kept(pipe):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            made.append(self)

    return Kept


def one_by_one(order, without):
    """Return the actions of an order, pairs as two, but for some kinds."""
    return [each for action in order for each in action.singles if each.op not in without]


def legal(schedule):
    return not any(pp.check(schedule, transport=transport) for transport in TRANSPORTS)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("pipe", SINGLE)
def test_schedules_with_one_stage_on_a_rank_compute_as_ours(pipe, ranks, microbatches):
    found = pp.run.record(pipe, ranks, microbatches)
    ours = pp.schedule(SINGLE[pipe], ranks, microbatches)
    assert (pp.strip(found).orders, found.placement) == (ours.orders, ours.placement)
    assert legal(found)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("pipe", LOOPS + VS)
def test_other_schedules_do_what_is_in_their_orders(pipe, ranks, microbatches):
    """The runtime runs the two parts of a pair one after the other."""
    for chunks in [2] if pipe in VS else [1, 2, 3]:
        made = []
        if pipe is schedules.ScheduleDualPipeV and microbatches < 2 * ranks:
            continue
        found = pp.run.record(kept(pipe, made), ranks, microbatches, chunks=chunks)
        expected = pp.Schedule.read(made[-1], placement=found.placement)
        assert found.placement.name == ("v" if pipe in VS and ranks > 1 else "loop")
        for order, theirs in zip(found.orders, expected.orders, strict=True):
            assert one_by_one(order, WAITS.keys()) == one_by_one(theirs, SHARDING - {pp.Op.REDUCE_GRAD})
        assert legal(found)


def test_when_messages_are_waited_for_is_written_down():
    first, last = texts(pp.run.record(schedules.Schedule1F1B, 2, 2))
    assert first == (
        "0F0 0SEND_F0 0F1 0WAIT_SEND_F0 (0SEND_F1;0RECV_B0)BATCH_P2P 0B0 0RECV_B1 0WAIT_RECV_B1 0B1 0REDUCE_GRAD"
    )
    assert last == (
        "1RECV_F0 1WAIT_RECV_F0 1F0 1B0 (1SEND_B0;1RECV_F1)BATCH_P2P 1F1 1B1 1SEND_B1 1WAIT_SEND_B1 1REDUCE_GRAD"
    )
    first, _ = texts(pp.run.record(schedules.ScheduleZBVZeroBubble, 2, 1))
    assert first == (
        "0F0 0SEND_F0 3RECV_F0 3WAIT_RECV_F0 3F0 3I0 3SEND_B0 3W0 3REDUCE_GRAD 0RECV_B0 0WAIT_RECV_B0 0I0 0W0 "
        "0REDUCE_GRAD 3WAIT_SEND_B0 0WAIT_SEND_F0"
    )


def texts(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


class Swapped(schedules.ScheduleInterleaved1F1B):
    """Rank 1 posts the receives of the first two microbatches in the other order."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        order = self.pipeline_order_with_comms[1]
        first, second = [at for at, action in enumerate(order) if str(action) in ("1RECV_F0", "1RECV_F1")]
        order.insert(first, order.pop(second))


class Backwards(schedules.ScheduleGPipe):
    """The last rank runs its backwards in the opposite order, and the first takes the gradients as they were before."""

    def _step_microbatches(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, *_, **__):
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs and target_mbs[0])
        stage, handles = self._stage, []
        for microbatch in range(self._n_microbatches):
            self._all(stage.get_fwd_recv_ops(microbatch))
            output = stage.forward_one_chunk(microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch])
            self._maybe_compute_loss(stage, output, target_mbs, microbatch)
            handles += [each.op(each.tensor, each.peer) for each in stage.get_fwd_send_ops(microbatch)]
        for microbatch in range(self._n_microbatches)[:: -1 if stage.is_last else 1]:
            self._all(stage.get_bwd_recv_ops(microbatch))
            stage.backward_one_chunk(microbatch, loss=self._maybe_get_loss(stage, microbatch))
            self._all(stage.get_bwd_send_ops(microbatch))

    def _all(self, calls):
        for call in calls:
            (dist.send if call.op == dist.isend else dist.recv)(call.tensor, call.peer)


def test_a_message_that_another_rank_takes_for_another_is_found():
    (problem, *_) = pp.check(pp.run.record(Swapped, 2, 4))
    assert (problem.kind, problem.rank) == ("message", 1)
    assert str(problem).startswith("rank 1, position 0: 1RECV_F1 would get what 0SEND_F0 sends")


def test_deferred_receives_wait_forever_where_two_ranks_have_one_stream():
    pipe = schedules.ScheduleInterleaved1F1B
    assert pp.verify(pp.run.record(pipe, 2, 2, chunks=1), transport="pair") == []
    (found,) = pp.verify(pp.run.record(pipe, 2, 2, chunks=1, defer_pp_recv=True), transport="pair")
    page = (Path(__file__).parents[2] / "docs/verdicts.md").read_text(encoding="utf-8")
    assert found.text in page.split("\n## PyTorch's own schedules")[1].split("\n## ")[0]


def test_a_loop_of_ones_own_is_recorded_with_blocking_messages_and_without_waits():
    found = pp.run.record(Backwards, 2, 2)
    first, last = texts(found)
    assert first == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0WAIT_RECV_B0 0B0 0RECV_B1 0WAIT_RECV_B1 0B1 0WAIT_SEND_F0 0WAIT_SEND_F1"
    )
    assert last.endswith("1B1 1SEND_B1 1WAIT_SEND_B1 1B0 1SEND_B0 1WAIT_SEND_B0")
    assert {problem.kind for problem in pp.check(found)} == {"message"}


class Used(schedules.ScheduleGPipe):
    def _step_microbatches(self, *given, **named):
        super()._step_microbatches(*given, **named)
        if not self._stage.is_last:
            (call,) = self._stage.get_bwd_recv_ops(0)
            call.op(call.tensor, call.peer)


class Unreceived(Backwards):
    def _all(self, calls):
        pass


class Idle(schedules.ScheduleGPipe):
    def step(self, *given, **named):
        pass


REFUSED = [
    (
        (schedules.Schedule1F1B, 4, 2),
        r"Schedule1F1B\(ranks=4, microbatches=2, .*on rank 0: .*microbatches \(2\) must be",
    ),
    ((schedules.ScheduleInterleaved1F1B, 4, 9), "a multiple of the number of rounds"),
    ((schedules.ScheduleZBVZeroBubble, 2, 4, {"chunks": 3}), "requires exactly 2 stages per rank, but got 3"),
    ((schedules.ScheduleDualPipeV, 2, 3), "at least as many microbatches as stages, but got 3"),
    ((schedules.ScheduleGPipe, 2, 4, {"chunks": 2}), "ScheduleGPipe has one stage on each rank; got chunks=2"),
    (
        (schedules.ScheduleGPipe, 2, 4, {"wrong": 2}),
        "unknown setting 'wrong' of ScheduleGPipe; known: chunks, .*scale_g",
    ),
    ((schedules.ScheduleGPipe, 2, 4, {"loss_fn": None}), "unknown setting 'loss_fn' of ScheduleGPipe"),
    ((schedules.ScheduleGPipe, 2, 4, {"args_chunk_spec": 3}), "unknown setting 'args_chunk_spec' of ScheduleGPipe"),
    ((schedules.PipelineScheduleMulti, 2, 4), "cannot be recorded; on rank 0: "),
    ((Used, 3, 2), "on rank 0: RuntimeError: it receives a tensor from rank 1 that no forward or backward uses"),
    ((Unreceived, 2, 2), "on rank 0: RuntimeError: what it uses as 0RECV_B0 is not received"),
    ((schedules._PipelineScheduleRuntime, 2, 2, {"loss_fn": None}), "unknown setting 'loss_fn'"),
    ((Idle, 2, 2), "Idle ends without computing anything"),
    ((schedules.ScheduleGPipe, 0, 4), "ranks must be at least 1"),
    ((schedules.ScheduleGPipe, 2, "4"), "microbatches must be a whole number; got '4'"),
    ((schedules.ScheduleZBVZeroBubble, 2, 4, {"chunks": 2.0}), "chunks must be a whole number; got 2.0"),
    ((nn.Linear, 2, 4), "pipe must be .* a schedule class of torch.distributed.pipelining"),
    (("Schedule1F1B", 2, 4), "pipe must be .* a schedule class of torch.distributed.pipelining"),
]


@pytest.mark.parametrize(("given", "problem"), REFUSED)
def test_what_cannot_be_recorded_is_an_error(given, problem):
    before = vars(dist).copy()
    pipe, ranks, microbatches, settings = (*given, {})[:4]
    with pytest.raises(pp.SettingError, match=problem):
        pp.run.record(pipe, ranks, microbatches, **settings)
    assert vars(dist) == before


def test_what_torch_is_set_to_does_not_matter_and_stays_as_it_is():
    before, expected = vars(dist).copy(), pp.run.record(schedules.ScheduleDualPipeV, 2, 8)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.device("meta"):
            assert pp.run.record(schedules.ScheduleDualPipeV, 2, 8) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    assert vars(dist) == before and not dist.is_initialized()


LIVE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

class Late(ScheduleGPipe):
    def __init__(self, stage, batches):
        super().__init__(stage, batches, fn.mse_loss)

    def _step_microbatches(self, *given, **named):
        if self._stage.is_first:
            dist.recv(torch.empty(1), 1)

def refusal(runtime, **options):
    try:
        pp.run.verified(runtime, **options)
    except pp.PipelineError as error:
        return [type(error).__name__, str(error)]

class Stepping(ScheduleGPipe):
    def step(self, *given, **named):
        raise RuntimeError("this must not run")

wrapped = ScheduleGPipe(PipelineStage(layer(rank), rank, size, torch.device("cpu")), 4, fn.mse_loss)
wrapped.step = lambda *given, step=wrapped.step, **named: step(*given, **named)

module = layer(rank)
stage = PipelineStage(module, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, fn.mse_loss)
assert pp.run.verified(schedule, transport="any") is schedule
assert not module[0].weight.grad, "nothing has run"
inputs = torch.ones(8, 4)
schedule.step(*[inputs] * (rank == 0), target=inputs if rank else None)
assert module[0].weight.grad is not None

zb_v = pp.schedule("zb-v", 2, 3)
held = {number: layer(number) for number in local_stages(zb_v, rank)}
assert pp.run.verified(pp.run.to_torch(zb_v, held, fn.mse_loss), transport="any")
print(json.dumps([
    refusal(schedule, peak=1),
    refusal(pp.run.to_torch(zb_v, held, fn.mse_loss, defer_pp_recv=True)),
    refusal(Late(stage, 4)),
    refusal(Stepping(stage, 4, fn.mse_loss)),
    refusal(wrapped),
    refusal(ScheduleGPipe(stage, 4), buffers=4, peak=1),
    refusal(zb_v),
    refusal(schedule, transport="fast"),
]))
dist.barrier()
"""


def test_a_schedule_is_verified_before_its_first_step(ranks):
    outputs = ranks(BEGIN + LIVE, 2)
    for output in outputs:
        peak, message, *own, inference, other, transport = json.loads(output.splitlines()[-1])
        rejected = "rejected before its first step:\n"
        assert peak == [
            "ScheduleError",
            f"Schedule1F1B is {rejected}rank 0 holds 2 activations at its peak; the limit is 1",
        ]
        assert (
            message[0] == "ScheduleError"
            and "rank 1, position 10: 2RECV_B0 would get what 0SEND_F2 sends" in message[1]
        )
        names = [("Late", "_step_microbatches"), ("Stepping", "step"), ("ScheduleGPipe", "step")]
        assert [each[1].partition(" of its own, which would run now")[0] for each in own] == [
            f"{kind} has a {method}" for kind, method in names
        ]
        assert {each[0] for each in own} == {"SettingError"} and inference is None
        assert other[0] == "SettingError" and other[1].startswith("runtime must be a schedule of torch.distributed.pip")
        assert transport[0] == "SettingError" and "transport must be one of" in transport[1]
