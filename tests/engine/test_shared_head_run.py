"""A head that all ranks share, on real ranks: losses and gradients are those of one process."""

from pathlib import Path

import pytest
import torch
from cases import BEGIN
from torch import nn

import ppedu as pp
from ppedu import PipelineError, SettingError
from ppedu.run import Pipeline, PostValidation, SharedHead

CORE = str(Path(__file__).parents[1] / "core")  # where the judge is

TRAIN = """
from ppedu.run import SharedHead
torch.set_default_dtype(torch.float64)
WIDTH, TOKENS, SEQUENCES, LENGTH = 6, 22, 2, 3

def body(stage):
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

def data(m, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SEQUENCES * m, LENGTH, WIDTH, generator=generator)
    y = torch.randint(TOKENS, (SEQUENCES * m, LENGTH), generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.2] = -100
    return x, y

HEAD = 8 * torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))
CUTS = [round(TOKENS * each / size) for each in range(size + 1)]  # rows that are not equally many

class WithHead(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, SharedHead(HEAD[CUTS[rank] : CUTS[rank + 1]], CUTS[rank])
    def forward(self, x):
        return self.inner(x)

def compare(schedule, steps=1, batching=Batching(), recompute=False):
    m, first = schedule.microbatches, schedule.placement.shards[rank]
    modules = {stage: body(stage) for stage in local_stages(schedule, rank)}
    modules[first] = WithHead(modules[first])
    stages = {stage: Stage(module, stage, recompute=recompute) for stage, module in modules.items()}
    pipeline = Pipeline(schedule, stages, batching=batching)
    whole, weight = nn.Sequential(*map(body, range(schedule.stages))), nn.Parameter(HEAD.clone())
    for step in range(steps):  # gradients of several steps add up
        x, y = data(m, step)
        loss = pipeline.step(x, y)
        losses = []
        for inputs, targets in zip(x.chunk(m), y.chunk(m), strict=True):
            logits = whole(inputs) @ weight.T
            count = batching.count or torch.numel
            losses.append(fn.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            (losses[-1] * count(targets) / sum(map(count, y.chunk(m)))).backward()
        torch.testing.assert_close(pipeline.losses, torch.stack(losses).detach(), rtol=1e-12, atol=1e-12)
    for stage, module in modules.items():
        own = module.inner if stage == first else module
        for ours, theirs in zip(own.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    rows = weight.grad[CUTS[rank] : CUTS[rank + 1]]
    torch.testing.assert_close(modules[first].head.weight.grad, rows, rtol=1e-12, atol=1e-12)
    assert [span.action for span in pipeline.timeline.rows[rank]] == [*pp.strip(schedule).orders[rank]]
    every = [*whole.parameters(), weight]
    norm = nn.utils.get_total_norm([each.grad for each in every]).item()
    assert abs(pipeline.clip_grad_norm(1e9) / norm - 1) < 1e-12  # it counts all rows of the head
    return pipeline
"""

CHECKS = {
    "published": """
for barriers in (1, 2):
    compare(pp.schedule("1f1b-vocab", size, 6, barriers=barriers), steps=barriers)
    compare(pp.schedule("v-half-vocab", size, 5, barriers=barriers), recompute=barriers == 2)
compare(pp.lower(pp.schedule("1f1b-vocab", size, 3)), batching=Batching(count=lambda y: int((y != -100).sum())))
again = [compare(pp.schedule("1f1b-vocab", size, 3)) for _ in range(2)]
for one, other in zip(*([*pipeline.modules] for pipeline in again), strict=True):
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # to the last bit
""",
    "random orders": """
sys.path.insert(0, CORE)
import judge
for seed in range(4):
    chance = random.Random(seed)
    placement = pp.Placement.make("loop", size, 1 + seed % 2)
    drawn = judge.draw(chance, lowered=False, most_microbatches=5, placement=placement, split=0.5, pairs=0.3)
    shared = pp.share_head(drawn, 1 + seed // 2 % 2)
    found = shared
    for _ in range(60):  # S and T elsewhere
        orders = [list(order) for order in found.orders]
        order = chance.choice(orders)
        spots = [index for index, each in enumerate(order) if each.op in ("S", "T")]
        order.insert(chance.randint(0, len(order)), order.pop(chance.choice(spots)))
        other = pp.Schedule("mine", placement, shared.microbatches, orders)
        found = found if pp.check(other) else other
    assert found != shared
    compare(found)
""",
}


@pytest.mark.parametrize("name", CHECKS)
def test_losses_and_gradients_are_those_of_one_process(ranks, name):
    ranks(f"CORE = {CORE!r}\n" + BEGIN + TRAIN + CHECKS[name], 4)


class Holding(nn.Module):
    def __init__(self, width=2, heads=1):
        super().__init__()
        self.inner = nn.Linear(2, width)
        self.heads = nn.ModuleList(SharedHead(torch.zeros(3, 2), 0) for _ in range(heads))

    def forward(self, x):
        return self.inner(x)


def test_what_a_shared_head_is_not_for_is_refused():
    plain, shared = pp.schedule("1f1b", 1, 2), pp.schedule("1f1b-vocab", 1, 2)
    x, y = torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(SettingError, match="a SharedHead is for a schedule with S and T, such as 1f1b-vocab"):
        Pipeline(plain, {0: Holding()})
    for module in (nn.Linear(2, 2), Holding(heads=2)):
        with pytest.raises(
            SettingError, match="needs one SharedHead on each rank; rank 0 has it in the module of stage 0"
        ):
            Pipeline(shared, {0: module})
    with pytest.raises(SettingError, match="computes the cross-entropy itself, without PostValidation"):
        Pipeline(shared, {0: Holding()}, nn.functional.mse_loss)
    with pytest.raises(SettingError, match="computes the cross-entropy itself, without PostValidation"):
        Pipeline(shared, {0: Holding()}, optimizer=PostValidation(torch.optim.SGD(nn.Linear(1, 1).parameters())))
    pipeline = Pipeline(shared, {0: Holding()})
    with pytest.raises(SettingError, match="which only step can do"):
        pipeline.eval(x, y)
    with pytest.raises(SettingError, match="step needs the targets on all of them"):
        pipeline.step(x)
    assert pipeline.step(x, y) == pytest.approx(torch.tensor(3.0).log().item())
    with pytest.raises(PipelineError, match=r"hidden states of shape \(1, 2\), by the targets; got of shape \(1, 5\)"):
        Pipeline(shared, {0: Holding(5)}).step(x, y)
