"""The findings of a plan about its best choice, and the reasons for the numbers in its sentences and its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ppedu.core import Op
from ppedu.core.actions import COPIES
from ppedu.core.numeric import Number, plural, pretty
from ppedu.planning.choice import Choice
from ppedu.planning.partition import KINDS
from ppedu.planning.pieces import SECONDS
from ppedu.planning.reasons import GB, Sentence, above, compared
from ppedu.sim import Span, Timeline
from ppedu.zoo.registry import require_registered

if TYPE_CHECKING:
    from ppedu.planning.plan import Plan

LARGE = 6  # choices that do not fit, in a finding
WORTH_A_WORD = 0.005  # the part of all ranks' time that a cause of the bubble takes
HEAVY = 1.5  # a piece that takes this many times as long as the median piece
HOLDS = {
    "weights": "The weights of the rank's layers: their number times the bytes of one, as above.",
    "gradients": "One for each weight of the rank, in the bytes given above.",
    "optimizer": "The states of the optimizer for each weight of the rank, in the bytes given above.",
    "activations": "The tensors that forwards keep for backwards, of all microbatches in flight at the peak.",
    "logits": "The head's results and their gradients, a number for each token and each word of the vocabulary.",
    "messages": "Room for an activation and a gradient on each link of the rank.",
}


def findings(plan: Plan) -> Iterator[Sentence]:
    """Yield the reasons for the best choice, and its limits, in sentences."""
    best, job = plan.best, plan.job
    pieces, unit, node, gpus = job.pieces.pieces, job.pieces.unit, job.machine.node, job.pieces.gpus
    said, timeline = words(plan, best), best.timeline()
    idle = f"{best.bubble:.1%}", said["bubble"]
    causes = timeline.causes()
    messages, imbalance = causes.get("communication", 0.0), causes.get("imbalance", 0.0)

    def points(share: float, without: str) -> tuple[str, list[str]]:
        lost = pretty(share * best.schedule.ranks * float(best.step_time), unit)
        total = f"{plural(best.schedule.ranks, 'rank')} × {pretty(best.step_time, unit)}"
        return f"{share * 100:.1f} points", [f"{without}, all ranks wait {lost} less, of {total}: {share:.1%}."]

    if messages > max(WORTH_A_WORD, best.bubble / 2):
        yield [
            "of the ", idle, " bubble, ", points(messages, "If messages took no time"), " are messages: faster "
            "links or fewer ranks would help more than another schedule",
        ]  # fmt: skip
    if job.machine.bandwidth is not None and not job.pieces.message and job.ranks > 1:
        yield [
            "messages take their latency alone: the model does not say how many bytes a stage sends; give them, as "
            "in Model.measured(…, message=67e6)"
        ]
    if node and gpus > node:
        yield [f"the {gpus} GPUs that split a stage are in several nodes of {node}, with slower links between them"]
    if imbalance > WORTH_A_WORD:
        times = [piece.forward + piece.backward for piece in pieces]
        usual, longest = sorted(times)[len(times) // 2], max(times)
        saved = points(imbalance, "If all stages took the mean time")
        found: Sentence = ["stages of equal length would save ", saved, " of the ", idle, " bubble"]
        if usual and longest >= HEAVY * usual and imbalance > best.bubble / 4:
            name, layers = pieces[times.index(longest)].name, f"{longest / usual:.1f}"
            takes = f"Its forward and backward take {pretty(longest, unit)}, a layer's {pretty(usual, unit)}"
            advice = "shard the vocabulary first (arXiv 2411.05288)" if name == "head" else "split it first"
            found += [f": the {name} takes as long as ", (layers, [f"{takes}: {layers}."]), f" layers; {advice}"]
        yield found
    sizes = best.memory
    rank = max(range(len(sizes)), key=sizes.__getitem__)
    held = [(kind, best.kinds[rank][kind] / GB) for kind in KINDS if best.kinds[rank][kind] >= GB / 20]
    if held:
        found = [f"rank {rank} is the fullest, with ", (f"{sizes[rank] / GB:.1f} GB", said["GB"])]
        for kind, size in held:
            found += [", " if len(found) > 2 else ": ", f"{kind} ", (f"{size:.1f}", [HOLDS[kind]])]
        yield found
    if best.slices:
        facts = require_registered(best.schedule.name).facts
        text = (
            f"Megatron-LM and torchtitan do not cut sequences; ppedu's Pipeline does, with "
            f"Batching(slices={best.slices}), for stages that take a past. {facts.used if facts else ''}"
        )
        yield [text.rstrip(". ")]
    if best.schedule.offloaded:
        yield _offload(timeline, float(job.host_bandwidth or 0) * SECONDS[unit] / GB)
    if best.schedule.placement.copies > 1:
        sent = [float(kinds["gradients"]) / GB for kinds in best.kinds]
        counts, when = ("leave out", "after the step") if best.after is None else ("count", "during the last backwards")
        why = "The gradients of the stages that the rank holds; another rank holds the same stages."
        yield [
            f"the times {counts} that {best.schedule.name}'s two copies of the model add up their gradients {when}: up "
            "to ", (f"{max(sent):.1f} GB", [why]), f" to send, on rank {sent.index(max(sent))}",
        ]  # fmt: skip
    fitting = [each for each in plan.choices if not each.excess]
    bubbles = [round(each.bubble, 3) for each in fitting]  # as printed: of equals, the best counts
    least = bubbles.index(min(bubbles))
    for index, choice in enumerate(fitting):
        if index and index in (1, least):
            found = [f"{choice.name}, ", *["the runner-up, "] * (index == 1)]
            if index == least:
                found += ["with the least bubble, ", (f"{choice.bubble:.1%}", words(plan, choice)["bubble"]), ", "]
            yield [*found, *compared(choice, best, unit)]
    too_large = [each for each in plan.choices if each.excess]
    if too_large:
        found = ["too large: "]
        for choice in too_large[:LARGE]:
            needed = f"{above(max(choice.memory), job.machine.memory)} GB", words(plan, choice)["GB"]
            found += ["; " if len(found) > 1 else "", f"{choice.name} (", needed, ")"]
        yield [*found, *([f"; and {len(too_large) - LARGE} more"] if len(too_large) > LARGE else [])]


def _offload(timeline: Timeline, bandwidth: float) -> Sentence:
    """Return what the rank with most on its host moves there. bandwidth: In GB per unit of time."""

    def copies(row: Sequence[Span]) -> list[tuple[Any, Any]]:
        """Return when each copy takes or leaves room on the host, and its time, which is negative if it leaves it."""
        spans = [span for span in row if span.action.op in COPIES]
        return sorted((start, end - start) if action.op is Op.O else (end, start - end) for action, start, end in spans)

    rows = [copies(row) for row in timeline.rows]
    most = [bandwidth * max(accumulate((time for _, time in row), initial=0)) for row in rows]
    rank = most.index(max(most))
    made = sum(single.op is Op.F for span in timeline.rows[rank] for single in span.action.singles)
    time = pretty(sum(abs(time) for _, time in rows[rank]), timeline.costs.unit)
    return [
        f"rank {rank} moves {len(rows[rank]) // 2} of its {made} activations to the host, up to ",
        (f"{most[rank]:.1f} GB at a time", ["On each GPU: from the start of an O to the end of its L."]),
        "; the copies take ",
        (time, ["Their bytes, there and back, at the bandwidth given above."]),
        ", beside computations; Megatron-LM and torchtitan do not offload; ppedu's Pipeline does",
    ]


def words(plan: Plan, choice: Choice) -> dict[str, list[str]]:
    """Return, for each column of a plan's table without its unit, the sentences behind a choice's number."""
    job, best, ranks, microbatches = plan.job, plan.best, choice.schedule.ranks, choice.schedule.microbatches
    unit = job.pieces.unit

    def time(number: Number) -> str:
        return pretty(number, unit)

    total, whole = ranks * choice.step_time, time(choice.whole)
    idle = total * choice.bubble
    step = "The simulated time from the first action of a step to the last, with the stages that the search has found."
    idles = f"{ranks} ranks × {time(choice.step_time)} = {time(total)}. They wait for {time(idle)} of it"
    seconds = float(choice.whole) * SECONDS[unit]
    longer = f"{whole} / {microbatches} microbatches, there {time(best.whole)} / {best.schedule.microbatches}"
    rank = max(range(ranks), key=choice.memory.__getitem__)
    kinds = [f"{kind} {float(size) / GB:.2f}" for kind in KINDS if (size := choice.kinds[rank][kind]) >= GB / 200]
    found = {
        "step": [step, f"The busiest rank works for {time(choice.busiest)} of it."],
        "": ["The fastest that fits in memory, or hardly slower and with less memory."]
        if choice is best
        else [f"How much longer a microbatch takes than with {best.name}: {longer}: {choice.longer(best):+.1%}."],
        "busiest rank": [
            "The work of the rank that has most.",
            f"{time(choice.busiest)} / {microbatches} microbatches = {time(choice.busiest / microbatches)} for each.",
        ],
        "bubble": ["The share of all ranks' time in which they are idle.", f"{idles}: {choice.bubble:.1%}."],
        "gradients, optimizer": [
            "The time that summing up gradients and the optimizer add to a step; computation hides the rest (arXiv "
            "1910.02054, section 7)."
        ],
        "GB": [
            f"The memory of the fullest rank, {rank}, at its peak.",
            f"In GB: {' + '.join(kinds) or 'nothing'} = {float(choice.memory[rank]) / GB:.1f}.",
        ],
    }
    if job.pieces.tokens and seconds:
        product = f"{job.pieces.tokens:,} tokens × {microbatches} microbatches × {plural(job.replicas, 'replica')}"
        found["tokens/s"] = [f"{product} / {seconds:.4g} s, the step with gradients and optimizer."]
    if job.pieces.flops and job.machine.peak:
        peak = job.machine.peak * job.machine.speedup(job.pieces.precision)
        found["MFU"] = [
            "The floating-point operations that the model needs, as a share of those that all GPUs could do.",
            f"{microbatches} × {float(job.pieces.flops):.3g} / ({ranks * job.pieces.gpus} GPUs × {float(peak):.3g} per "
            f"second × {seconds:.4g} s) = {choice.mfu or 0:.1%}.",
        ]
    return found
