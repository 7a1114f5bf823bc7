"""The reasons for numbers, against direct counts over the spans and the closed forms of the papers."""

import re
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu.core import SEND
from ppedu.view.why import bubble, causes, makespan, messages, peak, peaks

HALF = Fraction(1, 2)
RUNS = {
    "1f1b": pp.simulate(pp.schedule("1f1b", 4, 8)),
    "gpipe": pp.simulate(pp.schedule("gpipe", 3, 5), pp.Costs(forward=2, backward=3, latency=HALF)),
    "zb-h1": pp.simulate(pp.schedule("zb-h1", 4, 8), pp.Costs(latency=HALF, weight_memory=HALF)),
    "interleaved": pp.simulate(pp.schedule("interleaved", 4, 8)),
    "zb-v": pp.simulate(pp.schedule("zb-v", 3, 6), pp.Costs(forward=1.5, unit="s")),
    "dualpipe": pp.simulate(pp.schedule("dualpipe", 4, 8), pp.Costs(overlap=Fraction(5, 2))),
    "uneven": pp.simulate(pp.schedule("1f1b", 2, 4), pp.Costs(forward=[1, 2])),
}
each_run = pytest.mark.parametrize("timeline", RUNS.values(), ids=RUNS)


def said(why):
    return " ".join(why.words)


def found(pattern, why):
    """Return the numbers in the groups of a pattern."""
    return [float(each.replace(",", "")) for each in re.search(pattern, said(why)).groups()]


def formula(why):
    """Return the value of a formula with its numbers put in; None if there is no formula."""
    _, *lines = said(why).partition("The formula")[2].splitlines() or [""]
    return eval(lines[:2][-1].strip("= ").partition(". ")[0].strip(".").replace("·", "*")) if lines else None


@each_run
def test_the_bubble_is_a_ratio_of_times_that_can_be_counted(timeline):
    spans = [span for row in timeline.rows for span in row]
    work, total = sum(end - start for _, start, end in spans), len(timeline.rows) * max(end for *_, end in spans)
    ranks, length, all_time, worked, idle, again = found(
        r"(\d+) ranks × ([\d.]+) = ([\d.]+)\. They work for ([\d.]+) of it: ([\d.]+) / ([\d.]+)",
        bubble(timeline)._replace(words=[word.replace(" s", "") for word in bubble(timeline).words]),
    )
    assert ranks == len(timeline.rows) and all_time == again == pytest.approx(float(total), rel=1e-3)
    assert length == pytest.approx(float(total) / ranks, rel=1e-3) and worked == pytest.approx(float(work), rel=1e-3)
    assert idle == pytest.approx(float(total - work), rel=1e-3) and f"= {float(1 - work / total):.1%}" in said(
        bubble(timeline)
    )


@pytest.mark.parametrize("ranks, microbatches, chunks", [(2, 3, 1), (4, 8, 1), (8, 8, 1), (4, 8, 2), (2, 6, 3)])
def test_exact_fractions_are_those_of_the_papers(ranks, microbatches, chunks):
    name, options = ("interleaved", {"chunks": chunks}) if chunks > 1 else ("1f1b", {})
    timeline = pp.simulate(pp.schedule(name, ranks, microbatches, **options))
    paper = Fraction(ranks - 1, chunks * microbatches + ranks - 1)  # arXiv 2104.04473, section 2.2
    assert f" {paper.numerator} / {paper.denominator} = {float(paper):.1%}" in said(bubble(timeline))
    assert formula(bubble(timeline)) == pytest.approx(float(paper))
    assert formula(makespan(timeline)) == timeline.end
    assert ("arXiv 2104.04473", "arxiv.org/abs/2104.04473") in bubble(timeline).sources


@pytest.mark.parametrize("name", ["naive", "zb-h2", "v-half", "v-min", "dualpipe", "hanayo", "gems"])
def test_a_formula_with_its_numbers_gives_the_number_that_it_explains(name):
    timeline = pp.simulate(pp.schedule(name, 4, 8), pp.Costs(activation=3))
    for why, value in ((makespan(timeline), timeline.makespan), (bubble(timeline), timeline.bubble)):
        assert formula(why) in (None, pytest.approx(float(value)))
    for rank, why in enumerate(peaks(timeline, range(4))):
        assert formula(why) in (None, timeline.peak_activations[rank])


def test_a_formula_is_not_given_where_it_does_not_hold():
    one, other = (pp.schedule(name, 4, 8) for name in ("1f1b", "zb-h1"))
    impostor = pp.simulate(pp.Schedule("1f1b", other.placement, 8, other.orders))
    uneven = pp.simulate(one, pp.Costs(forward=[1, 2, 1, 1]))
    inference = pp.simulate(one.forwards, pp.Costs(forward=3, input=0, weight=0))
    for timeline in (impostor, uneven, inference, pp.simulate(pp.Schedule("mine", one.placement, 8, one.orders))):
        for why in (makespan(timeline), bubble(timeline), peak(timeline)):
            assert "formula" not in said(why) and not why.sources


@each_run
def test_the_critical_path_and_what_passes_in_it_are_as_long_as_the_makespan(timeline):
    words = makespan(timeline).words[1].replace(" s", "")
    taken = sum(map(float, re.findall(r" take ([\d.]+)", words)))
    passed = sum(map(float, re.findall(r"([\d.]+) pass", words)))
    assert taken + passed == pytest.approx(float(timeline.makespan))
    assert sum(map(int, re.findall(r"(\d+) [FBIW+]+ take", words))) == len(timeline.critical_path())


@each_run
def test_a_peak_is_the_forwards_begun_without_the_backwards_ended(timeline):
    share, kept = (
        Fraction(timeline.schedule.ranks, timeline.schedule.stages),
        timeline.costs.weight_memory,
    )  # of a stage
    for rank, why in enumerate(peaks(timeline, range(timeline.schedule.ranks))):
        counts = {what: int(count) for count, what in re.findall(r"(\d+) ([FBIW] (?:begun|ended))", said(why))}
        begun, full, halves = (counts.get(what, 0) for what in ("F begun", "B ended", "I ended"))
        held = begun - full - halves * (1 - kept) - counts.get("W ended", 0) * kept
        assert held * share == timeline.peak_activations[rank]
        assert why.text == f"peak {float(timeline.peak_activations[rank]):.4g}"
    listed = re.search(r"By rank: (.*?)\.( |$)", said(peak(timeline)))[1]
    assert [*map(float, listed.split(", "))] == [*map(float, timeline.peak_activations)]


@each_run
def test_causes_add_up_to_the_bubble(timeline):
    _, whole, _, *parts = causes(timeline)
    numbers = [float(part.text.rstrip("%")) for part in parts if not isinstance(part, str)]
    assert float(whole.text.rstrip("%")) == pytest.approx(100 * timeline.bubble, abs=0.05)
    assert sum(numbers) == pytest.approx(100 * timeline.bubble, abs=0.11)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe", "chimera"])
def test_messages_are_the_sends_of_the_lowered_schedule(name):
    made = pp.schedule(name, 4, 8)
    lowered = pp.lower(made)
    sends = sum(action.op in SEND for order in lowered.orders for action in order)
    assert messages(made).text == messages(lowered).text == str(sends)
    microbatches, hops, count = found(r"(\d+) microbatches × (\d+) × 2, forward and back, = (\d+)", messages(made))
    assert microbatches * hops * 2 == count == sends


def test_messages_are_not_counted_and_times_have_one_unit():
    lowered = pp.simulate(pp.lower(pp.schedule("1f1b", 2, 2)), pp.Costs(forward=0.01, backward=0.02, unit="s"))
    assert "They work for 120 ms of it: 60 ms / 180 ms = 33.3%." in said(bubble(lowered))
    assert [why.words[0].partition("with ")[2] for why in peaks(lowered, (0, 1))] == ["2 F begun.", "1 F begun."]


def test_an_empty_timeline_has_no_reasons_that_divide_by_zero():
    empty = pp.puzzle("first").timeline
    assert (bubble(empty).text, makespan(empty).text, peak(empty).text) == ("0.0%", "0", "0")
