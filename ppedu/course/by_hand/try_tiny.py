"""Does `run_schedule` train as one process does? Try it with schedules that need more and more of it.

usage: python try_tiny.py
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from ppedu.core import Schedule
from ppedu.course.by_hand.tiny import run_schedule
from ppedu.engine.stages.local import local_stages
from ppedu.zoo import schedule

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]  # the last two split backwards
RANKS, MICROBATCHES, SAMPLES, WIDTH = 2, 4, 3, 6
SECONDS = 5  # that a rank waits for a message
START = 30  # seconds until all ranks have started


def stages(count: int) -> list[nn.Module]:
    """Return the stages of a model, with the same weights each time."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def difference(plan: Schedule, rank: int) -> str:
    """Train a step with `run_schedule`, and say how this rank's gradients and loss differ from those of one process."""
    random = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(2, MICROBATCHES, SAMPLES, WIDTH, generator=random)
    whole, model = stages(plan.stages), stages(plan.stages)
    expected = mse_loss(nn.Sequential(*whole)(inputs), targets)
    expected.backward()
    held = {stage: model[stage] for stage in local_stages(plan, rank)}
    loss = run_schedule(plan, held, [*inputs], [*targets], (SAMPLES, WIDTH), mse_loss)
    for stage, module in held.items():
        for ours, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            if ours.grad is None or theirs.grad is None:
                return f"rank {rank}: a weight of stage {stage} has no gradient"
            if not torch.allclose(ours.grad, theirs.grad, atol=1e-6):
                return f"rank {rank}: a gradient of stage {stage} is wrong"
    wanted = expected.item() if plan.stages - 1 in held else 0.0
    return "" if abs(loss.item() - wanted) < 1e-6 else f"rank {rank}: the loss is {loss:.4f} instead of {wanted:.4f}"


def work(rank: int, folder: Path) -> None:
    """Try the schedules on this rank, and write a line about each: empty, or what is wrong, which ends the rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store, wait = f"file://{folder}/store", timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store, rank=rank, world_size=RANKS, timeout=wait)
    with (folder / str(rank)).open("w", encoding="utf-8", buffering=1) as report:
        for name in SCHEDULES:
            try:
                wrong = difference(schedule(name, RANKS, MICROBATCHES), rank)
            except Exception as error:
                text = str(error).splitlines() or ["without a message"]
                wrong = f"rank {rank}: {type(error).__name__}: {text[0]}"
            print(wrong, file=report)
            if wrong:
                os._exit(1)  # at once: the other ranks may wait for this one


def main() -> int:
    """Start the ranks, print how far each schedule got, and return whether one is wrong."""
    with TemporaryDirectory() as made:
        folder, context = Path(made), multiprocessing.get_context("spawn")
        ranks = [context.Process(target=work, args=(rank, folder), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(START + SECONDS * len(SCHEDULES))
            each.kill()
            each.join()
        # The first report to end has the cause; the ranks that wait for that one fail after it.
        files = sorted(folder.glob("[0-9]*"), key=lambda file: file.stat().st_mtime)
        reports = [file.read_text(encoding="utf-8").splitlines() for file in files]
    for place, name in enumerate(SCHEDULES):
        found = [report[place] for report in reports if len(report) > place]
        wrong = [line for line in found if line]
        if len(found) < RANKS:
            wrong.append("a rank ended, or its loop does not")
        if wrong:
            print(f"{name:12} not yet: {wrong[0]}")
            return 1
        print(f"{name:12} right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
