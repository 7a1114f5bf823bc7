"""On a GPU: gradients are those of one process, pairs run on two streams, and times and bytes are the GPU's."""

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

PRELUDE = """
import torch, torch.distributed as dist
from torch import nn
import ppedu as pp
from ppedu.run import Memory, Pipeline, Stage, local_stages, place

device, backend = place()
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

class Sleep(torch.autograd.Function):
    "Keeps the GPU busy in both directions, while the CPU goes on."
    @staticmethod
    def forward(ctx, x, cycles):
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.clone()
    @staticmethod
    def backward(ctx, dy):
        torch.cuda._sleep(ctx.cycles)
        return dy.clone(), None

class Slow(nn.Sequential):
    "A sequence of layers; the GPU sleeps before each."
    cycles = 0
    def forward(self, x):
        for part in self:
            x = part(Sleep.apply(x, self.cycles) if self.cycles else x)
        return x

def layer(stage, cycles=0):
    torch.manual_seed(stage)
    made = Slow(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)
    made.cycles = cycles
    return made

numbers = torch.Generator().manual_seed(1)
x, y = (torch.randn(64, 512, generator=numbers).to(device) for _ in range(2))

def run(name, cycles=0, steps=5, **options):
    "Run steps, and compare each with one process."
    schedule = pp.schedule(name, size, 8)
    held = {stage: layer(stage, cycles) for stage in local_stages(schedule, rank)}
    pipeline = Pipeline(schedule, held, nn.functional.mse_loss, **options)
    for _ in range(steps):  # the allocator gives the same memory out again and again
        judge = [layer(stage) for stage in range(schedule.stages)]
        loss = nn.functional.mse_loss(nn.Sequential(*judge)(x), y)
        loss.backward()
        for module in held.values():
            module.zero_grad()
        torch.testing.assert_close(pipeline.step(x, y).to(device), loss.detach(), rtol=1e-4, atol=1e-6)
        for stage, module in held.items():
            for ours, theirs in zip(module.parameters(), judge[stage].parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    return pipeline
"""

NAMES = ["1f1b", "zb-v", "1f1b-overlap", "interleaved-overlap", "dualpipe", "dualpipev"]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_on_a_gpu_are_those_of_one_process(ranks, name):
    ranks(PRELUDE + f"\nassert run({name!r}).timeline.makespan > 0", 2)


@pytest.mark.parametrize("name", ["1f1b-overlap", "dualpipe", "dualpipev"])
def test_a_slow_kernel_does_not_change_the_gradients_of_pairs(ranks, name):
    """A stream that reads a tensor before the other stream has written it gets wrong numbers."""
    ranks(PRELUDE + f"\nrun({name!r}, cycles=20_000_000, steps=2)", 2)


def test_with_nccl_gradients_are_those_of_one_process(ranks):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU for each of 2 ranks")
    for name in NAMES:
        ranks(PRELUDE + f"\nassert backend == 'nccl'\nrun({name!r}, cycles=1_000_000)", 2)


def test_the_clock_measures_the_gpu_and_not_the_launch_of_its_kernels(ranks):
    """An action whose kernels sleep lasts as long as they do, by an event of torch around one of them."""
    ranks(
        PRELUDE
        + """
cycles = 50_000_000
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
torch.cuda._sleep(cycles)
start.record(); torch.cuda._sleep(3 * cycles); end.record()
torch.cuda.synchronize()
expected = start.elapsed_time(end) / 1000
pipeline = run("gpipe", cycles, steps=2)
spans = pipeline.timeline.spans(0)
for span in spans:
    assert 0.9 * expected < span.end - span.start < 2 * expected, (span, expected)
for before, after in zip(spans, spans[1:]):
    assert before.end <= after.start + 1e-4
""",
        1,
    )


def test_memory_by_action_is_what_the_gpu_allocates(ranks):
    """A forward keeps at least what autograd saves; after the step only the gradients remain."""
    ranks(
        PRELUDE
        + """
schedule = pp.schedule("gpipe", size, 8)
modules = {stage: layer(stage) for stage in local_stages(schedule, rank)}
pipeline = Pipeline(schedule, modules, nn.functional.mse_loss)
memory = Memory(pipeline)
for _ in range(2):
    for module in modules.values():
        module.zero_grad()
    pipeline.step(x, y)
# Of a microbatch: the outputs of the first layer and of GELU, and what has come from the other rank.
saved = 8 * 4 * (2048 + 2048 + 512 * (rank > 0))
after = [0, *(memory.after[pp.F(rank, m)] for m in range(8))]
for before, now in zip(after, after[1:]):
    assert now - before >= saved, (before, now, saved)
gradients = sum(4 * weight.numel() for module in modules.values() for weight in module.parameters())
assert gradients <= memory.after[pp.B(rank, 7)] < gradients + 8 * saved
assert memory.peak >= max(memory.after.values()) and len(memory.curve()) == 17
""",
        2,
    )


def test_training_resumes_on_a_gpu_with_the_same_losses(ranks, tmp_path):
    program = f"""
import json, torch.distributed as dist
from ppedu.run import place
from ppedu.run.train import TrainConfig, train_gpt

device, backend = place()
dist.init_process_group(backend)
def train(steps, **settings):
    config = TrainConfig(schedule="zb-v", steps=steps, text={__file__!r}, every=2, **settings)
    return train_gpt(config, device=device).losses
whole = train(6)
train(4, save={str(tmp_path)!r})
assert train(6, save={str(tmp_path)!r}) == whole
"""
    ranks(program, 2, timeout=120)
