"""Published runs and what ppedu says of them: `make published` prints the table, tests hold its errors.

Nothing is fitted here. The speeds in `ppedu.planning.presets` were, and a few parts in `ppedu.planning.machine`; see
docs/published.md.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import ppedu as pp
from ppedu.planning.presets import MACHINES, MODELS

HERE = Path(__file__).parent
GPT = {"gated": False, "norm": "layer", "biases": "all"}
ZERO_BUBBLE = {"1f1b": "1f1b", "interleaved": "interleaved", "zb1p": "zb-h1", "zb2p": "zb-h2"}  # the authors' and ours
AMPLE = replace(MACHINES["a100"], memory=200e9)
Row = dict[str, str]


class Cell(NamedTuple):
    """A number that was measured and published, and ours."""

    source: str
    run: str
    published: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


def rows(name: str) -> list[Row]:
    return [*csv.DictReader((HERE / f"{name}.csv").read_text(encoding="utf-8").splitlines())]


def number(row: Row, name: str, default: int = 1) -> int:
    return int(row[name] or default)


def even(layers: int, stages: int) -> list[int]:
    """Return as many layers in each stage as possible, with the embedding in the first and the head in the last."""
    counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def asked(row: Row, model: pp.Model, microbatch: int, chunks: int, **options: object) -> dict[str, object]:
    """Return the arguments of `plan` for a run of Megatron's: its own sizes, groups, schedule and partition."""
    replicas, ranks = number(row, "replicas"), number(row, "pipeline")
    return {
        "model": model,
        "ranks": ranks,
        "microbatches": number(row, "global_batch") // replicas // microbatch,
        "sequence": number(row, "sequence"),
        "batch": microbatch,
        "replicas": replicas,
        "tensor": number(row, "tensor"),
        "schedules": "interleaved" if chunks > 1 else "1f1b",
        "partition": even(model.layers, ranks * chunks),
    } | options


def gpt(row: Row, **options: object) -> pp.Model:
    sizes = (number(row, name) for name in ("layers", "width", "heads", "vocabulary"))
    return pp.Model(*sizes, positions=number(row, "sequence"), **{**GPT, **options})


def step(row: Row, schedule: str = "1f1b") -> Iterator[Cell]:
    """From the measured times of each stage, the time of the step."""
    times = ([float(each) for each in row[f"{name}_us_of_each_rank"].split()] for name in ("forward", "backward"))
    timeline = pp.simulate(pp.schedule(schedule, 8, number(row, "global_batch")), pp.Costs(*times))
    yield Cell("stage times: seconds a step", _run(row), float(row["iteration_ms"]) / 1e3, timeline.makespan / 1e6)


def _run(row: Row) -> str:
    return f"{row['method']}, sequence {row['sequence']}, vocabulary {row['vocabulary']}"


def vocabulary() -> Iterator[Cell]:
    """arXiv 2411.05288, runs with whole vocabularies: the step from measured stages; step and memory from sizes."""
    for row in rows("vocabulary_parallelism"):
        if row["method"] not in ("base", "redis"):
            continue
        yield from step(row)
        best = pp.plan(machine="a100", **vocabulary_question(row)).best
        yield Cell("arXiv 2411.05288: seconds a step", _run(row), float(row["iteration_ms"]) / 1e3, float(best.whole))
        peak = max(best.memory) / 2**20
        yield Cell("arXiv 2411.05288: GiB", _run(row), float(row["largest_peak_mib"]) / 1024, peak / 1024)


def vocabulary_question(row: Row) -> dict[str, object]:
    options = {"partition": _moved(row)} if row["method"] == "redis" else {}
    return asked(row, gpt(row), 1, 1, **options)


def _moved(row: Row) -> list[int]:
    """Return the partition of a run whose layers were moved off the last stage, from its forward times."""
    times = [float(each) for each in row["forward_us_of_each_rank"].split()]
    last = number(row, "layers_last_stage", 0)
    layer = min(times) / 4
    counts = [round(time / layer) for time in times[:-1]] + [last]
    counts[0] += 32 - sum(counts)
    counts[0] += 1
    counts[-1] += 1
    return counts


def zero_bubble() -> Iterator[Cell]:
    """arXiv 2401.10241, tables 4 and 9: from measured F, I, W and messages, the speed-ups over 1F1B.

    An iteration of ZB-2p takes its longest rank's span: its ranks wait for no one between steps (section 4).
    """
    for row in rows("zero_bubble"):
        forward, first, second, message = (float(row[f"{name}_ms"]) for name in ("f", "b", "w", "message"))
        costs = pp.Costs(forward=forward, input=first, weight=second, latency=message)
        ranks, microbatches = number(row, "pipeline"), number(row, "microbatches")
        plain = pp.simulate(pp.schedule("1f1b", ranks, microbatches), costs).makespan
        for name, schedule in [*ZERO_BUBBLE.items()][1:]:
            options = {"chunks": number(row, "chunks_interleaved")} if name == "interleaved" else {}
            timed = _blocking(costs, message * options["chunks"]) if options else costs
            timeline = pp.simulate(pp.schedule(schedule, ranks, microbatches, **options), timed)
            time = timeline.span if name == "zb2p" else timeline.makespan
            published = float(row[f"samples_per_s_per_gpu_{name}"]) / float(row["samples_per_s_per_gpu_1f1b"])
            run = f"{row['model']}, {microbatches} microbatches, {schedule}"
            yield Cell("arXiv 2401.10241: speed-up over 1F1B", run, published, float(plain / time))


def zero_bubble_memory() -> Iterator[Cell]:
    """arXiv 2401.10241, table 4: memory from sizes, with dropout, without flash attention, and GPT-2's vocabulary.

    The paper names none of the three. The first and the last stage have a layer less than the others.
    """
    for row in rows("zero_bubble")[::3]:  # the memory is the same for each number of microbatches
        for name, schedule in ZERO_BUBBLE.items():
            best = pp.plan(machine=AMPLE, **zero_bubble_question(row, schedule)).best
            published = float(row[f"memory_gb_{name}"])
            yield Cell("arXiv 2401.10241: GiB", f"{row['model']}, {schedule}", published, max(best.memory) / 2**30)


def zero_bubble_question(row: Row, schedule: str) -> dict[str, object]:
    model = gpt(row | {"vocabulary": "50304"}, dropout=True, flash=False)
    chunks = number(row, "chunks_interleaved") if schedule == "interleaved" else 1
    parts = number(row, "pipeline") * chunks
    partition = [(model.layers + 2) // parts] * parts
    options = {"schedules": schedule, "partition": partition, "recompute": False, "zero": 0}
    return asked(row, model, number(row, "micro_batch"), chunks, **options)


def twice_the_microbatch() -> Iterator[tuple[float, float]]:
    """Yield how much faster twice the microbatch is, published and ours: arXiv 2401.10241, table 11 over table 4."""
    of_half = {(row["model"], row["microbatches"]): row for row in rows("zero_bubble")}
    for row in rows("zero_bubble_more"):
        if row["table"] == "11":
            half, name = of_half[row["model"], row["microbatches"]], row["schedule"].replace("-", "")
            found = (
                pp.plan(machine=AMPLE, **zero_bubble_question(each, ZERO_BUBBLE[name])).best.tokens_per_second or 0
                for each in (row, half)
            )
            published = float(row["samples_per_s_per_gpu"]) / float(half[f"samples_per_s_per_gpu_{name}"])
            yield published, next(found) / next(found)


def _blocking(costs: pp.Costs, message: float) -> pp.Costs:
    """Return costs with messages that occupy their ranks; costs are those of all chunks together."""
    return replace(costs, forward=costs.forward + message, input=costs.input + message, latency=0)


def recompute() -> Iterator[Cell]:
    """arXiv 2205.05198: seconds a step with full and with selective recompute."""
    for row, kind in product(rows("recompute"), ("full", "selective")):
        best = pp.plan(machine="a100", **recompute_question(row, kind)).best
        published = float(row[f"iteration_ms_{kind}_recompute"]) / 1e3
        yield Cell("arXiv 2205.05198: seconds a step", f"{row['model']}, {kind}", published, float(best.whole))


def recompute_question(row: Row, kind: str) -> dict[str, object]:
    model = gpt(row, tied=True, dropout=True, flash=False)
    return asked(row, model, number(row, "micro_batch"), number(row, "chunks"), recompute=kind, zero=0)


def sc21() -> Iterator[Cell]:
    """arXiv 2104.04473, table 1: TFLOP/s with full recompute, whose FLOPs count; without sequence parallelism."""
    for row in rows("megatron_sc21"):
        best = pp.plan(machine="a100", **sc21_question(row)).best
        ours = sc21_flops(row) * (best.tokens_per_second or 0) / number(row, "gpus") / 1e12
        yield Cell("arXiv 2104.04473: TFLOP/s", row["model"], float(row["tflops_per_gpu"]), ours)


def sc21_question(row: Row) -> dict[str, object]:
    microbatch, chunks = number(row, "micro_batch"), number(row, "chunks")
    model = gpt(row, tied=True, dropout=True, flash=False)
    options = {"sequence_parallel": False, "recompute": "full", "zero": 0, "blocking": True}
    return asked(row, model, microbatch, chunks, **options)


def sc21_flops(row: Row) -> float:
    """Return the FLOPs of a token: the paper's equation 3."""
    layers, width = number(row, "layers"), number(row, "width")
    return 96 * layers * width**2 * (1 + 2048 / (6 * width) + number(row, "vocabulary") / (16 * layers * width))


def core() -> Iterator[Cell]:
    """Megatron-Core's weak scaling: TFLOP/s at the best microbatch and number of chunks, which are not published."""
    for row in rows("megatron_core"):
        model, ranks = gpt(row), number(row, "pipeline")
        found = []
        for microbatch in (1, 2, 4):
            for chunks in range(1, 24):
                if model.layers % (ranks * chunks) or (ranks == 1 and chunks > 1):
                    continue
                if number(row, "global_batch") // number(row, "replicas") % (microbatch * (ranks if chunks > 1 else 1)):
                    continue
                try:
                    question = asked(row, model, microbatch, chunks, tensor_overlap=True)
                    best = pp.plan(machine="h100", **question).best
                except pp.SettingError:  # it does not fit
                    continue
                found.append(float(best.whole))
        flops = 72 * number(row, "global_batch") * 4096 * model.layers * model.width**2
        flops *= 1 + 4096 / (6 * model.width) + model.vocabulary / (12 * model.width * model.layers)
        ours = flops / min(found) / number(row, "gpus") / 1e12
        yield Cell("Megatron-Core, weak scaling: TFLOP/s", row["model"], float(row["tflops_per_gpu"]), ours)


def llama() -> Iterator[Cell]:
    """arXiv 2407.21783, table 4: MFU of Llama 3 405B with 8,192 tokens. A layer a chunk, which is not published.

    It ran on 80 GB without recompute; with these chunks and Megatron's tensors it would need 83 GB.
    """
    for row in rows("llama3")[:2]:
        model = pp.Model(126, 16384, 128, 128000, kv_heads=8, ffn=53248)
        options = {"partition": [1] * 128, "recompute": False, "zero": 2}
        machine = replace(MACHINES["h100"], memory=100e9)
        best = pp.plan(machine=machine, **asked(row, model, 1, 8, **options)).best
        yield Cell(
            "arXiv 2407.21783: MFU", f"405B on {row['gpus']} GPUs", float(row["mfu_percent"]), 100 * (best.mfu or 0)
        )


BRIDGE = {
    "LLAMA3_70B": "llama-3-70b",
    "LLAMA3.1_405B": "llama-3-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "DeepSeekV3": "deepseek-v3",
}
# DeepSeek-V3's layers in a number of stages: perf_recipes/ of Megatron-Bridge.
LAYOUTS = {16: "Et*4|(t*4|)*14tmL", 8: "Et*8|(t*8|)*6t*5mL"}


def bridge(row: Row) -> dict[str, object]:
    """Return the question of one of Megatron-Bridge's runs.

    Where no layout is published, the embedding and the head each take the place of a layer, as in its recipes for Llama
    3 405B and Qwen3 235B. Experts are exchanged beside the computation where a rank has several chunks. Gradients are
    in bf16 (`grad_reduce_in_fp32=False`), and so are the moments of DeepSeek-V3's optimizer. It makes the queries, keys
    and values of its latent attention again, but not on GB300s. Qwen3 sends its tokens by all-to-all on H100s and
    B200s. Llama 3 overlaps the exchange of its tensor groups, but not in NVFP4.
    """
    model = MODELS[BRIDGE[row["model"]]]
    chunks, precision = number(row, "chunks"), row["precision"].lower()
    options = {"precision": precision, "context": number(row, "context"), "recompute": False}
    options |= {"bytes_per_weight": (2, 2, 12)}
    stages = number(row, "pipeline") * chunks
    if (model.layers + 2) % stages == 0:
        options["partition"] = [(model.layers + 2) // stages] * stages
    elif row["model"] == "LLAMA3_70B" and stages == 40:
        options["partition"] = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
    options["tensor_overlap"] = not model.experts and precision != "nvfp4"
    if model.experts:
        options |= {"expert": number(row, "expert"), "overlap": chunks > 1}
        if row["model"].startswith("Qwen") and row["gpu"] in ("H100", "B200"):
            options["dispatcher"] = "alltoall"
        options["graphs"] = row["gpu"].startswith("GB") or row["model"] == "DeepSeekV3"
    if model.key_rank:
        model = replace(model, predictions=1)
        options |= {"bytes_per_weight": (2, 2, 8), "partition": LAYOUTS[stages]}
        options["recompute"] = "none" if row["gpu"] == "GB300" else "selective"
    return asked(row, model, number(row, "micro_batch"), chunks, **options)


def bridged() -> Iterator[tuple[Row, float]]:
    """Yield Megatron-Bridge's runs with their tokens per second and GPU: of the fastest release, or of the last."""
    for row in rows("training_runs"):
        yield row, float(row["tokens_per_s_per_gpu_highest"])
    for row in rows("megatron_bridge"):
        before = row["release"] == "26.04.01" and row["model"] == "Qwen3_235B_a22B" and not row["gpu"].startswith("GB")
        if row["release"] == "26.08" or before:
            yield row, float(row["tokens_per_s_per_gpu"])


def _tokens(source: str, row: Row, published: float) -> Cell:
    best = pp.plan(machine=row["gpu"].lower(), **bridge(row)).best  # it fits, or this is an error
    run = f"{row['model']}, {row['gpu']}, {row['precision']}, {row['pipeline']} ranks, {row['chunks'] or 1} chunks"
    return Cell(source, run, published, (best.tokens_per_second or 0) / number(row, "gpus"))


def megatron_bridge() -> Iterator[Cell]:
    """Megatron-Bridge: dense models, and mixtures of experts with CUDA graphs and without."""
    for row, published in bridged():
        kind = "Llama 3"
        if row["expert"]:
            kind = "experts" if bridge(row)["graphs"] else "experts without graphs"
        yield _tokens(f"Megatron-Bridge, {kind}: tokens/s", row, published)


def experts() -> Iterator[Cell]:
    """Qwen3 235B on H100s: Megatron's MoE model zoo."""
    model = MODELS["qwen3-235b-a22b"]
    for row in rows("moe_training"):
        chunks, stages = number(row, "chunks"), number(row, "pipeline") * number(row, "chunks")
        options = {
            "expert": number(row, "expert"),
            "overlap": row["exchange_overlapped"] == "1",
            "dispatcher": "alltoall" if row["dispatcher"] == "all-to-all" else "deepep",
            "recompute": "full" if row["recompute"] == "full" else False,
            "partition": [(model.layers + 2) // stages] * stages,
        }
        options |= {"zero": 3} if row["fsdp"] == "1" else {}
        machine = replace(MACHINES["h100"], memory=90e9)  # norms and activation functions were recomputed
        best = pp.plan(machine=machine, **asked(row, model, number(row, "micro_batch"), chunks, **options)).best
        run = f"tensor {row['tensor']}, {row['pipeline']} ranks, expert {row['expert']}, {row['dispatcher']}"
        run += ", overlapped" * bool(options["overlap"])
        yield Cell("MoE model zoo, H100: seconds a step", run, float(row["iteration_ms"]) / 1e3, float(best.whole))


def sharded() -> Iterator[Cell]:
    """arXiv 2411.05288: the step with a sharded vocabulary, in both of the paper's ways; one way here."""
    for row in rows("vocabulary_parallelism"):
        if row["method"] in ("vocab", "synctwice"):
            question = asked(row, gpt(row), 1, 1, shard_vocabulary=True, recompute=False)
            best = pp.plan(machine="a100", **question).best
            published = float(row["iteration_ms"]) / 1e3
            yield Cell("arXiv 2411.05288, sharded: seconds a step", _run(row), published, float(best.whole))


SOURCES: tuple[Callable[[], Iterator[Cell]], ...] = (
    vocabulary,
    zero_bubble,
    zero_bubble_memory,
    recompute,
    sc21,
    core,
    llama,
    megatron_bridge,
    experts,
    sharded,
)


def summary(cells: Iterable[Cell]) -> Iterator[str]:
    """Yield a line for each source."""
    ordered = sorted(cells, key=lambda cell: cell.source)
    for source, of_source in groupby(ordered, key=lambda cell: cell.source):
        errors = [cell.error for cell in of_source]
        sizes = [abs(error) for error in errors]
        worst = max(errors, key=abs)
        yield f"{source:50} {len(errors):5} {median(sizes):8.1%} {worst:+8.1%}"


class Run(NamedTuple):
    """A published run with its tokens per second, of all replicas. Those of one group have their GPU in common."""

    group: str
    machine: pp.Machine
    question: dict[str, object]
    speed: float


def runs() -> Iterator[Run]:
    """Yield the runs of which one can correct the machine for the others."""
    a100 = MACHINES["a100"]
    for row in rows("megatron_sc21"):
        speed = float(row["tflops_per_gpu"]) * 1e12 * number(row, "gpus") / sc21_flops(row)
        yield Run("arXiv 2104.04473", a100, sc21_question(row), speed)
    for row, kind in product(rows("recompute"), ("full", "selective")):
        speed = _speed(row, f"iteration_ms_{kind}_recompute")
        yield Run("arXiv 2205.05198", a100, recompute_question(row, kind), speed)
    for row in rows("vocabulary_parallelism"):
        if row["method"] in ("base", "redis"):
            yield Run("arXiv 2411.05288", a100, vocabulary_question(row), _speed(row, "iteration_ms"))
    for row, speed in bridged():
        if row["model"] != "Qwen3_30B_a3B":
            kind = "experts" if row["expert"] else "Llama 3"
            group = f"Megatron-Bridge, {kind}, {row['gpu']}, {row['precision']}"
            yield Run(group, MACHINES[row["gpu"].lower()], bridge(row), speed * number(row, "gpus"))


def _speed(row: Row, milliseconds: str) -> float:
    return 1e3 * number(row, "global_batch") * number(row, "sequence") / float(row[milliseconds])


def corrected() -> Iterator[tuple[str, float]]:
    """Yield, by group, how far each run is off with a machine that another one has corrected."""
    ordered = sorted(runs(), key=lambda run: run.group)
    for group, members in ((group, [*members]) for group, members in groupby(ordered, key=lambda run: run.group)):
        for one in members:
            others = [other for other in members if other is not one]
            try:
                machine = pp.calibrate(one.machine, one.speed, **one.question)
            except pp.SettingError:  # it says little about the speed of the GPUs
                continue
            for other in others:
                found = pp.plan(machine=machine, **other.question).best.tokens_per_second or 0
                yield group, found / other.speed - 1


def nine_in_ten(errors: Iterable[float]) -> float:
    """Return a number that nine in ten errors do not exceed, whatever their sign."""
    sizes = sorted(map(abs, errors))
    return sizes[9 * len(sizes) // 10]


if __name__ == "__main__":
    found = [cell for source in SOURCES for cell in source()]
    for cell in found:
        print(f"{cell.source:50} {cell.run:55} {cell.published:9.4g} {cell.ours:9.4g} {cell.error:+7.1%}")
    print(f"\n{'source':50} {'cells':>5} {'median':>8} {'worst':>8}")
    print("\n".join(summary(found)))
    errors = [error for _, error in corrected()]
    print(f"\nafter a calibration by another run of the same GPU: {len(errors)} pairs, median", end=" ")
    print(f"{median(map(abs, errors)):.1%}, nine in ten within {nine_in_ten(errors):.1%}")
