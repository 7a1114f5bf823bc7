"""The page of verdicts: torch's deferred receives, judged before they run, and their gradients."""

import ast
import json
import re
from pathlib import Path

import pytest
from cases import BEGIN
from releases import needs
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import ppedu as pp
from ppedu.engine.ranks.versions import DEFERRED, TORCHS_RECORDED

PAGE = (Path(__file__).parents[2] / "docs/verdicts.md").read_text(encoding="utf-8")
SIZES = [(2, 3), (2, 4), (2, 8), (4, 4), (4, 8)]
RUN = """
def layer(stage):
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

def far(weight, whole):
    return ((weight.grad - whole.grad).norm() / whole.grad.norm()).item()

microbatches = int(sys.argv[1])
torch.manual_seed(1)
inputs, targets = torch.randn(2 * microbatches, 4), torch.randn(2 * microbatches, 4)
for name in json.loads(sys.argv[2]):
    schedule = pp.schedule(name, size, microbatches)
    modules = {stage: layer(stage) for stage in local_stages(schedule, rank)}
    runtime = pp.run.to_torch(schedule, modules, fn.mse_loss, defer_pp_recv=True)
    kinds = sorted({problem.kind for problem in pp.check(pp.Schedule.read(runtime))})
    runtime.step(*[inputs] * (0 in modules), target=targets if schedule.stages - 1 in modules else None)
    whole = nn.Sequential(*map(layer, range(schedule.stages)))
    fn.mse_loss(whole(inputs), targets).backward()
    weights = [pair for s, module in modules.items() for pair in zip(module.parameters(), whole[s].parameters())]
    print(json.dumps([name, kinds, max(far(*pair) for pair in weights)]))
dist.barrier()
"""


def names(size, microbatches):
    """Return the schedules that torch can run, of this size."""
    found = []
    for name in pp.schedules():
        try:
            schedule = pp.schedule(name, size, microbatches)
        except pp.PipelineError:
            continue
        if schedule.plain and schedule.placement.copies == 1 and not schedule.forward_only:
            found.append(name)
    return found


def shown(size, microbatches):
    """Return a column of the first table, by the name of the schedule."""
    head, _, *rows = re.findall(r"^\|.*\|$", PAGE.split("\n## ")[1], re.MULTILINE)
    column = [cell.strip() for cell in head.split("|")].index(f"{size} × {microbatches}")
    return {(cells := [cell.strip() for cell in row.split("|")])[1]: cells[column] for row in rows}


class Ordered(_PipelineScheduleRuntime):
    """Torch's runtime with an order of ours, in a file."""

    def __init__(self, *given, path, **named):
        super().__init__(*given, **named)
        self._load_csv(path)


@needs(TORCHS_RECORDED)
@pytest.mark.parametrize(("size", "microbatches"), SIZES)
def test_the_step_that_is_recorded_has_the_same_verdict(size, microbatches, tmp_path):
    rejected = {name for name, cell in shown(size, microbatches).items() if cell.startswith("**")}
    for name in names(size, microbatches):
        schedule = pp.schedule(name, size, microbatches)
        path = tmp_path / f"{name}.csv"
        pp.export.to_torch(schedule, path)
        for deferred in (False, True):
            settings = {"chunks": schedule.chunks, "path": str(path), "defer_pp_recv": deferred}
            kinds = {problem.kind for problem in pp.check(pp.run.record(Ordered, size, microbatches, **settings))}
            assert kinds == ({"message"} if deferred and name in rejected else set()), name


@needs(DEFERRED)
@pytest.mark.parametrize(
    ("size", "microbatches"), [SIZES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in SIZES[1:])]
)
def test_what_is_rejected_trains_wrong_and_all_else_is_right(ranks, size, microbatches):
    cells = shown(size, microbatches)
    asked = names(size, microbatches)
    output = ranks(BEGIN + RUN, size, str(microbatches), json.dumps(asked), timeout=120)
    of_ranks = zip(
        *([json.loads(line) for line in text.splitlines() if line[0] == "["] for text in output), strict=True
    )
    for found in of_ranks:
        name, kinds, _ = found[0]
        error = max(far for *_, far in found)
        assert kinds == (["message"] if error > 0.1 else []) and (error > 0.1 or error < 1e-5), (name, kinds, error)
        cell = cells[name].strip("*")
        assert (float(cell) == pytest.approx(error, rel=0.05)) if kinds else (cell == "right"), name
    assert {name for name, cell in cells.items() if cell} >= {*asked}


def test_each_reported_bug_gets_the_verdict_on_the_page():
    bugs = PAGE.split("\n## Bugs that others reported\n")[1].split("\n### ")[1:-1]  # the last are out of reach
    assert len(bugs) == 13
    for bug in bugs:
        blocks = re.findall(r"```text\n(.*?)\n```", bug, re.DOTALL)
        said = {name: ast.literal_eval(value) for name, value in re.findall(r"`(\w+)=([^`]+)`", bug)}
        read = {name: said.pop(name) for name in ("placement", "forward_only") if name in said}
        for text, verdict in zip(blocks[::2], blocks[1::2], strict=True):
            schedule = pp.Schedule.read(text, **read)
            assert [each.text for each in pp.verify(schedule, **said)] == verdict.splitlines(), bug
            if said.get("transport") == "rendezvous":
                assert pp.verify(schedule) == [], "buffered, it is legal"


def test_the_order_of_hyperparallel_gets_the_verdict_on_the_page():
    text, verdict = re.findall(r"```text\n(.*?)\n```", PAGE.split("\n## HyperParallel")[1].split("\n## ")[0], re.DOTALL)
    assert [each.text for each in pp.verify(pp.Schedule.read(text))] == verdict.splitlines()
