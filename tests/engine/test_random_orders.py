"""Any legal order runs, and its gradients are those of one process, to the last bit."""

import json

import judge
import pytest
from cases import BEGIN
from hypothesis import given
from hypothesis import strategies as st
from stepper import paired, parents
from strategies import often

from ppedu import B, F, I, Placement, Schedule, W, recompute

RANKS, EXAMPLES = 3, 250

RUN = """
class Layer(nn.Module):
    "Takes and returns two activations. `modes`: by microbatch, what its outputs depend on, if not on all."
    def __init__(self, stage, frozen, modes):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(stage)
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4), nn.LayerNorm(4))
        self.layers.requires_grad_(not frozen)
        self.modes = {m: mode for at, m, mode in modes if at == stage}
    def forward(self, x, z, m):
        mode = self.modes.get(m, "all")
        if mode == "weights":
            x, z = x.detach(), z.detach()
        y = x * 2 if mode == "inputs" else self.layers(x)
        z = z + y.sin()
        return (y if mode != "nothing" else y.detach()), (z.detach() if mode in ("nothing", "one") else z)

def loss_fn(outputs, target):
    return fn.mse_loss(outputs[0], target) + outputs[1].mean()

def one_process(schedule, frozen, modes, inputs, targets):
    "Each stage's gradients, added up in that stage's order, on one process and without a Pipeline."
    modules = [Layer(stage, stage in frozen, modes) for stage in range(schedule.stages)]
    weights = [weight for module in modules for weight in module.parameters() if weight.requires_grad]
    grads, losses, wanted = {}, [], set()
    for m, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        xs = x, x
        for stage, module in enumerate(modules):
            xs = module(*xs, m=m)
            if any(each.requires_grad for each in xs):
                wanted.add(stage)
        losses.append(loss_fn(xs, y) / len(inputs))
        trains = weights and losses[-1].requires_grad
        found = torch.autograd.grad(losses[-1], weights, allow_unused=True) if trains else [None] * len(weights)
        found = iter([torch.zeros_like(w) if grad is None else grad for w, grad in zip(weights, found, strict=True)])
        for stage, module in enumerate(modules):
            grads[stage, m] = [next(found) for weight in module.parameters() if weight.requires_grad]
    total = torch.zeros(())
    for action in (one for order in schedule.orders for each in order for one in each.singles):
        if action.op == "F" and action.stage == schedule.stages - 1:
            total = total + losses[action.microbatch].detach()
        if action.op in ("B", "W") and action.stage not in frozen and action.stage in wanted:
            for weight, grad in zip(modules[action.stage].parameters(), grads[action.stage, action.microbatch]):
                weight.grad = grad if weight.grad is None else weight.grad + grad
    return modules, total

wrong = []
for number, case in enumerate(json.loads(sys.argv[1])):
    words, holders, split, backwards, microbatches, frozen, modes, options = case
    placement = pp.Placement("drawn", size, tuple(map(tuple, holders)), split, backwards=backwards)
    schedule = pp.Schedule("drawn", placement, microbatches, tuple(tuple(map(pp.Action.parse, row)) for row in words))
    x = torch.randn(2 * microbatches, 4, generator=torch.Generator().manual_seed(1))
    y = torch.randn(2 * microbatches, 4, generator=torch.Generator().manual_seed(2))
    modules = {stage: Layer(stage, stage in frozen, modes) for stage in local_stages(schedule, rank)}
    lowered = pp.lower(schedule, receive="late") if options["late"] else schedule
    batching = Batching(variable_shapes=options["variable"])
    pipeline = Pipeline(lowered, modules, loss_fn, debug=options["debug"], batching=batching, timeout=20)
    numbers = list(range(microbatches))
    pipeline.step((x, x), y, m=numbers[1:] + numbers[:1])  # whether gradients are wanted varies from step to step, too
    for module in modules.values():
        module.zero_grad()
    loss = pipeline.step((x, x), y, m=numbers)
    expected, total = one_process(schedule, frozen, modes, x.split(2), y.split(2))
    same = torch.equal if placement.copies == 1 else torch.allclose
    fine = same(loss, total) and pipeline.timeline.schedule.orders == schedule.orders
    for stage, module in modules.items():
        for weight, other in zip(module.parameters(), expected[stage].parameters(), strict=True):
            if weight.grad is None or other.grad is None:
                fine = fine and weight.grad is other.grad
            else:
                fine = fine and same(weight.grad, other.grad)
    if not fine:
        wrong.append(number)
print(json.dumps(wrong))
dist.barrier()
"""


@st.composite
def placements(draw, microbatches):
    """Draw several stages on a rank, in any arrangement, or two copies of the model, or backwards on other ranks."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return Placement.make("bidirectional", RANKS, 1, microbatches)
    holders = draw(st.permutations([0, 1, 2, *draw(st.lists(st.integers(0, 2), max_size=4))]))
    return Placement.custom(holders, draw(st.permutations(holders)) if kind == 1 else ())


@st.composite
def schedules(draw):
    """Draw actions in a random order that respects dependencies; some run in pairs, some again, some with copies."""
    microbatches = draw(st.integers(1, 5))
    placement = draw(placements(microbatches))
    random = draw(st.randoms(use_true_random=False))
    split, pairs = draw(st.sampled_from([0, 0.5, 1])), draw(st.sampled_from([0, 0.3]))
    left = []
    for stage in range(placement.stages):
        for m in range(microbatches):
            left += [make(stage, m) for make in (F, *((I, W) if random.random() < split else (B,)))]
    orders, done = [[] for _ in range(RANKS)], set()
    while left:
        ready = [action for action in left if all(done & set(choices) for choices in parents(action, placement.stages))]
        action = random.choice(ready)
        rank = placement.rank(action.stage, action.microbatch, action.op)
        here = [one for one in ready if placement.rank(one.stage, one.microbatch, one.op) == rank]
        others = [one for one in here if paired(action, one)]
        taken = [action, random.choice(others)] if others and random.random() < pairs else [action]
        orders[rank].append(paired(*taken) if len(taken) > 1 else action)
        done |= set(taken)
        left = [one for one in left if one not in taken]
    schedule = Schedule("drawn", placement, microbatches, tuple(map(tuple, orders)))
    if placement.backwards:
        return recompute(schedule, judge.parted(placement))
    schedule = judge.recompute(random, schedule) if draw(st.booleans()) else schedule
    return judge.offload(random, schedule) if draw(st.booleans()) else schedule


def modes():
    """Draw what the outputs of some stages depend on for some microbatches, if not on all: then gradients are zero."""
    depends = st.sampled_from(["inputs", "weights", "nothing", "one"])
    return st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 4)), depends, max_size=12)


def plain(schedule):
    """Return a schedule as JSON-compatible values, for another process."""
    orders = [list(map(str, order)) for order in schedule.orders]
    place = schedule.placement
    return orders, place.holders, place.split, place.backwards, schedule.microbatches


def test_any_legal_order_has_the_gradients_of_one_process(ranks):
    drawn = []

    @often(EXAMPLES)
    @given(schedules(), st.sets(st.integers(0, 6), max_size=2), modes(), st.booleans(), st.booleans(), st.booleans())
    def draw(schedule, frozen, modes, late, debug, variable):
        schedule.validate()
        # A stage, or a copy of one, whose outputs depend on no weights in the first step is refused. In that step, each
        # microbatch has the mode of the next one; the first of each copy depends on all.
        starts = [0, *([schedule.placement.split] if schedule.placement.copies > 1 else [])]
        full = {(start + 1) % schedule.microbatches for start in starts}
        some = [(stage, m, mode) for (stage, m), mode in modes.items() if m not in full]
        drawn.append((schedule, sorted(frozen), some, {"late": late, "debug": debug, "variable": variable}))

    draw()
    told = json.dumps([(*plain(schedule), *rest) for schedule, *rest in drawn])
    wrong = {number for text in ranks(BEGIN + RUN, RANKS, told, timeout=200) for number in json.loads(text)}
    if wrong:
        schedule, *rest = drawn[min(wrong, key=lambda number: sum(map(len, drawn[number][0].orders)))]
        pytest.fail(f"{schedule.placement.holders}, {rest}\n{schedule.to_csv()}")
    ops = {str(one.op) for schedule, *_ in drawn for order in schedule.orders for one in order}
    assert {"F", "B", "I", "W", "R"} < ops, "also overlapped pairs"
