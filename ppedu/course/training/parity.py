"""How far a pipeline is from the whole model in one process: the check that a loss curve cannot replace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppedu.core import SettingError
from ppedu.course.training.data import Text
from ppedu.course.training.gpt import GPT, GPTConfig, next_token_loss
from ppedu.engine.names import Tie
from ppedu.engine.ranks.comm import PipelineGroup


def train_alone(
    pieces: int,
    divide: bool = True,
    device: torch.device | str = "cpu",
) -> list[float]:
    """Train the toy GPT in one process, its batches in `pieces`; return the loss of each step."""
    text, losses = Text(), []
    model = GPT(GPTConfig(len(text.characters))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        batch = torch.stack(text.batch(16, 64, seed=step)).to(device)
        mean = torch.zeros((), device=device)
        for x, y in batch.chunk(pieces, dim=1):
            loss = next_token_loss(model(x), y)
            mean += loss.detach() / pieces
            if divide:
                loss = loss / pieces
            loss.backward()  # adds to the gradients of the pieces before
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


def difference(module: nn.Module, whole: nn.Module, part: str, group: PipelineGroup | None = None) -> float:
    """Return the relative difference between a rank's stage and the whole model, the largest over all ranks.

    It is the norm of the difference of all weights or gradients of the stage, divided by the norm of the whole model's.
    All ranks must call it.

    Args:
        module: This rank's stage, whose weights have the names that they have in `whole`.
        part: "weights" or "gradients".

    Raises:
        SettingError: `part` is neither, or a weight has no gradient yet.
    """
    if part not in ("weights", "gradients"):
        raise SettingError(f"part must be 'weights' or 'gradients'; got {part!r}")
    same = dict(whole.named_parameters(remove_duplicate=False))
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, weight in module.named_parameters():
        ours: torch.Tensor | None = weight.grad if part == "gradients" else weight
        theirs: torch.Tensor | None = same[name].grad if part == "gradients" else same[name]
        if ours is None or theirs is None:
            raise SettingError(f"{name} has no gradient; run a backward of the pipeline and of the whole model")
        pairs.append((ours.detach(), theirs.detach()))
    one, other = (torch.cat([each.flatten() for each in column]) for column in zip(*pairs, strict=True))
    return max(_gathered(float((one - other).norm() / other.norm()), group))


def copies_apart(module: nn.Module, stage: int, tied: Sequence[Tie], group: PipelineGroup | None = None) -> float:
    """Return the relative difference between the two copies of a tied weight, the largest of all pairs.

    All ranks must call it.

    Args:
        stage: The number of this rank's stage.
        tied: The pairs of tied weights, as for `Pipeline`.
    """
    own: dict[str, torch.Tensor] = {}
    for at, name in chain.from_iterable(tied):
        if at == stage:
            own[name] = module.get_parameter(name).detach().cpu()
    copies: dict[tuple[int, str], torch.Tensor] = {}
    for at, held in _gathered((stage, own), group):
        for name, weight in held.items():
            copies[at, name] = weight
    pairs = [(copies[first], copies[second]) for first, second in tied]
    return max((float((first - second).norm() / first.norm()) for first, second in pairs), default=0.0)


def _gathered(own: Any, group: PipelineGroup | None) -> list[Any]:
    """Return the objects that the ranks of the group give, in their order."""
    group = PipelineGroup.of(group)
    rows: list[Any] = [None] * group.size
    dist.all_gather_object(rows, own, group.process_group)
    return rows
