"""Orders equal those of torch.distributed.pipelining for the schedules that it has, too."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from strategies import sample

import ppedu as pp

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

SAME = [
    ("looped-bfs", "ScheduleLoopedBFS", {"chunks": 1}),
    ("looped-bfs", "ScheduleLoopedBFS", {"chunks": 3}),
    ("interleaved", "ScheduleInterleaved1F1B", {"chunks": 1}),
    ("interleaved", "ScheduleInterleaved1F1B", {"chunks": 2}),
    ("interleaved", "ScheduleInterleaved1F1B", {"chunks": 3}),
    ("zb-h1", "ScheduleInterleavedZeroBubble", {}),
    ("zb-interleaved", "ScheduleInterleavedZeroBubble", {"chunks": 2}),
    ("zb-interleaved", "ScheduleInterleavedZeroBubble", {"chunks": 3}),
    ("zb-v", "ScheduleZBVZeroBubble", {}),
    ("dualpipev", "ScheduleDualPipeV", {}),
]


def order_of_torch(theirs, rank, ranks, chunks, microbatches):
    """Return a rank's order from torch's generator, on a stand-in for an object that would need process groups."""
    rounds = max(1, microbatches // ranks)
    settings = SimpleNamespace(
        pp_group_size=ranks, _n_microbatches=microbatches, n_local_stages=chunks, num_stages=ranks * chunks, rank=rank,
        _stages=[None] * chunks, number_of_rounds=rounds, microbatches_per_round=microbatches // rounds,
    )  # fmt: skip
    order = getattr(torch_schedules, theirs)._calculate_single_rank_operations(settings, rank)
    return [action for action in order if action is not None]


@pytest.mark.parametrize(("name", "theirs", "options"), SAME)
def test_the_order_equals_that_of_torch(name, theirs, options):
    compared = 0
    for p in range(1, 7):
        for m in range(2 * p if name == "dualpipev" else 1, 3 * p + 5):
            if m % max(1, m // p) and name in ("interleaved", "zb-h1", "zb-interleaved"):
                continue  # torch refuses these
            ours = pp.schedule(name, p, m, **options)
            for rank in range(p):
                order = order_of_torch(theirs, rank, p, ours.chunks, m)
                assert list(map(str, ours.orders[rank])) == list(map(str, order))
                compared += 1
    assert compared > 100


@pytest.mark.parametrize(("name", "theirs"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_the_order_equals_that_of_the_loop_in_torch(name, theirs):
    """Run torch's loop on a stage that records its calls and has no peers."""
    for p in range(1, 7):
        for m in sample(range(1, 3 * p + 3), start=3 * p):
            ours = pp.schedule(name, p, m)
            for rank in range(p):
                ran: list[str] = []
                stage = MagicMock(stage_index=rank)
                for direction in ("fwd", "bwd"):
                    for way in ("recv", "send"):
                        getattr(stage, f"get_{direction}_{way}_ops").return_value = []
                stage.forward_one_chunk = lambda i, *_, r=rank, ran=ran, **__: ran.append(f"{r}F{i}")
                stage.backward_one_chunk = lambda i, *_, r=rank, ran=ran, **__: ran.append(f"{r}B{i}")
                own = MagicMock(_stage=stage, _num_stages=p, _n_microbatches=m, _stage_initialized=True)
                own._check_inputs.return_value = [()] * m, [{}] * m
                getattr(torch_schedules, theirs)._step_microbatches(own, [()] * m)
                assert list(map(str, ours.orders[rank])) == ran


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dualpipe_is_the_dualpipev_of_torch_and_its_mirror_image(p):
    """DualPipeV is DualPipe cut in half (DualPipe repository): half of the ranks, and half of the microbatches."""

    def unfolded(action, rank):
        if action.sub_actions:
            return f"({';'.join(unfolded(part, rank) for part in action.sub_actions)}){action.computation_type.value}"
        coming_down = (action.stage_index < p // 2) == (rank < p // 2)
        microbatch = action.microbatch_index + (0 if coming_down else m // 2)
        return f"{action.stage_index}{action.computation_type.value}{microbatch}"

    for m in range(2 * p, 3 * p + 4, 2):
        ours = pp.schedule("dualpipe", p, m)
        for rank in range(p):
            half = order_of_torch("ScheduleDualPipeV", min(rank, p - 1 - rank), p // 2, 2, m // 2)
            assert list(map(str, ours.orders[rank])) == [unfolded(action, rank) for action in half]
