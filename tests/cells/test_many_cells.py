"""Hundreds of cells in one kernel, many of which fail: nothing is left behind, and memory does not grow."""

import itertools
import os
import random
import re
import threading
import time
import uuid
from pathlib import Path

import pytest

from ppedu.launch.resources import memory

HEALTHY = """%%torchrun -n 3
import torch, torch.distributed as dist, ppedu as pp
dist.init_process_group("gloo")
x = torch.tensor({number} + dist.get_rank())
dist.all_reduce(x)
print(x.item())
pp.give_back(x.item())"""

BEGIN = """%%torchrun -n 3 --timeout {timeout}
import os, subprocess, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.zeros(1)
subprocess.Popen(["sleep", "1000"], start_new_session=rank == 1)
dist.barrier()
if rank == 0: open("here", "w")
"""

FAILURES = {
    "if rank == 2: [][5]\ndist.barrier()": "rank 2 failed:",
    "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()": "rank 1 was killed by SIGKILL",
    "if rank == 1: os._exit(4)\ndist.barrier()": "rank 1 exited with code 4",
    "dist.recv(x, src=(rank + 1) % 3)": "all receive, none sends",  # until the timeout
    "time.sleep(1000)  # until the interrupt": "interrupted\n",
    "while True: pass  # until the interrupt": "interrupted\n",
}


def interrupt(process, file):
    while not file.exists():
        time.sleep(0.01)
    os.kill(process, 2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cells", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_many_cells_in_a_row_leave_nothing_behind(tmp_path, marked, cells):
    import nbformat
    from nbclient import NotebookClient

    mark, page = uuid.uuid4().hex, nbformat.v4.new_notebook()
    (tmp_path / "temporary").mkdir()
    client = NotebookClient(page, kernel_name="python3", timeout=100, allow_errors=True)

    def run(source):
        page.cells = [nbformat.v4.new_code_cell(source)]
        outputs = client.execute_cell(page.cells[0], 0).outputs
        errors = ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]
        text = "".join(output.text for output in outputs if output.output_type == "stream")
        return text, re.sub(r"\x1b\[[\d;]*m", "", "".join(errors))

    def state():
        """Return the number of processes and open files, the temporary files, and the memory of the kernel."""
        files = sorted(path.name for path in (tmp_path / "temporary").iterdir())
        return (len(marked(mark)), len(list(Path(f"/proc/{kernel}/fd").iterdir())), files), memory(kernel)

    environment = os.environ | {"PPEDU_TEST": mark, "TMPDIR": str(tmp_path / "temporary")}
    failures = list(FAILURES.items())
    random.Random(cells).shuffle(failures)
    next_failure = itertools.cycle(failures)
    with client.setup_kernel(cwd=str(tmp_path), env=environment):
        kernel = int(run("import os; print(os.getpid())")[0])
        run("%load_ext ppedu")
        for number in range(-6, cells):
            if number % 3 == 0:  # the first cells are warm-up
                end, says = next(next_failure)
                (tmp_path / "here").unlink(missing_ok=True)
                if "interrupt" in end:
                    threading.Thread(target=interrupt, args=[kernel, tmp_path / "here"]).start()
                _, error = run(BEGIN.format(timeout=4 if "recv" in end else 60) + end)
                assert says in error, end
            else:
                total = 3 * number + 3
                assert run(HEALTHY.format(number=number)) == ("".join(f"[{rank}] {total}\n" for rank in range(3)), "")
                assert run("print(results)")[0] == f"[{total}, {total}, {total}]\n"
            if number == -1:
                before, small = state()
        after, large = state()
    assert after == before and after[0] == 2  # the kernel and the launcher
    assert large - small < 20 << 20
    end = time.monotonic() + 20
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked(mark) == []
