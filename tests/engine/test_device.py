"""Which device a rank computes on, where its messages lie, and what a training run reports of a GPU's memory."""

import pytest
import torch
from cases import BEGIN
from torch import nn

import ppedu as pp
from ppedu.course.training.report import Report
from ppedu.course.training.train import TrainConfig, train_gpt
from ppedu.run import Pipeline, Stage


def on_meta(*layers):
    return nn.Sequential(*layers).to("meta")


@pytest.mark.parametrize(
    "modules",
    [
        {0: nn.ReLU(), 1: on_meta(nn.Linear(2, 2))},
        {0: on_meta(nn.Linear(2, 2)), 1: nn.ReLU()},
        {0: nn.Linear(2, 2), 1: on_meta(nn.Linear(2, 2))},  # an embedding that stays on the CPU
        {0: nn.Identity(), 1: nn.Sequential(nn.Linear(2, 2), on_meta(nn.BatchNorm1d(2)))},
    ],
)
def test_a_rank_computes_where_its_weights_are_whatever_its_first_stage_is(modules):
    schedule = pp.schedule("interleaved", 1, 2, chunks=2)
    pipeline = Pipeline(schedule, {0: Stage(modules[0], 0), 1: modules[1]})
    assert pipeline.device.type == "meta"
    assert pipeline.stages[0].device.type == "meta" or [*modules[0].parameters()]


def test_without_weights_a_rank_computes_on_the_cpu():
    assert Pipeline(pp.schedule("gpipe", 1, 2), {0: nn.ReLU()}).device.type == "cpu"


def test_messages_lie_where_the_group_sends_from(ranks):
    """A group has a backend for each kind of device; `dist.get_backend` names one of them, or "undefined"."""
    program = """
pipeline = Pipeline(pp.schedule("gpipe", 2, 2), {rank: torch.nn.Linear(2, 2)}, torch.nn.functional.mse_loss)
assert pipeline.step(torch.ones(4, 2), torch.ones(4, 2)) > 0 and pipeline.group.device.type == "cpu"

torch.cuda.current_device = lambda: 1
cpu, gpu, other = torch.device("cpu"), torch.device("cuda:1"), torch.device("cuda:0")

def refused(group, device):
    try:
        group.on(device)
    except pp.SettingError as error:
        return str(error)

for backends, by_default, of_cpu, of_gpu in (
    ("cpu:gloo,cuda:gloo", cpu, cpu, cpu),
    ("cpu:gloo", cpu, cpu, cpu),
    ("cpu:gloo,cuda:nccl", gpu, cpu, gpu),
    ("cuda:nccl", gpu, None, gpu),
):
    dist.get_backend_config = lambda group=None: backends
    group = PipelineGroup.world()
    assert group.device == by_default and group.on(gpu).device == of_gpu, backends
    assert of_cpu is None or group.on(cpu).device == of_cpu, backends
    if "nccl" in backends:
        assert "call torch.cuda.set_device(0) before init_process_group" in refused(group, other)
assert "has its stages on cpu, but its process group sends from GPUs only; move them with .to('cuda:1')" in refused(
    group, cpu
)
"""
    ranks(BEGIN.replace('"gloo"', "") + program, 2)  # torch chooses


def test_on_a_gpu_the_report_counts_gradients_once(monkeypatch):
    """There, the bytes of a step are what the allocator gave out, and gradients are among them."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    config = TrainConfig(steps=2, layers=1, batch=8, text=__file__)
    report = Report()
    result = train_gpt(config, each=report)
    (line,) = [each for each in report.lines(config, result, 50) if each.startswith("memory")]
    assert "gradients" in line and ", activations " in line
    weights = 4 * sum(each.numel() for each in result.pipeline.stages[0].module.parameters())
    result.pipeline.device = torch.device("cuda")
    report._kept = 10 * weights
    (line,) = [each for each in report.lines(config, result, 50) if each.startswith("memory")]
    assert "gradients and activations" in line
    total = float(line.split("with ")[1].split(" ")[0])
    unit = {"kB": 1e3, "MB": 1e6}[line.split("with ")[1].split(" ")[1].rstrip(":")]
    assert total * unit == pytest.approx(weights + 2 * weights + 10 * weights, abs=unit / 10)
