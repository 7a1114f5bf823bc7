"""Handlers replace what an op does and when it waits; profiler traces name each action."""

import json

import pytest
import torch
from cases import BEGIN

import ppedu as pp

PRELUDE = (
    BEGIN
    + """
X, Y = torch.arange(32.0).view(8, 4) / 10, torch.ones(8, 4)

def make(schedule, **options):
    held = {stage: layer(stage) for stage in local_stages(schedule, rank)}
    return Pipeline(schedule, held, fn.mse_loss, **options), held
"""
)


def test_a_handler_of_a_pair_can_wait_for_each_part_separately(ranks):
    """Each part of a pair starts when its own message has arrived, in either order."""
    program = """
schedule = pp.schedule("1f1b-overlap", 2, 4)
late = 0.0
log = []

def either_first(action, step):
    # The backward first: it does not wait for the forward's activation, which may come later.
    forward, backward = sorted(action.parts, key=lambda part: part.op != "F")
    for part in (backward, forward):
        start = time.monotonic()
        step.wait(part)
        log.append((str(part), time.monotonic() - start))
        step.default(part)

def slowly(action, step):
    time.sleep(late)
    step.default(action)

pipeline, held = make(schedule)
expected, same = make(schedule)
expected.step(X, Y)
pipeline.on("OVERLAP_F_B", either_first)
pipeline.on("OVERLAP_B_F", either_first)
pipeline.step(X, Y)
for stage in held:
    for ours, theirs in zip(held[stage].parameters(), same[stage].parameters()):
        assert torch.equal(ours.grad, theirs.grad)
log.clear()
pipeline.on("SEND_F", slowly)  # from now on each activation is late, and no gradient is
late = 0.1
pipeline.step(X, Y)
if rank == 1:
    parts = dict(log)
    pairs = [action for action in pipeline.timeline.schedule.orders[1] if action.parts]
    print(json.dumps([[str(action), parts] for action in pairs]))
"""
    output = ranks(PRELUDE + program, 2)
    pairs = json.loads(output[1])
    assert pairs
    for action, waited in pairs:
        forward, backward = sorted(pp.Action.parse(action).parts, key=lambda part: part.op != pp.Op.F)
        assert waited[str(backward)] < waited[str(forward)] > 0.05, action  # its gradient did not wait for it


def test_the_time_of_a_handlers_action_does_not_include_its_wait(ranks):
    program = """
pipeline, held = make(pp.schedule("gpipe", 2, 4))
pipeline.step(X, Y)
pipeline.on("F", lambda action, step: step.default(action))
pipeline.on("SEND_F", lambda action, step: (time.sleep(0.1), step.default(action)))
pipeline.step(X, Y)
assert max(pipeline.timeline.busy) < 0.1 < pipeline.timeline.makespan
"""
    ranks(PRELUDE + program, 2)


def test_torchs_profiler_lists_every_action(ranks):
    program = """
from torch.profiler import ProfilerActivity, profile
pipeline, held = make(pp.schedule("zb-h1", 2, 4))
pipeline.step(X, Y)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    pipeline.step(X, Y)
print(json.dumps([event.name for event in profiler.events() if event.name.startswith("PP:")]))
"""
    output = ranks(PRELUDE + program, 2)
    lowered = pp.lower(pp.schedule("zb-h1", 2, 4))
    for rank, text in enumerate(output):
        assert sorted(json.loads(text.splitlines()[-1])) == sorted(f"PP:{action}" for action in lowered.orders[rank])


def test_receives_are_posted_two_actions_ahead(ranks):
    """With gloo, which sends only what is awaited; not where a step must run in the order that it was given."""
    program = """
def posted(schedule, **options):
    def note(action, step):
        log.append(" ".join([str(action), *map(str, step.messages.pending)]))
        step.default(action)

    pipeline, held = make(schedule, **options)
    pipeline.step(X, Y)  # the first messages announce their layouts
    pipeline.on("F", note)
    log = []
    pipeline.step(X, Y)
    return log

one = pp.schedule("gpipe", 2, 4)
print(json.dumps([posted(one), posted(one, debug=True), posted(pp.lower(one))]))
"""
    output = ranks(PRELUDE + program, 2)
    ahead, debug, lowered = json.loads(output[1])
    assert ahead == [
        "1F0 1RECV_F0 1RECV_F1 1RECV_F2",
        "1F1 1RECV_F1 1RECV_F2 1RECV_F3",
        "1F2 1RECV_F2 1RECV_F3",
        "1F3 1RECV_F3",
    ]
    assert debug == lowered == [f"1F{m} 1RECV_F{m}" for m in range(4)]


REFUSED = {
    "group": (3, "world", [1, 2]),
    "replicas": (2, [0, 1], "world"),
    "batching": (None, {}, "sum", {"reduction": "sum"}),
    "tied": ("abc", [1], 3, [((0, "weight"),)], [((0, "weight"), (1, 2))], {0: "weight"}),
    "autocast": ("bfloat16", True),
    "timeout": (0, -1, "60", None, float("inf"), float("nan")),
    "loss_fn": ("mse", 3),
    "schedule": (None, "1f1b", [], 3),
    "stages": (None, [], {}, {1: None}, {0: "layer"}, {0: None}),
}
REFUSED_IN_BATCHING = {
    "input_dims": (1, "first", [0]),
    "target_dim": ("abc", 1.5),
    "output_dim": ("abc", 0.0),
    "count": (3, "len"),
    "reduction": ("none", None, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_the_wrong_type_are_refused(name):
    for value in REFUSED[name]:
        given = {"schedule": pp.schedule("1f1b", 1, 2), "stages": {0: torch.nn.Linear(2, 2)}} | {name: value}
        with pytest.raises(pp.SettingError) as caught:
            pp.run.Pipeline(**given)
        assert str(caught.value).count("\n") == 0


def test_settings_of_the_wrong_type_are_refused_in_batching():
    for name, values in REFUSED_IN_BATCHING.items():
        for value in values:
            with pytest.raises(pp.SettingError, match=f"{name} must be "):
                pp.run.Batching(**{name: value})
