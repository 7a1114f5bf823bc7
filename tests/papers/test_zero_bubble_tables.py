"""Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 9: the bubble rates of 1F1B.

The rate is (cost - m(F+I+W)) / cost. Times are in microseconds and were measured on the paper's models; its c,
the time of a message, is paid on every way between two ranks.
"""

import pytest

import ppedu as pp
from ppedu import Costs

TABLE = [
    # p, m, F, I, W, c, bubble rate of 1F1B
    (8, 24, 18522, 18086, 9337, 601, 0.2431),
    (8, 32, 18513, 18086, 9331, 626, 0.1985),
    (8, 64, 18546, 18097, 9321, 762, 0.1240),
    (8, 24, 29718, 29444, 19927, 527, 0.2347),
    (8, 32, 29802, 29428, 19530, 577, 0.1898),
    (8, 64, 29935, 29621, 19388, 535, 0.1091),
    (16, 48, 11347, 11248, 8132, 377, 0.2552),
]


@pytest.mark.parametrize("p, m, f, i, w, c, rate", TABLE)
def test_bubble_rate_of_1f1b(p, m, f, i, w, c, rate):
    timeline = pp.simulate(pp.schedule("1f1b", p, m), Costs(forward=f, input=i, weight=w, latency=c))
    cost = timeline.makespan
    assert isinstance(cost, int)
    assert round((cost - m * (f + i + w)) / cost, 4) == rate
