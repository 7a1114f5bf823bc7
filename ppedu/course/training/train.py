"""Train the toy GPT on any number of ranks: `torchrun --nproc-per-node 4 -m ppedu.course.training.train`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from ppedu.core import PipelineError, Schedule, SettingError, offload
from ppedu.core.files import named
from ppedu.core.numeric import plural
from ppedu.core.validate import require_count, require_instance, require_number
from ppedu.course.training.data import Text
from ppedu.course.training.gpt import GPT, GPTConfig, next_token_loss
from ppedu.course.training.report import Report
from ppedu.engine.pipeline import Pipeline
from ppedu.engine.precision import LossScale, MasterWeights
from ppedu.engine.ranks.comm import PipelineGroup, place, side_by_side
from ppedu.engine.stages.local import local_stages
from ppedu.engine.stages.stage import Stage
from ppedu.planning.choice import load
from ppedu.sim import Timeline
from ppedu.view.saving import require_savable
from ppedu.zoo import schedule
from ppedu.zoo.options import option

# By name: the dtype for autocast.
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SEED = 10**9  # so that the generators' seeds, which combine it with the step, stay valid
PIPELINE, MODEL, TRAINING, FILES = "the pipeline", "the model", "the training", "files"  # groups of the command line


def setting(default: Any, group: str, metavar: str, meaning: str) -> Any:
    """Return a dataclass field that the command line can set; `meaning` is its help text there."""
    return field(default=default, metadata={"group": group, "metavar": metavar, "meaning": meaning})


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run. `ppedu train --help` describes those that are not listed here.

    Args:
        schedule, options: A name in `pp.schedules()`, and options of that schedule, such as {"chunks": 3}.
        context, layers, heads, width, tied: Of the model; see `GPTConfig`.
        cut: The number of pieces in each stage, as in `Choice.partition` of a plan: embedding and head are pieces, too.
            By default, the blocks are divided evenly.
        recompute: Keep only the stages' inputs, and compute activations again for the backwards.
        offload: The pairs (stage, microbatch) whose activations go to the host meanwhile, as a plan chooses them.
        clip: The maximum norm of all gradients; None for no clipping.
        dtype: "float32", or "bfloat16" or "float16" for forwards in mixed precision; float16 with a scale for the loss.
        weights: "float32", or "bfloat16" to store the weights and compute in it, accumulate gradients in fp32 and step
            the optimizer on fp32 copies.
        seed: Of the weights and the batches, which do not depend on the number of ranks.
        save: A folder for checkpoints. Training resumes from the checkpoint in it, if that was made with the same
            model, seed and alphabet.

    Raises:
        SettingError: A setting is invalid, or two do not fit together.
    """

    schedule: str = setting("1f1b", PIPELINE, "NAME", "a schedule that `ppedu list` shows")
    steps: int = setting(50, TRAINING, "N", "optimizer steps")
    microbatches: int = setting(8, PIPELINE, "N", "microbatches into which a pipeline cuts its part of the batch")
    batch: int = setting(32, TRAINING, "N", "sequences in a step")
    context: int = setting(64, MODEL, "N", "characters in a sequence")
    layers: int = setting(4, MODEL, "N", "transformer blocks")
    heads: int = setting(4, MODEL, "N", "attention heads")
    width: int = setting(64, MODEL, "N", "width of the residual stream")
    lr: float = setting(3e-3, TRAINING, "RATE", "learning rate of AdamW")
    seed: int = setting(0, TRAINING, "N", "seed of the weights and the batches")
    text: str | None = setting(None, FILES, "FILE", "train on this text instead of Python's documentation")
    options: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    cut: Sequence[int] | None = None
    recompute: bool = False
    offload: Sequence[tuple[int, int]] = ()
    clip: float | None = setting(None, TRAINING, "NORM", "maximum norm of all gradients")
    dtype: str = setting("float32", TRAINING, "NAME", "float32, or bfloat16 or float16 for mixed precision")
    weights: str = setting("float32", TRAINING, "NAME", "float32, or bfloat16 with fp32 gradients and copies")
    replicas: int = setting(1, PIPELINE, "N", "pipelines side by side, each with its part of the ranks and the batch")
    save: str | None = setting(
        None,
        FILES,
        "FOLDER",
        "write checkpoints to this folder, and resume from the one in it; load only checkpoints that you trust, "
        "because each contains a pickle (.metadata of torch), and a pickle can run any code",
    )
    every: int = setting(10, FILES, "N", "steps between two checkpoints")

    def __post_init__(self) -> None:
        for name in ("steps", "microbatches", "batch", "replicas", "every"):
            require_count(name, getattr(self, name))
        if require_count("seed", self.seed, least=0) > MAX_SEED:
            raise SettingError(f"seed must be at most {MAX_SEED}; got {self.seed}")
        self._require_divisible(self.batch, f"a batch of {self.batch}")
        if self.batch // self.replicas < self.microbatches:
            raise SettingError(
                f"{self.batch // self.replicas} sequences per pipeline cannot be cut into {self.microbatches} "
                f"microbatches; take a batch of at least {self.replicas * self.microbatches}, or fewer microbatches"
            )
        require_number("lr", self.lr, lambda number: number > 0, "a number above 0")
        if self.clip is not None:
            require_number("clip", self.clip, lambda number: number > 0, "a number above 0")
        if self.dtype not in list(DTYPES):  # a list, because `in` would raise TypeError for an unhashable value
            raise SettingError(f"dtype must be {' or '.join(DTYPES)}; got {self.dtype!r}")
        if self.cut is not None:
            self._require_cut(self.cut)
        if self.weights not in ["float32", "bfloat16"]:
            raise SettingError(f"weights must be float32 or bfloat16; got {self.weights!r}")
        if self.weights != "float32" and (self.dtype != "float32" or self.save is not None):
            raise SettingError(
                "bfloat16 weights compute in bfloat16, and their fp32 copies are not in a checkpoint; leave out dtype "
                "and save"
            )
        require_instance("options", self.options, Mapping, "a dict such as {'chunks': 3}")
        for file in (self.text, self.save):
            if file is not None:
                named(file)
        self.gpt(vocabulary=1)

    def _require_cut(self, cut: Sequence[int]) -> None:
        require_instance("cut", cut, (list, tuple), "the number of pieces in each stage, such as [1, 5]")
        if self.tied:
            raise SettingError("tied weights need the embedding in the first stage; leave out tied or the cut")
        pieces = sum(require_count("the pieces of a stage", each, least=0) for each in cut)
        if pieces != self.layers + 2:
            raise SettingError(
                f"the stages hold {pieces} pieces, and {plural(self.layers, 'layer')}, the embedding and "
                f"the head are {self.layers + 2}; take {pieces - 2} layers, or another cut"
            )

    def _require_divisible(self, number: int, in_words: str) -> None:
        if number % self.replicas:
            raise SettingError(
                f"{in_words} cannot be divided equally among {self.replicas} replicas; "
                f"take a multiple of {self.replicas}"
            )

    def gpt(self, vocabulary: int) -> GPTConfig:
        """Return the size of the model for a text with `vocabulary` different characters."""
        return GPTConfig(vocabulary, self.context, self.layers, self.heads, self.width, self.tied)

    def fixed(self, text: Text) -> dict[str, Any]:
        """Return the settings that a run must share with the checkpoint from which it resumes."""
        return asdict(self.gpt(len(text.characters))) | {"characters": text.characters, "seed": self.seed}

    def schedule_on(self, ranks: int) -> Schedule:
        """Return the schedule of each pipeline if `ranks` ranks train, replicas included.

        Raises:
            SettingError: the schedule is unknown, the replicas cannot divide the ranks equally, or there are more
                stages than layers.
            ScheduleError: the schedule is not legal.
        """
        self._require_divisible(ranks, f"{ranks} ranks")
        made = schedule(self.schedule, ranks // self.replicas, self.microbatches, **self.options)
        if self.offload:
            made = offload(made, self.offload)
        if self.cut is not None:
            if len(self.cut) != made.stages:
                raise SettingError(
                    f"the cut is for {plural(len(self.cut), 'stage')}; {made.name} has {made.stages} on "
                    f"{plural(made.ranks, 'rank')}"
                )
            for rank in range(made.ranks):
                if not any(self.cut[stage] for stage in made.placement.stages_of(rank)):
                    raise SettingError(f"rank {rank} has nothing to train in the cut {[*self.cut]}; take fewer ranks")
        elif made.stages > self.layers:
            raise SettingError(
                f"{self.layers} layers cannot be cut into the {made.stages} stages that {made.name} has "
                f"on {made.ranks} ranks; take at least {made.stages} layers"
            )
        made.validate()
        return made


@dataclass(frozen=True)
class TrainResult:
    """The loss of every step, including those before the checkpoint that was resumed, and this rank's pipeline."""

    losses: list[float]
    pipeline: Pipeline

    @property
    def timeline(self) -> Timeline | None:
        """The measured timeline of this pipeline's last step; None if the checkpoint had all steps already."""
        return self.pipeline.timeline if self.pipeline.results else None


def train_gpt(
    config: TrainConfig | None = None,
    group: PipelineGroup | None = None,
    progress: bool = False,
    device: torch.device | str | None = None,
    each: Callable[[TrainResult], object] | None = None,
) -> TrainResult:
    """Train the toy GPT on the ranks of `group`. Every rank must call it with the same `config`.

    Args:
        group: All ranks that train, replicas included; by default all ranks of the program.
        progress: Show a progress bar on the first rank's stderr.
        device: Of this rank's stages; by default `group.device`.
        each: Called after every step with the result so far.

    Raises:
        SettingError: The settings do not fit the number of ranks, or the text is too short.
        PipelineError: A checkpoint cannot be written or read, has another model, seed or alphabet, or another run is
            saving in the folder.
    """
    config, group = TrainConfig() if config is None else config, PipelineGroup.of(group)
    require_instance("config", config, TrainConfig, "a TrainConfig, such as TrainConfig(steps=50)")
    made = config.schedule_on(group.size)
    text = Text(config.text)
    model = config.gpt(len(text.characters))
    device = torch.device(device or group.device)
    own, beside = side_by_side(group, config.replicas)
    # The cut [2, 3, 1] gives the stages the pieces 0 and 1, 2 to 4, and 5.
    ends = accumulate(config.cut or (), initial=0)
    pieces = [range(begin, end) for begin, end in pairwise(ends)] or None
    modules = {
        stage: GPT.stage(model, stage, made.stages, config.seed, pieces).to(device, getattr(torch, config.weights))
        for stage in local_stages(made, own.rank)
    }
    tied, autocast = model.ties(made.stages), DTYPES[config.dtype]
    stages = {stage: Stage(module, stage, recompute=config.recompute) for stage, module in modules.items()}
    pipeline = Pipeline(made, stages, next_token_loss, own, replicas=beside, tied=tied, autocast=autocast)
    weights = [weight for module in modules.values() for weight in module.parameters()]
    masters = MasterWeights(weights) if config.weights != "float32" else None
    optimizer = torch.optim.AdamW(masters.copies if masters else weights, lr=config.lr)
    scale = LossScale() if config.dtype == "float16" else None
    losses: list[float] = []
    if config.save is not None:
        from ppedu.engine.stages.checkpoint import Checkpoints  # imported here, because it takes a second

        states = {"loss scale": scale} if scale else {}
        checkpoints = Checkpoints(config.save, modules.values(), optimizer, config.fixed(text), group, states)
        losses = checkpoints.load()
        pipeline.steps = len(losses)
        if losses and group.is_first:
            print(f"resuming after step {len(losses)}, from the checkpoint in {config.save}", file=sys.stderr)

    steps, bar = range(len(losses), config.steps), None
    if progress and group.is_first:
        with suppress(ModuleNotFoundError):  # tqdm is not needed to train
            from tqdm import tqdm

            bar = tqdm(steps, "training", config.steps, initial=len(losses), unit="step")
    for step in steps if bar is None else bar:
        batch = text.batch(config.batch, config.context, seed=config.seed * 1_000_003 + step)
        replica = group.rank // own.size
        inputs, targets = (tokens.chunk(config.replicas)[replica].to(device) for tokens in batch)
        loss = pipeline.step(inputs, targets, loss_scale=scale.value if scale else 1.0)
        if scale:  # a norm that is not finite is an overflow
            norm = pipeline.clip_grad_norm(config.clip or math.inf)
        elif config.clip is not None:
            pipeline.clip_grad_norm(config.clip, error_if_nonfinite=True)
        if scale is None or scale.update(norm):  # after an overflow, the weights stay as they are
            with masters or nullcontext():
                optimizer.step()
        for module in modules.values():
            module.zero_grad()
        losses.append(loss.item())
        if bar is not None:
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if config.save is not None and (len(losses) % config.every == 0 or len(losses) == config.steps):
            checkpoints.save(losses)
        if each is not None:
            each(TrainResult(losses, pipeline))
    return TrainResult(losses, pipeline)


def parser(**options: Any) -> argparse.ArgumentParser:
    """Return the parser of the command line: the settings of `TrainConfig`, and `--out`.

    Args:
        options: Of ArgumentParser.
    """
    options |= {"description": "Train a toy GPT with pipeline parallelism.", "argument_default": argparse.SUPPRESS}
    made = argparse.ArgumentParser(**options)  # what is not given is left out: its default is that of `TrainConfig`
    groups = {title: made.add_argument_group(title) for title in (PIPELINE, MODEL, TRAINING, FILES)}
    for each in fields(TrainConfig):
        if each.metadata:
            first_type = str(each.type).partition(" ")[0]  # annotations are text here: "float | None" begins with float
            kind = {"int": int, "float": float}.get(first_type, str)
            text = each.metadata["meaning"] + ("" if each.default is None else f" (default: {each.default})")
            groups[each.metadata["group"]].add_argument(
                f"--{each.name}", type=kind, metavar=each.metadata["metavar"], help=text
            )
    text = "an option of the schedule, as `list` shows them: -o chunks=3; may be repeated"
    how: dict[str, Any] = {"type": option, "action": "append", "dest": "options", "metavar": "NAME=VALUE"}
    groups[PIPELINE].add_argument("-o", "--option", help=text, **how)
    text = "use the token embedding's weights in the head"
    groups[MODEL].add_argument("--tied", action="store_true", help=text)
    text = "keep only the stages' inputs, and compute activations again for the backwards"
    groups[TRAINING].add_argument("--recompute", action="store_true", help=text)
    text = "train with the schedule, partition, microbatches and ranks of a plan: a file of `ppedu plan --save`"
    groups[PIPELINE].add_argument("--plan", metavar="FILE", default=None, help=text)
    text = "for the timeline (default: timeline.json)"
    groups[FILES].add_argument("--out", metavar="FILE", default="timeline.json", help=text)
    return made


def prepare(options: argparse.Namespace, ranks: int) -> TrainConfig:
    """Return the settings of a command line for `ranks` ranks, after checking all except the checkpoint folder.

    Args:
        options: As parsed by `parser`.

    Raises:
        SettingError: a setting is invalid.
        PipelineError: `options.out` cannot be written, or the text cannot be read.
    """
    settings = {each.name: vars(options)[each.name] for each in fields(TrainConfig) if each.name in options}
    if "options" in settings:
        settings["options"] = dict(settings["options"])
    if "every" in settings and "save" not in settings:
        raise SettingError("--every is for checkpoints; add --save and a folder, or leave it out")
    if options.plan is not None:
        settings |= _planned(options.plan, settings, ranks)
    config = TrainConfig(**settings)
    config.schedule_on(ranks)
    require_savable(options.out)
    Text(config.text).batch(1, config.context, seed=0)
    return config


def _planned(path: str, given: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the settings that a saved plan decides.

    Args:
        given: The settings on the command line.
    """
    plan = load(path)
    wanted = plan.pop("ranks") * given.get("replicas", 1)
    if ranks != wanted:
        raise SettingError(
            f"{path!r} is a plan for {plural(wanted, 'rank')}, replicas included; got {ranks}; start -n {wanted}"
        )
    if several := ["-o" if name == "options" else f"--{name}" for name in plan if name in given]:
        raise SettingError(f"the plan decides {', '.join(plan)}; leave out {' and '.join(several)}")
    if "layers" in given:
        return plan
    return {**plan, "layers": sum(plan["cut"]) - 2}  # the embedding and the head are pieces, too


def require_saved(config: TrainConfig) -> None:
    """Raise PipelineError unless the folder `config.save` can be used and its checkpoint, if any, can be resumed."""
    if config.save is not None:
        from ppedu.engine.stages.folder import Folder

        Folder(config.save, config.fixed(Text(config.text))).require_usable()


def main() -> None:
    """Train on one rank of `torchrun … -m ppedu.course.training.train`."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options = parser(prog="ppedu.course.training.train").parse_args()
    config = prepare(options, ranks)
    torch.set_num_threads(1)
    device, backend = place()
    if ranks > 1:
        dist.init_process_group(backend)
    try:
        report = Report()
        result = train_gpt(config, progress=True, device=device, each=report)
        found = report.lines(config, result, len(Text(config.text).characters)) if result.timeline else []
        if rank == 0:
            print(f"loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}")
            if result.timeline is None:
                print(f"{config.save} holds {len(result.losses)} steps already; take more --steps to continue")
            else:
                result.timeline.save(options.out)
                print(*found, sep="\n")
                print(f"{result.timeline.summary()}; saved to {options.out}")
    finally:
        failed = sys.exc_info()[0] is not None
        if dist.is_initialized() and not (failed and backend == "nccl"):  # it would wait for messages that never come
            dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        print(f"ppedu: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # Python's own end would wait for NCCL as well
