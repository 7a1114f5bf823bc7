"""Training: the number of ranks and the schedule change when something is computed, never the result."""

import json
import sys
from pathlib import Path

import pytest
from releases import needs

import ppedu as pp
from ppedu.course.training.train import TrainConfig, train_gpt
from ppedu.engine.ranks.versions import GRAD_DTYPE, lack
from ppedu.run import place

SMALL = {
    "steps": 2,
    "batch": 16,
    "context": 8,
    "layers": 8,
    "heads": 2,
    "width": 16,
    "lr": 1e-2,
    "seed": 3,
    "text": str(Path(__file__).parents[2] / "LICENSE"),  # short, and stays the same: norms depend on it
}

PIPELINE = """
import hashlib, json, sys
import torch.distributed as dist
from ppedu.course.training.train import TrainConfig, train_gpt

dist.init_process_group("gloo")
for settings in json.loads(sys.argv[1]):
    result = train_gpt(TrainConfig(**settings))
    timeline = result.timeline
    one = ("embedding.token.weight", "head.linear.weight")
    modules = [stage.module for stage in result.pipeline.stages.values()]
    found = [weight for module in modules for name, weight in module.named_parameters() if name in one]
    print(json.dumps(dict(
        losses=result.losses,
        tied=[hashlib.sha256(weight.detach().float().numpy().tobytes()).hexdigest() for weight in found],
        name=timeline.schedule.name,
        source=timeline.source,
        unit=timeline.costs.unit,
        orders=[[str(span.action) for span in row] for row in timeline.rows],
        times=[[(span.start, span.end) for span in row] for row in timeline.rows],
    )))
dist.barrier()
"""

PLAIN = """
import json, sys
import torch
from ppedu.run import GPT, next_token_loss
from ppedu.course.training.data import Text
from ppedu.course.training.train import TrainConfig

def train(config, pieces, lifo):
    text, losses = Text(config.text), []
    model = GPT(config.gpt(len(text.characters)), seed=config.seed)
    assert (model.head.linear.weight is model.embedding.token.weight) == config.tied
    weights = list(model.to(getattr(torch, config.weights)).parameters())
    for weight in weights:
        weight.grad_dtype = torch.float32
    copies = [weight.detach().float() for weight in weights] if config.weights == "bfloat16" else weights
    optimizer = torch.optim.AdamW(copies, lr=config.lr)
    scaler = torch.amp.GradScaler("cpu", enabled=config.dtype == "float16")
    autocast = torch.autocast("cpu", getattr(torch, config.dtype), enabled=config.dtype != "float32")
    clipped = set()
    for step in range(config.steps):
        inputs, targets = text.batch(config.batch, config.context, seed=config.seed * 1_000_003 + step)
        total, parts = torch.zeros(()), []
        for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            with autocast:
                parts.append(next_token_loss(model(x), y) / pieces)
            total += parts[-1].detach()
        for part in reversed(parts) if lifo else parts:
            scaler.scale(part).backward()
        for copy, weight in zip(copies, weights):
            copy.grad = weight.grad
        scaler.unscale_(optimizer)
        if config.clip:
            norm = torch.nn.utils.clip_grad_norm_(copies, config.clip)
            clipped.add(bool(norm > config.clip))
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        for copy, weight in zip(copies, weights):
            weight.data.copy_(copy)
        losses.append(total.item())
    assert not config.clip or clipped == {True, False}
    return losses

for settings, *how in json.loads(sys.argv[1]):
    print(json.dumps(train(TrainConfig(**settings), *how)))
"""


def sized(ranks):
    """Return the smallest settings with which every schedule runs on `ranks` ranks."""
    return SMALL | {"layers": 2 * ranks, "microbatches": 2 * ranks}


def possible(ranks):
    def is_possible(name):
        try:
            schedule = pp.schedule(name, ranks, 2 * ranks)
            return not schedule.updated and not schedule.placement.barriers
        except pp.SettingError:
            return False

    return list(filter(is_possible, pp.schedules()))


EVERY = {f"{name}-{ranks}": (ranks, sized(ranks) | {"schedule": name}) for ranks in (2, 4) for name in possible(ranks)}
# Adam does not see how large gradients are, but clipping them in the first steps alone does.
LONGER = sized(2) | {"steps": 4, "clip": 1.2}
TIED = {name: (2, LONGER | {"schedule": name, "tied": True}) for name in ("1f1b", "zb-h1", "dualpipev", "dualpipe")}
ALIKE = {
    "clip": (2, LONGER),
    "replicas": (4, LONGER | {"replicas": 2}),
    "replicas of one rank": (2, LONGER | {"replicas": 2}),
    "uneven microbatches": (2, LONGER | {"microbatches": 5}),
    "recompute": (2, LONGER | {"schedule": "zb-v", "recompute": True}),
    "chunks": (2, LONGER | {"schedule": "interleaved", "options": {"chunks": 1}}),
    "the embedding alone": (2, LONGER | {"cut": [1, 5]}),
    "an empty first stage": (2, LONGER | {"cut": [0, 3, 2, 1], "schedule": "zb-v"}),
}
MIXED = {
    "bfloat16": (2, sized(2) | {"dtype": "bfloat16"}),
    "float16": (2, LONGER | {"dtype": "float16", "schedule": "zb-h1"}),
    "bfloat16 weights": (2, LONGER | {"weights": "bfloat16", "schedule": "zb-v"}),
}
RUNNABLE = [case for case in MIXED.values() if "weights" not in case[1] or not lack(GRAD_DTYPE)]
CASES = [*EVERY.values(), *TIED.values(), *ALIKE.values(), *RUNNABLE]
# `make test` trains with each schedule on 2 ranks, and with one of each placement on 4.
SLOW = [
    case
    for case in EVERY.values()
    if case[0] == 4 and case[1]["schedule"] not in ("1f1b", "zb-v", "interleaved", "dualpipe")
]
every_schedule = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW else [], id=name) for name, case in EVERY.items()],
)


def alone(case):
    """Return the settings that do not determine how the work is divided."""
    return {
        name: value
        for name, value in case[1].items()
        if name not in ("schedule", "options", "microbatches", "replicas", "cut")
    }


def job(settings, pieces=1, lifo=False):
    """Return a training without a pipeline: on the whole batch or in equal pieces, in order or reversed."""
    return json.dumps([settings, pieces, lifo])


SINGLE = {"dtype": "float32", "weights": "float32"}
JOBS = [job(alone(case)) for case in [*TIED.values(), *ALIKE.values()]]
JOBS += [job(alone(case) | changed, 4) for case in RUNNABLE for changed in ({}, SINGLE)]
JOBS += [job(alone(EVERY[f"1f1b-{size}"]), 2 * size, lifo) for size in (2, 4) for lifo in (False, True)]
JOBS = list(dict.fromkeys(JOBS))


@pytest.fixture(scope="module")
def trained(ranks):
    """Each rank's report on a case. Cases with the same number of ranks run in one program, slow ones in another."""
    found = {}

    def get(case):
        size, slow = key = case[0], case in SLOW
        if key not in found:
            cases = [each[1] for each in CASES if each[0] == size and (each in SLOW) == slow]
            output = ranks(PIPELINE, size, json.dumps(cases), timeout=240)
            reports = zip(*[map(json.loads, text.splitlines()) for text in output], strict=True)
            found[key] = list(zip(cases, reports, strict=True))
        return next(reports for settings, reports in found[key] if settings == case[1])

    return get


@pytest.fixture(scope="module")
def plain(ranks):
    """The losses of a `job`. Those of JOBS run in one program."""
    found = {}

    def get(*given, **named):
        asked = job(*given, **named)
        if asked not in found:
            jobs = JOBS if asked in JOBS else [asked]
            text = ranks(PLAIN, 1, f"[{', '.join(jobs)}]", timeout=240)[0]
            found.update(zip(jobs, map(json.loads, text.splitlines()), strict=True))
        return found[asked]

    return get


def losses(reports):
    return [report["losses"] for report in reports]


@every_schedule
def test_losses_on_every_rank_equal_training_without_a_pipeline(trained, plain, case):
    size, name = case[0], case[1]["schedule"]
    # looped-bfs adds up the gradients from the last microbatch to the first.
    expected = plain(alone(case), 2 * size, lifo=name == "looped-bfs")
    placement = pp.schedule(name, size, 2 * size).placement
    rounds = placement.copies > 1 or placement.slices > 1 or name == "stp"  # sums in another order
    assert losses(trained(case)) == [pytest.approx(expected, rel=1e-6) if rounds else expected] * size


@every_schedule
def test_every_rank_has_the_timeline_measured_in_seconds(trained, case):
    size, settings = case
    first, *others = trained(case)
    assert all(report["times"] == first["times"] for report in others)
    schedule = pp.schedule(settings["schedule"], size, 2 * size)
    assert (first["source"], first["unit"], first["name"]) == ("measured", "s", schedule.name)
    assert first["orders"] == [list(map(str, order)) for order in schedule.orders]
    assert min(start for row in first["times"] for start, _ in row) == 0
    for row in first["times"]:
        times = [time for span in row for time in span]
        assert times == sorted(times) and times[-1] < 60


def test_an_action_starts_after_the_sender_of_its_message_has_ended(trained):
    report = trained(EVERY["1f1b-4"])[0]
    time = {
        action: span
        for order, spans in zip(report["orders"], report["times"], strict=True)
        for action, span in zip(order, spans, strict=True)
    }
    for stage in range(3):
        for m in range(8):
            assert time[f"{stage}F{m}"][1] <= time[f"{stage + 1}F{m}"][0]
            assert time[f"{stage + 1}B{m}"][1] <= time[f"{stage}B{m}"][0]


@pytest.mark.slow
def test_200_steps_follow_training_without_a_pipeline(ranks, plain):
    settings = SMALL | {"steps": 200, "batch": 8, "layers": 8}
    expected = plain(settings, 8)
    assert expected[-1] < expected[0] - 1
    output = ranks(PIPELINE, 4, json.dumps([settings | {"schedule": "dualpipev"}]), timeout=240)
    assert losses(map(json.loads, output)) == [expected] * 4


@pytest.mark.parametrize("case", TIED.values(), ids=TIED)
def test_tied_weights_stay_equal_bit_for_bit_and_train_as_one(trained, plain, case):
    reports = trained(case)
    held = [weight for report in reports for weight in report["tied"]]
    assert len(held) == (4 if case[1]["schedule"] == "dualpipe" else 2) and len(set(held)) == 1
    assert losses(reports) == [pytest.approx(plain(alone(case)), rel=1e-5)] * 2


@pytest.mark.parametrize("case", ALIKE.values(), ids=ALIKE)
def test_other_settings_follow_training_without_a_pipeline_on_the_whole_batch(trained, plain, case):
    assert losses(trained(case)) == [pytest.approx(plain(alone(case)), rel=1e-5)] * case[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if case in RUNNABLE else needs(GRAD_DTYPE)) for name, case in MIXED.items()]
)
def test_mixed_precision_equals_that_of_one_process(trained, plain, name):
    case = MIXED[name]
    expected = plain(alone(case), 4)
    assert expected != plain(alone(case) | SINGLE, 4)
    # Where gradients are clipped, their norm is a sum in another order.
    assert losses(trained(case)) == [pytest.approx(expected, rel=1e-5) if "clip" in case[1] else expected] * 2


REFUSED = {
    "0 steps": ({"steps": 0}, "steps must be at least 1; got 0"),
    "part of a step": ({"steps": 1.5}, "steps must be a whole number"),
    "0 microbatches": ({"microbatches": 0}, "microbatches must be at least 1"),
    "no batch": ({"batch": -8}, "batch must be at least 1"),
    "few sequences": (
        {"batch": 14, "replicas": 2},
        "7 sequences per pipeline cannot be cut into 8 microbatches; take a batch of at least 16, or fewer",
    ),
    "0 replicas": ({"replicas": 0}, "replicas must be at least 1"),
    "unequal replicas": (
        {"batch": 33, "replicas": 2},
        "33 cannot be divided equally among 2 replicas; take a multiple of 2",
    ),
    "never saved": ({"every": 0}, "every must be at least 1"),
    "negative seed": ({"seed": -1}, "seed must be at least 0"),
    "huge seed": ({"seed": 10**30}, "seed must be"),
    "lr 0": ({"lr": 0}, "lr must be a number above 0"),
    "lr nan": ({"lr": float("nan")}, "lr must be a number above 0"),
    "lr text": ({"lr": "fast"}, "lr must be .*'fast'"),
    "no lr": ({"lr": None}, "lr must be a number above 0; got None"),
    "clip 0": ({"clip": 0.0}, "clip must be a number above 0; got 0.0"),
    "dtype": ({"dtype": "float8"}, "dtype must be float32 or bfloat16 or float16; got 'float8'"),
    "width": ({"width": 65}, "width must be a multiple of the 4 heads, such as 32; got 65"),
    "weights": ({"weights": "float16"}, "weights must be float32 or bfloat16; got 'float16'"),
    "saved bfloat16 weights": ({"weights": "bfloat16", "save": "run"}, "their fp32 copies are not in a checkpoint"),
    "a cut for more layers": ({"cut": [3, 4]}, "the stages hold 7 pieces, .* are 6; take 5 layers, or another cut"),
    "a cut with a negative stage": ({"cut": [7, -1]}, "the pieces of a stage must be at least 0; got -1"),
    "a cut between tied weights": ({"cut": [3, 3], "tied": True}, "tied weights need the embedding in the first"),
    "a cut as a number": ({"cut": 3}, "cut must be the number of pieces in each stage, .*; got 3"),
    "dtype list": ({"dtype": ["float32"]}, r"dtype must be float32 or bfloat16 or float16; got \['float32'\]"),
    "options": ({"options": "chunks=2"}, "options must be a dict .* got 'chunks=2'"),
    "text": ({"text": []}, r"a file name must be text or a Path; got \[\]"),
    "save": ({"save": 0}, "a file name must be text or a Path; got 0"),
    "0 layers": ({"layers": 0}, "layers must be at least 1"),
    "0 context": ({"context": 0}, "context must be at least 1"),
}


@pytest.mark.parametrize(("setting", "says"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_setting_is_refused(setting, says):
    with pytest.raises(pp.SettingError, match=says):
        TrainConfig(**setting)


IMPOSSIBLE = {
    "unknown schedule": (4, {"schedule": "2f2b"}, "unknown schedule '2f2b'; available: naive, gpipe, 1f1b"),
    "not a schedule": (4, {"schedule": None}, "give the name of a schedule: naive, gpipe, .*got None"),
    "unknown option": (2, {"options": {"chunks": 2}}, "'1f1b' takes"),
    "more ranks than layers": (
        5,
        {},
        "4 layers cannot be cut into the 5 stages that 1f1b has on 5 ranks; take at least 5",
    ),
    "more stages than layers": (4, {"schedule": "zb-v"}, "the 8 stages that zb-v has on 4 ranks"),
    "few microbatches": (
        4,
        {"schedule": "dualpipe", "microbatches": 6, "layers": 8},
        "dualpipe on 4 ranks must be at least 8; got 6",
    ),
    "unequal pipelines": (4, {"replicas": 3, "batch": 33}, "4 ranks cannot be divided equally among 3 replicas"),
}


@pytest.mark.parametrize(("size", "setting", "says"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_settings_that_do_not_fit_the_ranks_are_refused(size, setting, says):
    with pytest.raises(pp.SettingError, match=says):
        TrainConfig(**setting).schedule_on(size)


@pytest.mark.parametrize(
    ("gpus", "ranks", "local", "expected", "says"),
    [
        (0, 4, 3, ("cpu", "gloo"), ""),
        (4, 4, 3, ("cuda:3", "nccl"), ""),
        (2, 4, 3, ("cuda:1", "gloo"), ""),
        (2, 4, 0, ("cuda:0", "gloo"), "4 ranks share 2 GPUs; their messages go through the host's memory\n"),
        (1, 2, 0, ("cuda:0", "gloo"), "2 ranks share 1 GPU; their messages go through the host's memory\n"),
    ],
)
def test_more_ranks_than_gpus_share_them_with_one_warning(monkeypatch, capsys, gpus, ranks, local, expected, says):
    chosen = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    device, backend = place()
    assert (str(device), backend) == expected and capsys.readouterr().err == says
    assert chosen == ([device] if gpus else [])


def test_without_tqdm_only_the_progress_bar_is_missing(monkeypatch, capsys):
    config = TrainConfig(steps=2, batch=2, microbatches=2, context=8, width=8)
    losses = train_gpt(config, progress=True).losses
    assert "training: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert train_gpt(config, progress=True).losses == losses
    assert not capsys.readouterr().err
