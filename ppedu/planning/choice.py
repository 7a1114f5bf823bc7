"""The schedules that a plan compares, each with its best partition, on the machines of a job."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import Any

from ppedu.core import Op, ParseError, PipelineError, Schedule, SettingError
from ppedu.core.files import named, write_text
from ppedu.core.numeric import Number, ratio
from ppedu.planning.layout import letters_of
from ppedu.planning.machine import EXCHANGED, Machine
from ppedu.planning.offload import Offloading
from ppedu.planning.partition import Cutting
from ppedu.planning.pieces import SECONDS, Piece, Pieces
from ppedu.planning.slices import mean
from ppedu.sim import Costs, Span, Timeline, simulate
from ppedu.sim.per_link import Link
from ppedu.zoo.registry import options_of


@dataclass(frozen=True)
class Choice:
    """A schedule with its best partition.

    Attributes:
        partition: The pieces of each stage: 0 is the embedding, then come the layers, and the last one is the head.
        recompute: Whether each stage runs its forward again before its backward, from its input (`Costs.recompute`).
        costs: Of the stages, to simulate with; activations in bytes. There, the keys and values of a slice end with it.
        step_time: Of the pipeline, in the unit of the model. after: What gradient reduction and optimizer add; None if
            the machine's bandwidths are unknown.
        tokens_per_second: Of all replicas. mfu: The model FLOPs utilization, of the peak in the format of the layers'
            matrices. None if unknown.
        busiest: How long the busiest rank works. bubble: The idle share of all ranks' time.
        kinds: By rank, the bytes at its peak, by what they are for. memory: Their sums.
        excess: By how many bytes the fullest rank exceeds the machine's memory, or 0.
        proven: Whether no partition is better.
        letters: Of the pieces, as in Megatron's layouts; see `ppedu.planning.layout`.
        slices: The tokens of each slice of a sequence; () if the schedule does not cut sequences.
        why: How it differs from the best choice, in a sentence.
    """

    schedule: Schedule
    partition: tuple[range, ...]
    recompute: bool
    costs: Costs
    step_time: Number
    after: Number | None
    tokens_per_second: float | None
    mfu: float | None
    busiest: Number
    bubble: float
    kinds: tuple[dict[str, Number], ...]
    excess: Number
    proven: bool
    letters: str
    slices: tuple[int, ...] = ()
    why: str = ""

    @property
    def memory(self) -> tuple[Number, ...]:
        return tuple(sum(kinds.values()) for kinds in self.kinds)

    @property
    def name(self) -> str:
        """The schedule's name, with its chunks and slices if there are several, recomputation and offload."""
        schedule = self.schedule
        several = {"chunks": schedule.chunks, "slices": schedule.slices}
        cut = "".join(f", {count} {what}" for what, count in several.items() if count > 1)
        return f"{schedule.name}{cut}{', recomputing' * self.recompute}{', offloading' * bool(schedule.offloaded)}"

    @property
    def microbatches(self) -> int:
        """The microbatches of a step, whole ones if the schedule cuts them into slices."""
        return self.schedule.microbatches // self.schedule.slices

    @property
    def whole(self) -> Number:
        """The time of the step with gradient reduction and optimizer, as far as it is known."""
        return self.step_time + (self.after or 0)

    def longer(self, other: Choice) -> float:
        """Return by what fraction a microbatch takes longer than with another choice, the end of the step included."""
        mine, others = (each.whole / each.microbatches for each in (self, other))
        return float(mine / others - 1) if others else 0.0

    def timeline(self) -> Timeline:
        """Return the simulation of the step, with its activations in GB."""
        costs: Any = self.costs
        activation, stage_input = ([size / 1e9 for size in sizes] for sizes in (costs.activation, costs.stage_input))
        gigabytes = replace(costs, activation=activation, stage_input=stage_input, memory_unit="GB")
        return simulate(self.schedule, gigabytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule and the partition to a file, for `ppedu train --plan`.

        Raises:
            PipelineError: The file cannot be written.
        """
        schedule = self.schedule
        saved = {
            "schedule": schedule.name,
            "options": {
                name: getattr(schedule, name) for name in ("chunks", "slices") if name in options_of(schedule.name)
            },
            "ranks": schedule.ranks,
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "cut": [len(each) for each in self.partition],
            "offload": sorted(schedule.offloaded),
        }
        write_text(path, json.dumps(saved) + "\n")

    def torchtitan(self) -> list[list[str]]:
        """Return the names of each stage's modules, as torchtitan's `module_fqns_per_model_part` has them.

        Raises:
            SettingError: The model predicts further tokens, sequences are cut, or activations are offloaded, which
                torchtitan does not know.
        """
        self._require_known("torchtitan")
        if "m" in self.letters:
            raise SettingError("torchtitan's models predict one token; plan without predictions")
        layers = len(self.letters) - 2
        names = [["tok_embeddings"], *([f"layers.{layer}"] for layer in range(layers)), ["norm", "output"]]
        return [[name for piece in pieces for name in names[piece]] for pieces in self.partition]

    def megatron(self) -> str:
        """Return the layout of the stages for Megatron's `--pipeline-model-parallel-layout`.

        E is the embedding, t a layer, m a further prediction, L the loss with the head; | separates stages.

        Raises:
            SettingError: The schedule does not place its stages in a loop, which is all that Megatron does; or it cuts
                sequences or offloads activations, which forks do that have no layouts.
        """
        schedule = self.schedule
        self._require_known("Megatron")
        if schedule.placement.name != "loop":
            raise SettingError(
                f"Megatron places stages in a loop, and {schedule.name} in the placement {schedule.placement.name!r}; "
                'plan with schedules=["1f1b", "interleaved"]'
            )
        stages = []
        for pieces in self.partition:
            runs = [(letter, len([*run])) for letter, run in groupby(self.letters[pieces.start : pieces.stop])]
            stages.append("".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs))
        return "|".join(stages)

    def _require_known(self, program: str) -> None:
        """Raise SettingError if a program lacks what the schedule does."""
        if self.slices:
            raise SettingError(f"{program} does not cut sequences into slices; plan with other schedules")
        if self.schedule.offloaded:
            raise SettingError(f"{program} does not offload activations; plan without host_bandwidth")


SAVED = {"schedule": str, "options": dict, "ranks": int, "microbatches": int, "recompute": bool, "cut": list}
SAVED["offload"] = list  # the stages and microbatches whose activations go to the host; older files lack it


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings that `Choice.save` wrote.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: It is not such a file.
    """
    try:
        found = {"offload": [], **json.loads(named(path).read_text(encoding="utf-8"))}
    except OSError as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, TypeError):  # the latter if it is not a table
        found = {}
    if {key: type(value) for key, value in found.items()} != SAVED:
        raise ParseError(f"{str(path)!r} is not a plan that `ppedu plan QUESTION.toml --save FILE` has written")
    return found


@dataclass(frozen=True)
class Workload:
    """A model and the machines that it is to run on.

    Attributes:
        zero: What the GPUs that hold the same stage share (arXiv 1910.02054): 0 nothing, 1 the optimizer, 2 also the
            gradients, 3 also the weights.
        blocking: Whether a rank cannot compute while it sends and receives.
        barrier: Whether ranks wait for each other between steps.
        batch: Sequences of a microbatch.
        slices: By the numbers of slices that schedules may cut sequences into, the pieces of each slice.
        host_bandwidth: Bytes per second between a GPU and its host; None if nothing is offloaded.
    """

    pieces: Pieces
    machine: Machine
    ranks: int
    replicas: int
    zero: int = 0
    blocking: bool = False
    barrier: bool = True
    batch: int = 1
    slices: Mapping[int, Sequence[Pieces]] = field(default_factory=dict)
    host_bandwidth: Number | None = None

    @cached_property
    def delays(self) -> dict[int, Number | dict[Link, Number]]:
        """The time of a message, by the number of slices, of their mean: one number, or one for each link of ranks."""
        pieces = self.pieces
        return {
            count: self.machine.delays(self.ranks, ratio(pieces.message, count), pieces.unit, pieces.gpus)
            for count in (1, *self.slices)
        }

    def holders(self, schedule: Schedule) -> int:
        """Return how many GPUs hold the same weights."""
        return self.replicas * self.pieces.context * min(schedule.placement.copies, schedule.ranks)

    def expert_holders(self, schedule: Schedule) -> int:
        """Return how many GPUs hold the same experts."""
        if self.pieces.expert == 1:
            return self.holders(schedule)
        return self.holders(schedule) * self.pieces.tensor // self.pieces.expert

    def cutting(
        self,
        schedule: Schedule,
        recompute: bool,
        until: float = math.inf,
        limit: Number | None = None,
        offload: bool = False,
    ) -> Cutting:
        """Return the search for a schedule's partition. limit: Bytes of a GPU, by default the machine's."""
        memory = self.machine.memory if limit is None else limit
        slices = self.slices.get(schedule.slices, (self.pieces,))
        if self.zero == 3:
            slices = [self._gathering(each, schedule) for each in slices]
        pieces = replace(
            mean(slices),
            bytes_per_weight=self._shared(self.holders(schedule)),
            expert_bytes=self._shared(self.expert_holders(schedule)),
        )
        kind: Callable[..., Cutting] = Cutting
        if offload:
            assert self.host_bandwidth
            kind = partial(Offloading, copying=1 / self.host_bandwidth / SECONDS[pieces.unit])
        return kind(
            schedule,
            pieces,
            memory,
            self.delays[schedule.slices],
            recompute,
            self.blocking,
            self.barrier,
            until,
            tuple(slices) if schedule.slices > 1 else (),
        )

    def _shared(self, holders: int) -> tuple[Number, Number, Number]:
        """Return the bytes per parameter on each of the GPUs that hold it: weights, gradients, optimizer."""
        sizes = [*self.pieces.bytes_per_weight]
        if holders > 1:
            for kind in range(3 - self.zero, 3):  # ZeRO shares the last one first
                sizes[kind] /= holders
        weights, gradients, optimizer = sizes
        return weights, gradients, optimizer

    def _gathering(self, pieces: Pieces, schedule: Schedule) -> Pieces:
        """Return the pieces if weights are gathered for each use, and gradients are summed up, while a GPU computes.

        Each then takes as long as the longer of the two. Two pieces are whole in memory at a time: the one that
        computes, and the next.
        """
        holders = self.holders(schedule)
        bandwidth = self.machine.among(self.replicas * self.ranks * pieces.gpus)
        if holders == 1 or not bandwidth:
            return pieces
        weights, gradients, _ = pieces.bytes_per_weight
        sent = (holders - 1) / holders / (EXCHANGED * bandwidth) / SECONDS[pieces.unit]

        def at_least(piece: Piece) -> Piece:
            gathered, summed = (size * (piece.weights - piece.experts) * sent for size in (weights, gradients))
            return replace(
                piece,
                forward=max(piece.forward, gathered),
                backward=max(piece.backward, gathered + summed),
                input=max(piece.input, gathered),
                weight=max(piece.weight, summed),
            )

        whole = 2 * weights * max(piece.weights - piece.experts for piece in pieces.pieces)
        return replace(pieces, pieces=tuple(map(at_least, pieces.pieces)), restored=pieces.restored + whole)

    def choice(self, found: Cutting) -> Choice:
        """Return the best partition of a search with all its numbers."""
        cuts, pieces = found.best, self.pieces
        kinds = tuple(found.kinds(cuts))
        step_time, busy = found.time(cuts), found.busy(cuts)
        timeline = found.simulated(cuts)
        schedule, after = timeline.schedule, self.after(timeline, found.parameters(cuts))
        seconds = float(step_time + (after or 0)) * SECONDS[pieces.unit]
        tokens = mfu = None
        microbatches = schedule.microbatches // schedule.slices
        if pieces.tokens and seconds:
            tokens = pieces.tokens * microbatches * self.replicas / seconds
        if pieces.flops and self.machine.peak:
            gpus = self.ranks * pieces.gpus
            peak = self.machine.peak * self.machine.speedup(pieces.precision)
            mfu = float(pieces.flops * microbatches / (seconds * peak * gpus))
        return Choice(
            schedule,
            tuple(range(begin, end) for begin, end in pairwise(cuts)),
            found.recompute,
            found.costs(cuts),
            step_time,
            after,
            tokens,
            mfu,
            busiest=max(busy),
            bubble=float(1 - sum(busy) / (self.ranks * step_time)) if step_time else 0.0,
            kinds=kinds,
            excess=max(0, *(size - self.machine.memory for size in found.memory(cuts))),
            proven=found.proven,
            letters=letters_of(pieces.pieces),
            slices=tuple((each.tokens or 0) // self.batch for each in found.slices),
        )

    def after(self, timeline: Timeline, parameters: Sequence[tuple[int, int]]) -> Number | None:
        """Return the time that gradients, optimizer and weights add to a step, if the bandwidths are known.

        Among the n GPUs that hold a stage, each sends (n - 1) / n of its gradients twice, in a ring; or, if they share
        the optimizer, of its gradients and then of its new weights (arXiv 1910.02054, section 7). The optimizer reads
        and writes all bytes of its parameters. A rank computes meanwhile: it sends its gradients from its last
        microbatch's first backward on, until the step ends, and gets its weights until its first microbatch's last
        forward has ended. What this does not hide is added.

        Args:
            timeline: Of the step without all this.
            parameters: By rank; and those of them that are of experts.
        """
        schedule, machine, second = timeline.schedule, self.machine, SECONDS[self.pieces.unit]
        bandwidth = machine.among(self.replicas * self.ranks * self.pieces.gpus)
        if (self.holders(schedule) > 1 and bandwidth is None) or machine.memory_bandwidth is None:
            return None
        weights, gradients, optimizer = self.pieces.bytes_per_weight
        at_end = gradients if self.zero else 2 * gradients  # sent by each holder
        at_begin = weights if self.zero in (1, 2) else 0
        ends, begins = [], []
        for row, (of_rank, of_experts) in zip(timeline.rows, parameters, strict=True):
            sent = read = 0.0
            for count, holders in (
                (of_rank - of_experts, self.holders(schedule)),
                (of_experts, self.expert_holders(schedule)),
            ):
                if bandwidth:
                    sent += count * (holders - 1) / holders / (EXCHANGED * bandwidth) / second
                read += 2 * count * (weights + gradients + optimizer) / (holders if self.zero else 1)
            begins.append(max(0, at_begin * sent - _first_forward(row)))
            reduced = max(0, at_end * sent - (timeline.makespan - _last_backward(row, schedule.slices)))
            ends.append(reduced + read / machine.memory_bandwidth / second)
        return max(begins) + max(ends)


def _last_backward(row: Sequence[Span], slices: int) -> Number:
    """Return when a rank starts the first backward of its last microbatch, or of this one's first slice.

    Gradients are not complete before: the backwards of slices run from the last one to the first.
    """
    singles = [(single, span.start) for span in row for single in span.action.singles if single.op in (Op.B, Op.I)]
    last = max((single.microbatch for single, _ in singles), default=0) // slices * slices
    return min((start for single, start in singles if single.microbatch == last), default=0)


def _first_forward(row: Sequence[Span]) -> Number:
    """Return when a rank has ended the last forward of its first microbatch."""
    singles = [(single, span.end) for span in row for single in span.action.singles if single.op is Op.F]
    first = min((single.microbatch for single, _ in singles), default=0)
    return max((end for single, end in singles if single.microbatch == first), default=0)
