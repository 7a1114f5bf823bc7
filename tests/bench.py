"""Timings, as ratios against a peer in the same run, or beside the bound they are meant to keep: `make bench`.

Nothing here fails: machines differ, and a busy one is slow.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("agg")

import ppedu as pp
from ppedu.notebook.pool import RankPool

REPEATS = 5
PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


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


def made_checked_simulated():
    schedule = pp.schedule("1f1b", ranks=64, microbatches=256)
    assert not pp.check(schedule)
    pp.simulate(schedule)


def drawn():
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        pp.simulate(pp.schedule("1f1b", ranks=32, microbatches=128)).save(file.name)


def main():
    python = sys.executable
    nothing = seconds([python, "-c", "pass"])
    print(
        f"import ppedu                       {seconds([python, '-c', 'import ppedu']) - nothing:6.3f} s   (bound 0.1)"
    )
    print(f"1f1b 64×256 made, checked, simulated {seconds(made_checked_simulated):4.3f} s   (bound 0.5)")
    print(f"1f1b 32×128 drawn and saved        {seconds(drawn):6.3f} s   (bound 5)")

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        pool = RankPool()
        pool.run(str(program), 4, write=lambda rank, piece: None)
        warm = seconds(lambda: pool.run(str(program), 4, write=lambda rank, piece: None))
        pool.close()
        torchrun = seconds([python, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(program)])
    longer = torchrun / warm
    print(f"4 ranks, one all_reduce            {warm:6.3f} s   torchrun {torchrun:.3f} s, {longer:.0f} times as long")


if __name__ == "__main__":
    main()
