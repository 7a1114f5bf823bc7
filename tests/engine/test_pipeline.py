"""Every schedule of the zoo has the gradients of one process, to the last bit if there is one copy of the model.

With two copies, each gradient is the sum of two partial sums, which rounds differently: equal to 1e-6.

`make test` runs each schedule once, on 4 ranks; `make test-all` also runs it on 2 and on 8 ranks, and with the fewest
and with many microbatches.
"""

import functools
import json
from itertools import islice

import pytest
from cases import BEGIN, NAMED, ONE_PROCESS, named

import ppedu as pp

RUN = """
config = GPTConfig(vocabulary=11, context=8, layers=int(sys.argv[1]), heads=2, width=16)

for case in json.loads(sys.argv[2]):
    name, microbatches = case
    schedule = named(name, size, microbatches)
    tokens = torch.randint(11, (2 * microbatches, 9), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    modules = {stage: GPT.stage(config, stage, schedule.stages) for stage in local_stages(schedule, rank)}
    pipeline = Pipeline(schedule, modules, next_token_loss)
    loss = pipeline.step(inputs, targets)
    if rank == 0:
        whole = [GPT.stage(config, stage, schedule.stages) for stage in range(schedule.stages)]
        total = one_process(schedule, whole, inputs.split(2), targets.split(2), next_token_loss)
        torch.save(([[weight.grad for weight in module.parameters()] for module in whole], total), sys.argv[3])
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
        larger = (m for m in range(max(fewest, ranks) + 1, 40) if m % ranks and _legal(name, ranks, m))
        many = next(m for m in range(4 * ranks, 60) if _legal(name, ranks, m))
        found.append([(ranks, name, m) for m in dict.fromkeys([*islice(larger, 1), fewest, many])])
    return found


@functools.cache
def _legal(name, ranks, microbatches):
    try:
        schedule = pp.schedule(name, ranks, microbatches)
        schedule.validate()
    except pp.PipelineError:
        return False
    return not schedule.updated and not schedule.placement.barriers  # in test_updates_run.py, test_shared_head_run.py


def possible(ranks):
    return [name for name in pp.schedules() if any(_legal(name, ranks, m) for m in (1, 2, 4, 8, 16))]


QUICK = [group[0] for group in cases(4, possible(4))]
QUICK += [(4, "atlas line 3", 8), (4, "atlas v 5", 6), (4, "atlas loop 5", 5), (4, "atlas bidirectional 3", 8)]
QUICK += [(4, "recompute zb-h2", 8), (4, "recompute zb-v", 5), (4, "recompute dualpipev", 8)]
QUICK += [(4, "offload zb-h1", 8), (4, "offload dualpipe", 8), (4, "po-f", 8)]
EVERY = [case for ranks in (2, 4) for group in cases(ranks, possible(ranks)) for case in group]
EVERY += [case for group in cases(8, ["zb-v", "dualpipe"]) for case in group] + QUICK[-10:]


@pytest.fixture(scope="module")
def reports(ranks, tmp_path_factory):
    found, expected = {}, str(tmp_path_factory.mktemp("expected") / "gradients.pt")

    def run(size, quick):
        mine = [case for case in EVERY if case[0] == size and (case in QUICK) == quick]
        layers = 2 * max(size, 4)
        program, drawn = BEGIN + NAMED + ONE_PROCESS + RUN, json.dumps([each[1:] for each in mine])
        output = ranks(program, size, str(layers), drawn, expected, timeout=280)
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
    two_copies = named(name, size, microbatches).placement.copies > 1
    far = max(report["far"] for report in found)
    same = not any(report["wrong"] for report in found)
    tell(
        f"{name:<20}{size:2} ranks {microbatches:3} microbatches   gradients {'equal' if same else f'{far:.0e} apart'}"
    )
    for report in found:
        assert report["far"] <= 1e-6 if two_copies else report["wrong"] == 0
        assert abs(report["loss"] - report["expected"]) <= (1e-6 if two_copies else 0)
        assert report["order"] and report["measured"]
