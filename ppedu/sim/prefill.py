"""Chunked prefill: long prompts through the pipeline of an inference server, and the running requests beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ppedu.core import F, Placement, Schedule, SettingError
from ppedu.core.numeric import Number, plain, pretty, ratio
from ppedu.core.validate import require_count, require_instance, require_number, require_one_of
from ppedu.sim.costs import Costs, require_costs
from ppedu.sim.lengths import equal_time_slices
from ppedu.sim.simulation import simulate
from ppedu.sim.timeline import Timeline


@dataclass(frozen=True, repr=False)
class Prefill(Timeline):
    """The timeline of a chunked prefill, made by `prefill`. In its actions, 2F5 is step 5 in stage 2.

    Args:
        lengths: The tokens in each chunk of a prompt.
        mixed: The tokens of running requests ride along in each step; if not, every second step is theirs.
    """

    lengths: tuple[int, ...] = ()
    mixed: bool = True

    @cached_property
    def _steps(self) -> list[tuple[Any, Any]]:
        """When each step starts on the first stage, and when it ends on the last one."""
        spans = {(action.stage, action.microbatch): (start, end) for row in self.rows for action, start, end in row}
        last = self.schedule.stages - 1
        return [(spans[0, step][0], spans[last, step][1]) for step in range(self.schedule.microbatches)]

    @property
    def first_tokens(self) -> tuple[Any, ...]:
        """The time of each prompt's first token: the end of its last chunk on the last stage."""
        slices = self.schedule.slices
        ends = [end for _, end in self._steps]
        return tuple(ends[(0 if self.mixed else -1) + last] for last in range(slices - 1, len(ends), slices))

    @property
    def time_to_first_token(self) -> Any:
        """That of the prompt that waits longest, if all arrive at the start."""
        return max(self.first_tokens)

    @cached_property
    def between_tokens(self) -> tuple[Any, ...]:
        """The times between two tokens of running requests, step by step.

        A request's next token needs the one before, which comes from the last stage. So requests take turns, in as many
        groups as steps are in flight: if they ride along in chunks, one for each rank (vLLM's `max_concurrent_batches`,
        SGLang's `pp_loop_size`), or more if messages take long, so that no rank has to wait for tokens. Their first
        ones are counted from the start.
        """
        theirs = self._steps if self.mixed else self._steps[1::2]
        starts, ends = zip(*theirs, strict=True)
        late = ratio(self.makespan, 100 * len(ends))  # equal times are not quite equal: tokens are whole
        groups = max(bisect_left(starts, end - late) - step for step, end in enumerate(ends))
        before = [self.start] * groups + [*ends]
        return tuple(plain(end - start) for start, end in zip(before, ends, strict=False))

    @property
    def longest_between_tokens(self) -> Any:
        return max(self.between_tokens)

    @property
    def mean_between_tokens(self) -> Any:
        return ratio(sum(self.between_tokens), len(self.between_tokens))

    def summary(self) -> str:
        """Return one line: that of a timeline, the time to the first token, and the times between tokens."""
        times = self.time_to_first_token, self.longest_between_tokens, self.mean_between_tokens
        first, longest, mean = (pretty(time, self.costs.unit) for time in times)
        return f"{super().summary()}, first token {first}, between tokens at most {longest}, on average {mean}"


def prefill(
    ranks: int,
    tokens: int,
    chunks: int | Sequence[int],
    costs: Costs | None = None,
    *,
    equal_time: bool = False,
    prompts: int = 1,
    decode: Number = 0,
    mixed: bool = True,
    placement: str = "loop",
) -> Prefill:
    """Return the timeline of long prompts whose chunks follow each other through the stages, as vLLM and SGLang do it.

        costs = Costs(0.5, attention=0.5)  # of the whole prompt on each rank
        prefill(4, 131072, 16, costs).time_to_first_token  # 0.64
        prefill(4, 131072, 16, costs, equal_time=True).time_to_first_token  # 0.59

    A chunk attends to all before it, so of equally long ones, later ones take longer, and all ranks wait for the last
    one. SGLang makes later ones shorter (`--enable-dynamic-chunking`, lmsys.org/blog/2026-01-15-chunked-pipeline), so
    that each takes as long as the first. If all stages take equally long, no other chunks are faster: a prompt takes
    the time of one rank's work, and for each other rank that of the longest chunk (TeraPipe, arXiv 2102.07988).

    Running requests get their tokens meanwhile. vLLM puts them into each chunk, within `--max-num-batched-tokens`
    (docs.vllm.ai/en/stable/configuration/optimization), as in Sarathi-Serve (arXiv 2403.02310), and so does SGLang with
    `--enable-mixed-chunk`; without it, they wait for the whole prompt (github.com/sgl-project/sglang/issues/32549).

    Args:
        tokens: In each prompt.
        chunks: Their number, or the tokens in each. 131072 tokens at `--max-num-batched-tokens 8192` are 16 chunks.
        costs: `forward` is the time that a rank takes for a whole prompt, of which `attention` is a part.
        equal_time: Chunks take equally long, see `equal_time_slices`. By default, they are equally long.
        prompts: They follow each other. All arrive at the start.
        decode: The time of a rank for the tokens of running requests, or any other time that a chunk of any length
            takes in addition. With it, many short chunks are slow.
        mixed: These tokens ride along in each chunk, which takes `decode` longer. If not, a step of its own follows
            each chunk.
        placement: "loop", or "v", with two stages on each rank. If all chunks take equally long, V is not faster: its
            last rank waits for half of the first chunk and half of the last one, for each other rank. With equally
            long ones it is, as the first one takes less; and shorter chunks at both ends are better still.

    Raises:
        SettingError: The chunks do not make up the prompt, or another argument is not suitable.
    """
    costs = require_costs(costs)
    require_one_of("placement", placement, ("loop", "v"))
    for name, flag in (("equal_time", equal_time), ("mixed", mixed)):
        require_instance(name, flag, bool, "True or False")
    require_number("decode", decode, lambda time: time >= 0, "a time of at least 0")
    if costs.lengths:
        raise SettingError("give the lengths of chunks as chunks, such as chunks=[6000, 4000, 3000]; leave out lengths")
    lengths = _lengths(tokens, chunks, costs.attention, equal_time)
    stages = 2 if placement == "v" else 1
    made = _schedule(Placement.make(placement, ranks, stages, prompts, len(lengths)), prompts)
    timeline = simulate(made, replace(costs, lengths=lengths))
    if mixed and not decode:
        return Prefill(made, timeline.rows, timeline.costs, lengths=lengths)
    of_stage = ratio(decode * made.ranks, made.stages)
    times: list[list[Any]] = [[] for _ in range(made.stages)]
    for action, start, end in sorted(span for row in timeline.rows for span in row):
        times[action.stage] += [end - start + of_stage] if mixed else [end - start, of_stage]
    steps = lengths if mixed else tuple(length for chunk in lengths for length in (chunk, 1))  # few tokens: one
    made = _schedule(replace(made.placement, slices=len(steps)), prompts)
    timeline = simulate(made, replace(costs, forward=times, lengths=steps))
    return Prefill(made, timeline.rows, timeline.costs, lengths=lengths, mixed=mixed)


def _lengths(tokens: int, chunks: int | Sequence[int], attention: Number, equal_time: bool) -> tuple[int, ...]:
    """Return the tokens in each chunk."""
    if not isinstance(chunks, Sequence):
        return equal_time_slices(tokens, chunks, attention if equal_time else 0)
    lengths = tuple(require_count("the tokens of a chunk", length) for length in chunks)
    if equal_time:
        raise SettingError("give the number of chunks of equal time, or their lengths")
    if sum(lengths) != require_count("tokens", tokens):
        raise SettingError(f"the chunks have {sum(lengths)} tokens, and the prompt has {tokens}")
    return lengths


def _schedule(placement: Placement, prompts: int) -> Schedule:
    """Return the schedule in which each rank runs its stages' forwards as early as those of equal time could run."""
    orders, steps = [], prompts * placement.slices
    for rank in range(placement.ranks):
        turns = [(2 * step + stage, stage, step) for stage in placement.stages_of(rank) for step in range(steps)]
        orders.append(tuple(F(stage, step) for _, stage, step in sorted(turns)))
    return Schedule("prefill", placement, steps, tuple(orders), forward_only=True)
