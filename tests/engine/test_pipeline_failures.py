"""A failure within a step is one clear error on every rank, within the timeout."""

import re
from dataclasses import replace

import pytest
from cases import AGAIN, STOPPED, run
from torch import nn

import ppedu as pp
from ppedu.run import Pipeline, Stage

LATE = "rank {rank}[ :].*(did not answer within|not every rank reached it within|the connection to .* is lost)"


def handled(rank, op, what, debug=False):
    return f'''
pipeline = make(debug={debug})
if rank == {rank}:
    pipeline.on("{op}", lambda action, step: {what})
pipeline.step(X, Y)
'''


def with_stage(stage, run, call="pipeline.step(X, Y)", **options):
    return f"""
pipeline = make(change={{{stage}: Of({run}, a=layer({stage}))}}, **{options})
{call}
"""


ALTERNATELY = "step.post(action._replace(microbatch=action.microbatch ^ 1))"
ALL_BUT_ONE = "action.microbatch == 1 or step.default(action)"
SPOILT = "pipeline.step(SPOILT, Y)"
DIFFER = r"\(here, the call, the batch's shapes or loss_scale differ from the last"
# Failures of one of three ranks, after which the pipeline cannot be used, by case and rank: the program, and the error
# of that rank. The others notice that it is late or gone.
OF_ONE = {
    ("a swapped receive", 1): (
        handled(1, "RECV_F", ALTERNATELY, debug=True),
        "CommunicationError: rank 1: 1RECV_F1 expects the message of 0SEND_F1, but that of 0SEND_F0 arrived",
    ),
    ("a missing send", 1): (
        handled(0, "SEND_F", ALL_BUT_ONE),
        r"rank 1: 1F3 waits for 1RECV_F3 \(rank 0 → 1: F of microbatch 3\): ",
    ),
    ("a missing send, debug", 1): (
        handled(0, "SEND_F", ALL_BUT_ONE, debug=True),
        "CommunicationError: rank 1: 1RECV_F1 expects the message of 0SEND_F1, but that of 0SEND_F2 arrived",
    ),
    ("a missing send of a gradient", 1): (
        handled(2, "SEND_B", None),
        r"rank 1: 1B0 waits for 1RECV_B0 \(rank 2 → 1: B of microbatch 0\): ",
    ),
    ("a missing receive", 1): (
        handled(1, "RECV_F", None),
        "CommunicationError: rank 1: 1F0 waits for 1RECV_F0, which is not posted",
    ),
    ("a forward without a result", 0): (
        handled(0, "F", None),
        "PipelineError: rank 0: 0SEND_F0 failed: there is no result of 0F0: its handler must call step.give",
    ),
    ("another shape than earlier", 0): (
        with_stage(0, "lambda s, x: s.a(x) if x.isfinite().all() else s.a(x)[:1]", SPOILT),
        r"CommunicationError: rank 0: 0SEND_F2 sends float32 \(1, 4\), but the receiver expects float32",
    ),
    ("another dtype than earlier", 0): (
        with_stage(0, "lambda s, x: s.a(x) if x.isfinite().all() else s.a(x).double()", SPOILT),
        r"CommunicationError: rank 0: 0SEND_F2 sends float64 \(2, 4\), but the receiver expects float32",
    ),
    ("a shape that does not fit", 1): (
        with_stage(0, "lambda s, x: s.a(x)[:, :3]"),
        "PipelineError: rank 1: 1F0 failed: RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied",
    ),
    ("a dtype that does not fit", 1): (
        with_stage(0, "lambda s, x: s.a(x).double()"),
        "PipelineError: rank 1: 1F0 failed: RuntimeError: mat1 and mat2 must have the same dtype",
    ),
    ("a dtype that cannot be sent", 0): (
        with_stage(0, "lambda s, x: torch.complex(s.a(x), x)"),
        "0SEND_F0 failed: cannot send a 2-dimensional tensor of torch.complex64; .*; send torch.view_as_real",
    ),
    ("a dict between stages", 0): (
        with_stage(0, "lambda s, x: {'x': s.a(x)}"),
        "PipelineError: rank 0: 0F0 failed: pass a tensor or a tuple of tensors between stages; got dict",
    ),
    ("a tuple of more than tensors between stages", 1): (
        with_stage(1, "lambda s, x: (s.a(x), None)"),
        "rank 1: 1F0 failed: pass a tensor or a tuple of tensors between stages; got tuple of Tensor, NoneType",
    ),
    ("a DTensor between stages", 0): (
        """
from torch.distributed.tensor import DTensor, init_device_mesh
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
pipeline = make(change={0: Of(lambda s, x: DTensor.from_local(s.a(x), mesh), a=layer(0))})
pipeline.step(X, Y)
""",
        "PipelineError: rank 0: 0SEND_F0 failed: a message can only have dense tensors of one rank; got a DTensor",
    ),
    ("a sparse tensor between stages", 0): (
        with_stage(0, "lambda s, x: s.a(x).to_sparse()"),
        "PipelineError: rank 0: 0SEND_F0 failed: a message can only .* got a sparse tensor: send its to_dense",
    ),
    ("a message that torch refuses", 0): (
        """
pipeline = make()
if rank == 0:
    pipeline.messages.channel = type("Refusing", (), {"send": lambda *a: exec("raise RuntimeError('no such luck')")})()
pipeline.step(X, Y)
""",
        r"CommunicationError: rank 0: 0SEND_F0 \(.*\): RuntimeError: no such luck \(in the order: ",
    ),
    ("an input changed in place", 1): (
        with_stage(1, "lambda s, x: s.a(x.relu_())"),
        "PipelineError: rank 1: 1F0 failed: stage 1 changes its input in place, .* with x = x.clone",
    ),
    ("a stage that raises", 1): (
        with_stage(1, "lambda s, x: s.a(x) if x.isfinite().all() else 1 // 0", SPOILT),
        "PipelineError: rank 1: 1F2 failed: ZeroDivisionError: integer division or modulo by zero",
    ),
    ("a backward that raises", 1): (
        """
class Broken(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, dy: 1 // 0)
pipeline = make("zb-h1", change={1: Of(lambda s, x: Broken.apply(s.a(x)), a=layer(1))})
pipeline.step(X, Y)
""",
        "PipelineError: rank 1: 1I0 failed: ZeroDivisionError",
    ),
    ("an interrupt", 1): (with_stage(1, "lambda s, x: interrupt()"), "KeyboardInterrupt"),
    ("a loss of several numbers", 2): (
        "pipeline = make(loss_fn=lambda y, target: (y - target).square()); pipeline.eval(X, Y)",
        r"PipelineError: rank 2: 2F0 failed: a microbatch.s loss must be .* got a tensor of shape \(2, 4\)",
    ),
    ("a loss that is not a tensor", 2): (
        "pipeline = make(loss_fn=lambda y, target: 0.5); pipeline.step(X, Y)",
        "PipelineError: rank 2: 2F0 failed: a microbatch's loss must be a tensor with one element; got float",
    ),
    ("no loss_fn", 2): (
        "pipeline = make(loss_fn=None); pipeline.step(X, Y)",
        r"PipelineError: rank 2: 2F0 failed: .* got .*: return a scalar from loss_fn, or from the last stage",
    ),
    ("another batch on one rank, later", 2): (
        "pipeline = make(); pipeline.step(X, Y); pipeline.step(X if rank < 2 else X[:6], Y)",
        rf"rank 2 cannot start step {DIFFER}",
    ),
    ("an eval on one rank, later", 1): (
        "pipeline = make(); pipeline.step(X, Y); (pipeline.eval if rank == 1 else pipeline.step)(X, Y)",
        rf"rank 1 cannot start eval {DIFFER}",
    ),
    ("weights unfrozen between steps", 0): (
        """
pipeline = make(change={0: layer(0).requires_grad_(False)})
pipeline.step(X, Y)
if rank == 0:
    pipeline.stages[0].module.requires_grad_()
pipeline.step(X, Y)
""",
        "CommunicationError: rank 0: 0SEND_F0 sends .* make a new Pipeline after \\(un\\)freezing",
    ),
    ("a write after a send", 0): (
        """
class Reused(nn.Module):
    "Gives the same memory again and again."
    def __init__(self):
        super().__init__()
        self.a, self.memory = layer(0), torch.zeros(2, 4)
    def forward(self, x):
        y = self.a(x)
        y.data = self.memory.copy_(y.detach())
        return y
pipeline = make("gpipe", change={0: Reused()}, debug=True)
pipeline.step(X, Y)
""",
        "CommunicationError: rank 0: a tensor of 0SEND_F0 was written to after it was sent; make a new tensor",
    ),
    ("a rank that is late for the step", 0): (
        "pipeline = make(); time.sleep(2 if rank == 2 else 0); pipeline.step(X, Y)",
        "CommunicationError: rank 0 cannot start step: not every rank reached it within 1.5 s",
    ),
    ("a rank that is slow", 0): (
        with_stage(1, "lambda s, x: (time.sleep(2), s.a(x))[1]"),
        r"rank 0: 0B0 waits for 0RECV_B0 \(rank 1 → 0: B of microbatch 0\): rank 1 did not answer within 1.5 s",
    ),
}
DIFFERENT = "CommunicationError: rank {} has a different {} than rank 0; give all ranks the same"
# Failures that all ranks report alike, and after which the pipeline can be used: the program, and the error.
OF_ALL = {
    "a loss that is not finite": (
        "pipeline = make(); pipeline.step(SPOILT, Y)",
        r"rank 2: 2F2 gave a loss of nan; check microbatch 2 and the learning rate, .*: if all its targets are "
        r"padding, their mean is NaN, and Batching\(count=.*\) leaves them out",
    ),
    "microbatches that do not fit": (
        "pipeline = make(); pipeline.step(list(X.split(3)), Y)",
        "SettingError: input 0 is a list of 3 microbatches, but the schedule has 4",
    ),
    "another batch on one rank": (
        "pipeline = make(); pipeline.step(X if rank < 2 else X[:6], Y)",
        "CommunicationError: microbatch 2 of the inputs has a different shape or dtype on rank 0 than on rank 2",
    ),
    "another loss scale on one rank": (
        "pipeline = make(); pipeline.step(X, Y, loss_scale=1.0 + (rank == 1))",
        DIFFERENT.format(1, "loss_scale"),
    ),
    "a norm below 0 to clip to": (
        "pipeline = make(); pipeline.step(X, Y); pipeline.clip_grad_norm(-1.0)",
        "SettingError: max_norm must be a number above 0; got -1.0",
    ),
    "a step in inference mode": (
        "pipeline = make(); torch.inference_mode()(pipeline.step)(X, Y)",
        "SettingError: step cannot compute gradients within torch.inference_mode",
    ),
    "an eval on one rank": (
        "pipeline = make(); (pipeline.eval if rank == 1 else pipeline.step)(X, Y)",
        "CommunicationError: rank 0 calls step, but rank 1 calls eval; call the same on all",
    ),
}
# Settings that differ, which the next step reports again.
UNLIKE = {
    "another schedule on one rank": (
        "pipeline = make('1f1b' if rank < 2 else 'gpipe'); pipeline.step(X, Y)",
        DIFFERENT.format(2, "schedule"),
    ),
    "another number of microbatches on one rank": (
        "pipeline = make(microbatches=4 if rank else 8); pipeline.step(X, Y)",
        DIFFERENT.format(1, "schedule"),
    ),
    "debug on one rank": (
        "pipeline = make(debug=rank == 1); pipeline.step(X, Y)",
        DIFFERENT.format(1, "debug"),
    ),
    "another seed on one rank": (
        "pipeline = make(); pipeline.seed = rank; pipeline.step(X, Y)",
        DIFFERENT.format(1, "seed"),
    ),
}
# In these cases, no pipeline is made.
NOT_MADE = {
    "orders that run only if sends are buffered": (
        """
lowered = pp.lower(pp.schedule("1f1b", size, 4))
orders = [[], [], []]
for order, late in zip(lowered.orders, orders):
    for action in order:
        if action.op in ("F", "B"):  # each receive just before what needs it
            receive = pp.Action(action.stage, Op("RECV_" + action.op), action.microbatch)
            late += [receive] * (receive in order)
        if action.op not in ("RECV_F", "RECV_B"):
            late.append(action)
late = pp.Schedule("late", lowered.placement, 4, tuple(map(tuple, orders)))
assert not pp.check(late)
pipeline = make(late)
""",
        r"SettingError: .* buffers sends \(gloo\), but not where a send waits for its receive \(NCCL\): deadlock: "
        r"rank 1 waits at position .*; give Pipeline\(pp.strip\(schedule\), …\), which places messages of its own",
    ),
}
# The program, the error of each rank, and that of a step after it.
FAILURES = {
    name: (code, [LATE] * rank + [why] + [LATE] * (2 - rank), STOPPED) for (name, rank), (code, why) in OF_ONE.items()
}
for cases, after in ((OF_ALL, AGAIN), (UNLIKE, "CommunicationError"), (NOT_MADE, "")):
    FAILURES |= {name: (code, [why] * 3, after) for name, (code, why) in cases.items()}
FAILURES["another loss scale on one rank, later"] = (
    """
pipeline = make()
for scale in (1.0, 8.0, 4.0 if rank < 2 else 8.0):
    pipeline.step(X, Y, loss_scale=scale)
""",
    [r"rank 0 cannot start step \(here, .* loss_scale differ from the last ones\)", "", LATE],  # rank 1: either
    STOPPED,
)


@pytest.fixture(scope="module")
def failures(ranks):
    return run(ranks, 3, 7, {case: code for case, (code, _, _) in FAILURES.items()})


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_a_clear_error_on_every_rank(failures, case):
    _, expected, after = FAILURES[case]
    for rank, (why, (first, then, took)) in enumerate(zip(expected, failures[case], strict=True)):
        assert re.search(why.format(rank=rank) if why == LATE else why, first), first
        assert then.startswith(after), then
        assert took < 10  # the timeout is 1.5 s


DYING = """
pipeline = make(change={1: Of(lambda s, x: os._exit(0), a=layer(1))}, timeout=30)
print(json.dumps([case, outcome(lambda: pipeline.step(X, Y)), "", 0]), flush=True)
time.sleep(rank == 0)  # the other ranks connect through rank 0
os._exit(0)
"""


def test_ranks_that_wait_for_a_dead_rank_report_the_lost_connection(ranks):
    first, last = run(ranks, 3, 1, {"dying": DYING})["dying"]
    # If rank 1 dies early, rank 0 cannot send the next activation.
    waits, sends = (
        r"0B0 waits for 0RECV_B0 \(rank 1 → 0: B of microbatch 0\)",
        r"0SEND_F\d \(rank 0 → 1: F of microbatch \d\)",
    )
    assert re.search(f"rank 0: ({waits}|{sends}): the connection to rank 1 is lost", first[0])
    assert (
        "rank 2: 2RECV_F0 (rank 1 → 2: F of microbatch 0): the connection to rank 1 is lost; that rank has" in last[0]
    )


ENDED = """
pipeline = make(timeout=30)
pipeline.step(X, Y)
if rank == 1:
    os._exit(0)
time.sleep(1)
print(json.dumps([case, outcome(lambda: pipeline.step(X, Y)), "", 0]), flush=True)
time.sleep(rank == 0)
os._exit(0)
"""


def test_a_rank_that_dies_between_steps_is_reported_by_the_others(ranks):
    first, last = run(ranks, 3, 1, {"ended": ENDED})["ended"]
    assert first[0].startswith("CommunicationError: rank 0 cannot start step: ")
    # Rank 2 may notice that rank 1 is gone, or that rank 0 has.
    waits = "rank 2: 2RECV_F0 (rank 1 → 2: F of microbatch 0): the connection"
    assert last[0].startswith((f"CommunicationError: {waits}", "CommunicationError: rank 2 cannot start step: "))
    assert "failed first" not in first[0] + last[0]


def with_change(change):
    """Return a lowered schedule after `change` has edited its orders."""
    schedule = pp.lower(pp.schedule("1f1b", ranks=2, microbatches=3))
    orders = [list(order) for order in schedule.orders]
    change(orders)
    return replace(schedule, orders=tuple(map(tuple, orders)))


def swap(order, one, other):
    here, there = (order.index(pp.Action.parse(word)) for word in (one, other))
    order[here], order[there] = order[there], order[here]


def test_illegal_orders_are_refused_at_construction():
    swapped = with_change(lambda orders: swap(orders[1], "1RECV_F0", "1RECV_F1"))
    with pytest.raises(pp.ScheduleError, match="1RECV_F1 would get what 0SEND_F0 sends"):
        Pipeline(swapped, {})
    missing = with_change(lambda orders: orders[0].remove(pp.Action.parse("0SEND_F1")))
    with pytest.raises(pp.ScheduleError, match="rank 0: 0SEND_F1 is never run"):
        Pipeline(missing, {})


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ({}, "rank 0 holds the stages 0, 1; got none: give a module for each"),
        ({0: nn.Identity()}, "rank 0 holds the stages 0, 1; got 0: give a module for each"),
        ({0: nn.Identity(), 1: nn.Identity(), 2: nn.Identity()}, "rank 0 holds the stages 0, 1; got 0, 1, 2: give"),
        ([nn.Identity()], "rank 0 holds the stages 0, 1; got [Identity()]: give a module for each"),
        (
            {0: Stage(nn.Identity(), 1), 1: nn.Identity()},
            "stage 0 got a Stage made for stage 1; make one for each, such",
        ),
        (
            {0: Stage(nn.Identity(), 0, nn.functional.mse_loss), 1: nn.Identity()},
            "stage 0 has a loss_fn, but the last stage is 1; give the loss to Pipeline(…, loss_fn) instead",
        ),
        ({0: nn.Identity(), 1: abs}, "the module of stage 1 must be a torch.nn.Module; got <built-in function abs>"),
    ],
)
def test_stages_other_than_those_of_the_rank_are_refused(stages, why):
    with pytest.raises(pp.SettingError, match=re.escape(why)):
        Pipeline(pp.schedule("interleaved", ranks=1, microbatches=2, chunks=2), stages)


def test_too_few_ranks_are_refused():
    with pytest.raises(pp.SettingError, match="needs 2 ranks; the group has 1"):
        Pipeline(pp.schedule("1f1b", ranks=2, microbatches=2), {0: nn.Identity()})
