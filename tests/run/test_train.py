"""Training: the number of ranks and the schedule change when things are computed, never what."""

import json

import pytest

import ppedu as pp
from ppedu.run import LOOPS
from ppedu.run.train import TrainConfig

TEXT = pp.core.check.__file__  # one that is at hand, and short
SMALL = f"steps=12, microbatches=4, batch=8, context=16, heads=2, width=16, lr=1e-2, seed=3, text={TEXT!r}"

PIPELINE = f"""
import json
import torch.distributed as dist
from ppedu.run import LOOPS
from ppedu.run.train import TrainConfig, train_gpt

dist.init_process_group("gloo")
for schedule in LOOPS:
    result = train_gpt(TrainConfig(schedule, {SMALL}))
    timeline = result.timeline
    report = dict(schedule=schedule, losses=result.losses, timeline=timeline is not None)
    if timeline is not None:
        report |= dict(
            source=timeline.source,
            unit=timeline.costs.unit,
            name=timeline.schedule.name,
            orders=[[str(span.action) for span in row] for row in timeline.rows],
            times=[[(span.start, span.end) for span in row] for row in timeline.rows],
        )
    print(json.dumps(report))
dist.barrier()
"""

PLAIN = f"""
import json, torch
from ppedu.run import GPT, next_token_loss
from ppedu.run.data import Text
from ppedu.run.train import TrainConfig

config = TrainConfig({SMALL})
text, losses = Text(config.text), []
model = GPT(config.gpt(len(text.characters)), seed=config.seed)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
for step in range(config.steps):
    inputs, targets = text.batch(config.batch, config.context, seed=config.seed * 1_000_003 + step)
    total = torch.zeros(())
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        loss = next_token_loss(model(x), y) / config.microbatches
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total.item())
print(json.dumps(losses))
"""


@pytest.fixture(scope="module")
def trained(ranks):
    """What each rank reports, by number of ranks and schedule."""
    found = {}
    for size in (1, 2, 4):
        lines = [map(json.loads, text.splitlines()) for text in ranks(PIPELINE, size)]
        for reports in zip(*lines, strict=True):
            found[size, reports[0]["schedule"]] = reports
    return found


@pytest.fixture(scope="module")
def plain(ranks):
    """The losses of the same training, written without a pipeline."""
    return json.loads(ranks(PLAIN, 1)[0])


each = pytest.mark.parametrize(("size", "schedule"), [(size, schedule) for size in (1, 2, 4) for schedule in LOOPS])


@each
def test_losses_are_those_of_training_without_a_pipeline_on_every_rank(trained, plain, size, schedule):
    assert [report["losses"] for report in trained[size, schedule]] == [plain] * size


def test_the_losses_fall(plain):
    assert plain[-1] < plain[0] - 0.5


@each
def test_rank_0_alone_has_the_timeline(trained, size, schedule):
    assert [report["timeline"] for report in trained[size, schedule]] == [True] + [False] * (size - 1)


@each
def test_the_timeline_is_a_measured_one_in_seconds(trained, size, schedule):
    report = trained[size, schedule][0]
    assert (report["source"], report["unit"], report["name"]) == ("measured", "s", schedule)
    assert min(start for row in report["times"] for start, _ in row) == 0
    for row in report["times"]:
        times = [time for span in row for time in span]
        assert times == sorted(times) and times[-1] < 60
        assert all(start < end for start, end in row)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_timelines_orders_are_the_schedules(trained, size, schedule):
    expected = [list(map(str, order)) for order in pp.schedule(schedule, size, 4).orders]
    assert trained[size, schedule][0]["orders"] == expected


@pytest.mark.parametrize("schedule", LOOPS)
def test_what_needs_a_message_starts_after_its_sender_has_ended(trained, schedule):
    report = trained[4, schedule][0]
    time = {
        action: span
        for order, spans in zip(report["orders"], report["times"], strict=True)
        for action, span in zip(order, spans, strict=True)
    }
    for stage in range(3):
        for m in range(4):
            assert time[f"{stage}F{m}"][1] <= time[f"{stage + 1}F{m}"][0]
            assert time[f"{stage + 1}B{m}"][1] <= time[f"{stage}B{m}"][0]


REFUSED = {
    "unknown schedule": ({"schedule": "2f2b"}, "no loop for the schedule '2f2b'; there is: naive, gpipe, 1f1b"),
    "not a schedule": ({"schedule": None}, "no loop for the schedule None"),
    "0 steps": ({"steps": 0}, "steps must be at least 1; got 0"),
    "part of a step": ({"steps": 1.5}, "steps must be a whole number"),
    "0 microbatches": ({"microbatches": 0}, "microbatches must be at least 1"),
    "no batch": ({"batch": -8}, "batch must be at least 1"),
    "unequal microbatches": (
        {"batch": 30},
        "30 cannot be cut into 8 equal microbatches; take a batch that is a multiple of 8",
    ),
    "negative seed": ({"seed": -1}, "seed must be at least 0"),
    "huge seed": ({"seed": 10**30}, "seed must be"),
    "lr 0": ({"lr": 0}, "lr must be above 0"),
    "lr nan": ({"lr": float("nan")}, "lr must be above 0"),
    "lr text": ({"lr": "fast"}, "lr must be .*'fast'"),
    "width": ({"width": 65}, "width 65 cannot be shared among 4 heads"),
    "0 layers": ({"layers": 0}, "layers must be at least 1"),
    "0 context": ({"context": 0}, "context must be at least 1"),
}


@pytest.mark.parametrize(("setting", "says"), REFUSED.values(), ids=REFUSED)
def test_a_setting_that_cannot_work_is_refused(setting, says):
    with pytest.raises(pp.SettingError, match=says):
        TrainConfig(**setting)


@pytest.mark.parametrize("ranks", [5, 64])
def test_more_ranks_than_layers_are_refused(ranks):
    with pytest.raises(pp.SettingError, match=f"4 layers cannot be cut into {ranks} stages"):
        TrainConfig().check_ranks(ranks)
