"""A plan as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from textwrap import wrap
from typing import TYPE_CHECKING

from ppedu.core.numeric import Number, plural
from ppedu.core.tables import LINE, in_html, in_text
from ppedu.planning.findings import findings
from ppedu.planning.reasons import GB, joined

if TYPE_CHECKING:
    from ppedu.planning.choice import Choice, Workload
    from ppedu.search.optimal import Found

SHOWN = 8  # choices in the printed table
LISTED = 16  # ranks in the printed partition
ACTIVATIONS = ("activations", "logits")  # the kinds of bytes that a schedule decides
SHARED = ("nothing", "the optimizer", "gradients and optimizer", "weights, gradients and optimizer")  # by ZeRO's stage
INTERRUPTED = "The search was interrupted, or its time was over; a longer one may find better partitions."


@dataclass(frozen=True)
class Plan:
    """The answer of `ppedu.plan`.

    Attributes:
        choices: The best first; those that do not fit in memory last.
        interrupted: Whether the search was ended early. stopped: Whether Ctrl+C has ended it.
    """

    job: Workload
    choices: tuple[Choice, ...]
    interrupted: bool = False
    stopped: bool = False

    @property
    def best(self) -> Choice:
        """The fastest choice that fits in memory, or one that is hardly slower and needs less of it."""
        return self.choices[0]

    def search(self, choice: Choice | None = None, time_limit: float = 30) -> Found:
        """Search for a schedule that is faster than a choice, by default the best one, with the same stages.

        It has the memory that weights, gradients, optimizer and messages leave on the fullest rank. Needs OR-tools; see
        `ppedu.search.optimal`, which raises the same errors.
        """
        from ppedu.search.optimal import optimal

        chosen = self.best if choice is None else choice
        fixed = [sum(size for kind, size in each.items() if kind not in ACTIVATIONS) for each in chosen.kinds]
        schedule = chosen.schedule
        return optimal(
            schedule.ranks,
            schedule.microbatches,
            chosen.costs,
            placement=schedule.placement,
            memory=self.job.machine.memory - max(fixed),
            time_limit=time_limit,
        )

    @property
    def findings(self) -> list[str]:
        """The reasons for the best choice, and its limits, in sentences."""
        return [*map(joined, findings(self))]

    def rows(self, count: int) -> Iterator[Sequence[str]]:
        """Yield the head of the table and its rows: the choices that fit. Columns without a number are left out."""
        unit = self.job.pieces.unit
        shown = [each for each in self.choices if not each.excess][:count]
        several = len({each.microbatches for each in self.choices}) > 1
        best = self.best
        columns = {
            "schedule": [each.name for each in shown],
            "microbatches": [str(each.microbatches) if several else "" for each in shown],
            f"step [{unit}]": [_number(each.step_time) for each in shown],
            "": ["best" if each is best else f"{float(each.longer(best)):+.1%}" for each in shown],
            f"busiest rank [{unit}]": [_number(each.busiest) for each in shown],
            "bubble": [f"{each.bubble:.1%}" for each in shown],
            f"gradients, optimizer [{unit}]": ["" if each.after is None else _number(each.after) for each in shown],
            "tokens/s": ["" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}" for each in shown],
            "MFU": ["" if each.mfu is None else f"{each.mfu:.1%}" for each in shown],
            "GB": [f"{float(max(each.memory)) / GB:.1f}" for each in shown],
        }
        kept = {title: cells for title, cells in columns.items() if any(cells)}
        yield [*kept]
        yield from zip(*kept.values(), strict=True)

    def partition(self, choice: Choice | None = None, most: int | None = None) -> str:
        """Return a choice's partition in a line for each rank: which layers it holds, in which stages.

        Args:
            choice: One of `choices`; by default the best.
            most: Of more ranks than this, only the first and the last are listed.
        """
        chosen = choice or self.best
        lines = []
        for rank in range(chosen.schedule.ranks):
            stages = chosen.schedule.placement.stages_of(rank)
            held = "; ".join(f"stage {stage}: {_held(chosen.partition[stage], chosen.letters)}" for stage in stages)
            lines.append(f"rank {rank}: {held}")
        if most and len(lines) > most:
            lines[most // 2 : -(most // 2)] = [f"… {len(lines) - most // 2 * 2} more ranks: print(plan.partition())"]
        return "\n".join(lines)

    @property
    def stages(self) -> str:
        """The best choice and the layers of its ranks, in lines."""
        copies = " (two copies of the model: two ranks hold each stage)" * (self.best.schedule.placement.copies > 1)
        tokens = ", ".join(map(str, self.best.slices))
        cut = f"\nthe tokens of a sequence's slices: {tokens}" if tokens else ""
        return f"best: {self.best.name}{copies}{cut}\n{self.partition(most=LISTED)}"

    @property
    def size(self) -> str:
        """The GPUs and their memory, in words."""
        job = self.job
        split = f" of {job.pieces.gpus} GPUs" if job.pieces.gpus > 1 else ""
        size = f"{plural(job.ranks, 'rank')}{split}, {plural(job.replicas, 'replica')}"
        return f"{size}, {float(job.machine.memory) / GB:g} GB each"

    @property
    def settings(self) -> str:
        """The questions and assumptions behind the plan, in words."""
        pieces, zero = self.job.pieces, self.job.zero
        weights, gradients, optimizer = pieces.bytes_per_weight
        said = [f"bytes of a weight: {weights:g}, its gradient {gradients:g}, the optimizer {optimizer:g}"]
        if zero and self.job.holders(self.best.schedule) > 1:
            said.append(f"the GPUs that hold the same stage share {SHARED[zero]} (ZeRO {zero})")
        if pieces.context > 1:
            said.append(f"each sequence is in {pieces.context} parts")
        if pieces.expert > 1:
            beside = ", beside the computation of another microbatch" if pieces.overlap else ""
            copies = ", once for each expert" if pieces.dispatcher == "alltoall" else ""
            said.append(f"a layer's experts are on {pieces.expert} GPUs, and tokens are sent to them{copies}{beside}")
        if pieces.visited:
            said.append(
                "CUDA graphs start the kernels of layers with experts"
                if pieces.graphs
                else "without CUDA graphs, a layer with experts takes the host 9.5 ms at least"
            )
        if pieces.tensor_overlap and pieces.tensor > 1:
            said.append("half of a tensor group's exchange is hidden")
        if pieces.shard_vocabulary:
            said.append("every rank has a part of the embedding and of the head")
        if pieces.precision != "bf16":
            said.append(f"the layers' matrices are in {pieces.precision}, and MFU is of that format's peak")
        if pieces.recompute != "none":
            said.append("each layer is recomputed" if pieces.recompute == "full" else "attention is recomputed")
        if self.job.blocking:
            said.append("ranks do not compute while they send and receive")
        if self.job.host_bandwidth:
            said.append(f"activations go to the host at {float(self.job.host_bandwidth) / GB:g} GB/s where they must")
        if not self.job.barrier:
            said.append("a step begins without waiting for all ranks")
        if pieces.flops and (spread := self.job.machine.spread):
            said.append(f"nine in ten runs like this take up to {float(spread):.0%} more or less than their plan")
        return "; ".join(said)

    def __str__(self) -> str:
        head, *rows = self.rows(SHOWN)
        more = sum(not each.excess for each in self.choices) - len(rows)
        lines = [self.size, *wrap(self.settings, LINE)]
        lines += ["", *chain.from_iterable(in_text([head, *rows], 40, LINE))]
        lines += [f"… and {more} more"] if more > 0 else []
        lines += [""]
        for line in self.stages.splitlines():
            lines += wrap(line, LINE, subsequent_indent="  ")
        lines += [""]
        for number, finding in enumerate(self.findings, 1):
            lines += wrap(f"{number}. {finding}", LINE, subsequent_indent="   ")
        if self.interrupted:
            lines += ["", INTERRUPTED]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        rows = [[escape(cell) for cell in row] for row in self.rows(len(self.choices))]
        notes = "".join(f"<li>{escape(finding)}</li>" for finding in self.findings)
        stages = f'<pre style="white-space: pre-wrap;">{escape(self.partition())}</pre>'
        said = f"<p>{escape(self.size)}; {escape(self.settings)}</p>"
        return f"{in_html(rows)}{said}{stages}<ol>{notes}</ol>"


def _held(pieces: range, letters: str) -> str:
    """Return a stage's pieces in words: "embedding, layers 0–3". letters: Of all pieces."""
    words = []
    for letter, run in groupby(pieces, letters.__getitem__):
        places = [*run]
        if letter == "t":
            first, last = places[0] - 1, places[-1] - 1
            words.append(f"layer {first}" if first == last else f"layers {first}–{last}")
        else:
            words.append({"E": "embedding", "m": "prediction", "L": "head"}[letter])
    return ", ".join(words) or "nothing"


def _number(number: Number) -> str:
    return f"{float(number):,.0f}" if number >= 100 else f"{float(number):#.3g}"
