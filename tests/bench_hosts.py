"""Ranks on two hosts beside ranks on one machine: how long they take to start, and how well a step is predicted.

The hosts are network namespaces of this machine; see tests/hosts/netns.py. `make bench`. Nothing here fails.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from netns import SSHD, Network

import ppedu as pp
from ppedu.launch.pool import RankPool

MEET = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(()))
"""
STEP = """
import json, sys, torch.distributed as dist
import ppedu as pp
dist.init_process_group("gloo")
latency = pp.run.latency(4096)
emulation = pp.run.Emulation(pp.schedule(sys.argv[1], 4, 8), pp.Costs(forward=0.04, backward=0.08))
makespan = min(emulation.step().makespan for _ in range(3))
print(json.dumps([makespan, [[*pair, seconds] for pair, seconds in latency.items()]]))
"""
DELAYS = (0.0, 0.002, 0.005, 0.02)  # seconds that the link to one host takes more
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "gpipe")


def run(pool: RankPool, program: Path, *arguments: str) -> str:
    """Run a program on four ranks, and return what rank 0 prints."""
    pieces: list[bytes] = []
    pool.run(program, 4, arguments, timeout=60, write=lambda rank, piece: pieces.append(piece if rank == 0 else b""))
    return b"".join(pieces).decode()


def main() -> None:
    """Measure, and print two tables."""
    if os.geteuid() or not Path(SSHD).exists():
        print("skipped: hosts need root and openssh-server")
        return
    network = Network(Path(tempfile.mkdtemp()))
    os.environ["PATH"] = f"{network.folder / 'bin'}:{os.environ['PATH']}"
    meet, step = network.folder / "meet.py", network.folder / "step.py"
    meet.write_text(MEET)
    step.write_text(STEP)
    try:
        print("4 ranks, seconds until they have met     first     then")
        for on in ("local", "ssh:alpha,beta", "ssh:alpha,beta,gamma"):
            pool = RankPool(on=on)
            times = []
            for _ in range(6):
                start = time.monotonic()
                run(pool, meet)
                times.append(time.monotonic() - start)
            print(f"{on:36}{times[0]:10.1f}{median(times[1:]):9.2f}")
            pool.close()
        print("\nF 40 ms, B 80 ms; measured / simulated with the measured latency - 1")
        print("link      " + "".join(f"{name:>14}" for name in SCHEDULES))
        pool = RankPool(on="ssh:alpha,beta")
        run(pool, meet)
        for delay in DELAYS:
            with network.slow("beta", delay):
                print(f"{1000 * delay:4.0f} ms   ", end="")
                for name in SCHEDULES:
                    measured, links = json.loads(run(pool, step, name))
                    latency = {(one, other): seconds for one, other, seconds in links}
                    costs = pp.Costs(forward=0.04, backward=0.08, latency=latency)
                    print(f"{measured / pp.simulate(pp.schedule(name, 4, 8), costs).makespan - 1:+14.1%}", end="")
                print(flush=True)
        pool.close()
    finally:
        network.close()


if __name__ == "__main__":
    sys.exit(main())
