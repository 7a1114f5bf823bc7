"""Train the toy GPT on however many ranks there are: `torchrun --nproc-per-node 4 -m ppedu.run.train`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ppedu.core.display import require_savable
from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.files import named
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_count, require_instance
from ppedu.run.comm import PipelineGroup, place
from ppedu.run.data import Text
from ppedu.run.gpt import GPT, GPTConfig, next_token_loss
from ppedu.run.pipeline import Pipeline, local_stages
from ppedu.zoo import schedule
from ppedu.zoo.options import option

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}  # and what forwards are autocast to
MOST_SEED = 10**9  # a generator's seed is made of it and the step


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, and how.

    schedule: any name in `pp.schedules()`. options: of the schedule, such as {"chunks": 3}. steps: optimizer steps.
    batch: sequences in a step. microbatches: pieces that a pipeline cuts its part of the batch into.
    context, layers, heads, width, tied: of the GPT. lr: AdamW's learning rate. clip: the most that the norm of all
    gradients may be. dtype: "float32", or "bfloat16" for forwards in mixed precision. seed: of the weights and the
    batches; the number of ranks changes neither. text: a file in place of Python's documentation.
    replicas: pipelines side by side, each of which takes its part of the batch.
    save: a folder for checkpoints; training goes on from the one that is there, if it is of the same model, the same
    seed and a text of the same characters. every: steps from one to the next.

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
    options: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    clip: float | None = None
    dtype: str = "float32"
    replicas: int = 1
    save: str | None = None
    every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "microbatches", "batch", "replicas", "every"):
            require_count(name, getattr(self, name))
        if require_count("seed", self.seed, least=0) > MOST_SEED:
            raise SettingError(f"seed must be at most {MOST_SEED}; got {self.seed}")
        if self.batch % self.replicas:
            raise SettingError(
                f"a batch of {self.batch} cannot be shared equally by {self.replicas} replicas; "
                f"take a multiple of {self.replicas}"
            )
        if self.batch // self.replicas < self.microbatches:
            raise SettingError(
                f"{self.batch // self.replicas} sequences for a pipeline cannot be cut into {self.microbatches} "
                f"microbatches; take a batch of at least {self.replicas * self.microbatches}, or fewer microbatches"
            )
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value > 0) and (name, value) != ("clip", None):
                raise SettingError(f"{name} must be above 0; got {value!r}")
        if self.dtype not in list(DTYPES):  # a list, so that a value that cannot be hashed is refused as well
            raise SettingError(f"dtype must be {' or '.join(DTYPES)}; got {self.dtype!r}")
        if not isinstance(self.options, Mapping):
            raise SettingError(f"options must be a dict such as {{'chunks': 3}}; got {self.options!r}")
        for file in (self.text, self.save):
            if file is not None:
                named(file)
        self.gpt(vocabulary=1)

    def gpt(self, vocabulary: int) -> GPTConfig:
        return GPTConfig(vocabulary, self.context, self.layers, self.heads, self.width, self.tied)

    def fixed(self, text: Text) -> dict[str, Any]:
        """Return the settings that must be the same for one run to go on from the checkpoint of another."""
        return asdict(self.gpt(len(text.characters))) | {"characters": text.characters, "seed": self.seed}

    def schedule_on(self, ranks: int) -> Schedule:
        """What each pipeline runs, where so many ranks train.

        Raises:
            SettingError: there is no such schedule, the replicas cannot share the ranks, or there are more stages than
                layers.
            ScheduleError: the schedule is not legal.
        """
        if ranks % self.replicas:
            raise SettingError(
                f"{ranks} ranks cannot be shared equally by {self.replicas} replicas; "
                f"take a multiple of {self.replicas}"
            )
        made = schedule(self.schedule, ranks // self.replicas, self.microbatches, **self.options)
        if made.stages > self.layers:
            raise SettingError(
                f"{self.layers} layers cannot be cut into the {made.stages} stages that {made.name} has "
                f"on {made.ranks} ranks; take at least {made.stages} layers"
            )
        made.validate()
        return made


@dataclass(frozen=True)
class TrainResult:
    """What came out: the loss of every step, those before a checkpoint included, and this rank's pipeline."""

    losses: list[float]
    pipeline: Pipeline

    @property
    def timeline(self) -> Timeline | None:
        """The last step of this pipeline's ranks, measured; None where the checkpoint left no step to do."""
        return self.pipeline.timeline if self.pipeline.steps else None


def train_gpt(
    config: TrainConfig | None = None,
    group: PipelineGroup | None = None,
    progress: bool = False,
    device: torch.device | str | None = None,
    each: Callable[[TrainResult], object] | None = None,
) -> TrainResult:
    """Train on the ranks of `group`; every rank must call it with the same `config`.

    progress: the first rank shows a progress bar on stderr. device: where this rank's stages are; by default where the
    group's messages arrive. each: called after every step with what there is until then.

    Raises:
        SettingError: what `TrainConfig.schedule_on` refuses, or a text that is too short.
        PipelineError: a checkpoint cannot be written or read, is of another model, seed or alphabet, or another run
            saves in the folder.
    """
    config, group = TrainConfig() if config is None else config, PipelineGroup.of(group)
    require_instance("config", config, TrainConfig, "a TrainConfig, such as TrainConfig(steps=50)")
    made = config.schedule_on(group.size)
    text = Text(config.text)
    model = config.gpt(len(text.characters))
    device = torch.device(device or group.device)
    own, beside = side_by_side(group, config.replicas)
    modules = {
        stage: GPT.stage(model, stage, made.stages, config.seed).to(device) for stage in local_stages(made, own.rank)
    }
    pipeline = Pipeline(
        made,
        modules,
        next_token_loss,
        own,
        replicas=beside,
        tied=model.ties(made.stages),
        autocast=DTYPES[config.dtype],
    )
    weights = [weight for module in modules.values() for weight in module.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=config.lr)
    losses: list[float] = []
    if config.save is not None:
        from ppedu.run.checkpoint import Checkpoints  # what it needs of torch takes a second to load

        checkpoints = Checkpoints(config.save, modules.values(), optimizer, config.fixed(text), group)
        losses = checkpoints.load()
        if losses and group.is_first:
            print(f"going on after step {len(losses)}, from the checkpoint in {config.save}", file=sys.stderr)

    quiet = not (progress and group.is_first)
    steps = range(len(losses), config.steps)
    bar = tqdm(steps, "training", config.steps, initial=len(losses), disable=quiet, unit="step")
    for step in bar:
        batch = text.batch(config.batch, config.context, seed=config.seed * 1_000_003 + step)
        inputs, targets = (tokens.chunk(config.replicas)[group.rank // own.size].to(device) for tokens in batch)
        loss = pipeline.step(inputs, targets)
        if config.clip is not None:
            pipeline.clip_grad_norm(config.clip, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if config.save is not None and (len(losses) % config.every == 0 or len(losses) == config.steps):
            checkpoints.save(losses)
        if each is not None:
            each(TrainResult(losses, pipeline))
    return TrainResult(losses, pipeline)


def side_by_side(group: PipelineGroup, replicas: int) -> tuple[PipelineGroup, dist.ProcessGroup | None]:
    """This rank's pipeline, one of `replicas` that share the group's ranks in order; and its like in all of them."""
    if replicas == 1:
        return group, None
    size = group.size // replicas
    replica, place = divmod(group.rank, size)
    pipeline = [group.peer(replica * size + each) for each in range(size)]
    beside = [group.peer(each * size + place) for each in range(replicas)]
    # Made by their members alone, as ranks outside `group` have no part in it.
    made = [dist.new_group(ranks, use_local_synchronization=True) for ranks in (pipeline, beside)]
    return PipelineGroup(place, size, made[0]), made[1]


SETTINGS: dict[str, dict[str, tuple[type, str, str]]] = {  # in groups, by name: the type, what it is, what it does
    "the pipeline": {
        "schedule": (str, "NAME", "one that `python -m ppedu list` shows"),
        "microbatches": (int, "N", "pieces that a pipeline cuts its part of the batch into"),
        "replicas": (int, "N", "pipelines side by side, each with its part of the ranks and of the batch"),
    },
    "the model": {
        "layers": (int, "N", "transformer blocks"),
        "heads": (int, "N", "attention heads"),
        "width": (int, "N", "width of the residual stream"),
        "context": (int, "N", "characters in a sequence"),
    },
    "the training": {
        "steps": (int, "N", "optimizer steps"),
        "batch": (int, "N", "sequences in a step"),
        "lr": (float, "RATE", "AdamW's learning rate"),
        "clip": (float, "NORM", "the most that the norm of all gradients may be"),
        "dtype": (str, "NAME", "float32, or bfloat16 for forwards in mixed precision"),
        "seed": (int, "N", "of the weights and the batches"),
    },
    "files": {
        "text": (str, "FILE", "train on this text, in place of Python's documentation"),
        "save": (
            str,
            "FOLDER",
            "write checkpoints there, and go on from the one that is there; load only your own, because torch stores "
            "a pickle (.metadata) in each, and a pickle can run any code",
        ),
        "every": (int, "N", "steps from one checkpoint to the next"),
    },
}


def parser(**options: Any) -> argparse.ArgumentParser:
    """The command line: each setting of `TrainConfig`, and `--out`. `options` go to argparse."""
    made = argparse.ArgumentParser(description="Train a toy GPT with pipeline parallelism.", **options)
    groups = {title: made.add_argument_group(title) for title in SETTINGS}
    for title, settings in SETTINGS.items():
        for name, (kind, metavar, meaning) in settings.items():
            default = getattr(TrainConfig, name)
            told = meaning if default is None else f"{meaning} (default: {default})"
            groups[title].add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=told)
    told = "an option of the schedule, as `list` shows them: -o chunks=3; may be repeated"
    groups["the pipeline"].add_argument(
        "-o", "--option", type=option, action="append", default=[], dest="options", metavar="NAME=VALUE", help=told
    )
    groups["the model"].add_argument("--tied", action="store_true", help="the head has the token embedding's weights")
    groups["files"].add_argument(
        "--out", metavar="FILE", default="timeline.json", help="for the timeline (default: timeline.json)"
    )
    return made


def prepare(options: argparse.Namespace, ranks: int) -> TrainConfig:
    """Return the settings that the command line gives, all of them checked but the folder for checkpoints.

    Raises:
        SettingError: a setting cannot work.
        PipelineError: `out` cannot be written, or the text cannot be read.
    """
    given = {name: value for name, value in vars(options).items() if name in TrainConfig.__dataclass_fields__}
    config = TrainConfig(**given | {"options": dict(options.options)})
    config.schedule_on(ranks)
    require_savable(options.out)
    Text(config.text).batch(1, config.context, seed=0)
    return config


def require_saved(config: TrainConfig) -> None:
    """Raise PipelineError unless checkpoints can be saved as `config` says, and training can go on from those there."""
    if config.save is not None:
        from ppedu.run.checkpoint import require_usable

        require_usable(config.save, config.fixed(Text(config.text)))


def main() -> None:
    """One rank of `torchrun … -m ppedu.run.train`."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options = parser(prog="ppedu.run.train").parse_args()
    config = prepare(options, ranks)
    torch.set_num_threads(1)
    device, backend = place()
    if ranks > 1:
        dist.init_process_group(backend)
    try:
        result = train_gpt(config, progress=True, device=device)
        if rank == 0:
            print(f"loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}")
            if result.timeline is None:
                print(f"{config.save} holds {len(result.losses)} steps already; take more --steps to go on")
            else:
                result.timeline.save(options.out)
                print(f"{result.timeline.summary()}; saved to {options.out}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        sys.exit(f"ppedu: {error}")
