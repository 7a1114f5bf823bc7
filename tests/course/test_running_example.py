"""The lessons' running example, against parameters and FLOPs that PyTorch counts, and the claims of its story."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ppedu as pp
from ppedu.course.exercises.common import learner_schedule
from ppedu.course.project import GB
from ppedu.notebook import heron
from ppedu.run import GPT, GPTConfig

RANKS = 8


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return GPT(GPTConfig(heron.vocabulary, heron.sequence, layers=2, heads=64, width=heron.width))


def test_the_weights_are_those_of_a_gpt_of_this_size(model):
    two = sum(weight.numel() for weight in model.parameters())
    counted = two + (heron.layers - 2) * sum(weight.numel() for weight in model.layers["0"].parameters())
    assert counted == pytest.approx(heron.weights, rel=0.002)  # biases, norms and positions


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "dualpipe"])
def test_all_ranks_together_hold_the_state_of_all_weights(name):
    timeline = pp.simulate(pp.schedule(name, RANKS, 32))
    placement = timeline.schedule.placement
    states = [heron.stage_state(stage, placement.stages) for stage in range(placement.stages)]
    assert sum(states) * heron.node == pytest.approx(16 * heron.weights)
    ends = {"1f1b": 1, "zb-v": 2, "interleaved": 1, "dualpipe": 2}[name]  # embedding and head meet on rank 0
    weights = placement.copies * heron.layers // RANKS * heron.layer_weights + ends * heron.vocabulary * heron.width
    assert heron.peak(timeline) - max(timeline.peak_activations) == pytest.approx(16 * weights / heron.node / GB)


def test_a_layers_time_is_its_flops_over_the_speed_of_a_node(model):
    x = torch.empty(1, heron.sequence, heron.width, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.layers["0"](x)
    attention = 4 * heron.sequence**2 * heron.width  # counted in full; the half above the diagonal is not needed
    flops = counter.get_total_flops() - attention / 2
    assert flops / (heron.node * heron.speed) == pytest.approx(heron.layer_time)


def test_gpipe_runs_out_of_memory_where_1f1b_fits():
    costs = heron.costs(RANKS)
    peaks = {name: heron.peak(pp.simulate(pp.schedule(name, RANKS, 32), costs)) for name in ("gpipe", "1f1b")}
    assert peaks["gpipe"] > heron.memory / GB > 2 * peaks["1f1b"]


def test_the_cluster_costs_its_gpus():
    assert heron.gpus(RANKS) == 2048
    assert heron.dollars(RANKS, 24 * 3600) == 2048 * 2 * 24


def test_the_folded_answer_to_the_challenge_of_lesson_0():
    shown = pp.explore("gpipe", RANKS, 32, costs=heron.costs(RANKS))
    shown.set(microbatches=59)
    assert shown.timeline.bubble > 0.11
    shown.set(microbatches=60)
    assert shown.timeline.bubble < 0.11
    assert heron.peak(shown.timeline) == pytest.approx(152, abs=0.5)
    shown.set(schedule="1f1b")
    assert f"{shown.timeline.bubble:.1%}" == "14.2%"
    assert heron.peak(shown.timeline) < heron.memory / GB / 2


def test_a_longer_warmup_takes_back_what_slow_messages_cost_as_lesson_5_says():
    def eager(rank, ranks, microbatches):
        ahead = 2 * (ranks - rank) - 1  # forwards before the first backward; 1F1B runs ranks - rank
        yield from (pp.F(rank, m) for m in range(ahead))
        for m in range(microbatches):
            yield pp.B(rank, m)
            if m + ahead < microbatches:
                yield pp.F(rank, m + ahead)

    schedules = pp.schedule("gpipe", RANKS, 32), pp.schedule("1f1b", RANKS, 32), learner_schedule(eager, RANKS, 32)
    gpipe, lean, longer = (pp.simulate(each, heron.costs(RANKS)) for each in schedules)
    assert longer.makespan == pytest.approx(gpipe.makespan) and longer.makespan < lean.makespan
    assert heron.peak(longer) < heron.memory / GB


def test_the_heads_time_makes_the_bubble_as_large_as_lesson_0_says():
    layer, head = heron.layer_time, 2 * heron.sequence * heron.vocabulary * heron.width / (heron.node * heron.speed)
    layers = heron.layers // RANKS
    stages = [layers * layer] * (RANKS - 1) + [layers * layer + head]
    costs = pp.Costs(forward=stages, latency=heron.costs(RANKS).latency)
    for name in ("gpipe", "1f1b"):
        bubble = pp.simulate(pp.schedule(name, RANKS, 32), costs).bubble
        assert f"{bubble:.1%}" == "26.3%"


def with_head(schedule):
    """Return a step in which the last stage also takes the head's time."""
    head = 2 * heron.sequence * heron.vocabulary * heron.width / (heron.node * heron.speed)
    forward = [heron.layers / schedule.stages * heron.layer_time] * schedule.stages
    forward[-1] += head
    return pp.simulate(schedule, replace(heron.costs(RANKS), forward=forward))


def test_the_head_makes_waiting_longer_and_zb_v_stays_the_fastest():
    chunks = with_head(pp.schedule("interleaved", RANKS, 32, chunks=4))
    names = "1f1b", "zb-h1", "zb-v"
    steps = {name: with_head(pp.schedule(name, RANKS, 32)) for name in names}
    bubbles = [f"{step.bubble:.1%}" for step in (steps["1f1b"], chunks, steps["zb-v"])]
    assert bubbles == ["26.3%", "18.9%", "15.1%"]
    assert steps["zb-v"].makespan < min(chunks.makespan, steps["zb-h1"].makespan, steps["1f1b"].makespan)
