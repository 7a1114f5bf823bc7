"""Updates within a step (U): the versions of a stage's weights, and the optimizer that makes the next one.

A version is the tensors behind the parameters. While a forward or a backward runs, the parameters have those of its
microbatch, as in PipeDream's own code (github.com/msr-fiddle/pipedream). An update first gives them new tensors: the
optimizer changes weights in place, and microbatches in flight still need the old ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ppedu.core import COMPUTE, Action, Op, Schedule, SettingError
from ppedu.engine.ranks.versions import keep_version_counters
from ppedu.engine.stages.stage import Stage
from ppedu.sim import versions

Optimizers = Mapping[int, torch.optim.Optimizer]  # by stage
ENDS = {Op.B, Op.W}
Tensors = Sequence[torch.Tensor | None]


class Weights:
    """One stage's weights while a step updates them.

    Args:
        used, stepped: by microbatch; see `ppedu.versions`.

    Attributes:
        kept: the tensors of each version that is still needed, by number.
    """

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer, used: Sequence[int], stepped: Sequence[int]):
        self.optimizer, self._used, self._stepped = optimizer, used, stepped
        self._weights = stage.trained
        self._nothing: Tensors = [None] * len(self._weights)
        self.begin()

    def begin(self) -> None:
        """Start a step with version 0, which is that of the parameters."""
        self.kept = {0: [weight.data for weight in self._weights]}
        self._latest, self._flying = 0, Counter(self._used)
        self._grads: dict[int, Tensors] = {}  # by the version to which they will be applied

    def of(self, action: Action) -> AbstractContextManager[None]:
        """Return the context in which an action runs: with the weights of its microbatch, if it needs them."""
        return self._at(action) if action.op in COMPUTE and action.op is not Op.U else nullcontext()

    @contextmanager
    def _at(self, action: Action) -> Iterator[None]:
        version, update = self._used[action.microbatch], self._stepped[action.microbatch]
        self._put(self.kept[version], self._grads.get(update, self._nothing))
        try:
            yield
        finally:
            self._grads[update] = [weight.grad for weight in self._weights]
            self._put(self.kept[self._latest], self._nothing)
        self._flying[version] -= action.op in ENDS
        self._forget()

    def update(self) -> None:
        """Make the next version: step from the latest with the gradients that are for it."""
        tensors = [weight.data.clone() for weight in self._weights]
        self._put(tensors, self._grads.pop(self._latest))
        with keep_version_counters(self._weights):  # of tensors that graphs have, and that do not change
            self.optimizer.step()
        self._latest += 1
        self.kept[self._latest] = [weight.data for weight in self._weights]
        self._put(self.kept[self._latest], self._nothing)
        self._forget()

    def _put(self, tensors: Sequence[torch.Tensor], grads: Tensors) -> None:
        torch.clear_autocast_cache()  # it knows weights by their parameters
        for weight, tensor, grad in zip(self._weights, tensors, grads, strict=True):
            weight.data, weight.grad = tensor, grad

    def _forget(self) -> None:
        for version in [each for each in self.kept if each != self._latest and not self._flying[each]]:
            del self.kept[version]


def find_updates(schedule: Schedule, stages: Mapping[int, Stage], optimizers: Any) -> dict[int, Weights]:
    """Return the weights of each stage that the schedule updates, by number; none if it has no U.

    Raises:
        SettingError: a stage lacks an optimizer with exactly its weights, or the schedule has no U.
    """
    if not schedule.updated:
        if isinstance(optimizers, Mapping):
            raise SettingError(f"{schedule!r} has no U, so it steps no optimizers; call their step() yourself")
        return {}
    if not isinstance(optimizers, Mapping) or set(optimizers) != set(stages):
        raise SettingError(
            f"{schedule!r} updates weights: give an optimizer for each stage of this rank, such as "
            f"optimizer={{{min(stages)}: torch.optim.SGD(module.parameters(), lr=0.1)}}; got {optimizers!r}"
        )
    trained = [weight for stage in stages.values() for weight in stage.trained]
    if len(set(trained)) < len(trained):
        raise SettingError("two stages of this rank share a weight, which both would update; give each its own")
    found, plan = {}, versions(schedule)
    for number, stage in stages.items():
        stepped = {weight for group in optimizers[number].param_groups for weight in group["params"]}
        if stepped != set(stage.trained):
            raise SettingError(f"the optimizer of stage {number} must have all weights of that stage, and no others")
        found[number] = Weights(stage, optimizers[number], plan.used[number], plan.stepped[number])
    return found
