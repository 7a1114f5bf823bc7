"""Every schedule of the zoo has the gradients of one process, to the last bit if there is one copy of the model.

With two copies, each gradient is the sum of two partial sums, which rounds differently: equal to 1e-6.

`make test` runs each schedule once, on 4 ranks; `make test-all` also runs it on 2 and on 8 ranks, and with the fewest
and with many microbatches.
"""

import json
import re

import pytest

import ppedu as pp

RUN = """
import json, sys
import torch, torch.distributed as dist
import ppedu as pp
from ppedu.run import GPT, GPTConfig, Pipeline, local_stages, next_token_loss

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
config = GPTConfig(vocabulary=11, context=8, layers=int(sys.argv[1]), heads=2, width=16)

def named(name, size, microbatches):
    "A registered schedule, or one of the atlas, such as that for a placement and a memory: 'atlas v 5'."
    if not name.startswith("atlas"):
        return pp.schedule(name, size, microbatches)
    _, place, memory = name.split()
    return pp.search.atlas(size, microbatches, int(memory), place).schedule

def one_process(schedule, inputs, targets):
    "Each stage's gradients, added up in that stage's order, on one process and without a Pipeline."
    modules = [GPT.stage(config, stage, schedule.stages) for stage in range(schedule.stages)]
    waits, losses = {}, []  # the gradients of every stage and microbatch alone
    for m, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        for module in modules:
            x = module(x)
        loss = next_token_loss(x, y) / len(inputs)
        losses.append(loss.detach())
        weights = [weight for module in modules for weight in module.parameters()]
        grads = iter(torch.autograd.grad(loss, weights))
        for stage, module in enumerate(modules):
            waits[stage, m] = [next(grads) for _ in module.parameters()]
    last = [action.microbatch for order in schedule.orders for each in order for action in each.singles
            if action.stage == schedule.stages - 1 and action.op == "F"]
    total = torch.zeros(())
    for m in last:
        total += losses[m]
    grads = []
    for stage in range(schedule.stages):
        done = [single.microbatch for order in schedule.orders for each in order for single in each.singles
                if single.stage == stage and single.op in ("B", "W")]
        grads.append(list(waits[stage, done[0]]))
        for m in done[1:]:
            grads[-1] = [grad + more for grad, more in zip(grads[-1], waits[stage, m], strict=True)]
    return grads, total

for case in json.loads(sys.argv[2]):
    name, microbatches = case
    schedule = named(name, size, microbatches)
    tokens = torch.randint(11, (2 * microbatches, 9), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    modules = {stage: GPT.stage(config, stage, schedule.stages) for stage in local_stages(schedule, rank)}
    pipeline = Pipeline(schedule, modules, next_token_loss)
    loss = pipeline.step(inputs, targets)
    if rank == 0:
        torch.save(one_process(schedule, inputs.split(2), targets.split(2)), sys.argv[3])
    dist.barrier()
    expected, total = torch.load(sys.argv[3])
    far, wrong = 0.0, 0
    for stage, module in modules.items():
        for weight, other in zip(module.parameters(), expected[stage], strict=True):
            wrong += not torch.equal(weight.grad, other)
            far = max(far, ((weight.grad - other).norm() / other.norm()).item())
    timeline = pipeline.timeline
    print(json.dumps(dict(
        wrong=wrong, far=far, loss=loss.item(), expected=total.item(),
        order=timeline.schedule.orders == schedule.orders,
        measured=[[span.action for span in row] for row in timeline.rows] == list(map(list, schedule.orders)),
    )))
dist.barrier()
"""


def cases(ranks, names):
    """Return cases with a number of microbatches that the ranks do not divide, if it is legal, first for each name."""
    found = []
    for name in names:
        fewest = next(m for m in range(1, 40) if _legal(name, ranks, m))
        uneven = [m for m in range(max(fewest, ranks) + 1, 40) if m % ranks and _legal(name, ranks, m)]
        many = next(m for m in range(4 * ranks, 60) if _legal(name, ranks, m))
        found.append([(ranks, name, m) for m in dict.fromkeys([*uneven[:1], fewest, many])])
    return found


def _legal(name, ranks, microbatches):
    try:
        pp.schedule(name, ranks, microbatches).validate()
    except pp.PipelineError:
        return False
    return True


def possible(ranks):
    return [name for name in pp.schedules() if any(_legal(name, ranks, m) for m in (1, 2, 4, 8, 16))]


QUICK = [group[0] for group in cases(4, possible(4))]
QUICK += [(4, "atlas line 3", 8), (4, "atlas v 5", 6), (4, "atlas loop 5", 5), (4, "atlas bidirectional 3", 8)]
EVERY = [case for ranks in (2, 4) for group in cases(ranks, possible(ranks)) for case in group]
EVERY += [case for group in cases(8, ["zb-v", "dualpipe"]) for case in group] + QUICK[-4:]


@pytest.fixture(scope="module")
def reports(ranks, tmp_path_factory):
    found, expected = {}, str(tmp_path_factory.mktemp("expected") / "gradients.pt")

    def run(size, quick):
        mine = [case for case in EVERY if case[0] == size and (case in QUICK) == quick]
        layers = 2 * max(size, 4)
        output = ranks(RUN, size, str(layers), json.dumps([each[1:] for each in mine]), expected, timeout=280)
        for case, lines in zip(mine, zip(*[text.splitlines() for text in output], strict=True), strict=True):
            found[case] = [json.loads(line) for line in lines]

    def get(case):
        if case not in found:
            run(case[0], case in QUICK)
        return found[case]

    return get


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow, id="-".join(map(str, case)))
        for case in EVERY
    ],
)
def test_gradients_and_loss_are_those_of_one_process(reports, case, tell):
    size, name, microbatches = case
    found = reports(case)
    two_copies = "bidirectional" in name or (
        not name.startswith("atlas") and pp.schedule(name, size, microbatches).placement.copies > 1
    )
    far = max(report["far"] for report in found)
    same = not any(report["wrong"] for report in found)
    tell(
        f"{name:<20}{size:2} ranks {microbatches:3} microbatches   gradients {'equal' if same else f'{far:.0e} apart'}"
    )
    for report in found:
        assert report["far"] <= 1e-6 if two_copies else report["wrong"] == 0
        assert abs(report["loss"] - report["expected"]) <= (1e-6 if two_copies else 0)
        assert report["order"] and report["measured"]


@pytest.mark.parametrize(("name", "tied"), [("chimera", []), ("1f1b", [((0, "weight"), (3, "weight"))])])
def test_copies_of_weights_that_differ_from_the_start_are_refused(ranks, name, tied):
    output = ranks(
        """
        import json, sys
        import torch, torch.distributed as dist
        import ppedu as pp
        from ppedu.run import Pipeline, local_stages

        dist.init_process_group("gloo")
        name, tied = json.loads(sys.argv[1])
        schedule = pp.schedule(name, 4, 4)
        for alike in (True, False):
            torch.manual_seed(0 if alike else dist.get_rank())
            stages = {stage: torch.nn.Linear(4, 4) for stage in local_stages(schedule, dist.get_rank())}
            if alike:
                for stage in stages.values():
                    torch.nn.init.ones_(stage.weight)
                    torch.nn.init.zeros_(stage.bias)
            pipeline = Pipeline(schedule, stages, torch.nn.functional.mse_loss, tied=tied, timeout=2)
            try:
                pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
                print("equal: fine")
            except pp.PipelineError as error:
                print(type(error).__name__, error)
        """,
        4,
        json.dumps((name, tied)),
    )
    for rank, text in enumerate(output):
        fine, refused = text.splitlines()
        assert fine == "equal: fine"
        assert refused.startswith("SettingError ")
        if name == "chimera":
            assert re.match(r"SettingError stage \d: the weight 'weight' differs between rank \d and rank \d", refused)
        elif rank in (0, 3):
            assert refused.startswith(
                f"SettingError the tied weights on rank {rank} and rank {3 - rank} are not the same"
            )
        else:
            assert "rank 0 cannot start step; its own error says why" in refused


def test_copies_whose_weights_were_replaced_still_add_up_their_gradients(ranks):
    program = """
        import torch, torch.distributed as dist, ppedu as pp
        dist.init_process_group("gloo")
        X, Y = torch.arange(32.0).view(8, 4) / 10, torch.ones(8, 4)
        def layers():
            torch.manual_seed(5)
            return {stage: torch.nn.Linear(4, 4) for stage in range(2)}
        def step(modules):
            pipeline = pp.run.Pipeline(pp.schedule("dualpipe", 2, 4), modules, torch.nn.functional.mse_loss)
            yield
            pipeline.step(X, Y)
        fresh, loaded = layers(), layers()
        for modules in (fresh, loaded):
            running = step(modules)
            next(running)
            if modules is loaded:
                for module in modules.values():
                    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
            next(running, None)
        for stage in range(2):
            for ours, theirs in zip(loaded[stage].parameters(), fresh[stage].parameters()):
                assert torch.equal(ours.grad, theirs.grad), stage
        """
    ranks(program, 2)
