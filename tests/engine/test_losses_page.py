"""The numbers of docs/losses.md, and its recipes: one process with autograd beside real ranks."""

import json
import re
from pathlib import Path

import pytest
from cases import BEGIN

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")][2:]
WRITTEN = {case: " ".join(re.findall(r"`(Batching\(.*\))`", written)) for case, _, _, written in ROWS}

PROGRAM = """
from torch.nn.functional import cross_entropy

place, rank = divmod(rank, 2)
members = [2 * place, 2 * place + 1], [rank, rank + 2]  # of this rank's pipeline, and its replicas
pairs = [dist.new_group(ranks, use_local_synchronization=True) for ranks in members]
written, code = json.loads(sys.argv[1])
exec(code)
warnings.simplefilter("ignore")

def tokens(*lengths):
    "Return sequences of 6 tokens, and their targets, of which the first `length` count."
    numbers = torch.Generator().manual_seed(len(lengths))
    inputs, targets = torch.randint(13, (2, len(lengths), 6), generator=numbers)
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return inputs, targets

class Body(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.token = nn.Embedding(13, 8)
    def forward(self, x):
        return self.token(x)

class Head(nn.Module):
    def __init__(self, heads=1):
        super().__init__()
        torch.manual_seed(2)
        self.heads = nn.ModuleList(nn.Linear(8, 13) for _ in range(heads))
    def forward(self, x):
        made = tuple(head(x) for head in self.heads)
        return made if len(made) > 1 else made[0]

def mean(logits, targets, **options):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)

def total(logits, targets):
    return mean(logits, targets, reduction="sum")

def two(logits, targets):
    return mean(logits[0], targets[0]) + 0.3 * mean(logits[1], targets[1])

def balance(x):
    "Like a load-balancing loss: a product of two means over tokens."
    return 4 * (x.softmax(-1).flatten(0, 1).mean(0) * (x > 0).double().flatten(0, 1).mean(0)).sum()

def one_process(loss_fn, batches, heads=1, add=None):
    "Return the sum of the batches' losses, each with a weight, and the gradients."
    stages, found = [Body(), Head(heads)], 0.0
    for weight, x, y in batches:
        hidden = stages[0](x)
        loss = weight * (loss_fn(stages[1](hidden), y) + (add(hidden) if add else 0))
        loss.backward()
        found += loss.item()
    return found, [[weight.grad for weight in stage.parameters()] for stage in stages]

def pipelined(loss_fn, batches, batching=None, heads=1, add=None, replicas=None, **options):
    "Return the sum of the steps' losses, and this rank's gradients."
    stage = [Body, lambda: Head(heads)][rank]()
    group = PipelineGroup(rank, 2, pairs[0])
    pipeline = Pipeline(
        pp.schedule("1f1b", 2, 4), {rank: stage}, loss_fn, group, batching=batching or Batching(), replicas=replicas
    )
    if add and rank == 0:
        def forward(action, step):
            kept = []
            hook = stage.register_forward_hook(lambda module, xs, y: kept.append(y))
            step.default(action)
            hook.remove()
            step.add_loss(action, add(kept[0]))
        pipeline.on("F", forward)
    losses = [pipeline.step(*batch, **options).item() for batch in batches]
    return sum(losses), [weight.grad for weight in stage.parameters()]

def row(case, expected, default, recipe=None):
    "Note what a case computes; the recipe has the results of one process, and without one, the default has."
    loss, grads = default if recipe is None else recipe
    assert abs(loss - expected[0]) < 2e-6, (case, loss, expected[0])
    for ours, theirs in zip(grads, expected[1][rank], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7, msg=case)
    rows[case] = expected[0], default if isinstance(default, str) else default[0]

def batching(case):
    return eval(written[case])

rows, even, uneven = {}, tokens(*[6] * 8), tokens(*[6] * 10)
padded, again = tokens(6, 1, 2, 5, 3, 6, 1, 4), tokens(1, 6, 1, 1, 2, 3, 1, 1, 5)
case = "a mean, and equal microbatches"
row(case, one_process(mean, [(1, *even)]), pipelined(mean, [even]))
case = "a mean, and microbatches of 3, 3, 2 and 2 samples"
row(case, one_process(mean, [(1, *uneven)]), pipelined(mean, [uneven]))
case = "padding with −100"
row(case, one_process(mean, [(1, *padded)]), pipelined(mean, [padded]), pipelined(mean, [padded], batching(case)))
case = "a microbatch of padding alone"
empty = tokens(6, 1, 0, 0, 3, 6, 1, 4)
try:
    pipelined(mean, [empty])
except pp.PipelineError as error:
    assert "1F1 gave a loss of nan" in str(error) and "Batching(count=" in str(error)
row(case, one_process(mean, [(1, *empty)]), "an error", pipelined(mean, [empty], batching(case)))
case = "a sum"
row(case, one_process(total, [(1, *padded)]), pipelined(total, [padded]), pipelined(total, [padded], batching(case)))
case = "two means with unlike counts"
shifted = padded[1].roll(-1, 1)
shifted[:, -1] = -100
x, both = padded[0], (padded[1], shifted)
row(
    case,
    one_process(two, [(1, x, both)], heads=2),
    pipelined(two, [(x, both)], Batching(count=lambda y: int((y[0] != -100).sum())), heads=2),
    pipelined(loss_fn, [(x, both)], batching(case), heads=2, loss_kwargs={"counts": counts(both)}),
)
case = "`add_loss` of a mean over tokens"
add = lambda x: x.square().mean()
row(case, one_process(mean, [(1, *uneven)], add=add), pipelined(mean, [uneven], add=add))
case = "`add_loss` of a product of means"
pieces = [(len(x) / 10, x, y) for x, y in zip(*(each.tensor_split(4) for each in uneven), strict=True)]
row(case, one_process(mean, pieces, add=balance), pipelined(mean, [uneven], add=balance))
rows[case] = one_process(mean, [(1, *uneven)], add=balance)[0], rows[case][1]
case = "replicas with unlike counts"
unlike = tokens(6, 6, 5, 6, 1, 2, 1, 1)
own = [each.chunk(2)[place] for each in unlike]
default = pipelined(mean, [own], replicas=pairs[1])
row(case, one_process(mean, [(1, *unlike)]), default, pipelined(mean, [own], batching(case), replicas=pairs[1]))
case = "gradients of two steps"
batches = [padded, again]
whole = [torch.cat(each) for each in zip(*batches)]
row(
    case,
    one_process(mean, [(1, *whole)]),
    pipelined(mean, batches),
    pipelined(
        lambda y, t, counts: loss_fn((y,), (t,), counts),
        batches,
        batching(case),
        loss_kwargs={"counts": counts((whole[1],))},
    ),
)
case = "`PostValidation`, and padding"
stage = [Body, Head][rank]()
before = [weight.detach().clone() for weight in stage.parameters()]
optimizer = torch.optim.SGD(stage.parameters(), 1.0)
pipeline = Pipeline(
    pp.schedule("1f1b", 2, 4), {rank: stage}, mean, PipelineGroup(rank, 2, pairs[0]),
    batching=batching(case), optimizer=PostValidation(optimizer),
)
assert pipeline.step(*padded) is None
recipe = pipeline.flush().item(), [old - new for old, new in zip(before, stage.parameters(), strict=True)]
row(case, one_process(mean, [(1, *padded)]), pipelined(mean, [padded]), recipe)
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def rows(ranks):
    return json.loads(ranks(BEGIN + PROGRAM, 4, json.dumps([WRITTEN, CODE]))[1])


def test_every_number_of_the_page_is_computed(rows):
    def shown(number):
        return number if isinstance(number, str) else f"{number:.4f}"

    assert [row[:3] for row in ROWS] == [[case, *map(shown, numbers)] for case, numbers in rows.items()]


def test_every_setting_of_the_page_is_needed(rows):
    for case, *_, written in ROWS:
        expected, default = rows[case]
        assert (written == "nothing") == (default == pytest.approx(expected)) or "product" in case
