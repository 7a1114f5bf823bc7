"""Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 9: bubble rates.

The rate is (cost - m(F+I+W)) / cost. The cost of ZB-H2 is its span, that of the other schedules the makespan. Times are
in microseconds and were measured on the paper's models; c, the time of a message, is added to every hop between ranks.
"""

import pytest

import ppedu as pp
from ppedu import Costs
from ppedu.zoo import theory

TABLE = [  # the embedding and the loss are each counted as a layer
    # p, m, layers, F, I, W, c, bubble rates of 1F1B, 1F1B-I, ZB-H1 and ZB-H2
    (8, 24, 24, 18522, 18086, 9337, 601, 0.2431, 0.1090, 0.1585, 0.1083),
    (8, 32, 24, 18513, 18086, 9331, 626, 0.1985, 0.0847, 0.1242, 0.0837),
    (8, 64, 24, 18546, 18097, 9321, 762, 0.1240, 0.0461, 0.0674, 0.0444),
    (8, 24, 32, 29718, 29444, 19927, 527, 0.2347, 0.0827, 0.1323, 0.0698),
    (8, 32, 32, 29802, 29428, 19530, 577, 0.1898, 0.0644, 0.1045, 0.0559),
    (8, 64, 32, 29935, 29621, 19388, 535, 0.1091, 0.0328, 0.0554, 0.0294),
    (16, 48, 48, 11347, 11248, 8132, 377, 0.2552, 0.1136, 0.1397, 0.0672),
]
# For 1F1B-I the paper prints .1055 .0818 .0443 .0808 .0628 .0320 .1104. In its script only the first microbatch of each
# group waits for the output of the previous chunk from the last rank. Here every microbatch waits.


def rates(p, m, layers, f, i, w, c):
    costs = Costs(forward=f, input=i, weight=w, latency=c)
    names = {"1f1b": {}, "interleaved": {"chunks": layers // p}, "zb-h1": {}, "zb-h2": {}}
    for name, options in names.items():
        quantity = "span" if name == "zb-h2" else "makespan"
        cost = getattr(pp.simulate(pp.schedule(name, p, m, **options), costs), quantity)
        if name != "interleaved":  # whose formula is for zero latency
            assert getattr(theory, quantity)(name, p, m, costs).value == cost
        yield round(float((cost - m * (f + i + w)) / cost), 4)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(map(str, row[:3])))
def test_bubble_rates(row):
    assert tuple(rates(*row[:7])) == row[7:]
