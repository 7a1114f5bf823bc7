"""A machine whose speed is that of a run that was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ppedu.core import SettingError
from ppedu.planning.machine import Machine
from ppedu.planning.pieces import FLOP, Pieces, require_amount
from ppedu.planning.planner import plan
from ppedu.planning.presets import machine_named

CLOSE = 1e-4  # of the time, relative
ATTEMPTS = 10
SPREAD = 0.09  # nine in ten published runs are as close after another one has corrected the machine (docs/published.md)
DEPENDS = 0.5  # the least change of the time that a change of the speed brings, both relative
FASTEST, SLOWEST = 1e-3, 1e4  # times the machine's own slowness


def calibrate(machine: Machine | str, tokens_per_second: float, **run: Any) -> Machine:
    """Return the machine with the speeds at which `plan` gives a run the speed that was measured.

        h100 = pp.calibrate(
            "h100", 64 * 1664, model="llama-3-70b", ranks=8, microbatches=128, sequence=8192, tensor=4, replicas=2,
            schedules="interleaved", partition="Ett|(tt|)*38ttL", precision="fp8", recompute=False,
        )
        pp.plan("llama-3-70b", h100, ranks=16, …)

    One number corrects matrices, attention and the memory's bandwidth together. Links stay as they are. Of published
    runs, others on the same GPU in the same format are then within 10% in nine of ten cases (docs/published.md).

    Args:
        tokens_per_second: Of all replicas of the run.
        run: The other arguments of `plan`, for a model by sizes: best with one schedule and the run's own partition.
            Otherwise, the choice that is best at the machine's own speed is taken; at another speed, another may be.

    Raises:
        SettingError: As in `plan`; or no speed explains the number: links or the host take longer; or the time of
            the run says little about the speed of its GPUs.
    """
    require_amount("tokens_per_second", tokens_per_second, "tokens of all replicas per second, such as 100e3", 1e-9)
    tokens_per_second = float(tokens_per_second)
    now = machine_named(machine)
    if isinstance(model := run.get("model"), Pieces) and model.unit != FLOP:
        raise SettingError("calibrate is for models by sizes: times that were measured have no speed to correct")
    if now.flops is None:
        raise SettingError(
            "the machine has no speed to correct; give its achieved FLOP/s, such as Machine(flops=600e12)"
        )
    best = plan(machine=now, **run).best
    fixed = run | {
        "schedules": [best.schedule.name],
        "partition": [len(pieces) for pieces in best.partition],
        "microbatches": best.microbatches,
    }

    def seconds(slowness: float) -> float:
        """Return the time of a token at 1/`slowness` of the machine's speed."""
        tokens = plan(machine=_scaled(replace(now, peak=None), 1 / slowness), **fixed).best.tokens_per_second
        if tokens is None:
            raise SettingError("the tokens of a microbatch are unknown; give sequence=, such as sequence=8192")
        return 1 / tokens

    # The time is nearly a line over the slowness, so the secant method takes few steps.
    wanted, earlier, slowness = 1 / tokens_per_second, 1.0, 2.0
    earlier_time, time = seconds(earlier), seconds(slowness)
    depends = time / earlier_time - 1  # how much longer the run takes on GPUs that are twice as slow
    for _ in range(ATTEMPTS):
        slope = (time - earlier_time) / (slowness - earlier)
        earlier, earlier_time = slowness, time
        if not slope:
            break
        slowness += (wanted - time) / slope
        if slowness > SLOWEST:
            raise SettingError(
                f"{tokens_per_second:,.3g} tokens/s are too few: at the machine's own speed, the plan has "
                f"{1 / seconds(1.0):,.0f}; give those of all replicas"
            )
        if slowness < FASTEST:
            raise SettingError(
                f"no speed of the GPUs explains {tokens_per_second:,.0f} tokens/s: links or the host take longer; "
                f"at the machine's own speed, the plan has {1 / seconds(1.0):,.0f}"
            )
        time = seconds(slowness)
        if abs(time / wanted - 1) < CLOSE:
            break
    depends = min(depends, slope * slowness / time)
    if depends < DEPENDS:
        raise SettingError(
            "this run says little about the speed of its GPUs, for it waits for its links or its host: on GPUs that "
            f"are 10% slower, it would take {0.1 * depends:.1%} longer; take a run that computes most of the time"
        )
    if now.peak and now.flops > now.peak * slowness:
        raise SettingError(
            f"{tokens_per_second:,.0f} tokens/s would need {now.flops / slowness / 1e12:,.0f} TFLOP/s of each GPU, "
            f"more than its peak of {now.peak / 1e12:,.0f}; check ranks, replicas, tensor, sequence and precision"
        )
    return replace(_scaled(now, 1 / slowness), spread=SPREAD)


def _scaled(machine: Machine, factor: float) -> Machine:
    assert machine.flops
    known = {name: getattr(machine, name) for name in ("flops", "attention", "memory_bandwidth")}
    return replace(machine, **{name: speed * factor for name, speed in known.items() if speed is not None})
