"""Timings, as ratios against a peer in the same run, or beside the bound they are meant to keep: `make bench`.

Nothing here fails: machines differ, and a busy one is slow.
"""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import matplotlib

matplotlib.use("agg")

import torch.distributed.pipelining.schedules as torchs

import ppedu as pp
from ppedu import Placement
from ppedu.launch.pool import RankPool

REPEATS = 5
PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def once(work):
    """The processor's time for `work`, which others on the machine do not lengthen as much."""
    start = time.process_time()
    work()
    return time.process_time() - start


def seconds(work):
    """The median time of `work`, a function or a command line."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        if callable(work):
            work()
        else:
            subprocess.run(work, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return median(times)


def simulated(schedule):
    """The timeline of a schedule, which is checked first."""
    assert not pp.check(schedule)
    return pp.simulate(schedule)


def made_checked_simulated(name, ranks, microbatches):
    schedule = pp.schedule(name, ranks, microbatches)
    simulated(schedule)
    return sum(map(len, schedule.orders))


def torchs_orders(kind, ranks, chunks, microbatches):
    """The orders of one of torch's schedules, made without a process group."""
    own = SimpleNamespace(
        _stages=[None] * chunks,
        n_local_stages=chunks,
        pp_group_size=ranks,
        num_stages=ranks * chunks,
        _num_stages=ranks * chunks,
        _n_microbatches=microbatches,
        n_microbatches=microbatches,
        microbatches_per_round=microbatches // max(1, microbatches // ranks),
    )
    orders = {rank: kind._calculate_single_rank_operations(own, rank) for rank in range(ranks)}
    if hasattr(kind, "_add_bubbles_to_actions"):
        own.pipeline_order = orders
        orders = kind._add_bubbles_to_actions(own, own.num_stages)
    return orders


def torchs_lowered(kind, ranks, chunks, microbatches):
    """All that torch does when such a schedule is set up: made, looked over, sharding and messages added."""
    orders = torchs_orders(kind, ranks, chunks, microbatches)
    stages = ranks * chunks
    torchs._validate_schedule(orders, ranks, stages, microbatches)
    orders = {
        rank: torchs._add_reduce_grad(torchs._add_unshard_reshard(order), microbatches)
        for rank, order in orders.items()
    }
    holder = Placement.make("v" if kind in V_SHAPED else "loop", ranks, chunks).rank
    return torchs._add_send_recv(orders, holder, stages)


V_SHAPED = torchs.ScheduleZBVZeroBubble, torchs.ScheduleDualPipeV
SHARED = {
    "looped-bfs": torchs.ScheduleLoopedBFS,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zb-interleaved": torchs.ScheduleInterleavedZeroBubble,
    "zb-v": torchs.ScheduleZBVZeroBubble,
    "dualpipev": torchs.ScheduleDualPipeV,
}


def schedules():
    """Print how long schedules take to make, lower, check and simulate."""
    print("64 ranks, 256 microbatches, 2 chunks, with sharding")
    print("  made, lowered, checked and simulated; made and lowered by torch; ratio (goal 5)")
    for name, kind in SHARED.items():
        ours = once(lambda name=name: simulated(pp.lower(pp.schedule(name, 64, 256), fsdp=True)))
        theirs = once(lambda kind=kind: torchs_lowered(kind, 64, 2, 256))
        print(f"  {name:<50} {ours:6.3f} s {theirs:6.3f} s   {theirs / ours:4.1f}")
    print("Made; checked, simulated and peak_activations; ratio (goal: at most 4)")
    for name, ranks, microbatches in (
        ("1f1b", 64, 400),
        ("interleaved", 32, 400),
        ("zb-h1", 64, 270),
        ("1f1b", 256, 2048),
    ):
        making = once(partial(pp.schedule, name, ranks, microbatches))
        made = pp.schedule(name, ranks, microbatches)
        rest = once(lambda made=made: simulated(made).peak_activations)
        size = f"{name}, {sum(map(len, made.orders)):,} actions"
        print(f"  {size:<50} {making:6.3f} s {rest:6.3f} s   {rest / making:4.1f}")
    print("8 ranks, 32 microbatches: made, checked, simulated (bound 10 ms)")
    for name in pp.schedules():
        took = median(once(lambda name=name: made_checked_simulated(name, 8, 32)) for _ in range(9))
        print(f"  {name:<50} {1000 * took:6.1f} ms")
    print("1f1b of 16 ranks, made, checked, simulated")
    for microbatches in (32, 320, 3200, 32000):
        start = time.perf_counter()
        actions = made_checked_simulated("1f1b", 16, microbatches)
        took = time.perf_counter() - start
        print(f"  {actions:9,} actions {took:50.3f} s   {took / actions * 1e6:4.1f} µs an action")


EMULATED = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipev"]
IN_A_ROW = ["zb-h2", "zb-v", "1f1b"]
EMULATION = """
import sys
from statistics import median
import torch.distributed as dist
import ppedu as pp
from ppedu.engine.emulate import Emulation

dist.init_process_group("gloo")
for name in sys.argv[2:]:
    emulation = Emulation(pp.schedule(name, 4, 8), pp.Costs(forward=0.02, input=0.02, weight=0.02))
    times = sorted(emulation.step().makespan for _ in range(int(sys.argv[1])))
    if dist.get_rank() == 0:
        simulated, middle = emulation.simulated.makespan, median(times)
        shown = f"{middle / simulated:.3f} ({times[0] / simulated:.3f}–{times[-1] / simulated:.3f})"
        print(f"  {name:<30} {1000 * middle:6.0f} ms    {1000 * simulated:6.0f} ms   {shown}", flush=True)
dist.barrier()
"""
STEPS = """
import sys
from statistics import median
import torch.distributed as dist
import ppedu as pp

dist.init_process_group("gloo")
costs = pp.Costs(forward=0.02, input=0.02, weight=0.02, latency=0.002)
for name in sys.argv[2:]:
    schedule = pp.schedule(name, 4, 8)
    for barrier in (True, False):
        simulated = pp.simulate(schedule, costs, steps=5, barrier=barrier).makespan
        emulation = pp.run.Emulation(schedule, costs, barrier=barrier)
        times = sorted(emulation.run(5).makespan for _ in range(int(sys.argv[1])))
        if dist.get_rank() == 0:
            shown = f"{median(times) / simulated:.3f} ({times[0] / simulated:.3f}–{times[-1] / simulated:.3f})"
            label = f"{name}, {'with' if barrier else 'without'} a barrier"
            print(f"  {label:<30} {1000 * median(times):6.0f} ms    {1000 * simulated:6.0f} ms   {shown}", flush=True)
dist.barrier()
"""


def emulated(pool, folder):
    """How near emulated stages come to the simulation."""
    print("4 ranks, 8 microbatches, 20 ms   emulated    simulated   ratio (bound 1.05)")
    program = Path(folder, "emulation.py")
    program.write_text(EMULATION)
    pool.run(str(program), 4, [str(REPEATS), *EMULATED], write=lambda rank, piece: print(piece.decode(), end=""))
    print("5 steps in a row                 emulated    simulated   ratio (bound 1.03)")
    program.write_text(STEPS)
    pool.run(str(program), 4, [str(REPEATS), *IN_A_ROW], write=lambda rank, piece: print(piece.decode(), end=""))


def drawn():
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        pp.simulate(pp.schedule("1f1b", ranks=32, microbatches=128)).save(file.name)


def main():
    python = sys.executable
    nothing = seconds([python, "-c", "pass"])
    print(
        f"import ppedu                       {seconds([python, '-c', 'import ppedu']) - nothing:6.3f} s   (bound 0.1)"
    )
    schedules()
    print(f"1f1b 32×128 drawn and saved        {seconds(drawn):6.3f} s   (bound 5)")

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        pool = RankPool()
        pool.run(str(program), 4, write=lambda rank, piece: None)
        warm = seconds(lambda: pool.run(str(program), 4, write=lambda rank, piece: None))
        emulated(pool, folder)
        pool.close()
        torchrun = seconds([python, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(program)])
    longer = torchrun / warm
    print(f"4 ranks, one all_reduce            {warm:6.3f} s   torchrun {torchrun:.3f} s, {longer:.0f} times as long")


if __name__ == "__main__":
    main()
