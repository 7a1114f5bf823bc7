"""Figures that papers print, and the same simulated. The tests compare them, and the site shows them side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ppedu as pp
from ppedu.sim import Timeline


class Figure(NamedTuple):
    """A figure that a paper prints. simulated: what a correct simulation gives, rounded like the paper's."""

    schedule: str
    source: str
    setting: str
    printed: float
    simulated: float
    ranks: int
    microbatches: int
    costs: pp.Costs
    options: dict[str, Any]

    def timeline(self) -> Timeline:
        return pp.simulate(pp.schedule(self.schedule, self.ranks, self.microbatches, **self.options), self.costs)


ZERO_BUBBLE = "arXiv 2401.10241, tables 5 and 9"
# The cost of ZB-H2 is its span, that of the other schedules the makespan. Times are in microseconds and were measured
# on the paper's models, whose embedding and loss are each counted as a layer; c is added to every hop between ranks.
RATES = "bubble rate, (cost − m(F+I+W)) / cost"
SPANS = "bubble rate by the span, (span − m(F+I+W)) / span"
WHY = {
    "interleaved": "In the paper's script, only the first microbatch of each group waits for the output of the "
    "previous chunk from the last rank. Here every microbatch waits."
}
TABLE = [
    # p, m, layers, F, I, W, c; rates of 1F1B, 1F1B-I as printed, 1F1B-I if every microbatch waits, ZB-H1 and ZB-H2
    (8, 24, 24, 18522, 18086, 9337, 601, 0.2431, 0.1055, 0.1090, 0.1585, 0.1083),
    (8, 32, 24, 18513, 18086, 9331, 626, 0.1985, 0.0818, 0.0847, 0.1242, 0.0837),
    (8, 64, 24, 18546, 18097, 9321, 762, 0.1240, 0.0443, 0.0461, 0.0674, 0.0444),
    (8, 24, 32, 29718, 29444, 19927, 527, 0.2347, 0.0808, 0.0827, 0.1323, 0.0698),
    (8, 32, 32, 29802, 29428, 19530, 577, 0.1898, 0.0628, 0.0644, 0.1045, 0.0559),
    (8, 64, 32, 29935, 29621, 19388, 535, 0.1091, 0.0320, 0.0328, 0.0554, 0.0294),
    (16, 48, 48, 11347, 11248, 8132, 377, 0.2552, 0.1104, 0.1136, 0.1397, 0.0672),
]


def figures() -> Iterator[Figure]:
    for p, m, layers, f, i, w, c, plain, printed, interleaved, h1, h2 in TABLE:
        costs = pp.Costs(forward=f, input=i, weight=w, latency=c)
        for name, said, simulated in (
            ("1f1b", plain, plain),
            ("interleaved", printed, interleaved),
            ("zb-h1", h1, h1),
            ("zb-h2", h2, h2),
        ):
            setting = f"{p} ranks, {m} microbatches; F {f:,}, I {i:,}, W {w:,}, a hop {c:,} µs"
            options = {"chunks": layers // p} if name == "interleaved" else {}
            yield Figure(name, ZERO_BUBBLE, setting, said, simulated, p, m, costs, options)


def rate(figure: Figure) -> float:
    """Return the bubble rate of a figure's simulation, as the paper defines it."""
    timeline, costs = figure.timeline(), figure.costs
    cost = timeline.span if figure.schedule == "zb-h2" else timeline.makespan
    times: list[Any] = [costs.forward, costs.input, costs.weight]
    work = figure.microbatches * sum(times)
    return round(float((cost - work) / cost), 4)
