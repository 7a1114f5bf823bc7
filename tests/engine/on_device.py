"""The beginning of the programs of test_cuda.py: a model, its steps beside one process, and kernels that sleep."""

PRELUDE = """
import os, re, sys, time, warnings
os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}  # kB, not 32 MiB each
import torch, torch.distributed as dist
from pathlib import Path
from statistics import median
from torch import nn
from torch.profiler import profile
import ppedu as pp
from ppedu.engine import clock
from ppedu.run import Memory, Pipeline, PipelineGroup, PostValidation, Stage, local_stages, place
from ppedu.course.training.report import Report
from ppedu.course.training.train import TrainConfig, train_gpt

device, backend = place()
dist.init_process_group((sys.argv[1] if sys.argv[1:] else backend) or None)
rank, size = dist.get_rank(), dist.get_world_size()
mse_loss = nn.functional.mse_loss

def tell(text, by=0):
    "Put a text into the table."
    if rank == by:
        print("tell:", text, flush=True)

def seconds(call):
    "Return how long a call takes, with all that it leaves to the GPU."
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

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

def layer(stage):
    torch.manual_seed(stage)
    return Slow(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)

numbers = torch.Generator().manual_seed(1)
x, y = (torch.randn(64, 512, generator=numbers).to(device) for _ in range(2))

def one_process(stages, layer=layer, autocast=None):
    "Return the stages and the loss of one process, which computes one microbatch after the other."
    judge, loss = [layer(stage) for stage in range(stages)], 0
    for inputs, targets in zip(x.chunk(8), y.chunk(8)):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            part = mse_loss(nn.Sequential(*judge)(inputs), targets) / 8
        part.backward()
        loss += part.detach()
    return judge, loss

def make(name, layer=layer, cycles=0, recompute=False, **options):
    schedule = pp.schedule(name, size, 8) if isinstance(name, str) else name
    held = {s: Stage(layer(s), s, recompute=recompute) for s in local_stages(schedule, rank)}
    for stage in held.values():
        stage.module.cycles = cycles
    return Pipeline(schedule, held, mse_loss, **options)

def clear(pipeline):
    for stage in pipeline.stages.values():
        stage.module.zero_grad()

def run(name, layer=layer, steps=3, tolerance=1e-4, **options):
    "Compare some steps with one process: the loss, and each weight's gradient to a part of its largest number."
    pipeline = make(name, layer, **options)
    judge, expected = one_process(pipeline.schedule.stages, layer, options.get("autocast"))
    for _ in range(steps):  # the allocator gives the same memory out again and again
        clear(pipeline)
        loss = pipeline.step(x, y)
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0, check_device=False, check_dtype=False)
        for index, stage in pipeline.stages.items():
            for ours, theirs in zip(stage.module.parameters(), judge[index].parameters(), strict=True):
                most = theirs.grad.abs().max().item()
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance * most)
    return pipeline

def train(steps, each=None, **settings):
    config = TrainConfig(steps=steps, text=TEXT, **settings)
    return config, train_gpt(config, device=device, each=each)

def ready(timeout):
    "Return a pipeline that has run a step, since a GPU's first kernels and messages take seconds."
    one_process(size)
    dist.barrier()
    pipeline = make("1f1b", timeout=timeout)
    pipeline.step(x, y)
    return pipeline

def instead_of_second_message(pipeline, call):
    "Let rank 0 make a call instead of sending the activation of microbatch 1."
    if rank == 0:
        pipeline.on(pp.Op.SEND_F, lambda action, step: call() if action.microbatch == 1 else step.default(action))
""".replace("TEXT", repr(__file__))
