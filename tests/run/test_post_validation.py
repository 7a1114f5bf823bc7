"""Training without a barrier: bit for bit the same weights as with one, also after steps that are taken back."""

import pytest
from cases import run

TRAIN = """
from ppedu.run import PostValidation

def train(name, max_norm, validated, steps=20, **options):
    "Return the losses, the weights and buffers, and which steps were taken back."
    schedule = pp.schedule(name, 4, 8)
    def module(stage):
        linear = layer(stage)
        return nn.Sequential(linear, nn.BatchNorm1d(4), nn.Dropout(0.1))
    stages = {stage: module(stage) for stage in local_stages(schedule, rank)}
    optimizer = torch.optim.AdamW(nn.ModuleList(stages.values()).parameters(), lr=1e-2)
    validation = PostValidation(optimizer, max_norm) if validated else None
    pipeline = Pipeline(schedule, stages, fn.mse_loss, fresh(), optimizer=validation, timeout=20, **options)
    torch.manual_seed(7 + rank)
    losses, norms = [], []
    for step in range(steps):
        x, y = numbers(32, 4 + step)[:, :4].contiguous(), numbers(32, 8 + step)[:, :4] * (4 if step % 3 == 0 else 1)
        losses.append(pipeline.step(x, y.contiguous()))
        if not validated:
            norms.append(pipeline.clip_grad_norm(max_norm or float("inf")))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9  # as a scheduler does, before a step is validated
    if validated:
        assert losses.pop(0) is None
        losses.append(pipeline.flush())
        assert pipeline.flush() is None
        assert all(weight.grad is None for weight in nn.ModuleList(stages.values()).parameters())
        assert pipeline.timeline.makespan > 0
    state = [value.clone() for stage in stages.values() for value in stage.state_dict().values()]
    return torch.stack(losses), state, norms
"""

SAME = """
for max_norm in MAX_NORMS:
    losses, state, norms = train(NAME, max_norm, validated=False)
    again, found, _ = train(NAME, max_norm, validated=True)
    assert max_norm is None or {norm > max_norm for norm in norms} == EXPECTED[max_norm], norms
    assert torch.equal(losses, again) and all(map(torch.equal, state, found))
"""
EXPECTED = "{8.0: {True, False}, 0.001: {True}, 1e9: {False}}"
NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-min", "dualpipev"]
CASES = {
    name: TRAIN + SAME.replace("NAME", repr(name)).replace("MAX_NORMS", "[8.0]").replace("EXPECTED", EXPECTED)
    for name in NAMES
}
CASES["with any norm"] = TRAIN + SAME.replace("NAME", '"zb-h1"').replace("MAX_NORMS", "[None, 0.001, 1e9]").replace(
    "EXPECTED", EXPECTED
)
CASES["shapes that depend on the data"] = (
    TRAIN
    + """
losses, state, _ = train("1f1b", 8.0, validated=False)
again, found, _ = train("1f1b", 8.0, validated=True, batching=Batching(variable_shapes=True))
assert torch.equal(losses, again) and all(map(torch.equal, state, found))
"""
)
CASES["a loss that is not finite"] = (
    TRAIN
    + """
pipeline = make(microbatches=4)
weights = [weight for stage in pipeline.stages.values() for weight in stage.module.parameters()]
optimizer = torch.optim.SGD(weights, 0.1)
pipeline = make(microbatches=4, change={rank: pipeline.stages[rank].module}, optimizer=PostValidation(optimizer))
assert pipeline.step(X, Y) is None
first = pipeline.flush()
before = [weight.detach().clone() for weight in weights]
assert pipeline.step(SPOILT, Y) is None
assert "3F2 gave a loss of nan" in outcome(lambda: pipeline.step(X, Y))
assert all(map(torch.equal, before, weights))
assert pipeline.step(X, Y) is None and pipeline.flush() < first  # it can be used, and the step was not taken
expected = [weight.detach().clone() for weight in weights]
pipeline.step(X, Y)
assert torch.isfinite(pipeline.eval(X, Y)) and not any(map(torch.equal, expected, weights))
assert pipeline.flush() is None  # the evaluation has waited
"""
)
CASES["a step that is taken back"] = """
from ppedu.run import PostValidation

def train(schedule, spoilt):
    "Return the weights and losses after three good steps, and the errors of the steps in `spoilt`."
    schedule = pp.schedule(schedule, 4, 4)
    stages = {stage: nn.Sequential(layer(stage), nn.Dropout(0.2)) for stage in local_stages(schedule, rank)}
    weights = list(nn.ModuleList(stages.values()).parameters())
    optimizer = PostValidation(torch.optim.AdamW(weights, 0.01), 0.5)
    pipeline = Pipeline(schedule, stages, fn.mse_loss, fresh(), optimizer=optimizer, timeout=20)
    losses, errors = [], []
    def call(number, *batch):
        torch.manual_seed(number)
        try:
            losses.append(pipeline.step(*batch))
        except pp.PipelineError as error:
            errors.append(str(error))
            state = torch.get_rng_state()
            torch.manual_seed(number)
            assert torch.equal(torch.get_rng_state(), state)  # the call has done nothing
            losses.append(pipeline.step(*batch))
    for number in range(3):
        batch = numbers(8, 4 + number)[:, :4].contiguous(), Y
        call(number, *batch)
        if number in spoilt:
            losses.append(pipeline.flush())
            pipeline.step(SPOILT, Y)
    losses.append(outcome(pipeline.flush))
    return [weight.detach().clone() for weight in weights], losses, errors

for name in ("1f1b", "zb-h1", "zb-v"):
    expected, losses, errors = train(name, [])
    found, again, told = train(name, [0, 1])
    assert all(map(torch.equal, expected, found)) and not errors and len(told) == 2
    assert [each.item() for each in losses if each is not None] == [each.item() for each in again if each is not None]
    assert "F2 gave a loss of nan" in told[0] and "that was step 1, counted from 0; it has been taken back" in told[0]
    assert "that was step 3," in told[1]
    assert told[1].endswith("and this call has done nothing: call step again with the same batch")
    assert train(name, [2])[1][-1].split(" (lines")[0].endswith("taken back, so the weights are as before it")
"""
CASES["replicas decide alike"] = """
import random
from ppedu.run import PostValidation
half, mine = divmod(rank, 2)
group = PipelineGroup(mine, 2, dist.new_group([2 * half, 2 * half + 1], use_local_synchronization=True))
replicas = dist.new_group([mine, 2 + mine], use_local_synchronization=True)
for seed, name in enumerate(["gpipe", "1f1b", "zb-h1"]):
    draw, held, judge = random.Random(seed), layer(mine), [layer(0), layer(1)]
    max_norm = draw.choice([None, 0.3])
    optimizer = PostValidation(torch.optim.SGD(held.parameters(), 0.1), max_norm)
    schedule = pp.schedule(name, 2, 4)
    pipeline = Pipeline(schedule, {mine: held}, fn.l1_loss, group, replicas=replicas, optimizer=optimizer, timeout=20)
    weights = [weight for module in judge for weight in module.parameters()]
    good = True
    for step in range(8):
        x, y = numbers(16, 4) + step, torch.cat([Y, -Y])
        spoilt = draw.choice([[], [], [0], [1], [0, 1]])
        for replica in spoilt:
            y[8 * replica + draw.randrange(8), 0] = torch.inf
        batch = [each.split(8)[half].contiguous() for each in (x, y)]
        told = outcome(lambda: pipeline.step(*batch))
        assert good != isinstance(told, str), (step, told)
        if not good:
            assert pipeline.step(*batch) is None
        good = not spoilt
        if good:
            reference(judge, x.split(2), y.split(2), fn.l1_loss)
            nn.utils.clip_grad_norm_(weights, max_norm or torch.inf)
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    outcome(pipeline.flush)
    state = torch.cat([weight.detach().flatten() for weight in held.parameters()])
    both = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(both, state, group=replicas)
    assert torch.equal(*both), name
    torch.testing.assert_close(state, torch.cat([weight.detach().flatten() for weight in judge[mine].parameters()]))
"""
CASES["what does not fit"] = (
    TRAIN
    + """
foreign = PostValidation(torch.optim.SGD([*layer(0).parameters()]))
assert "optimizer of PostValidation has 4 weights that no stage of this rank has, the first of" in outcome(
    lambda: make(optimizer=foreign)
)
own = {rank: layer(rank)}
optimizer = torch.optim.SGD(own[rank].parameters())
pipeline = make(optimizer=PostValidation(optimizer), change=own)
assert "the pipeline steps the optimizer, and clips before" in outcome(lambda: pipeline.clip_grad_norm(1.0))
assert "optimizer must be a PostValidation" in outcome(lambda: make(optimizer=optimizer))
assert "optimizer must be an optimizer of torch" in outcome(lambda: PostValidation(1))
assert "max_norm must be a number above 0; got 0" in outcome(lambda: PostValidation(optimizer, 0))
other = PostValidation(optimizer, 1.0 + rank)
assert "has a different max_norm than rank 0" in outcome(lambda: make(optimizer=other, change=own).step(X, Y))
"""
)


@pytest.fixture(scope="module")
def found(ranks):
    return run(ranks, 4, 1, CASES)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_losses_are_those_of_training_with_a_barrier(found, case):
    assert [first for first, _, _ in found[case]] == ["fine"] * 4
