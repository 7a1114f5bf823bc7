"""Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 9: bubble rates."""

import pytest
from figures import figures, rate

from ppedu.zoo import theory


@pytest.mark.parametrize("figure", [*figures()], ids=lambda each: f"{each.schedule}-{each.ranks}-{each.microbatches}")
def test_bubble_rates(figure):
    assert rate(figure) == figure.simulated
    assert (figure.printed == figure.simulated) == (figure.schedule != "interleaved")
    if figure.schedule != "interleaved":  # whose formula is for zero latency
        quantity = "span" if figure.schedule == "zb-h2" else "makespan"
        value = getattr(theory, quantity)(figure.schedule, figure.ranks, figure.microbatches, figure.costs).value
        assert value == getattr(figure.timeline(), quantity)
