"""Where messages and operations are put into a queue, as on GPUs with NCCL: what the host may read, and when."""

from pathlib import Path

import pytest
from cases import BEGIN, OF

import ppedu as pp

PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from queued import Queued
{BEGIN.replace("gloo", "queued")}
numbers = torch.Generator().manual_seed(1)
x, y = (torch.randn(16, 8, generator=numbers) for _ in range(2))

def layer(stage):
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

def make(name, **options):
    schedule = pp.schedule(name, size, 8)
    held = {{stage: layer(stage) for stage in local_stages(schedule, rank)}}  # before there is a queue
    return Pipeline(schedule, held, nn.functional.mse_loss, **options), held

def agree(pipeline, held, loss):
    judge = [layer(stage) for stage in range(pipeline.schedule.stages)]
    expected = nn.functional.mse_loss(nn.Sequential(*judge)(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for stage, module in held.items():
        for ours, theirs in zip(module.parameters(), judge[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text: f"{{pipeline.schedule!r}}: {{text}}")

"""


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients_of_schedules_are_those_of_one_process(ranks, each):
    """With 3, those of every third schedule."""
    program = f"""
for name in [name for name in pp.schedules() if pp.schedule(name, 4, 8).plain][::{each}]:
    pipeline, held = make(name)
    with Queued():
        loss = pipeline.step(x, y)
    agree(pipeline, held, loss)
"""
    ranks(PRELUDE + program, 4)


def test_gradients_are_right_where_the_host_reads_what_arrives(ranks):
    """Headers, marks and checksums are read during a step; replicas and copies add up gradients at its end."""
    program = """
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
beside = [dist.new_group([0, 2]), dist.new_group([1, 3])]
place, rank, size = rank // 2, rank % 2, 2
own, replicas = PipelineGroup(rank, 2, pairs[place]), beside[rank]
for name, options in (
    ("1f1b", {"debug": True}),
    ("zb-v", {"batching": Batching(variable_shapes=True)}),
    ("dualpipe", {"replicas": replicas, "debug": True}),
    ("interleaved", {"replicas": replicas}),
):
    pipeline, held = make(name, group=own, **options)
    with Queued():
        loss = pipeline.step(x, y)
    agree(pipeline, held, loss)

# A tensor that wants a gradient in some microbatches only, and forwards that run again.
def images(s, x):
    return (x, s.layer(x)) if x[0, 0] > 0 else (x, s.layer(x).detach())

first = layer(0)
module = Of(lambda s, x, z: x + z) if rank else Of(images, layer=first)
stage = Stage(module, rank, recompute=True)
pipeline = Pipeline(pp.schedule("1f1b", 2, 8), {rank: stage}, nn.functional.mse_loss, own)
z = x.clone()
z[::2, 0] = torch.tensor([1.0, -1.0] * 4)
with Queued():
    loss = pipeline.step(z, y)
judge = layer(0)
parts = [each + (judge(each) if each[0, 0] > 0 else judge(each).detach()) for each in z.split(2)]
expected = nn.functional.mse_loss(torch.cat(parts), y)
expected.backward()
torch.testing.assert_close(loss, expected.detach())
if rank == 0:
    for ours, theirs in zip(first.parameters(), judge.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
"""
    ranks(PRELUDE + OF + program, 4)


def test_post_validation_takes_back_what_the_queue_has_done(ranks):
    program = """
held, judge = layer(rank), [layer(stage) for stage in range(size)]
steps = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (held, nn.Sequential(*judge))]
pipeline = Pipeline(
    pp.schedule("zb-h1", size, 8), {rank: held}, nn.functional.mse_loss, optimizer=PostValidation(steps[0], 0.1)
)
for _ in range(4):
    with Queued():
        pipeline.step(x, y)
    steps[1].zero_grad()
    nn.functional.mse_loss(nn.Sequential(*judge)(x), y).backward()
    nn.utils.clip_grad_norm_(nn.Sequential(*judge).parameters(), 0.1)
    steps[1].step()
with Queued():
    pipeline.flush()
for ours, theirs in zip(held.parameters(), judge[rank].parameters(), strict=True):
    torch.testing.assert_close(ours, theirs)
"""
    ranks(PRELUDE + program, 2)


LATE = """
_, stage, op, m, timeout = sys.argv
missing = pp.Action(int(stage), op, int(m))
pipeline, held = make("1f1b", timeout=float(timeout))
for op in (pp.Op.SEND_F, pp.Op.SEND_B):
    pipeline.on(op, lambda action, step: None if action == missing else step.default(action))
try:
    with Queued():
        pipeline.step(x, y)
except pp.CommunicationError as error:
    print(error, flush=True)
os._exit(0)  # the thread of the queue still waits
"""


def test_a_message_that_is_never_sent_is_an_error_within_the_timeout(ranks):
    """NCCL's `wait()` returns, and the host would hang where it next reads, for as long as NCCL waits."""
    first, last = ranks(PRELUDE + LATE, 2, "1", "SEND_B", "7", "1.5")
    late = "0B7 waits for 0RECV_B7 (rank 1 → 0: B of microbatch 7): rank 1 did not answer within 1.5 s"
    assert f"rank 0: {late}" in first
    assert "rank 1 cannot end the step: not every rank reached it within 1.5 s" in last


def test_a_rank_that_never_comes_is_an_error_within_the_timeout(ranks):
    """NCCL connects the ranks at their first call, and has no time limit for that."""
    program = """
if rank == 0:
    pipeline, held = make("1f1b", timeout=1.5)
    try:
        with Queued():
            pipeline.step(x, y)
    except pp.CommunicationError as error:
        print(error, flush=True)
else:
    while not dist.group.WORLD.get_group_store().check(["done"]):
        time.sleep(0.1)
dist.group.WORLD.get_group_store().set("done", "")
os._exit(0)
"""
    assert "rank 0 cannot start step: not every rank reached it within 1.5 s" in ranks(PRELUDE + program, 2)[0]


def test_a_hang_report_names_the_message_that_the_queue_waits_for(ranks):
    with pytest.raises(pp.PipelineError) as error:
        ranks(PRELUDE + LATE, 2, "0", "SEND_F", "7", "60", timeout=4)
    assert "rank 1 waits in 1F7, for 1RECV_F7 from rank 0" in str(error.value)


def test_offsets_between_clocks_are_as_exact_as_they_claim(ranks):
    """The rank that answers is early, so all its receives could be queued before the first message is sent."""
    program = """
real = time.monotonic
time.monotonic = lambda: real() + 1000 * rank
clock.machine = lambda: rank
with Queued():
    pipeline, _ = make("1f1b")
    pipeline.step(x, y)
clocks = pipeline.clocks
assert 0 < clocks.error < 1 and abs(clocks.offset + 1000 * rank) <= clocks.error, (clocks.offset, clocks.error)
with Queued():
    time.sleep(0.5 * (rank > 0))
    found = clock.offset(pipeline.group, range(size))
assert abs(found.seconds + 1000 * rank) <= found.error + 1e-9, found
"""
    ranks(PRELUDE + program, 3)


def test_times_of_the_queue_are_not_late_by_the_time_that_the_host_takes_to_wake_up(ranks):
    program = """
import queued
from ppedu.engine.ranks import device
late = iter([0.05, 0.05, 0.0, 0.05, 0.05])
wake_up = queued.Mark.synchronize
def synchronize(mark):
    wake_up(mark)
    time.sleep(next(late, 0.05))
queued.Mark.synchronize = synchronize
place = device.mark(None)
assert abs(device.host_clock(torch.device("cpu"))(place) - place.time) < 0.02
"""
    ranks(PRELUDE + program, 1)
