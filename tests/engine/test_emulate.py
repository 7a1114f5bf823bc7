"""Emulated stages on real ranks: the order of the schedule, at least the simulated times, labeled as emulated."""

import json
import sys

import pytest
import torch
from cases import BEGIN

import ppedu as pp
from ppedu.engine import clock
from ppedu.engine.emulate import Emulation, TimedMessages, emulate
from ppedu.engine.ranks.messages import Messages
from ppedu.run import PipelineGroup

RUN = """
for name, microbatches, costs in json.loads(sys.argv[1]):
    schedule = pp.schedule(name, dist.get_world_size(), microbatches)
    emulation = pp.run.Emulation(schedule, pp.Costs(**costs), size=1000)
    first, second = emulation.step(), emulation.step()
    print(json.dumps({
        "label": [first.source, second.source, repr(second).split()[1]],
        "order": first.schedule.orders == second.schedule.orders == schedule.orders,
        "makespans": [first.makespan, second.makespan],
        "ends": {str(one): span.end for row in second.rows for span in row for one in span.action.singles},
        "starts": {str(one): span.start for row in second.rows for span in row for one in span.action.singles},
        "messages": sorted({str(layout) for row in emulation.messages.activation_layouts.values() for layout in row}),
        "losses": emulation.pipeline.losses.tolist(),
    }))
dist.barrier()
"""
COSTS = {"forward": 0.004, "input": 0.005, "weight": 0.003}
CASES = [
    ("1f1b", 4, COSTS),
    ("1f1b", 4, {**COSTS, "latency": 0.005}),
    ("zb-v", 6, COSTS),
    ("pipedream", 4, {**COSTS, "update": 0.002}),
    ("dualpipe", 8, {**COSTS, "overlap": 0.009}),
    ("roundpipe", 5, COSTS),
]


IN_A_ROW = """
schedule = pp.schedule("zb-h2", 4, 8)
costs = pp.Costs(forward=[0.004] * 4, input=[0.004] * 4, weight=[0.004] * 3 + [0.05])  # rank 3 ends long after rank 0
for barrier in (True, False):
    whole = pp.run.emulate(schedule, costs, steps=2, barrier=barrier)
    alike = [[span.action for span in row] for row in whole.rows] == [list(order) for order in whole.schedule.orders]
    firsts = [[step.rows[rank][0].start for rank in range(4)] for step in whole.steps]
    lasts = [[step.rows[rank][-1].end for rank in range(4)] for step in whole.steps]
    print(json.dumps([whole.source, alike, len(whole.steps), firsts, lasts]))
dist.barrier()
"""


def test_steps_in_a_row_wait_for_each_other_only_with_a_barrier(ranks):
    for text in ranks(BEGIN + IN_A_ROW, 4):
        (*_, firsts, lasts), (*_, early, late) = found = [*map(json.loads, text.splitlines())]
        assert [each[:3] for each in found] == [["emulated", True, 2]] * 2
        assert min(firsts[1]) >= max(lasts[0]) and early[1][0] < late[0][3]


@pytest.fixture(scope="module")
def reports(ranks):
    """Each rank's report, by case."""
    output = ranks(BEGIN + RUN, 4, json.dumps(CASES))
    return list(zip(*([json.loads(line) for line in text.splitlines()] for text in output), strict=True))


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: f"{CASES[case][0]}-{case}")
def test_all_ranks_get_the_same_timeline_in_the_order_of_the_schedule_labelled_as_emulated(reports, case):
    first, *others = reports[case]
    assert all(other == first for other in others)
    assert first["label"] == ["emulated", "emulated", "emulated"]
    assert first["order"] and set(first["losses"]) == {0}
    known = CASES[case][0] != "roundpipe"  # there, each message states its layout
    assert first["messages"] == ["float64 (125,)"] * known


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: f"{CASES[case][0]}-{case}")
def test_a_step_takes_at_least_its_simulation_and_respects_all_dependencies(reports, case):
    name, microbatches, costs = CASES[case]
    simulated = pp.simulate(pp.schedule(name, 4, microbatches), pp.Costs(**costs))
    report = reports[case][0]
    assert min(report["makespans"]) >= 0.99 * simulated.makespan
    for stage in range(1, simulated.schedule.stages):
        for m in range(microbatches):
            assert report["starts"][f"{stage}F{m}"] >= report["ends"][f"{stage - 1}F{m}"] - 1e-9
            before, after = (
                next(name for name in (f"{place}B{m}", f"{place}I{m}") if name in report["ends"])
                for place in (stage, stage - 1)
            )
            assert report["starts"][after] >= report["ends"][before] - 1e-9


def test_machines_with_different_clocks_agree_on_when_a_message_was_made(ranks):
    program = """
real = time.monotonic
if rank:
    time.monotonic = lambda: real() + 1000
    clock.machine = lambda: rank
emulation = pp.run.Emulation(pp.schedule("1f1b", 2, 2), pp.Costs(forward=0.01, latency=0.02))
assert 0.9 * emulation.simulated.makespan < emulation.step().makespan < 10
dist.barrier()
"""
    ranks(BEGIN + program, 2)


class SlowSleeper:
    """A fake of `time`, whose sleeps end `late` seconds too late."""

    def __init__(self, late):
        self.now, self.late = 1000.0, late

    def monotonic(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.now += seconds + self.late


@pytest.fixture
def slow(monkeypatch):
    def patch(late):
        time = SlowSleeper(late)
        for module in (sys.modules[emulate.__module__], clock):
            monkeypatch.setattr(module, "time", time)
        return time

    return patch


def test_a_process_that_is_woken_late_catches_up(slow):
    slow(late=0.003)
    timeline = emulate(pp.schedule("gpipe", 1, 4), pp.Costs(forward=0.01, backward=0.02))
    assert [str(span.action) for span in timeline.spans(0)] == [f"0{op}{m}" for op in "FB" for m in range(4)]
    assert 0.12 <= timeline.makespan <= 0.12 + 0.0031


@pytest.mark.parametrize(
    ("waits", "latency", "due"),
    [
        (0, 0, 990),  # it had arrived: the device had it as soon as it was made
        (3, 0, 995),  # sent 2 s before the rank began to wait for 3 s, so it took 5 s
        (3, 1, 995),
        (3, 20, 1010),
    ],
)
def test_a_message_that_a_rank_waits_for_counts_with_its_real_travel_time(slow, monkeypatch, waits, latency, due):
    time = slow(late=0)

    def wait(*_):
        time.sleep(waits)
        return (torch.tensor([990.0, 998.0], dtype=torch.float64),)

    monkeypatch.setattr(Messages, "wait", wait)
    messages = TimedMessages(pp.Placement.make("loop", 2), PipelineGroup(0, 1), 1.0, debug=False)
    messages.costs = pp.Costs(latency={(1, 0): latency})
    messages.wait(pp.Action(0, pp.Op.RECV_B, 0), pp.B(0, 0), torch.device("cpu"))
    assert messages.due == pytest.approx(due, abs=1e-3)
    assert time.now >= messages.due


def test_wrong_arguments_are_refused():
    schedule = pp.schedule("1f1b", 2, 2)
    with pytest.raises(pp.PipelineError, match="needs 2 ranks; the group has 1"):
        emulate(schedule, pp.Costs())
    with pytest.raises(pp.PipelineError, match="size must be at least 1"):
        Emulation(pp.schedule("1f1b", 1, 2), pp.Costs(), size=0)
    with pytest.raises(pp.PipelineError, match="costs must be Costs in seconds, such as"):
        emulate(schedule, {"forward": 1})


def test_emulated_stages_send_from_the_cpu_where_the_ranks_are_connected_by_nccl(ranks):
    """NCCL, which only the default group claims to be here, cannot send from the CPU."""
    program = """
found = dist.get_backend_config
dist.get_backend_config = lambda group=None: "cuda:nccl" if group in (None, dist.group.WORLD) else found(group)
torch.cuda.current_device = lambda: 0
emulation = pp.run.Emulation(pp.schedule("1f1b", 2, 2), pp.Costs(forward=0.001, backward=0.001))
assert len(emulation.run(1).rows) == 2
print(dist.get_backend(emulation.pipeline.group.process_group))
"""
    assert ranks(BEGIN + program, 2) == ["gloo\n"] * 2
