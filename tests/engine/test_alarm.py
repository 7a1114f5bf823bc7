"""An error known to one rank reaches the other ranks at once; if nothing was started, all of them can go on."""

import json
import re

import pytest
from cases import AGAIN, PRELUDE, STOPPED, run

TIMEOUT = 60  # of the pipelines; no rank may wait for it
SOON = 30  # seconds, on a busy machine; half of TIMEOUT
OTHERS = "SettingError: rank {bad} cannot {call}; its own error says why"
FIRST = "CommunicationError: .*rank {bad} failed first, and its own error says why"

# Calls that one rank refuses: the program, the rank, and its error. The others say which rank it was, and can go on.
REFUSED = {
    "no targets": ("step(X)", 2, "SettingError: rank 2 holds the last stage, so step needs the targets"),
    "no inputs": ("step(None, Y)", 0, "SettingError: rank 0 holds the first stage, so step"),
    **{
        name: (f"step(X, Y, {name}=3 if rank == 1 else None)", 1, f"SettingError: {name} must be a dict")
        for name in ("stage_kwargs", "loss_kwargs")
    },
    "an evaluation": ("eval(X)", 2, "SettingError: rank 2 holds the last stage, so eval needs"),
    "a forward": ("forward(X[:3] if rank == 0 else None)", 0, "SettingError: input 0 of shape (3, 4)"),
}
# Errors that end the use of the pipeline, in the same form. The others say which rank was the first.
FATAL = {
    "one rank, and a call like the last one": (
        "step(X, Y); pipeline.step(X, Y if rank < 2 else None)",
        2,
        "SettingError: rank 2 holds the last stage, so step needs the targets",
    ),
    "an interrupt within a step": (
        "on('F', lambda action, step: interrupt() if rank == 1 else step.default(action)); pipeline.step(X, Y)",
        1,
        "KeyboardInterrupt",
    ),
    "after the last action": (
        "messages.end = (lambda: 1 // 0) if rank == 1 else pipeline.messages.end; pipeline.step(X, Y)",
        1,
        "ZeroDivisionError",
    ),
}
# By case: the rank (None: all) and its error, those of the others, and the loss or error of a step after it.
CASES = {name: (bad, own, OTHERS, AGAIN) for name, (_, bad, own) in REFUSED.items()}
CASES |= {name: (bad, own, FIRST, STOPPED) for name, (_, bad, own) in FATAL.items()}
CASES["no valid token"] = 2, "SettingError: the microbatches' targets count [0, 0, 0, 0]", OTHERS, ""
CASES["all ranks, and a call like the last one"] = (
    None, "SettingError: input 0 of shape (3, 4) cannot be cut into 4 microbatches", "", AGAIN,
)  # fmt: skip
BEFORE = f"pipeline = make(timeout={TIMEOUT})\npipeline."
PROGRAMS = {name: BEFORE + code for name, (code, _, _) in (REFUSED | FATAL).items()}
PROGRAMS["no valid token"] = "make(timeout=60, batching=Batching(count=lambda y: 0)).step(X, Y if rank == 2 else None)"
PROGRAMS["all ranks, and a call like the last one"] = BEFORE + "step(X, Y); pipeline.step(X[:3], Y[:3])"

# A rank's error in a random action, of a random schedule.
PROGRAMS["any action"] = """
for seed in range(8):
    draw = random.Random(seed)
    schedule = pp.schedule(draw.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"]), 3, 6)
    bad = draw.randrange(3)
    action = draw.choice(schedule.orders[bad])
    pipeline = make(schedule, timeout=60)
    def run(each, step):
        if each == action:
            1 // 0
        step.default(each)
    pipeline.on(action.op, run)
    start = time.monotonic()
    found = outcome(lambda: pipeline.step(numbers(12, 4), numbers(4, 12).t()))
    assert time.monotonic() - start < 30
    own = f"PipelineError: rank {bad}: {action} failed: ZeroDivision"
    assert (own if rank == bad else f"rank {bad} failed first") in found, (schedule.name, action, found)
"""

# A training run in which, again and again, a call cannot be made on one rank, or on all.
PROGRAMS["any call"] = """
pipeline, judge, batching = make(timeout=60), [layer(stage) for stage in range(3)], []
draw = random.Random(3)
for number in range(14):
    call, bad = draw.choice(["step", "eval"]), draw.choice([None, None, 0, 1, 2, 3])
    wrong = draw.choice([{"stage_kwargs": 3}, {"loss_kwargs": 3}, {"stage_kwargs": {7: {}}}, {"mask": X[:2]}])
    batch = numbers(8, 4 + number)[:, :4], numbers(8, 5 + number)[:, :4]
    start = time.monotonic()
    given = batch[0] if rank == 0 else None, batch[1] if rank == 2 else None
    found = outcome(lambda: getattr(pipeline, call)(*given, **(wrong if bad in (rank, 3) else {})))
    assert time.monotonic() - start < 30
    if bad is None:
        losses = reference(judge, batch[0].split(2), batch[1].split(2)) if call == "step" else None
        with torch.no_grad():
            whole = fn.mse_loss(nn.Sequential(*judge)(batch[0]), batch[1])
        assert torch.allclose(found, whole) and (losses is None or torch.equal(pipeline.losses, losses))
    elif bad in (rank, 3):
        assert found.startswith("SettingError: ") and "its own error" not in found, found
    else:
        assert f"rank {bad} cannot {call}; its own" in found.replace("start ", ""), found
agree(pipeline, judge, exact=False)
"""


@pytest.fixture(scope="module")
def found(ranks):
    return run(ranks, 3, 5, PROGRAMS)


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_one_rank_reaches_the_others_at_once(found, case):
    bad, own, others, after = CASES[case]
    for rank, (first, then, took) in enumerate(found[case]):
        if bad in (rank, None):
            assert first.startswith(own), first
        else:
            assert re.search(others.format(bad=bad, call="start [a-z]*"), first), first
        assert then.startswith(after), then
        assert took < SOON


def test_an_error_in_any_action_reaches_the_others_at_once(found):
    assert [first for first, _, _ in found["any action"]] == ["fine"] * 3


def test_calls_that_one_rank_refuses_leave_no_trace(found):
    assert [first for first, _, _ in found["any call"]] == ["fine"] * 3


REPLICAS = """
beside = dist.new_group(range(dist.get_rank() % 2, 4, 2), use_local_synchronization=True)
one = dist.get_rank() == 3
pipeline = make(timeout=60, replicas=beside)
pipeline.step(X, Y)
assert "input 0 of shape (3, 4)" in outcome(lambda: pipeline.step(X[:3], Y[:3]))
assert pipeline.step(X, Y) > 0
WRONG
"""
AFTER = {
    "refused": ("pipeline.step(X, None if one else Y)", "rank 1 holds the last stage, so step needs"),
    "within a step": (
        "pipeline.on('B', lambda action, step: 1 // 0 if one else step.default(action)); pipeline.step(X, Y)",
        "rank 1: 1B0 failed",
    ),
}


def test_an_error_of_one_rank_reaches_its_replicas_at_once(ranks):
    shares = [[(name, REPLICAS.replace("WRONG", wrong)) for name, (wrong, _) in AFTER.items()]] * 2
    output = ranks(PRELUDE, 4, "2", json.dumps(shares))
    for rank, text in enumerate(output):
        for case, first, _, took in map(json.loads, text.splitlines()):
            assert (AFTER[case][1] if rank == 3 else "global rank 3 failed first") in first, (rank, first)
            assert took < SOON
