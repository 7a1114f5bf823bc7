"""The memory of a rank, measured in bytes: on a CPU what autograd saves for backwards, on a GPU what is allocated."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ppedu.core import Action, Op, PipelineError
from ppedu.core.validate import require_instance
from ppedu.engine.interpreter import Handler, Step
from ppedu.engine.pipeline import Pipeline
from ppedu.engine.stages.host import Kept
from ppedu.engine.stages.split_backward import as_saved
from ppedu.engine.stages.watch import storages


class Memory:
    """The bytes that a rank holds for backwards, measured in every step of a pipeline from now on, until `close`.

    On a CPU, the bytes are those of the tensors that autograd has saved, of the inputs that are kept to recompute from,
    and of the gradients that an I keeps for its W. Memory that several of them share counts once, and that of weights,
    buffers and the batch does not count. Messages that have not arrived do not count either. On a GPU, they are all
    bytes that are allocated, less those at the start of the step: gradients and messages are among them.

    Args:
        pipeline: this rank's. Its steps become slower, since every tensor that autograd saves is looked at.

    Attributes:
        after: by computing action, in order, the bytes after it in the last step.
        peak: the most bytes at any time of the last step.

    Raises:
        SettingError: `pipeline` is not a Pipeline.
    """

    def __init__(self, pipeline: Pipeline):
        require_instance("pipeline", pipeline, Pipeline, "a ppedu.run.Pipeline")
        self.after: dict[Action, int] = {}
        self.peak = 0
        self._pipeline = pipeline
        self._meter = Allocated(pipeline.device) if pipeline.device.type == "cuda" else Saved()
        self._step: weakref.ref[Step] | None = None
        self._before = dict(pipeline.handlers)
        self._own: dict[Op, Handler] = {}
        for op in (Op.F, Op.B, Op.I, Op.W, Op.R, Op.O, Op.L):
            self._own[op] = partial(self._measure, inner=self._before.get(op))
            pipeline.on(op, self._own[op])

    def curve(self) -> list[tuple[float, int]]:
        """Return the last step's bytes as a step curve, on the clock of `Pipeline.timeline`; see `Timeline.memory`.

        The times are the ends of this rank's actions; each has the bytes from then on.

        Raises:
            PipelineError: no step has been measured.
        """
        if not self.after:
            raise PipelineError("no memory has been measured yet; run a step after Memory(pipeline)")
        timeline = self._pipeline.timeline
        curve = [(timeline.start, 0)]
        for span in timeline.spans(self._pipeline.group.rank):
            last = span.action.singles[-1]  # of a pair, the second part
            curve.append((span.end, self.after[last]))
        return curve

    def close(self) -> None:
        """Stop measuring. What was measured stays, and so do handlers that were set since."""
        handlers = self._pipeline.handlers
        for op, handler in self._own.items():
            if handlers.get(op) is handler:
                del handlers[op]
                if op in self._before:
                    handlers[op] = self._before[op]

    def _measure(self, action: Action, step: Step, inner: Handler | None) -> None:
        """Run an action, and note the bytes after it."""
        if self._step is None or self._step() is not step:
            self._step, self.after, self.peak = weakref.ref(step), {}, 0
            self._meter.begin(step)
        with self._meter:
            if inner:
                inner(action, step)
            else:
                step.default(action)
        self.after[action] = self._meter.held()
        self.peak = max(self.peak, self._meter.peak)


class Saved:
    """Counts the bytes of the tensors that stages keep for backwards, and the most of them within an action."""

    def __init__(self) -> None:
        self._hooks = saved_tensors_hooks(self._save, as_saved)

    def begin(self, step: Step) -> None:
        """Start to count in a new step."""
        modules = [stage.module for stage in step.stages.values()]
        weights = chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
        batch = step.batch
        given = batch.inputs, batch.targets, batch.keywords, batch.stage_keywords
        self._step, self._always = step, set(storages([*weights, given]))
        self._saved: weakref.WeakSet[Kept] = weakref.WeakSet()

    def __enter__(self) -> None:
        self.peak = 0
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def held(self) -> int:
        """Return the bytes that are held now."""
        tensors: list[Any] = [kept.tensor for kept in self._saved]
        away: list[Any] = []
        for stage in self._step.stages.values():
            tensors += [kept.tensor for kept in stage.host.saved]
            away += stage.host.away
            tensors += [(each.xs, each.keywords) for each in stage.again.values()]
            for function in stage.weight_halves.values():  # a partial, whose arguments are tensors
                tensors.append(getattr(function, "args", ()))
        others = self._always | storages(away).keys()
        bytes_held = sum(size for place, size in storages(tensors).items() if place not in others)
        self.peak = max(self.peak, bytes_held)
        return bytes_held

    def _save(self, tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        self._saved.add(kept)
        self.held()
        return kept


class Allocated:
    """Counts the bytes that are allocated on a GPU, and the most of them within an action."""

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self, step: Step) -> None:
        """Start to count in a new step."""
        self._before = torch.cuda.memory_allocated(self._device)

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *error: Any) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before

    def held(self) -> int:
        """Return the bytes that are allocated now, more than at the start of the step."""
        return torch.cuda.memory_allocated(self._device) - self._before
