"""The bug museum, on real ranks: each bug shows its symptom, its detector finds it, and its cure removes it."""

import inspect
import json
from importlib.metadata import version

import pytest

import ppedu as pp
from ppedu.course.by_hand.bugs import MUSEUM

START = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
import ppedu as pp
from ppedu.run import Pipeline, PipelineGroup, Stage, measured
from ppedu.course.by_hand.bugs import MAX_NORM, MUSEUM

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

def layer(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 4)

def samples(count):
    return torch.randn(2, count, 4, generator=torch.Generator().manual_seed(5))

def factor(weight, wanted):
    "The factor that brings `wanted` closest to the gradient, and the relative distance that remains."
    if weight.grad is None:
        return None
    times = (weight.grad * wanted).sum() / wanted.square().sum()
    return times.item(), ((weight.grad - times * wanted).norm() / weight.grad.norm()).item()
"""

STEPS = """
def one_process(name, inputs, targets):
    "The gradients of both stages' weights, and the loss."
    first = layer(0)
    whole = nn.Sequential(first, first) if name == "tied copies drift apart" else nn.Sequential(layer(0), layer(1))
    loss = mse_loss(whole(inputs), targets)
    loss.backward()
    if name == "norm per stage":
        nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    return [part.weight.grad for part in whole], loss.item()

for name in json.loads(sys.argv[1]):
    for program in (MUSEUM[name].wrong, MUSEUM[name].right):
        inputs, targets = samples(7 if name == "mean of means" else 8)
        wanted, loss = one_process(name, inputs, targets)
        seed = 0 if name == "tied copies drift apart" else rank
        stage = Stage(layer(seed), rank, mse_loss if rank == ranks - 1 else None)
        dist.barrier()
        time.sleep(0.5 * (name == "written after isend" and rank == 1))  # the receiver is late
        program(stage, inputs.split(2), targets.split(2), (2, 4))
        weight = stage.module.weight
        said = {
            "factor": factor(weight, wanted[rank]),
            "loss": stage.loss.item() / loss,
            "losses": [each.item() for each in stage.losses.values()],
            "held": list(stage.held),
        }
        if name in ("backward missing", "gradients newest first"):
            ran = measured(name, stage, PipelineGroup.world())
            said["problems"] = [str(problem) for problem in pp.check(ran.schedule)] if ran else []
        if name == "tied copies drift apart":
            torch.optim.SGD([weight], lr=0.1).step()
            copies = [torch.empty_like(weight) for _ in range(ranks)]
            dist.all_gather(copies, weight.detach())
            said["apart"] = ((copies[0] - copies[1]).norm() / copies[0].norm()).item()
            try:
                MUSEUM[name].right(stage, inputs.split(2), targets.split(2), (2, 4))
            except pp.SettingError as error:
                said["refused"] = str(error)
        print(json.dumps(said))
dist.barrier()
"""

HANG = "both send first"
ORDERS = "warmup reversed", "warmup short by one"
SEED = "same seed everywhere"
TORCHS = "receives deferred", "first stage frozen"
REPLICAS = "wrapped in ddp"
QUIET = [name for name in MUSEUM if name not in (HANG, *ORDERS, SEED, *TORCHS, REPLICAS)]


@pytest.fixture(scope="module")
def found(ranks):
    """The ranks' reports on the wrong step (0) and on the right one (1): `found[name][0 or 1][rank]`."""
    output = ranks(START + STEPS, 2, json.dumps(QUIET))
    said = list(zip(*([json.loads(line) for line in text.splitlines()] for text in output), strict=True))
    return {name: said[2 * place : 2 * place + 2] for place, name in enumerate(QUIET)}


def is_once(factor):
    times, off = factor
    return abs(times - 1) < 1e-5 and off < 1e-5


@pytest.mark.parametrize("name", QUIET)
def test_a_silent_bug_shows_against_one_process_and_its_cure_removes_it(found, name):
    wrong, right = found[name]
    assert not all(is_once(each["factor"]) for each in wrong)
    assert all(is_once(each["factor"]) and each["held"] == [] for each in right)
    assert right[1]["loss"] == pytest.approx(1)


def test_a_wrong_order_of_gradients_spoils_all_ranks_but_the_last(found):
    first, last = found["gradients newest first"][0]
    assert first["factor"][1] > 0.3 and is_once(last["factor"]) and last["loss"] == pytest.approx(1)


def test_check_compares_the_order_of_receives_with_that_of_sends():
    lowered = pp.lower(pp.schedule("gpipe", 2, 4))
    newest = iter([action for action in lowered.orders[1] if action.op == "SEND_B"][::-1])
    last = tuple(next(newest) if action.op == "SEND_B" else action for action in lowered.orders[1])
    early = pp.Schedule("mixed", lowered.placement, 4, (lowered.orders[0], last))
    assert "message" in {problem.kind for problem in pp.check(early)} and pp.check(lowered) == []


def test_a_reused_receive_buffer_spoils_only_the_receivers_gradients(found):
    first, last = found["one receive buffer"][0]
    assert is_once(first["factor"]) and last["factor"][1] > 0.3 and last["loss"] == pytest.approx(1)


def test_a_late_receiver_gets_values_written_after_the_send(found):
    (_, wrong), (_, right) = found["written after isend"]
    assert abs(wrong["loss"] - 1) > 0.1 and right["loss"] == pytest.approx(1)


def test_gradients_of_undivided_losses_are_m_times_too_large(found):
    for each in found["loss not divided"][0]:
        assert each["factor"] == [pytest.approx(4), pytest.approx(0, abs=1e-5)]


def test_a_mean_of_means_is_off_by_no_constant_factor(found):
    wrong = found["mean of means"][0]
    assert wrong[1]["loss"] != pytest.approx(1, abs=0.01)
    assert all(each["factor"][1] > 0.01 for each in wrong)


def test_a_repeated_microbatch_has_the_same_loss_every_time(found):
    (_, wrong), (_, right) = found["first microbatch repeated"]
    assert len(wrong["losses"]) == 4 and len(set(wrong["losses"])) == 1 and len(set(right["losses"])) == 4


def test_a_missing_backward_is_found_in_the_measured_order_and_its_activations_stay(found):
    wrong, right = found["backward missing"]
    assert [each["held"] for each in wrong] == [[1], [1]] and wrong[1]["loss"] == pytest.approx(1)
    assert len(wrong[0]["problems"]) == 2 and all("B1 is never run" in each for each in wrong[0]["problems"])
    assert right[0]["problems"] == []


def test_clipping_by_its_own_norm_scales_each_stage_by_another_factor(found):
    (first, off), (last, also_off) = (each["factor"] for each in found["norm per stage"][0])
    assert max(off, also_off) < 1e-5 and min(first, last) > 1.01 and abs(first - last) > 0.01


def test_tied_copies_drift_apart_and_are_then_refused(found):
    wrong, right = found["tied copies drift apart"]
    for each in wrong:
        assert each["apart"] > 0.01 and "the tied weights on rank " in each["refused"]
    assert all(each["apart"] == 0 and "refused" not in each for each in right)


def test_ddp_averages_only_one_microbatch(ranks):
    output = ranks(
        START
        + """
for program in (MUSEUM["wrapped in ddp"].wrong, MUSEUM["wrapped in ddp"].right):
    inputs, targets = samples(8)
    judge = layer(0)
    mse_loss(judge(inputs), targets).backward()
    stage = Stage(layer(0), 0, mse_loss)
    program(stage, inputs[rank * 4 :][:4].split(1), targets[rank * 4 :][:4].split(1), (1, 4))
    error = (stage.module.weight.grad - judge.weight.grad).norm() / judge.weight.grad.norm()
    print(json.dumps([error.item(), stage.module.weight.grad.sum().item()]))
""",
        2,
    )
    wrong, right = zip(*([json.loads(line) for line in text.splitlines()] for text in output), strict=True)
    assert all(error > 0.1 for error, _ in wrong) and all(error < 1e-6 for error, _ in right)
    assert wrong[0][1] != wrong[1][1] and right[0][1] == right[1][1]  # each replica has gradients of its own


def test_debug_reports_a_tensor_overwritten_after_it_was_sent(ranks):
    ranks(
        START
        + """
class Reused(nn.Linear):
    "Returns the same memory every time."
    memory = torch.zeros(2, 4)

    def forward(self, x):
        y = super().forward(x)
        y.data = self.memory.copy_(y.detach())
        return y

module = Reused(4, 4) if rank == 0 else layer(1)
pipeline = Pipeline(pp.schedule("gpipe", 2, 4), {rank: module}, mse_loss, debug=True, timeout=2)
inputs, targets = samples(8)
try:
    pipeline.step(inputs, targets)
    said = ""
except pp.CommunicationError as error:
    said = str(error)
assert said if rank == 1 else "a tensor of 0SEND_F0 was written to after it was sent" in said, said
""",
        2,
    )


def test_both_send_first_hangs_and_the_error_says_which_rank_waits_for_which(ranks):
    program = (
        START
        + """
inputs, targets = samples(8)
stage = Stage(layer(rank), rank, mse_loss if rank == ranks - 1 else None)
getattr(MUSEUM["both send first"], sys.argv[1])(stage, inputs.split(2), targets.split(2), (2, 4))
whole = nn.Sequential(layer(0), layer(1))
mse_loss(whole(inputs), targets).backward()
assert torch.allclose(stage.module.weight.grad, whole[rank].weight.grad, rtol=0, atol=1e-6)
dist.barrier()
"""
    )
    ranks(program, 2, "right")
    deadlock = "deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0: all send, none receives"
    with pytest.raises(pp.RankError, match=deadlock):
        ranks(program, 2, "wrong", timeout=3)


def test_torchs_two_bugs_show_against_one_process_and_their_cures_remove_them(ranks, tmp_path):
    if not version("torch").startswith("2.13"):
        pytest.skip("these are bugs of torch 2.13")
    output = ranks(
        START
        + """
inputs, targets = samples(6)
for name in ("receives deferred", "first stage frozen"):
    whole = nn.Sequential(*map(layer, range(4)))
    whole[0].requires_grad_(name != "first stage frozen")
    mse_loss(whole(inputs), targets).backward()
    for program in (MUSEUM[name].wrong, MUSEUM[name].right):
        modules = {stage: layer(stage) for stage in (rank, 3 - rank)}
        for stage, module in modules.items():
            module.requires_grad_(stage > 0 or name != "first stage frozen")
        runtime = program(modules, mse_loss, inputs, targets)
        said = {s: factor(m.weight, whole[s].weight.grad) for s, m in modules.items() if m.weight.requires_grad}
        print("said", json.dumps(said))
        if rank == 0 and program is MUSEUM["receives deferred"].wrong:
            runtime._dump_csv(sys.argv[1])
dist.barrier()
""",
        2,
        str(tmp_path / "late.csv"),
    )
    lines = [[json.loads(line[5:]) for line in text.splitlines() if line.startswith("said")] for text in output]
    late, in_time, frozen, whole = ({**one, **other} for one, other in zip(*lines, strict=True))
    assert sorted(late) == list("0123") and not any(map(is_once, late.values()))
    assert sorted(frozen) == list("123") and frozen["1"] is None and is_once(frozen["2"]) and is_once(frozen["3"])
    assert all(map(is_once, [*in_time.values(), *whole.values()]))
    problems = pp.check(pp.Schedule.from_csv(tmp_path / "late.csv", "v", 3))
    assert [problem.kind for problem in problems] == ["message", "message"]


def test_ranks_with_the_same_seed_start_equal(ranks):
    ranks(
        START
        + """
def start(program):
    "Both ranks' weights."
    rows = [torch.empty(4, 4) for _ in range(ranks)]
    dist.all_gather(rows, program(lambda: nn.Linear(4, 4)).weight.detach())
    return rows

torch.manual_seed(0)
first, last = nn.Linear(4, 4).weight, nn.Linear(4, 4).weight
wrong, right = start(MUSEUM["same seed everywhere"].wrong), start(MUSEUM["same seed everywhere"].right)
assert torch.equal(wrong[0], wrong[1]) and not torch.equal(wrong[1], last)
assert torch.equal(right[0], first) and torch.equal(right[1], last)
dist.barrier()
""",
        2,
    )


# Schedules


def ordered(generator, ranks, microbatches):
    orders = tuple(tuple(generator(rank, ranks, microbatches)) for rank in range(ranks))
    return pp.Schedule("mine", pp.Placement.make("loop", ranks), microbatches, orders)


def test_a_reversed_warmup_hangs_and_check_finds_it_before_the_start(ranks):
    """Sends are asynchronous here, so it is the order that hangs."""
    program = """
    import sys
    import torch, torch.distributed as dist
    from ppedu.course.by_hand.bugs import MUSEUM

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step, sent = {"F": 1, "B": -1}, []
    for action in getattr(MUSEUM["warmup reversed"], sys.argv[1])(rank, ranks, 4):
        source, target = rank - step[action.op], rank + step[action.op]
        if 0 <= source < ranks:
            message = torch.empty(1)
            dist.recv(message, source)
            assert message == action.microbatch
        if 0 <= target < ranks:
            sent.append(dist.isend(torch.tensor([float(action.microbatch)]), target))
    for each in sent:
        each.wait()
    dist.barrier()
    """
    bug = MUSEUM["warmup reversed"]
    assert [problem.kind for problem in pp.check(ordered(bug.wrong, 2, 4))] == ["deadlock"]
    assert pp.check(ordered(bug.right, 2, 4)) == []
    ranks(program, 2, "right")
    deadlock = "deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0: all receive, none sends"
    with pytest.raises(pp.RankError, match=deadlock):
        ranks(program, 2, "wrong", timeout=3)


def test_a_warmup_short_by_one_is_correct_and_slow(ranks):
    bug = MUSEUM["warmup short by one"]
    wrong, right = (ordered(program, 4, 8) for program in (bug.wrong, bug.right))
    assert pp.check(wrong) == pp.check(right) == []
    unit = pp.Costs(forward=1, backward=1)
    assert [pp.simulate(each, unit).makespan for each in (wrong, right)] == [36, 22]
    text = ranks(
        """
        import torch.distributed as dist
        import ppedu as pp
        from ppedu.run import emulate
        from ppedu.course.by_hand.bugs import MUSEUM

        dist.init_process_group("gloo")
        bug = MUSEUM["warmup short by one"]
        for program in (bug.wrong, bug.right):
            orders = tuple(tuple(program(rank, 4, 8)) for rank in range(4))
            schedule = pp.Schedule("mine", pp.Placement.make("loop", 4), 8, orders)
            print(emulate(schedule, pp.Costs(forward=0.02, backward=0.02)).makespan)
        dist.barrier()
        """,
        4,
    )[0]
    slow, fast = map(float, text.split())
    assert slow >= 36 * 0.02 * 0.99 and slow > 1.2 * fast  # 1.64 on an idle machine


# The museum itself


def test_every_exhibit_is_complete_and_fits_on_a_slide():
    for name, bug in MUSEUM.items():
        assert inspect.getdoc(bug.wrong).endswith(".") and bug.symptom and bug.detector and bug.cure
        assert name == bug.wrong.__name__.replace("_", " ")
        assert len(inspect.getsource(bug.wrong).partition("def ")[2].splitlines()) <= 22
        assert f"def {bug.wrong.__name__}(" in str(bug) and "@MUSEUM" not in str(bug)


def test_the_museum_prints_as_a_table():
    head, *lines = str(MUSEUM).splitlines()
    assert head.split() == ["bug", "you", "see", "found", "by", "cure"] and max(map(len, lines)) <= 120
    assert [line[:27].split("  ")[0] for line in lines if line.startswith("both")] == ["both send first"]
    page = MUSEUM._repr_html_()
    assert page.count("<tr>") == len(MUSEUM) + 1 and all(f">{name}</td>" in page for name in MUSEUM)
    with pytest.raises(pp.SettingError, match="unknown exhibit 'x'; available: both send first, "):
        MUSEUM["x"]
