"""Train the toy GPT on however many ranks there are: `torchrun --nproc-per-node 4 -m ppedu.run.train`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ppedu.core.errors import PipelineError, SettingError, require_count
from ppedu.core.partition import evenly
from ppedu.core.timeline import Timeline
from ppedu.run.comm import PipelineGroup
from ppedu.run.data import Text
from ppedu.run.gpt import GPT, GPTConfig, next_token_loss
from ppedu.run.loops import LOOPS, measured
from ppedu.run.stage import Stage
from ppedu.view import require_savable

MOST_SEED = 10**9  # a generator's seed is made of it and the step


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, and how.

    schedule: one of `LOOPS`. steps: optimizer steps. batch: sequences in a step, a multiple of `microbatches`.
    context, layers, heads, width: of the GPT. lr: AdamW's learning rate. text: a file in place of Python's
    documentation. seed: of the weights and the batches; the number of ranks changes neither.

    Raises:
        SettingError: a setting cannot work.
    """

    schedule: str = "1f1b"
    steps: int = 50
    microbatches: int = 8
    batch: int = 32
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 64
    lr: float = 3e-3
    seed: int = 0
    text: str | None = None

    def __post_init__(self) -> None:
        if self.schedule not in LOOPS:
            raise SettingError(f"there is no loop for the schedule {self.schedule!r}; there is: {', '.join(LOOPS)}")
        require_count("steps", self.steps)
        require_count("microbatches", self.microbatches)
        require_count("batch", self.batch)
        if require_count("seed", self.seed, least=0) > MOST_SEED:
            raise SettingError(f"seed must be at most {MOST_SEED}; got {self.seed}")
        if self.batch % self.microbatches:
            raise SettingError(
                f"a batch of {self.batch} cannot be cut into {self.microbatches} equal microbatches; "
                f"take a batch that is a multiple of {self.microbatches}"
            )
        if not isinstance(self.lr, (int, float)) or not self.lr > 0:
            raise SettingError(f"lr must be above 0; got {self.lr!r}")
        self.gpt(vocabulary=1)

    def gpt(self, vocabulary: int) -> GPTConfig:
        return GPTConfig(vocabulary, self.context, self.layers, self.heads, self.width)

    def check_ranks(self, ranks: int) -> None:
        """Return if the model can be cut for so many ranks.

        Raises:
            SettingError: there are more ranks, and so stages, than layers.
        """
        evenly(self.layers, ranks)


@dataclass(frozen=True)
class TrainResult:
    """What came out: the loss of every step, the last step's measured timeline (on rank 0), this rank's stage."""

    losses: list[float]
    timeline: Timeline | None
    stage: Stage


def train_gpt(
    config: TrainConfig | None = None, group: PipelineGroup | None = None, progress: bool = False
) -> TrainResult:
    """Train on the ranks of `group`, one stage on each; every rank must call it with the same `config`.

    progress: rank 0 shows a progress bar on stderr.

    Raises:
        SettingError: the model cannot be cut for this many ranks, or the text is too short.
    """
    config, group = config or TrainConfig(), group or PipelineGroup.world()
    config.check_ranks(group.size)
    text = Text(config.text)
    model = config.gpt(len(text.characters))
    module = GPT.stage(model, group.rank, group.size, config.seed).to(group.device)
    stage = Stage(module, group.rank, next_token_loss if group.is_last else None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.lr)
    step_through = LOOPS[config.schedule]
    size = config.batch // config.microbatches
    shape = (size, config.context, config.width)

    losses = []
    bar = tqdm(range(config.steps), disable=not (progress and group.is_first), desc="training", unit="step")
    for step in bar:
        batch = text.batch(config.batch, config.context, seed=config.seed * 1_000_003 + step)
        inputs, targets = (tokens.to(group.device).split(size) for tokens in batch)
        loss = step_through(stage, inputs, targets, shape, group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_from_last(loss, group))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return TrainResult(losses, measured(config.schedule, stage, group), stage)


def _from_last(loss: torch.Tensor, group: PipelineGroup) -> float:
    """The last rank's loss, on every rank."""
    loss = loss.to(group.device)
    if group.size > 1:
        dist.broadcast(loss, group.peer(group.size - 1), group.process_group)
    return loss.item()


def parser(**options: Any) -> argparse.ArgumentParser:
    """The command line: each setting of `TrainConfig`, and `--out`. `options` go to argparse."""
    made = argparse.ArgumentParser(description="Train a toy GPT with pipeline parallelism.", **options)
    meaning = {
        "schedule": f"one of {', '.join(LOOPS)}",
        "steps": "optimizer steps",
        "microbatches": "pieces that the batch is cut into",
        "batch": "sequences in a step",
        "context": "characters in a sequence",
        "layers": "transformer blocks",
        "heads": "attention heads",
        "width": "width of the residual stream",
        "lr": "AdamW's learning rate",
        "seed": "seed of the weights and the batches",
        "text": "a text file to train on, in place of Python's documentation",
    }
    for name, default in vars(TrainConfig()).items():
        kind = str if default is None else type(default)
        made.add_argument(f"--{name}", type=kind, default=default, help=f"{meaning[name]} (default: {default})")
    made.add_argument("--out", default="timeline.json", help="file for the timeline (default: timeline.json)")
    return made


def prepare(options: argparse.Namespace, ranks: int) -> TrainConfig:
    """The settings, once it is sure that training can start and its result can be saved.

    Raises:
        SettingError: a setting cannot work.
        PipelineError: `out` cannot be written, or the text not be read.
    """
    config = TrainConfig(
        **{name: value for name, value in vars(options).items() if name in TrainConfig.__dataclass_fields__}
    )
    config.check_ranks(ranks)
    require_savable(options.out)
    Text(config.text).batch(1, config.context, seed=0)
    return config


def main() -> None:
    """One rank of `torchrun … -m ppedu.run.train`."""
    ranks, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    options = parser(prog="ppedu.run.train").parse_args()
    config = prepare(options, ranks)
    torch.set_num_threads(1)
    if ranks > 1:
        # One GPU for each rank of this machine, or the CPU for all of them.
        gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if gpus:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if gpus else "gloo")
    try:
        result = train_gpt(config, progress=True)
        if result.timeline is not None:
            result.timeline.save(options.out)
            print(f"loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}")
            print(f"{result.timeline.summary()}; saved to {options.out}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        sys.exit(f"ppedu: {error}")
