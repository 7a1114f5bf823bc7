"""Replicas, copies, ties, frozen and unused weights, buffers: any combination has the results of one process."""

import json
import re

import pytest
from cases import BEGIN

import ppedu as pp

PRELUDE = (
    BEGIN
    + """
from functools import cache

WORLD, RANK = size, rank
torch.set_default_dtype(torch.float64)

@cache
def side_by_side(size):
    "This rank's pipeline, and the ranks of the same stages in all pipelines."
    place, rank = divmod(RANK, size)
    own = dist.new_group(range(place * size, place * size + size), use_local_synchronization=True)
    beside = dist.new_group(range(rank, WORLD, size), use_local_synchronization=True)
    return place, PipelineGroup(rank, size, own), beside

class Layer(nn.Module):
    "A linear layer, one that is never used, and the running mean of its inputs."
    def __init__(self, stage):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(stage % 7)
            self.linear, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)
        self.register_buffer("running", torch.zeros(4, dtype=torch.float32))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("cache", torch.empty(0), persistent=False)
    def forward(self, x):
        if self.training:
            self.running.lerp_(x.detach().mean(0).float(), 0.1)
            self.seen += 1
            self.cache = x.detach()
        return torch.tanh(self.linear(x)) + 1

def caught(call):
    try:
        return call() and "fine"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
)

COMBINATIONS = """
names, cases = json.loads(sys.argv[1])
done = set()
for name, seed in cases:
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4])
    replicas, microbatches = WORLD // size, draw.choice([2, 4, 6, 8])
    try:
        schedule = pp.schedule(name, size, microbatches)
    except pp.SettingError:
        continue  # some want an even number of ranks, or more microbatches
    stages = schedule.stages
    copies = 1 if size == 1 else schedule.placement.copies  # on ranks of their own
    judge = [Layer(stage) for stage in range(stages)]
    # Pairs of stages with one weight: those that are tied, and those with one parameter, on all of their ranks.
    ties = [[draw.randrange(stages) for _ in range(2)] for _ in range(draw.choice([0, 0, 1, 2, 3]))]
    ties += [pair[::-1] for pair in ties if draw.random() < 0.2]
    held_by = [{copy[stage] for copy in schedule.placement.holders} for stage in range(stages)]
    pairs = [(one, other) for other in range(stages) for one in range(other) if held_by[one] == held_by[other]]
    sharing = [pair for pair in pairs if draw.random() < 0.3]
    first = list(range(stages))  # by stage, the first with its weight
    for one, other in (ties + sharing) * stages:
        first[one] = first[other] = min(first[one], first[other])
    for stage, layer in enumerate(judge):
        layer.linear.weight.data.copy_(judge[first[stage]].linear.weight.data)
    frozen = {(stage, each) for stage in range(stages) for each in ("weight", "bias") if draw.random() < 0.2}
    frozen = {(stage, each) for stage, each in frozen if each == "bias"} | {
        (stage, "weight") for stage in range(stages) if (first[stage], "weight") in frozen
    }
    if len(frozen) == 2 * stages:
        frozen = set()
    for stage, layer in enumerate(judge):
        layer.linear.weight.requires_grad_((stage, "weight") not in frozen)
        layer.linear.bias.requires_grad_((stage, "bias") not in frozen)
        # A stage that trains nothing that it uses is refused, unless it is frozen as a whole.
        layer.unused.requires_grad_(not {(stage, "weight"), (stage, "bias")} <= frozen)
    place, group, beside = side_by_side(size)
    held = {stage: copy.deepcopy(judge[stage]) for stage in local_stages(schedule, group.rank)}
    for one, other in sharing:
        if one in held:
            held[other].linear.weight = held[one].linear.weight
    for stage, layer in enumerate(judge):
        layer.linear.weight = judge[first[stage]].linear.weight

    reduction = draw.choice(["mean", "sum"])
    pipeline = Pipeline(
        schedule, held, lambda y, target: fn.mse_loss(y, target, reduction=reduction), group,
        replicas=beside if replicas > 1 or draw.random() < 0.5 else None, batching=Batching(reduction=reduction),
        tied=[tuple((stage, "linear.weight") for stage in pair) for pair in ties],
    )
    sizes = [microbatches + draw.randrange(9) for _ in range(replicas)]
    x = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed))
    y = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed + 1))
    loss = pipeline.step(x.split(sizes)[place], y.split(sizes)[place])

    # One process: the whole batch in one piece; its buffers, microbatch by microbatch, as each holder sees them.
    whole = x
    for layer in judge:
        whole = layer.eval()(whole)
    expected = fn.mse_loss(whole, y, reduction=reduction)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    running = torch.zeros(stages, 4)
    with torch.no_grad():
        for xs in x.split(sizes):
            came = []  # by microbatch and stage
            for piece in xs.tensor_split(microbatches):
                came.append([piece] + [piece := layer(piece) for layer in judge])
            for order in schedule.orders:  # what a holder sees, in its order
                mean = torch.zeros(stages, 4, dtype=torch.float32)
                for one in (single for action in order for single in action.singles if single.op in "FR"):
                    mean[one.stage].lerp_(came[one.microbatch][one.stage].mean(0).float(), 0.1)
                running += mean / (replicas * copies)
    for stage, module in held.items():
        for (path, ours), theirs in zip(module.named_parameters(), judge[stage].parameters(), strict=True):
            what = name, seed, size, stage, path
            assert (ours.grad is None) == (theirs.grad is None), what
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what} {m}")
        torch.testing.assert_close(module.running.double(), running[stage], rtol=1e-5, atol=1e-6)
        again = sum(at == stage for at, _ in schedule.recomputed)
        assert module.seen == microbatches // copies + again

    # Its norm is that of one process, however many ranks hold a weight.
    weights = {id(weight): weight for layer in judge for weight in layer.parameters()}
    most = draw.choice([0.01, 1e6])
    norm = nn.utils.clip_grad_norm_(weights.values(), most)
    assert abs(pipeline.clip_grad_norm(most) / norm - 1) < 1e-9, (name, seed)
    for stage, module in held.items():
        for ours, theirs in zip(module.parameters(), judge[stage].parameters(), strict=True):
            assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    done.add((name, size))
print(json.dumps(sorted(done)))
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_random_combinations_of_replicas_ties_and_frozen_weights_match_one_process(ranks, seed):
    names = [name for name in pp.schedules() if pp.schedule(name, 4, 8).plain]
    cases = [(name, 1000 * seed + number) for number, name in enumerate(names)][:: 1 if seed else 2]
    done = [json.loads(text) for text in ranks(PRELUDE + COMBINATIONS, 4, json.dumps([names, cases]))]
    assert done == done[:1] * 4 and len(done[0]) > len(cases) / 2


def told(ranks, program, size=4):
    return [text.splitlines() for text in ranks(PRELUDE + program, size)]


def test_a_weight_shared_by_two_stages_of_a_rank_is_exchanged_once(ranks):
    program = """
from ppedu.engine import gradients
sent = []  # the lengths of the rows that are exchanged
start_swap, all_reduce = gradients.start_swap, dist.all_reduce
gradients.start_swap = lambda mine, *others: (sent.append(mine.numel()), start_swap(mine, *others))[1]
dist.all_reduce = lambda row, **options: (sent.append(row.numel()), all_reduce(row, **options))[1]

place, group, beside = side_by_side(2)
x, y = (torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
for name in ("dualpipe", "zb-v", "interleaved"):
    schedule = pp.schedule(name, 2, 8)
    rank_of = [min(copy[stage] for copy in schedule.placement.holders) for stage in range(schedule.stages)]
    for ties in ([], [((0, "weight"), (schedule.stages - 1, "weight"))] * 2) if rank_of[0] == rank_of[-1] else ([],):
        weights = [nn.Parameter(torch.eye(4)) for _ in range(2)], [nn.Parameter(torch.eye(4)) for _ in range(2)]
        ours, theirs = ([nn.Linear(4, 4, bias=False) for _ in rank_of] for _ in range(2))
        for modules, shared in zip((ours, theirs), weights):
            for module, rank in zip(modules, rank_of):
                module.weight = shared[rank]
        held = {stage: ours[stage] for stage in local_stages(schedule, group.rank)}
        pipeline = Pipeline(schedule, held, fn.mse_loss, group, replicas=beside, tied=ties)
        for scale in (1, 2.0**10, 1):
            sent.clear()
            pipeline.step(x.split(8)[place], y.split(8)[place], loss_scale=scale)
            # 16 gradients and a mark, for the mean over replicas and the sum over copies.
            assert [length for length in sent if length > 1] == [17] * schedule.placement.copies, (name, sent)
            fn.mse_loss(nn.Sequential(*theirs)(x), y).backward()
            for stage in held:
                torch.testing.assert_close(ours[stage].weight.grad, theirs[stage].weight.grad, rtol=1e-9, atol=1e-9)
        norm = nn.utils.clip_grad_norm_(nn.Sequential(*theirs).parameters(), 0.1)
        assert abs(pipeline.clip_grad_norm(0.1) / norm - 1) < 1e-9, name
"""
    told(ranks, program)


def test_ties_form_classes_across_ranks(ranks):
    program = """
class Known(nn.Linear):
    "A module that finds its weight by another name, too, as a compiled one does."
    known = property(lambda self: self.weight)

place, group, beside = side_by_side(4)
def make(schedule, ties, change=lambda held: None):
    held = {stage: Known(4, 4) for stage in local_stages(schedule, RANK)}
    for stage, module in held.items():
        torch.manual_seed(0)
        module.weight.data.normal_()
        module.bias.data.fill_(stage)
    change(held)
    tied = [((one, "weight"), (other, "known")) for one, other in ties]
    return held, Pipeline(schedule, held, fn.mse_loss, group, tied=tied, timeout=10)

x, y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
chain = [(0, 1), (1, 2)]
TIES = [  # and the stages that have one weight
    (chain, [0, 1, 2]),
    ([(3, 1), (1, 2), (2, 3)], [1, 2, 3]),
    ([(1, 1)], [1]),
    ([(0, 3), (0, 3), (3, 0)], [0, 3]),
    ([(0, 1), (2, 3), (3, 0)], [0, 1, 2, 3]),
]
for name in ("1f1b", "zb-v", "gems"):
    schedule = pp.schedule(name, 4, 8)
    for ties, together in TIES:
        held, pipeline = make(schedule, ties)
        judge = [nn.Linear(4, 4) for _ in range(schedule.stages)]
        for stage, layer in enumerate(judge):
            torch.manual_seed(0)
            layer.weight.data.normal_()
            layer.bias.data.fill_(stage)
        for stage in together:
            judge[stage].weight = judge[together[0]].weight
        fn.mse_loss(nn.Sequential(*judge)(x), y).backward()
        pipeline.step(x, y)
        for stage, module in held.items():
            torch.testing.assert_close(module.weight.grad, judge[stage].weight.grad, rtol=1e-9, atol=1e-9)
        weights = nn.ModuleList(judge).parameters()
        assert abs(pipeline.clip_grad_norm(0.1) / nn.utils.clip_grad_norm_(weights, 0.1) - 1) < 1e-9

schedule = pp.schedule("1f1b", 4, 4)
def frozen(held):
    if 2 in held:
        held[2].weight.requires_grad_(False)
def other_values(held):
    if 2 in held:
        held[2].weight.data += 1
for change in (frozen, other_values):
    print(caught(lambda: make(schedule, chain, change)[1].step(x, y)))
"""
    output = told(ranks, program)
    refused = "SettingError: the tied weights on rank 2 and rank 0 are not the same in shape, dtype, requires_grad or "
    for lines in zip(*output, strict=True):
        assert lines[2].startswith(refused)
        assert all(line.startswith("SettingError: ") for line in lines)
        assert "cannot start step; its own error says why" in lines[3]  # it holds none of these weights


def test_a_stage_in_a_synchronizing_wrapper_is_refused_on_every_rank(ranks):
    program = """
from torch.distributed._composable.replicate import replicate
place, group, beside = side_by_side(2)
for name in ("gpipe", "zb-h1"):
    schedule = pp.schedule(name, 2, 4)
    for wrap, where in ((nn.parallel.DistributedDataParallel, 1), (replicate, 1)):
        for inside in (False, True):
            stages = {stage: Layer(stage) for stage in local_stages(schedule, group.rank)}
            if group.rank == where:
                whole = nn.Sequential(nn.Linear(4, 4), wrap(stages[where], process_group=beside))
                stages[where] = whole if inside else whole[1]
            pipeline = Pipeline(schedule, stages, fn.mse_loss, group, replicas=beside, timeout=20)
            print(caught(lambda: pipeline.step(torch.ones(4, 4), torch.ones(4, 4))))
"""
    output = told(ranks, program)
    for lines in output:  # also on the rank whose own stage is plain
        assert len(lines) == 8
        for line in lines:
            assert line.startswith(
                "SettingError: stage 1 on rank 1 is in a wrapper, such as DistributedDataParallel, that synchronizes "
                "gradients after the wrong backward; give the plain module and Pipeline(replicas=group)"
            )


# The schedule, the ranks of a pipeline, a stage, what changes it, and what the error names: a part and two ranks.
UNLIKE = {
    "a weight of replicas": ("gpipe", 2, 1, "linear.weight.data[0, 0] += RANK // 2", "weight 'linear.weight'", 1, 3),
    "a frozen weight": ("zb-v", 2, 2, "unused.requires_grad_(False).bias.data += RANK", "weight 'unused.bias'", 1, 3),
    "a buffer of replicas": ("1f1b", 2, 0, "running += float(RANK)", "buffer 'running'", 0, 2),
    "a counter of replicas": ("1f1b", 1, 0, "seen += RANK == 3", "buffer 'seen'", 0, 3),
    "a buffer of copies": ("dualpipe", 4, 2, "running[3] -= float(RANK == 2)", "buffer 'running'", 2, 1),
    "a weight of copies": ("chimera", 4, 0, "linear.bias.data += float(RANK == 3)", "weight 'linear.bias'", 0, 3),
}


@pytest.fixture(scope="module")
def started(ranks):
    """The outcome of a step of each case on each rank, with equal stages and with different ones."""
    program = f"""
for name, size, changed, change, *_ in {list(UNLIKE.values())}:
    place, group, beside = side_by_side(size)
    schedule = pp.schedule(name, size, 8)
    for unlike in (False, True):
        held = {{stage: Layer(stage) for stage in local_stages(schedule, group.rank)}}
        if unlike and changed in held:
            exec(f"held[{{changed}}].{{change}}")
        replicas = beside if size < WORLD else None
        pipeline = Pipeline(schedule, held, fn.mse_loss, group, replicas=replicas, timeout=10)
        print(caught(lambda: [pipeline.step(torch.ones(8, 4), torch.ones(8, 4))]))
"""
    output = told(ranks, program)
    pairs = [list(zip(lines[::2], lines[1::2], strict=True)) for lines in output]
    return dict(zip(UNLIKE, zip(*pairs, strict=True), strict=True))


@pytest.mark.parametrize("case", UNLIKE)
def test_replicas_and_copies_that_start_different_are_refused(started, case):
    _, _, stage, _, what, one, other = UNLIKE[case]
    named = f"SettingError: stage {stage}: the {what} differs between (global )?rank {one} and (global )?rank {other}"
    found = [bool(re.match(named, second)) for _, second in started[case]]
    assert all(first == "fine" for first, _ in started[case])
    assert found[one] and found[other]
    assert all(second.startswith("SettingError") for _, second in started[case])  # no rank is left to wait


def test_replicas_with_different_weights_are_refused(ranks):
    program = """
place, group, beside = side_by_side(2)
held = {group.rank: nn.Linear(4, 4, bias=place == 0)}
pipeline = Pipeline(pp.schedule("gpipe", 2, 4), held, fn.mse_loss, group, replicas=beside, timeout=10)
print(caught(lambda: pipeline.step(torch.ones(4, 4), torch.ones(4, 4))))
"""
    output = told(ranks, program)
    for rank, (line,) in enumerate(output):
        assert re.match(
            f"SettingError: stage {rank % 2} has different weights or buffers on global rank {rank % 2 + 2}", line
        )


def test_integer_buffers_that_differ_after_a_step_are_an_error(ranks):
    program = """
place, group, beside = side_by_side(4)
schedule = pp.schedule("gems", 4, 5)  # 3 microbatches for one copy, 2 for the other
pipeline = Pipeline(schedule, {s: Layer(s) for s in local_stages(schedule, RANK)}, fn.mse_loss, group, timeout=10)
print(caught(lambda: pipeline.step(torch.ones(5, 4), torch.ones(5, 4))))
"""
    output = told(ranks, program)
    for rank, (line,) in enumerate(output):
        stage = min(rank, 3 - rank)
        holders = f"rank {stage} and rank {3 - stage}"
        assert line.startswith(
            f"PipelineError: stage {stage}: the buffer 'seen' differs between {holders} after the step"
        )


def test_sparse_gradients_are_shared_and_clipped(ranks):
    program = """
class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(5, 4, sparse=sparse)
    def forward(self, tokens):
        return self.words(tokens)

tokens, y = torch.tensor([0, 1, 1, 3, 3, 3, 0, 1]), torch.ones(8, 4)
for name, size in (("1f1b", 2), ("dualpipe", 4), ("gems", 4), ("zb-h1", 4)):
    place, group, beside = side_by_side(size)
    schedule, found = pp.schedule(name, size, 8), []
    for sparse in (False, True):
        held = {s: Layer(s) if s else Words(sparse) for s in local_stages(schedule, group.rank)}
        pipeline = Pipeline(schedule, held, fn.mse_loss, group, replicas=beside if size < WORLD else None)
        pipeline.step(tokens, y)
        norm = pipeline.clip_grad_norm(0.01)
        weights = [weight for stage in sorted(held) for weight in held[stage].parameters()]
        found.append([norm, *(weight.grad.to_dense() for weight in weights if weight.grad is not None)])
    assert abs(found[0][0] / found[1][0] - 1) < 1e-12
    for dense, sparse in zip(*(each[1:] for each in found), strict=True):
        torch.testing.assert_close(dense, sparse, rtol=1e-12, atol=1e-12)
"""
    told(ranks, program)


def test_a_norm_that_is_not_finite_is_that_of_torch_or_an_error_on_every_rank(ranks):
    program = """
place, group, beside = side_by_side(4)
for value in (torch.inf, torch.nan):
    judge = [Layer(stage) for stage in range(4)]
    held = {RANK: Layer(RANK)}
    pipeline = Pipeline(pp.schedule("1f1b", 4, 4), held, fn.mse_loss, group)
    pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
    whole = torch.ones(4, 4)
    for layer in judge:
        whole = layer(whole)
    fn.mse_loss(whole, torch.ones(4, 4)).backward()
    for layers, stage in ((judge, 2), (held, 2)):
        if layers is judge or RANK == 2:
            layers[stage].linear.weight.grad[1, 1] = value
    before = held[RANK].linear.weight.grad.clone()
    refused = caught(lambda: pipeline.clip_grad_norm(1.0, error_if_nonfinite=True))
    assert refused.startswith(f"PipelineError: the norm of the gradients over all stages is {value}"), refused
    torch.testing.assert_close(held[RANK].linear.weight.grad, before, rtol=0, atol=0, equal_nan=True)
    expected = nn.utils.clip_grad_norm_([w for layer in judge for w in layer.parameters()], 1.0)
    assert str(pipeline.clip_grad_norm(1.0)) == str(expected.item())
    for ours, theirs in zip(held[RANK].linear.parameters(), judge[RANK].linear.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)
"""
    told(ranks, program)
