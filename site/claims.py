"""Claims about schedules that are in circulation and do not hold, each with the code that refutes it."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import ppedu as pp
from ppedu.core import Schedule


class Claim(NamedTuple):
    """A claim. kind: where one reads it. code: prints why it is wrong. shown: the name of the schedule in `code`."""

    kind: str
    said: str
    code: str
    but: str
    shown: str = ""

    def run(self) -> tuple[str, Schedule | None]:
        """Return what the code prints, and the schedule that it is about."""
        scope: dict[str, object] = {"pp": pp}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(self.code, scope)
        made = scope.get(self.shown)
        return printed.getvalue().rstrip(), made if isinstance(made, Schedule) else None


WARMUP = """
def with_warmup(warmup):
    orders = []
    for rank in range(4):
        first = warmup(rank)
        order = [pp.F(rank, i) for i in range(first)]
        for i in range(first, 8):
            order += [pp.F(rank, i), pp.B(rank, i - first)]
        orders.append(order + [pp.B(rank, i) for i in range(8 - first, 8)])
    return pp.Schedule("mine", pp.Placement.make("loop", 4), 8, orders)
"""

CLAIMS = [
    Claim(
        "a formula",
        "The bubble of 1F1B is (p−1) / (2(m−1) + p) of the time.",
        """
for p, m in (2, 4), (4, 8), (8, 32):
    said = (p - 1) / (2 * (m - 1) + p)
    one, gpipe = (pp.simulate(pp.schedule(name, p, m)).bubble for name in ("1f1b", "gpipe"))
    print(f"p={p}, m={m}: said {said:.1%}, 1f1b {float(one):.1%}, gpipe {float(gpipe):.1%}")
s = pp.schedule("1f1b", 4, 8)
""",
        "1F1B waits as long as GPipe, (p−1)(F+B) on each rank; it needs less memory, not less time.",
        "s",
    ),
    Claim(
        "a read-me",
        "With the same ranks and microbatches, GPipe has a bubble of 43 % and 1F1B one of 19 %.",
        """
for name in ("gpipe", "1f1b"):
    s = pp.schedule(name, 4, 4)
    print(f"{name}: {float(pp.simulate(s).bubble):.1%}")
""",
        "43 % is right for both. With equal stages the two always wait equally long.",
        "s",
    ),
    Claim(
        "a formula",
        "With pipelining, a device keeps (p+m) / (p·m) of the activations of the whole batch.",
        """
for name in ("gpipe", "1f1b"):
    for p, m in (2, 4), (4, 8), (8, 8):
        peak = max(pp.simulate(pp.schedule(name, p, m)).peak_activations)
        print(f"{name}, p={p}, m={m}: said {(p + m) / (p * m):.3f}, at most {peak / (p * m):.3f}")
s = pp.schedule("gpipe", 4, 8)
""",
        "A rank that keeps everything, as in GPipe, holds 1/p of all activations, because it holds 1/p of the layers.",
        "s",
    ),
    Claim(
        "a table",
        "A table titled 1F1B, in which each rank runs all its forwards before its first backward.",
        f"""{WARMUP}
s = with_warmup(lambda rank: 8)
print("as gpipe:", s.orders == pp.schedule("gpipe", 4, 8).orders)
print("as 1f1b:", s.orders == pp.schedule("1f1b", 4, 8).orders)
""",
        "This is GPipe. In 1F1B, rank r runs p − r − 1 forwards and then alternates.",
        "s",
    ),
    Claim(
        "an order",
        "An order of 1F1B in which the last rank runs F1 … Fm where the others run F0 … Fm−1.",
        """
base = pp.schedule("1f1b", 4, 8)
last = [each._replace(microbatch=each.microbatch + 1) if each.op == "F" else each for each in base.orders[3]]
s = pp.Schedule("mine", base.placement, 8, [*base.orders[:3], last])
for problem in pp.check(s)[:2]:
    print(problem)
""",
        "Microbatch 0 never reaches the loss, and a microbatch 8 was never sent.",
    ),
    Claim(
        "code",
        "The warm-up of 1F1B has p − r − 2 forwards on rank r.",
        f"""{WARMUP}
costs = pp.Costs(forward=1, backward=1)
s = with_warmup(lambda rank: max(2 - rank, 0))
print("legal:", pp.check(s) == [])
print("makespan:", pp.simulate(s, costs).makespan, "instead of", pp.simulate(pp.schedule("1f1b", 4, 8), costs).makespan)
""",
        "It is one forward short. Nothing fails and the gradients are right, so only the clock shows it.",
        "s",
    ),
    Claim(
        "code",
        "The warm-up has as many forwards as the rank's number.",
        f"""{WARMUP}
s = with_warmup(lambda rank: rank)
for problem in pp.check(s):
    print(problem)
""",
        "The first rank must run ahead the furthest. In this order the ranks wait for each other forever.",
    ),
    Claim(
        "a library's rule",
        "Interleaved 1F1B takes its microbatches in groups of p; the last group may be shorter.",
        """
print("legal:", pp.check(pp.schedule("interleaved", 4, 5, chunks=3)) == [])
try:
    pp.schedule("interleaved", 4, 5, chunks=3, group=4)
except pp.PipelineError as error:
    print(error)
""",
        "With some sizes the ranks then wait for each other. Groups of nearly equal size are always legal.",
    ),
    Claim(
        "a paper (arXiv 2401.10241, tables 5 and 9)",
        "The bubble rates of 1F1B-I, such as 0.1055 for 8 ranks, 24 microbatches and 3 chunks.",
        """
s = pp.schedule("interleaved", 8, 24, chunks=3)
t = pp.simulate(s, pp.Costs(forward=18522, input=18086, weight=9337, latency=601))
print(f"{float(1 - 24 * (18522 + 18086 + 9337) / t.makespan):.4f}")
""",
        "In the paper's script, only the first microbatch of each group waits for the previous chunk. The columns of "
        "1F1B, ZB-H1 and ZB-H2 agree to the last digit.",
        "s",
    ),
    Claim(
        "a read-me (github.com/MICLAB-BUPT/STP)",
        "On p ranks, interleaved 1F1B holds the activations of at most 3p−2 chunks, and STP of 3p.",
        """
for p, m in (2, 8), (4, 16), (8, 32):
    for name, said in ("interleaved", 3 * p - 2), ("stp", 3 * p):
        s = pp.schedule(name, p, m)
        free, keep = (max(pp.simulate(s, pp.Costs(activation=2, weight_memory=w)).peak_activations) for w in (0, 1))
        print(f"{name}, p={p}: said {said}, {free} if I frees everything, {keep} if W does")
""",
        "The formulas leave out the forward that runs before the first backward has ended, or beside it.",
        "s",
    ),
]
