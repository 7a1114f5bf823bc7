"""The figures that a training run prints at its end: tokens per second, utilization of the GPUs, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ppedu.engine.memory import Memory
from ppedu.planning.model import Model
from ppedu.planning.presets import MACHINES

if TYPE_CHECKING:
    from ppedu.course.training.train import TrainConfig, TrainResult

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Report:
    """Measures a rank's memory in the second step of a training run: give it as `each` to `train_gpt`."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._kept: int | None = None

    def __call__(self, result: TrainResult) -> None:
        if self._memory is None:
            self._memory = Memory(result.pipeline)
        elif self._kept is None:
            self._kept = self._memory.peak
            self._memory.close()

    def lines(self, config: TrainConfig, result: TrainResult, vocabulary: int) -> list[str]:
        """Return the sentences on a run whose timeline is known. All ranks must call this."""
        weights = [weight for stage in result.pipeline.stages.values() for weight in stage.module.parameters()]
        count = sum(weight.numel() for weight in weights)
        # AdamW keeps two moments of each weight, and bfloat16 weights have a copy besides: each in fp32, so 4 bytes.
        optimizer_bytes = 8 if config.weights == "float32" else 12
        kinds = {
            "weights": sum(weight.numel() * weight.element_size() for weight in weights),
            "gradients": 4 * count,
            "optimizer": optimizer_bytes * count,
        }
        if self._kept is not None and result.pipeline.device.type == "cuda":
            # On a GPU, these are all bytes that the step allocates, its gradients among them.
            kinds["gradients and activations"] = self._kept
            del kinds["gradients"]
        elif self._kept is not None:
            kinds["activations"] = self._kept
        of_ranks = [kinds]
        if dist.is_initialized():
            of_ranks = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(of_ranks, kinds)
        assert result.timeline is not None
        seconds = float(result.timeline.makespan)
        found = [f"last step: {config.batch * config.context / seconds:,.0f} tokens/s, without the optimizer"]
        peak = peak_of(result.pipeline.device)
        if peak and (config.dtype, config.weights) != ("float32", "float32"):
            used = flops(config, vocabulary) / (seconds * peak * len(of_ranks))
            found[0] += f"; {used:.1%} of the peak FLOP/s (MFU)"
        totals = [sum(each.values()) for each in of_ranks]
        rank = totals.index(max(totals))
        parts = ", ".join(f"{kind} {_bytes(size)}" for kind, size in of_ranks[rank].items())
        return [*found, f"memory: rank {rank} is the fullest, with {_bytes(totals[rank])}: {parts}"]


def flops(config: TrainConfig, vocabulary: int) -> float:
    """Return the FLOPs of a training step, over all replicas."""
    sizes = Model(config.layers, config.width, config.heads, vocabulary, gated=False)
    return float(sizes.pieces(config.context, config.batch).flops or 0)


def peak_of(device: torch.device) -> float | None:
    """Return the FLOP/s in bf16 on the data sheet of a GPU, if it is one of `ppedu.planning.presets.MACHINES`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((float(machine.peak) for key, machine in MACHINES.items() if key in name and machine.peak), None)


def _bytes(size: float) -> str:
    scale, unit = next((each for each in UNITS if size >= each[0]), UNITS[-1])
    return f"{size / scale:.1f} {unit}"
