"""Losses of every form: the last stage's own, sums, with keywords, auxiliary ones. The reference is one process."""

import pytest
from cases import BEGIN, OF

PRELUDE = """
torch.set_default_dtype(torch.float64)
numbers = torch.Generator().manual_seed(1)
X, Y = torch.randn(11, 4, generator=numbers), torch.randn(11, 4, generator=numbers)
PADDED = torch.randint(4, (11, 3), generator=numbers)
PADDED[[0, 1, 2, 5, 9], 1:] = -100
NAMES = ["1f1b", "zb-v", "dualpipe"]

def make(name, loss_fn=None, last=None, **options):
    schedule = pp.schedule(name, 2, 4)
    held = {stage: layer(stage) for stage in local_stages(schedule, rank)}
    if last and schedule.stages - 1 in held:
        held[schedule.stages - 1] = last(held[schedule.stages - 1])
    judge = [layer(stage) for stage in range(schedule.stages)]
    return Pipeline(schedule, held, loss_fn, **options), held, judge

def refused(call):
    try:
        call()
    except pp.PipelineError as error:
        return str(error)
    raise AssertionError("it is not refused")

def run(judge, x):
    outputs = [x]
    for layer in judge:
        outputs.append(layer(outputs[-1]))
    return outputs

def agree(held, judge):
    for stage, module in held.items():
        for ours, theirs in zip(module.parameters(), judge[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)

"""

CASES = {
    "outputs of a training step": """
def named(module):
    return Of(lambda s, x: {"y": s.a(x)}, a=module)

for name in NAMES:
    pipeline, held, judge = make(name, lambda y, target: fn.mse_loss(y["y"], target), last=named)
    loss, outputs = pipeline.step(X, Y, outputs=True)
    expected = run(judge, X)[-1]
    fn.mse_loss(expected, Y).backward()
    agree(held, judge)
    torch.testing.assert_close(loss, pipeline.loss)
    holders = {copy[-1] for copy in pipeline.schedule.placement.holders}
    assert (outputs is not None) == (rank in holders)
    if outputs and len(holders) == 1:
        torch.testing.assert_close(outputs["y"], expected.detach())
        assert not outputs["y"].requires_grad
    elif outputs:  # each rank has those of its own copy's microbatches
        own = [m for m in range(4) if pipeline.schedule.placement.rank(3 if name == "zb-v" else 1, m) == rank]
        torch.testing.assert_close(outputs["y"], torch.cat([expected.detach().tensor_split(4)[m] for m in own]))
    loss, again = pipeline.eval(X, Y, outputs=True)
    assert again is None or torch.equal(again["y"], outputs["y"])
    assert torch.equal(loss, pipeline.loss) and isinstance(pipeline.step(X, Y), torch.Tensor)
""",
    "a last stage that returns its loss": """
def lossy(module):
    return Of(lambda s, x, labels: fn.mse_loss(s.a(x), labels), a=module)

for name in NAMES:
    pipeline, held, judge = make(name, last=lossy)
    for stage in pipeline.stages.values():
        if stage is not pipeline.last:
            stage.module = Of(lambda s, x, labels: s.a(x), a=stage.module)
    loss = pipeline.step(X if 0 in held else None, labels=Y)  # 11 samples in 4 microbatches: 3 3 3 2
    expected = fn.mse_loss(run(judge, X)[-1], Y)
    expected.backward()
    agree(held, judge)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(pipeline.eval(X, labels=Y), loss)
""",
    "samples that only the first rank knows": """
def lossy(module):
    return Of(lambda s, x: s.a(x).square().mean(), a=module)

for name in NAMES:
    pipeline, held, judge = make(name, last=lossy)
    loss = pipeline.step(X) if 0 in held else pipeline.step()
    expected = run(judge, X)[-1].square().mean()
    expected.backward()
    agree(held, judge)
    torch.testing.assert_close(loss, expected.detach())
""",
    "keywords of the loss": """
def loss_fn(y, target, weight, smooth=0.0):
    return fn.cross_entropy(y, target, weight=weight, label_smoothing=smooth, reduction="sum") / 7

for name in NAMES:
    classes = PADDED[:, 0]
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0])
    pipeline, held, judge = make(name, loss_fn, batching=Batching(reduction="sum"))
    loss = pipeline.step(X, classes, loss_kwargs={"weight": weight, "smooth": 0.1})
    expected = loss_fn(run(judge, X)[-1], classes, weight, 0.1)
    expected.backward()
    agree(held, judge)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(pipeline.eval(X, classes, loss_kwargs={"weight": weight, "smooth": 0.1}), loss)
""",
    "sums and means, of samples and of tokens": """
def words(y, targets, reduction):
    logits = y[:, None, :] * torch.arange(1, 4)[:, None]
    return fn.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction=reduction)

def counted(targets):
    return int((targets >= 0).sum())

for name in NAMES:
    for reduction in ("mean", "sum"):
        count = counted if reduction == "mean" else None
        batching = Batching(reduction=reduction, count=count)
        pipeline, held, judge = make(name, lambda y, t: words(y, t, reduction), batching=batching)
        loss = pipeline.step(X, PADDED)
        expected = words(run(judge, X)[-1], PADDED, reduction)
        expected.backward()
        agree(held, judge)
        torch.testing.assert_close(loss, expected.detach())
""",
    "losses of stages that are not the last": """
def balance(y):
    return y.square().mean()

def forward(action, step):
    kept = []
    hook = step.stages[action.stage].module.register_forward_hook(lambda module, xs, y: kept.append(y))
    step.default(action)
    hook.remove()
    step.add_loss(action, 0.1 * balance(kept[0]))

for name in [*NAMES, "zb-h1", "interleaved"]:
    for reduction in ("mean", "sum"):
        loss_fn = lambda y, target: fn.mse_loss(y, target, reduction=reduction)
        pipeline, held, judge = make(name, loss_fn, batching=Batching(reduction=reduction))
        pipeline.on("F", forward)
        loss = pipeline.step(X, Y)
        expected = torch.zeros(())
        for x, y in zip(X.tensor_split(4), Y.tensor_split(4)):
            outputs = run(judge, x)
            one = loss_fn(outputs[-1], y) + sum(0.1 * balance(each) for each in outputs[1:])
            expected = expected + (one * len(x) / len(X) if reduction == "mean" else one)
        expected.backward()
        agree(held, judge)
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(pipeline.eval(X, Y), loss)

pipeline, held, judge = make("1f1b", fn.mse_loss)
pipeline.on("B", lambda action, step: (step.default(action), step.add_loss(action, torch.ones((), requires_grad=True))))
error = refused(lambda: pipeline.step(X, Y))
assert "add a loss to microbatch 0 after its forward and before its backward" in error or rank == 0, error
""",
    "stages that write over their inputs": """
class Over(nn.Module):
    "Changes its input in place, and the output of its layer."
    def __init__(self, stage, kind, frozen):
        super().__init__()
        torch.manual_seed(stage)
        self.change, self.layer = kind(inplace=True), layer(stage).requires_grad_(not frozen)
    def forward(self, x):
        return self.change(self.layer(self.change(x)))

KINDS = [nn.ReLU, nn.SiLU, lambda inplace: nn.LeakyReLU(0.5, inplace)]  # ReLU twice is ReLU
for number, name in enumerate([*NAMES, "interleaved", "zb-h1", "gpipe"] * 3):
    draw, schedule = random.Random(number), pp.schedule(name, 2, 4)
    drawn = [(draw.choice(KINDS), draw.random() < 0.3) for _ in range(schedule.stages - 1)] + [(nn.SiLU, False)]
    judge = [Over(stage, *each) for stage, each in enumerate(drawn)]
    recompute = [draw.random() < 0.5 for _ in drawn]
    held = {stage: copy.deepcopy(judge[stage]) for stage in local_stages(schedule, rank)}
    stages = {stage: Stage(module, stage, recompute=recompute[stage]) for stage, module in held.items()}
    x, y = X.clone(), Y.clone()
    Pipeline(schedule, stages, fn.mse_loss).step(x, y)
    assert torch.equal(x, X) and torch.equal(y, Y)
    for piece, target in zip(X.tensor_split(4), Y.tensor_split(4)):
        for module in judge:
            piece = module(piece.clone())
        (fn.mse_loss(piece, target) * len(target) / len(Y)).backward()
    for stage, module in held.items():
        for ours, theirs in zip(module.parameters(), judge[stage].parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-10), (name, stage)
""",
    "a part of the batch that is passed on and changed": """
def first(stage):
    return Of(lambda s, x, scale: (s.a(x), scale), a=layer(stage))

def second(stage):
    return Of(lambda s, x, scale: s.a(x) * scale.mul_(2), a=layer(stage))

schedule, kinds = pp.schedule("zb-v", 2, 4), {1: first, 2: second}  # both are on rank 1
judge = [kinds.get(stage, layer)(stage) for stage in range(4)]
held = {stage: copy.deepcopy(judge[stage]) for stage in local_stages(schedule, rank)}
scale = Y.clone()
Pipeline(schedule, held, fn.mse_loss).step(X, Y, stage_kwargs={1: {"scale": scale}})
assert torch.equal(scale, Y)
fn.mse_loss(judge[3](judge[2](*judge[1](judge[0](X), scale))), Y).backward()
agree(held, judge)
""",
    "images in some microbatches": """
def eye():
    return Of(lambda s, x, image: x + s.a(x) if image else x * 2, a=layer(0))

for name in ["gpipe", "1f1b", "zb-h1"]:
    schedule = pp.schedule(name, 2, 4)
    held, judge = {rank: layer(1) if rank else eye()}, [eye(), layer(1)]
    pipeline = Pipeline(schedule, held, fn.mse_loss, timeout=5)
    for images in ([0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]):
        loss, expected = pipeline.step(X, Y, stage_kwargs={0: {"image": images}}), 0
        for x, y, image in zip(X.tensor_split(4), Y.tensor_split(4), images):
            expected = expected + fn.mse_loss(judge[1](judge[0](x, image)), y) * len(x) / len(X)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for ours, theirs in zip(held[rank].parameters(), judge[rank].parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) == (rank == 0 and not any(images))
            assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-10)
        held[rank].zero_grad()
        nn.ModuleList(judge).zero_grad()
""",
    "a stage that detaches": """
held = {rank: Of(lambda s, x: s.a(x).detach(), a=layer(0)) if rank == 0 else layer(1)}
pipeline = Pipeline(pp.schedule("1f1b", 2, 4), held, fn.mse_loss, timeout=3)
error = refused(lambda: pipeline.step(X, Y))
assert rank or "rank 0: 0B3 failed: the output of stage 0 does not depend on the weights" in error
assert rank or " [0B3]" in error
""",
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(ranks, case):
    ranks(BEGIN + PRELUDE + OF + CASES[case], 2)
