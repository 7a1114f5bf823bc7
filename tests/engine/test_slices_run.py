"""Slices of sequences on real ranks: any legal order has the gradients of one process, to the last bit."""

import json

import judge
import pytest
import torch
from cases import BEGIN, NAMED, ONE_PROCESS, run
from hypothesis import given
from hypothesis import strategies as st
from strategies import often
from torch import nn

import ppedu as pp
from ppedu import B, F, I, Placement, Schedule, SettingError, W
from ppedu.core.dependencies import requires
from ppedu.run import GPT, Batching, GPTConfig, Stage

RANKS, EXAMPLES = 3, 60

RUN = """
config = GPTConfig(vocabulary=11, context=12, layers=6, heads=2, width=8)
wrong = []
for number, (rows, holders, slices, microbatches, recompute) in enumerate(json.loads(sys.argv[1])):
    placement = pp.Placement("drawn", size, (tuple(holders),), slices=slices)
    schedule = pp.Schedule("drawn", placement, microbatches, tuple(tuple(map(pp.Action.parse, row)) for row in rows))
    tokens = torch.randint(11, (2 * microbatches // slices, 13), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    stages = {stage: GPT.stage(config, stage, len(holders)) for stage in local_stages(schedule, rank)}
    kept = {stage: Stage(module, stage, recompute=recompute) for stage, module in stages.items()}
    pipeline = Pipeline(schedule, kept, next_token_loss, timeout=20)
    loss = pipeline.step(inputs, targets)
    outputs = pipeline.forward(inputs)
    whole = [GPT.stage(config, stage, len(holders)) for stage in range(len(holders))]
    total = one_process(schedule, whole, inputs.split(2), targets.split(2), next_token_loss)
    fine = torch.equal(loss, total) and all(not stage.pasts for stage in kept.values())
    for stage, module in stages.items():
        for weight, other in zip(module.parameters(), whole[stage].parameters(), strict=True):
            fine = fine and torch.equal(weight.grad, other.grad)
    if outputs is not None:  # whole sequences, without a past
        x = inputs
        for module in whole:
            x = module(x)
        fine = fine and torch.allclose(outputs, x, atol=1e-6)
    if not fine:
        wrong.append(number)
print(json.dumps(wrong))
dist.barrier()
"""


@st.composite
def schedules(draw):
    """Draw slices' actions in a random order that respects dependencies; some with R."""
    slices, sequences = draw(st.sampled_from([2, 3, 4])), draw(st.integers(1, 2))
    holders = tuple(draw(st.permutations([0, 1, 2, *draw(st.lists(st.integers(0, 2), max_size=3))])))
    placement = Placement("drawn", RANKS, (holders,), slices=slices)
    random, split = draw(st.randoms(use_true_random=False)), draw(st.sampled_from([0, 0.5, 1]))
    left = []
    for stage in range(len(holders)):
        for m in range(slices * sequences):
            left += [make(stage, m) for make in (F, *((I, W) if random.random() < split else (B,)))]
    orders, done = [[] for _ in range(RANKS)], set()
    while left:
        action = random.choice([one for one in left if done.issuperset(requires(one, placement))])
        orders[holders[action.stage]].append(action)
        done.add(("B" if action.op == "I" else str(action.op), action.stage, action.microbatch))
        left.remove(action)
    schedule = Schedule("drawn", placement, slices * sequences, tuple(map(tuple, orders)))
    return judge.recompute(random, schedule) if draw(st.booleans()) else schedule


def test_any_order_of_slices_has_the_gradients_of_one_process(ranks):
    drawn = []

    @often(EXAMPLES)
    @given(schedules(), st.booleans())
    def draw(schedule, recompute):
        schedule.validate()
        drawn.append((schedule, recompute))

    draw()
    plain = []
    for schedule, recompute in drawn:
        rows = [list(map(str, order)) for order in schedule.orders]
        plain.append((rows, schedule.placement.holders[0], schedule.slices, schedule.microbatches, recompute))
    found = ranks(BEGIN + NAMED + ONE_PROCESS + RUN, RANKS, json.dumps(plain), timeout=200)
    wrong = {number for text in found for number in json.loads(text)}
    if wrong:
        schedule, recompute = drawn[min(wrong, key=lambda number: sum(map(len, drawn[number][0].orders)))]
        pytest.fail(f"{schedule.placement}, {recompute=}\n{schedule.to_csv()}")


SETUP = """
config = GPTConfig(vocabulary=11, context=16, layers=6, heads=2, width=8)
tokens = torch.randint(11, (4, 11), generator=torch.Generator().manual_seed(3))
inputs, targets = tokens[:, :-1], tokens[:, 1:]

def sliced(change=None, **options):
    "A pipeline of seq1f1b with 2 microbatches of 3 slices."
    schedule = pp.schedule("seq1f1b", size, 2, slices=3)
    stages = {rank: GPT.stage(config, rank, size) if change is None else change}
    return Pipeline(schedule, stages, next_token_loss, fresh(), timeout=1.5, **options)
"""

CASES = {
    "unequal": """
pipeline = sliced(batching=Batching(slices=(6, 3, 1)))
loss, outputs = pipeline.step(inputs, targets, outputs=True)
whole = nn.Sequential(*[GPT.stage(config, stage, size) for stage in range(size)])
expected = next_token_loss(whole(inputs), targets)  # a mean over all tokens: a slice counts by its own
expected.backward()
torch.testing.assert_close(loss, expected.detach())
for weight, other in zip(pipeline.stages[rank].module.parameters(), whole[rank].parameters(), strict=True):
    torch.testing.assert_close(weight.grad, other.grad, atol=1e-6, rtol=1e-4)
if outputs is not None:
    torch.testing.assert_close(outputs, whole(inputs).detach(), atol=1e-6, rtol=1e-4)
""",
    "prefill": """
one = nn.ModuleList(GPT.stage(config, stage, size) for stage in range(size))
for chunks in (1, 4, [4, 3, 2, 1]):
    made = pp.prefill(size, 10, chunks)
    options = {"group": fresh(), "batching": Batching(slices=made.lengths), "timeout": 1.5}
    pipeline = Pipeline(made.schedule, {rank: GPT.stage(config, rank, size)}, next_token_loss, **options)
    outputs = pipeline.forward(inputs[:1])
    x = inputs[:1]
    for stage in one:
        x = stage(x)
    assert (outputs is None) == (rank < size - 1), made.lengths
    if outputs is not None:
        torch.testing.assert_close(outputs, x.detach(), atol=1e-6, rtol=1e-4)
        assert outputs.argmax(-1).equal(x.argmax(-1))
    assert pipeline.timeline.schedule.orders == made.schedule.orders
""",
    "no past": """
pipeline = sliced(nn.Linear(8, 8))
""",
    "too short": """
pipeline = sliced()
pipeline.step(inputs[:, :2], targets[:, :2])
""",
    "no tokens": """
pipeline = sliced()
pipeline.step(inputs, targets[:, 0])
""",
    "other lengths": """
pipeline = sliced(batching=Batching(slices=(6, 3, 2)))
pipeline.step(inputs, targets)
""",
    "lengths of two": """
pipeline = sliced(batching=Batching(slices=(5, 5)))
pipeline.step(inputs, targets)
""",
}
ERRORS = {
    "no past": "SettingError: the forward of stage 0 takes no `past`, the keys and values of earlier slices; write",
    "too short": "SettingError: inputs[0] has 2 tokens, in dimension 1, which cannot be cut into 3 slices",
    "no tokens": r"SettingError: targets of shape (2,) has no tokens, but the schedule cuts sequences into slices",
    "other lengths": "SettingError: inputs[0] has 10 tokens, in dimension 1, which cannot be cut into slices of 6, 3",
    "lengths of two": "SettingError: Batching(slices=…) gives the tokens of 2 slices, but the schedule has 3",
}


@pytest.fixture(scope="module")
def found(ranks):
    return run(ranks, RANKS, 1, {name: SETUP + code for name, code in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_lengths_of_slices_and_what_cannot_be_cut(found, case):
    assert found[case][0][0].startswith(ERRORS.get(case, "fine"))


def test_a_past_has_room_for_its_sequence_only():
    stage = Stage(GPT(GPTConfig(vocabulary=11, context=8, layers=1, heads=2, width=8)), 0)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    stage.begin([tokens, tokens], [], slices=(4, 3))
    stage.forward(0)
    with pytest.raises(pp.PipelineError, match=r"4 keys of shape \(1, 2, 4, 4\), but there is room for 3"):
        stage.forward(1)
    with pytest.raises(SettingError, match="the tokens of a slice must be at least 1"):
        Batching(slices=(4, 0))
    stage = Stage(nn.Identity(), 0)
    stage.begin([torch.zeros(3)], [], slices=2)
    with pytest.raises(pp.PipelineError, match="gets no tensor of shape"):
        stage.forward(0)
