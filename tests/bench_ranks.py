"""`%%torchrun` beside other ways to run ranks from a notebook: what a cell costs, what failures do. `make bench`.

Every figure is of a real Jupyter kernel, one for each way, and another one once a cell does not run in it any more.
Before they fail, the ranks each start a `sleep` and a DataLoader with 2 workers. The four ways fail at the same time:
mostly they wait. ipyparallel and accelerate are given a free port for each cell; the others choose one themselves.
Nothing here fails: machines differ, and a busy one is slow.
"""

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from itertools import zip_longest
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from jupyter_client import KernelManager

from ppedu.launch.resources import memory

REPEATS = 5  # or fewer, if they take long
DEADLOCK = 3  # seconds after which a user interrupts ranks that wait for each other
IDLE, NEXT, GONE, ALL = 40, 30, 6, 345  # seconds at most: to be idle, next cell, processes' end; and for all this

MEET = """\
import os, subprocess, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([2.0**rank])
dist.all_reduce(x)
"""
FAMILY = """\
subprocess.Popen(["sleep", "100"])
loader = iter(torch.utils.data.DataLoader(range(100), num_workers=2))
next(loader)
"""
THERE = 'print(os.getpid(), int(x), file=open(f"rank{rank}", "w"))\n'
WAIT = 'while not os.path.exists("go"): time.sleep(0.01)\n'
END = "dist.destroy_process_group()\n"
# How the program of each failure ends, and the ranks to be named. The lines to be named end in "here".
FAILURES = {
    "interrupt": ("while rank % 2: x = x + 1  # here\ntime.sleep(1000)  # here", {0, 1, 2, 3}),
    "rank 2 raises": (f'{WAIT}if rank == 2: raise ValueError("no data")  # here\ndist.all_reduce(x)', {2}),
    "rank 2 killed": ("while True: time.sleep(0.01); dist.all_reduce(x)  # here", {2}),
    "deadlock": ("if rank == 0: dist.recv(x, 1)  # here\nif rank == 1: dist.recv(x, 0)  # here", {0, 1}),
    "kernel killed": ("time.sleep(1000)", None),
}
# How ranks are named; the one that is said to be the cause comes first.
NAMED = [r"Root Cause.*?rank\s+: (\d)", r"\[(\d):\w+\]", r"\brank ?(\d)"]

CLUSTER = """\
import ipyparallel
cluster = ipyparallel.Cluster(n=4)
for rank, engine in enumerate(cluster.start_and_connect_sync(activate=True)):
    own = dict(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
    engine.execute(f"import os; os.environ.update({own})", block=True)
"""
AGAIN = """\
%%px
import torch.distributed as dist
dist.is_initialized() and dist.destroy_process_group()
os.environ["MASTER_PORT"] = "{port}"
{program}"""
TORCHRUN = """\
_ = open("job.py", "w").write({program!r})
!torchrun --standalone --nproc-per-node 4 job.py"""
LAUNCHER = """\
def job():
{indented}
notebook_launcher(job, num_processes=4, use_port="{port}")"""
# The notebook's first cell; a cell; at which of its lines, as the way counts them, the program begins.
WAYS = {
    "%%torchrun": ("%load_ext ppedu", "%%torchrun -n 4\n{program}", 2),
    "!torchrun": ("", TORCHRUN, 1),
    "ipyparallel": (CLUSTER, AGAIN, 4),
    "accelerate": ("from accelerate import notebook_launcher", LAUNCHER, 2),
}


def cell(way, program):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return WAYS[way][1].format(program=program, indented=textwrap.indent(program, "    "), port=port)


def marked(mark):
    """The processes that were started with `mark` in their environment and have not ended."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and mark.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


def end(mark):
    while left := marked(mark):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def megabytes(mark):
    """The memory of all processes with `mark`; what several share is counted once."""
    return sum(memory(process) or 0 for process in marked(mark)) / 2**20


def until(condition, limit):
    """Wait until `condition()` holds: for how many seconds; None if it does not within `limit` of them."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() > start + limit:
            return None
        time.sleep(0.01)
    return time.monotonic() - start


def ready(way):
    """A kernel in which a cell has run well; `.cold` is how many seconds that took once it could be talked to."""
    folder, mark = tempfile.mkdtemp(), uuid.uuid4().hex
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where torchrun is
    manager = KernelManager(kernel_name="python3")
    environment = os.environ | {"PPEDU_BENCH_KERNEL": mark, "PATH": path, "IPYTHONDIR": folder}
    manager.start_kernel(cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(IDLE)
    kernel = SimpleNamespace(way=way, manager=manager, client=client, folder=Path(folder), mark=mark)
    start = time.monotonic()
    outcome(kernel, client.execute(WAYS[way][0]))
    well(kernel)
    kernel.cold = time.monotonic() - start
    return kernel


def close(kernel):
    kernel.client.stop_channels()
    end(kernel.mark)


def begin(kernel, program, ranks=4):
    """Send a request to run a program, and wait until all its ranks have met."""
    for path in [*kernel.folder.glob("rank?"), *kernel.folder.glob("go")]:
        path.unlink()
    request = kernel.client.execute(cell(kernel.way, program))
    until(lambda: sum(path.stat().st_size > 0 for path in kernel.folder.glob("rank?")) >= ranks, IDLE)
    return request


def outcome(kernel, request, limit=IDLE):
    """For how long until the cell is idle, None if it is not within `limit` seconds; and what it has shown."""
    text, start = "", time.monotonic()
    while (left := start + limit - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            message = kernel.client.get_iopub_msg(timeout=left)
            if message["parent_header"].get("msg_id") == request:
                content = message["content"]
                if content.get("execution_state") == "idle":
                    return time.monotonic() - start, text
                shown = [content.get("text", ""), *content.get("traceback", [])]
                text += re.sub(r"\x1b\[[\d;]*m", "", "\n".join(shown))
    return None, text


def well(kernel, limit=IDLE):
    """For how long a cell runs whose ranks meet and end; None if they do not, or not within `limit` seconds."""
    took, _ = outcome(kernel, begin(kernel, MEET + THERE + END, 0), limit)
    sums = [path.read_text().split()[1:] for path in kernel.folder.glob("rank?")]
    return took if sums == [["15"]] * 4 else None


def provoke(kernel, failure, program):
    """Let a program fail: for how long until idle, None if that takes too long; and what has been shown."""
    request = begin(kernel, program)
    time.sleep(DEADLOCK if failure == "deadlock" else 0.3)
    if failure == "rank 2 raises":
        (kernel.folder / "go").touch()
    elif failure == "rank 2 killed":
        with contextlib.suppress(FileNotFoundError):  # where the ranks did not even start
            os.kill(int((kernel.folder / "rank2").read_text().split()[0]), signal.SIGKILL)
    elif failure == "kernel killed":
        os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
        return until(lambda: not marked(kernel.mark), GONE), ""
    else:
        kernel.manager.interrupt_kernel()
    return outcome(kernel, request)


def told(text, ranks, program, first):
    """Are the right ranks named in what was shown, and the right lines of the program, whose first has that number?"""
    if not ranks:
        return "–", "–"
    named = [int(rank) for pattern in NAMED for rank in re.findall(pattern, text, re.DOTALL)]
    right = ranks <= set(named if len(ranks) > 1 else named[:1])
    lines = [(n, line) for n, line in enumerate(program.splitlines(), first) if line.endswith("here")]
    shown = [re.search(rf"(line {n}\b[^\n]*\n?|> {n} )[^\n]*{re.escape(line)}", text) for n, line in lines]
    return "yes" if right else "wrong" if named else "no", "yes" if all(shown) else "no"


def costs(kernel):
    """Print what a cell costs: the median of those that ran well, as a launcher's ranks may not all start."""
    times = []
    for _ in range(REPEATS):
        if sum(times) < 20 and (took := well(kernel)):
            times.append(took)
    request = begin(kernel, MEET + THERE + WAIT + END)
    memory = megabytes(kernel.mark)
    (kernel.folder / "go").touch()
    outcome(kernel, request)
    later = f"{median(times):.3f} s" if times else "no"
    print(f"  {kernel.way:<35} {kernel.cold:8.2f} s {later:>12} {memory:18.0f} MB", flush=True)


def failures(kernel):
    """Print a line for each failure."""
    way = kernel.way
    for failure, (ending, ranks) in FAILURES.items():
        before, program = marked(kernel.mark), MEET + FAMILY + THERE + ending
        took, text = provoke(kernel, failure, program)
        alive = took is not None and failure != "kernel killed"
        if not alive:
            os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
            before = set()
        own = marked(kernel.mark) - before
        until(lambda own=own, mark=kernel.mark: not own & marked(mark), GONE)
        left = len(own & marked(kernel.mark))
        if not alive:
            close(kernel)
            kernel = ready(way)
        again = well(kernel, NEXT)
        rank, line = told(text, ranks, program, WAYS[way][2])
        after = f"{took:.2f} s" if took is not None else f">{GONE if failure == 'kernel killed' else IDLE} s"
        works = f"{again:.2f} s" if again else "no"
        print(f"  {failure:<15} {way:<19} {after:>8}   {rank:<12} {line:<10} {works:>9} {left:>16}", flush=True)
        if not again:
            close(kernel)
            kernel = ready(way)


def tables(folder):
    last, go, rows, started = time.monotonic() + ALL, Path(folder, "go"), [], []
    print("4 ranks, one all_reduce (bound 0.2 s)   first cell   later cell   memory with 4 ranks", flush=True)
    for way in WAYS:
        rows.append(Path(folder, f"{way}.rows"))
        command = [sys.executable, __file__, way, str(go)]
        started.append(subprocess.Popen(command, stdout=rows[-1].open("w"), start_new_session=True))
        until(lambda: rows[-1].read_text() or started[-1].poll() is not None, last - time.monotonic())
        print(rows[-1].read_text(), end="", flush=True)
    go.touch()
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0, last - time.monotonic()))
    print("4 ranks fail (bound 3 s)              idle after   rank named   line named   next cell   processes left")
    for each in zip_longest(*[file.read_text().splitlines()[1:] for file in rows], fillvalue="  not measured"):
        print(*each, sep="\n")
    print(f"The kernel is killed, too, if not idle within {IDLE} s. Then the next cell is a new kernel's.")
    print("Idle, of a killed kernel: when its last process has ended. Line, of a killed rank: where all were.")


def measure(way, go):
    kernel = ready(way)
    costs(kernel)
    until(Path(go).exists, ALL)
    failures(kernel)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {"PPEDU_BENCH": os.environ.get("PPEDU_BENCH", "") + mark, "TMPDIR": folder}
        tempfile.tempdir = folder
        try:
            measure(*sys.argv[1:]) if sys.argv[1:] else tables(folder)
        finally:
            end(mark)


if __name__ == "__main__":
    main()
