"""Pictures of mistakes: a wait in a cycle has its arrow, and a send the receive that gets it."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import judge
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu.core.checking import TRANSPORTS
from ppedu.view.knot import draw
from ppedu.view.look import MARK

SVG = "{http://www.w3.org/2000/svg}"
EXCHANGE = """0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"""


def drawn(svg):
    """Return the texts of the boxes that are marked, and the number of red arrows."""
    root = ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '))
    parts = list(root)
    marked = [
        after.text for before, after in pairwise(parts) if before.get("stroke") == MARK and before.tag == f"{SVG}rect"
    ]
    return marked, sum(part.tag == f"{SVG}path" and part.get("stroke") == MARK for part in parts) // 2


@pytest.mark.parametrize("transport", ["buffered", "rendezvous"])
@given(st.randoms(use_true_random=False))
@often(200)
def test_each_rank_that_waits_in_a_cycle_has_an_arrow(transport, chance):
    schedule = judge.mutate(chance, judge.loosen(chance, judge.draw(chance)), ["receives", "delay", "swap"])
    problems = pp.check(schedule, transport=transport)
    for problem in problems:
        if problem.kind == "deadlock":
            marked, arrows = drawn(draw(schedule, [problem]))
            cycle = [str(schedule.orders[rank][index]).removesuffix("BATCH_P2P") for rank, index in problem.cycle]
            event("a deadlock")
            assert sorted(marked) == sorted(cycle) and arrows == len(cycle)


@given(st.randoms(use_true_random=False), st.sampled_from(TRANSPORTS))
@often(200)
def test_whatever_is_wrong_can_be_drawn(chance, transport):
    schedule = judge.mutate(chance, judge.loosen(chance, judge.draw(chance)), judge.MUTATIONS + judge.LOOSE)
    if schedule.lowered:
        html = pp.verify(schedule, transport=transport)._repr_html_()
        ElementTree.fromstring(f"<div>{html}</div>")


def test_an_action_that_fills_a_buffer_too_early_is_marked():
    html = pp.verify(pp.Schedule.read(EXCHANGE), buffers=1)._repr_html_()
    assert "which is in use until 0B0" in html
    assert drawn(html[html.index("<svg") :]) == (["0F1"], 0)


def test_a_receive_gets_the_message_at_the_other_end_of_its_arrow():
    schedule = pp.Schedule.read(
        EXCHANGE.replace("1RECV_F0 1F0", "1RECV_F1 1F0").replace("1RECV_F1 1F1", "1RECV_F0 1F1")
    )
    problems = [problem for problem in pp.check(schedule) if problem.kind == "message"]
    assert drawn(draw(schedule, problems)) == (["0SEND_F0", "0SEND_F1", "1RECV_F1", "1RECV_F0"], 2)


def test_a_notebook_draws_the_smallest_part():
    lowered = pp.lower(pp.schedule("1f1b", 8, 16))
    orders = [[*map(str, order)] for order in lowered.orders]
    orders[5].remove("5RECV_B0")
    orders[5].insert(orders[5].index("5SEND_F1"), "5RECV_B0")
    html = pp.Schedule("<ours>", lowered.placement, 16, orders)._repr_mimebundle_()[0]["text/html"]
    assert re.sub("<svg.*", "", html) == (
        "<p>deadlock: rank 5 waits at position 5 (5RECV_B0) for 6SEND_B0 of rank 6, rank 6 waits at position 3 "
        "(6RECV_F1) for 5SEND_F1 of rank 5</p>"
        "<p>The same on 2 ranks, 2 microbatches (&lt;ours&gt;: stages 5, 6; microbatches 0, 1, numbered from 0):</p>"
    )
    assert drawn(html[html.index("<svg") :]) == (["0RECV_B0", "1RECV_F1"], 2)


def test_verdicts_without_a_place():
    schedule = pp.Schedule.read(EXCHANGE)
    assert pp.verify(schedule)._repr_html_() == "<p>legal</p>"
    assert "<svg" in pp.verify(schedule, transport="any")._repr_html_()
    assert pp.verify(schedule, peak=1)._repr_html_() == "<p>rank 0 holds 2 activations at its peak; the limit is 1</p>"
