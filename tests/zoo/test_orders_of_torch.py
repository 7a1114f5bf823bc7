"""Order for order the same as torch.distributed.pipelining, where it has the schedule too."""

from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize(("name", "theirs", "options"), SAME)
def test_the_order_is_torchs(name, theirs, options):
    compared = 0
    for p in range(1, 7):
        for m in range(2 * p if name == "dualpipev" else 1, 3 * p + 5):
            rounds = max(1, m // p)
            if m % rounds and name in ("interleaved", "zb-h1", "zb-interleaved"):
                continue  # torch refuses these
            ours = pp.schedule(name, p, m, **options)
            for rank in range(p):
                # What torch's generation reads of the schedule object, which else needs process groups to be made.
                settings = SimpleNamespace(
                    pp_group_size=p, _n_microbatches=m, n_local_stages=ours.chunks, num_stages=ours.stages, rank=rank,
                    _stages=[None] * ours.chunks, number_of_rounds=rounds, microbatches_per_round=m // rounds,
                )  # fmt: skip
                order = getattr(torch_schedules, theirs)._calculate_single_rank_operations(settings, rank)
                assert list(map(str, ours.orders[rank])) == [str(action) for action in order if action is not None]
                compared += 1
    assert compared > 100
