"""Memory and longest cell of each lesson on one processor, for `make bench`.

The memory is that of the kernel and its ranks together, without JupyterLab. It should stay under 1 GB, and the longest
cell under 30 s. Widgets are real widgets here, as for a learner.
"""

import os
import threading
import time
import uuid
from pathlib import Path

import nbformat
from bench_ranks import megabytes
from nbclient import NotebookClient

LESSONS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def measure(lesson):
    """The most megabytes at any time; for how many seconds each code cell ran, by its place."""
    mark, seconds, sizes, ended = f"PPEDU_BENCH={uuid.uuid4().hex}", {}, [], threading.Event()
    page = nbformat.read(lesson, as_version=4)
    client = NotebookClient(page, timeout=300, resources={"metadata": {"path": str(lesson.parent)}})
    client.comm_open_handlers.clear()  # https://github.com/jupyter/nbclient/issues/312: with an Output it may hang

    def watch():
        while not ended.wait(0.1):
            sizes.append(megabytes(mark))

    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})  # and so has all that is started from here
    with client.setup_kernel(env=os.environ | dict([mark.split("=")], OMP_NUM_THREADS="1")):
        os.sched_setaffinity(0, {max(processors)})
        watcher = threading.Thread(target=watch)
        watcher.start()
        for place, cell in enumerate(page.cells):
            if cell.cell_type == "code":
                begun = time.monotonic()
                client.execute_cell(cell, place)
                seconds[place] = time.monotonic() - begun
        ended.set()
        watcher.join()
    os.sched_setaffinity(0, processors)
    return max(sizes), seconds


def main():
    print("Lessons with one processor: memory of kernel and ranks (PSS) at its largest; longest cell; all cells")
    for lesson in LESSONS:
        most, seconds = measure(lesson)
        cell, longest = max(seconds.items(), key=lambda item: item[1])
        line = f"{most:4.0f} MB {longest:7.1f} s (cell {cell:2}) {sum(seconds.values()):7.1f} s"
        print(f"  {lesson.stem:28} {line}", flush=True)


if __name__ == "__main__":
    main()
