"""Measured memory: known sizes, in bytes, and the same figures as the counted activations."""

import pytest
import torch
from cases import run
from torch import nn

from ppedu import PipelineError, SettingError
from ppedu.run import Memory, Stage

# A stage saves its input for the weight's gradient, and tanh's output. Both have 2 rows of 16 numbers, 128 bytes. The
# input of stage 0 belongs to the batch.
SETUP = """
def measured(name, recompute=False, steps=2, optimizer=None):
    schedule = pp.schedule(name, 4, 8) if isinstance(name, str) else name
    stages = {index: nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for index in local_stages(schedule, rank)}
    stages = {index: Stage(module, index, recompute=recompute) for index, module in stages.items()}
    pipeline = Pipeline(schedule, stages, fn.mse_loss, fresh())
    memory = Memory(pipeline)
    for _ in range(steps):
        pipeline.step(numbers(16, 16), numbers(16, 16))
    return pipeline, memory
"""

CASES = {
    "full backwards": """
for name in ["gpipe", "1f1b", "interleaved"]:
    for recompute in (False, True):
        pipeline, memory = measured(name, recompute)
        schedule = pipeline.schedule
        whole, inputs = ([each] + [each + 128] * (schedule.stages - 1) for each in (128, 0))
        costs = pp.Costs(activation=whole, recompute=recompute, stage_input=inputs)
        assert memory.peak == pp.simulate(schedule, costs).peak_activations[rank], (name, recompute, memory.peak)
        held = 0
        for action in schedule.order(rank):
            kept = (inputs if recompute else whole)[action.stage]
            held += kept if action.op == "F" else -kept
            assert memory.after[action] == held, (name, recompute, action)
        curve, counted = memory.curve(), pipeline.timeline.memory(rank)
        assert curve[0][1] == curve[-1][1] == 0 and counted[0][0] == curve[0][0] and counted[-1][0] == curve[-1][0]
""",
    "slices": """
# A microbatch of 2 samples with 4 tokens of 16 numbers takes 512 bytes, and each of its 4 slices 128.
class Sliced(nn.Sequential):
    def forward(self, x, past):
        return super().forward(x)

for name in ["terapipe", "seq1f1b"]:
    schedule = pp.schedule(name, 4, 8, slices=4)
    pipeline = Pipeline(schedule, {rank: Sliced(nn.Linear(16, 16), nn.Tanh())}, fn.mse_loss, fresh())
    memory = Memory(pipeline)
    pipeline.step(numbers(16, 4, 16), numbers(16, 4, 16))
    costs = pp.Costs(activation=[512] + [1024] * 3)
    assert memory.peak == pp.simulate(schedule, costs).peak_activations[rank], (name, memory.peak)
""",
    "an action that recomputes": """
# Before its R, a microbatch keeps its input; after it, also tanh's output.
whole, inputs = [128, 256, 256, 256], [0, 128, 128, 128]
schedule = pp.recompute(pp.schedule("1f1b", 4, 8))
pipeline, memory = measured(schedule)
simulated = pp.simulate(schedule, pp.Costs(activation=whole, stage_input=inputs))
assert memory.peak == simulated.peak_activations[rank], memory.peak
assert memory.peak < measured("1f1b")[1].peak or rank == 3
pipeline, memory = measured(pp.recompute(pp.schedule("zb-h1", 4, 8)))
changes = {"F": inputs[rank], "R": 128, "I": 256 - whole[rank], "W": -256}
held = 0
for action in pipeline.schedule.order(rank):
    held += changes[action.op]
    assert memory.after[action] == held, action
""",
    "copies to the host": """
# On a CPU, copies end at once: in a simulation, too. A microbatch keeps nothing from O to L.
whole = [128, 256, 256, 256]
for name in ["gpipe", "1f1b", "zb-h1"]:
    for schedule in (pp.offload(pp.schedule(name, 4, 8)), pp.offload(pp.schedule(name, 4, 8), 0.5, 1)):
        pipeline, memory = measured(schedule)
        peaks = pp.simulate(schedule, pp.Costs(activation=whole, offload=0)).peak_activations
        held, most = 0, 0
        changes = {"F": whole[rank], "O": -whole[rank], "L": whole[rank], "B": -whole[rank]}
        changes |= {"I": 256 - whole[rank], "W": -256}
        for action in pipeline.schedule.order(rank):
            held += changes[action.op]
            most = max(most, held)
            assert memory.after[action] == held, (name, action, memory.after[action], held)
        assert memory.peak == most, (name, memory.peak, most)
        assert name == "zb-h1" or memory.peak == peaks[rank], (name, memory.peak, peaks)
        assert not any(stage.host.saved or stage.host.away for stage in pipeline.stages.values())
# With an R, the input moves.
schedule = pp.offload(pp.recompute(pp.schedule("1f1b", 4, 8)))
pipeline, memory = measured(schedule)
simulated = pp.simulate(schedule, pp.Costs(activation=whole, stage_input=[0, 128, 128, 128], offload=0))
assert memory.peak == simulated.peak_activations[rank], (memory.peak, simulated.peak_activations)
""",
    "split backwards": """
# Between I and W, a stage keeps its input, and the gradient of its matrix product's output.
for name in ["zb-h1", "zb-interleaved"]:
    for recompute in (False, True):
        pipeline, memory = measured(name, recompute)
        in_flight, halves = Counter(), Counter()
        for action in pipeline.schedule.order(rank):
            before, after = {"F": (0, 1), "I": (1, 0), "B": (1, 0)}.get(action.op, (0, 0))
            in_flight[action.stage] += after - before
            halves[action.stage] += {"I": 1, "W": -1}.get(action.op, 0)
            held = 0
            for stage in in_flight:
                alive = (128 if stage else 0) if recompute else (256 if stage else 128)
                held += in_flight[stage] * alive + halves[stage] * 256
            assert memory.after[action] == held, (name, recompute, action)
""",
    "closed": """
pipeline, memory = measured("1f1b")
peak, after = memory.peak, dict(memory.after)
own = pipeline.handlers["B"] = lambda action, step: step.default(action)
memory.close()
assert pipeline.handlers == {"B": own}
pipeline.step(numbers(32, 16), numbers(32, 16))
assert memory.peak == peak and memory.after == after
""",
    "buffers do not count": """
class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.Tanh())
        self.register_buffer("scale", torch.full((16,), 2.0))
    def forward(self, x):
        return super().forward(x * self.scale)  # saves the buffer, the product and tanh's output

pipeline = make("1f1b", 8, {rank: Scaled()})
memory = Memory(pipeline)
pipeline.step(numbers(16, 16), numbers(16, 16))
assert memory.peak == (4 - rank) * 256, memory.peak
""",
    "gradients are the same as without measuring": """
for name in ["1f1b", "zb-v", "dualpipe"]:
    schedule = pp.schedule(name, 4, 8)
    plain, other = make(schedule), make(schedule)
    memory = Memory(other)
    for _ in range(2):
        plain.step(X, Y), other.step(X, Y)
        agree(other, {index: stage.module for index, stage in plain.stages.items()})
    parts = [part for action in schedule.order(rank) for part in action.parts or (action,)]
    assert [*memory.after] == parts and memory.peak > 0
    memory.curve()
""",
    "another handler still runs": """
pipeline, seen = make(), []
pipeline.on("F", lambda action, step: (seen.append(action), step.default(action)))
memory = Memory(pipeline)
pipeline.step(X, Y)
assert len(seen) == 4 and len(memory.after) == 8
""",
}


@pytest.fixture(scope="module")
def found(ranks):
    return run(ranks, 4, 1, {name: SETUP + code for name, code in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_known_stages(found, case):
    assert [first for first, _, _ in found[case]] == ["fine"] * 4


def test_memory_needs_a_pipeline():
    with pytest.raises(SettingError, match="pipeline must be a ppedu"):
        Memory(nn.Linear(2, 2))


def test_a_recomputed_stage_cannot_run_a_backward_within_its_forward():
    class Force(nn.Linear):
        def forward(self, x):
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, self.weight, create_graph=True)[0]

    assert Stage(Force(4, 4), 0).forward(0, torch.ones(2, 4)).shape == (4, 4)
    with pytest.raises(PipelineError, match="recompute=True cannot run a backward within its forward"):
        Stage(Force(4, 4), 0, recompute=True).forward(0, torch.ones(2, 4))
