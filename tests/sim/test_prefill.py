"""Chunked prefill against the recurrence of a flow shop, all cuts of short prompts, and a table computed elsewhere."""

import itertools
import random
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu import Costs, SettingError

LONG = 131072
HALF = Costs(0.5, attention=0.5)


def flow_shop(times, ranks, latency=0):
    """Return when each job starts on the first machine, and ends on the last. Every machine takes as long for a job."""
    free, spans = [0] * ranks, []
    for time in times:
        ready, start = 0, free[0]
        for rank in range(ranks):
            free[rank] = max(free[rank], ready) + time
            ready = free[rank] + latency
        spans.append((start, free[-1]))
    return spans


def times_of(lengths, attention):
    """Return the part of a prompt's time that each chunk takes: ∫ 1 - attention + 2 attention x dx."""
    cuts = [Fraction(cut, sum(lengths)) for cut in itertools.accumulate(lengths, initial=0)]
    return [(1 - attention) * (b - a) + 2 * attention * (b - a) * (a + b) / 2 for a, b in itertools.pairwise(cuts)]


def cuts_of(tokens, chunks):
    for inner in itertools.combinations(range(1, tokens), chunks - 1):
        yield [b - a for a, b in itertools.pairwise((0, *inner, tokens))]


def test_it_is_a_flow_shop():
    dice = random.Random(3)
    for _ in range(60):
        lengths = [dice.randint(1, 30) for _ in range(dice.randint(1, 8))]
        attention, ranks, prompts = dice.choice([0, Fraction(1, 3), 1]), dice.randint(1, 5), dice.randint(1, 2)
        latency, decode, mixed = dice.choice([0, Fraction(1, 9)]), dice.choice([0, Fraction(1, 7)]), dice.random() < 0.5
        costs = Costs(3, attention=attention, latency=latency)
        found = pp.prefill(ranks, sum(lengths), lengths, costs, prompts=prompts, decode=decode, mixed=mixed)
        steps = [3 * time for time in times_of(lengths, attention)] * prompts
        own = bool(decode) and not mixed
        steps = [each for time in steps for each in (time, decode)] if own else [time + decode for time in steps]
        spans = flow_shop(steps, ranks, latency)
        ends = [end for _, end in (spans[::2] if own else spans)]
        assert found.makespan == spans[-1][1]
        assert found.first_tokens == tuple(ends[len(lengths) - 1 :: len(lengths)])
        assert pp.check(found.schedule) == [] == pp.check(pp.lower(found.schedule), transport="any")


def test_a_prompt_takes_one_ranks_work_and_the_longest_chunk_for_each_other_rank():
    for chunks, equal_time in itertools.product((1, 3, 8), (False, True)):
        found = pp.prefill(4, 1000, chunks, Costs(1, attention=Fraction(1, 2)), equal_time=equal_time)
        assert found.makespan == 1 + 3 * max(times_of(found.lengths, Fraction(1, 2)))


def test_the_table_of_another_tool():
    """Its cells, but for 8 chunks and more, which are those of chunks with a fixed cost of 0.00055, fitted to them."""
    table = {1: (2.00, 2.00), 4: (1.02, 0.88), 8: (0.78, 0.69), 16: (0.65, 0.60), 32: (0.59, 0.57)}
    pure = {1: (2.00, 2.00), 4: (1.02, 0.88), 8: (0.77, 0.69), 16: (0.64, 0.59), 32: (0.57, 0.55)}
    for cells, fixed in ((table, 0.00055), (pure, 0)):
        for chunks, cell in cells.items():
            found = (pp.prefill(4, LONG, chunks, HALF, equal_time=each, decode=fixed) for each in (False, True))
            assert tuple(round(each.time_to_first_token + 1e-9, 2) for each in found) == cell


def test_no_chunks_are_faster_than_those_of_equal_time():
    """But for whole tokens, each of which every rank but one may have to wait for."""
    exactly = 0
    for attention, (ranks, tokens, chunks) in itertools.product(
        (0, Fraction(1, 2), 1), ((2, 12, 3), (4, 10, 3), (3, 9, 4))
    ):
        costs = Costs(1, attention=attention)
        best = min(pp.prefill(ranks, tokens, lengths, costs).makespan for lengths in cuts_of(tokens, chunks))
        found = pp.prefill(ranks, tokens, chunks, costs, equal_time=True).makespan
        assert found <= best + (ranks - 1) * times_of([tokens - 1, 1], attention)[-1]
        exactly += found == best
    assert exactly == 7  # of 9


def test_unequal_stages_want_other_chunks():
    """If the last stage takes twice as long, it should start soon: a short first chunk."""
    costs = Costs([1, 1, 2], attention=Fraction(1, 2))
    best = min(cuts_of(12, 3), key=lambda lengths: pp.prefill(3, 12, lengths, costs).makespan)
    equal = pp.prefill(3, 12, 3, costs, equal_time=True)
    assert best == [4, 4, 4] and equal.lengths == (5, 4, 3)
    assert equal.makespan / pp.prefill(3, 12, best, costs).makespan == pytest.approx(1.06, abs=0.001)


def test_a_v_waits_for_half_of_the_first_chunk_and_half_of_the_last():
    for chunks in (2, 4, 8, 16):
        one, two = (pp.prefill(4, LONG, chunks, HALF, equal_time=True, placement=name) for name in ("loop", "v"))
        assert two.makespan == pytest.approx(one.makespan, rel=1e-4)
        one, two = (pp.prefill(4, LONG, chunks, HALF, placement=name) for name in ("loop", "v"))
        assert two.makespan < one.makespan
    costs = Costs(1, attention=Fraction(1, 2))
    found = {tuple(lengths): pp.prefill(2, 16, lengths, costs, placement="v").makespan for lengths in cuts_of(16, 3)}
    for lengths, makespan in found.items():
        first, *_, last = times_of(lengths, Fraction(1, 2))
        assert makespan >= 1 + (first + last) / 2
    assert min(found, key=found.get) == (6, 7, 3)  # shorter at both ends than those of equal time
    assert pp.prefill(2, 16, 3, costs, equal_time=True).lengths == (7, 5, 4)


def test_running_requests_take_turns():
    """A request rides in every fourth chunk, if there are four ranks, or in every third step between chunks."""
    for mixed, decode in itertools.product((True, False), (Fraction(1, 50), Fraction(1, 10))):
        found = pp.prefill(4, 1000, 10, Costs(1, attention=Fraction(1, 2)), decode=decode, mixed=mixed)
        times = times_of(found.lengths, Fraction(1, 2))
        spans = flow_shop([each for time in times for each in (time, decode)], 4)[1::2]
        spans = flow_shop([time + decode for time in times], 4) if mixed else spans
        ends = [end for _, end in spans]
        turn = 4 if mixed else 3
        assert all(start >= end for (start, _), end in zip(spans[turn:], ends, strict=False))  # it has arrived
        assert any(start < end for (start, _), end in zip(spans[turn - 1 :], ends, strict=False))
        gaps = [end - before for end, before in zip(ends, [0] * turn + ends, strict=False)]
        assert found.between_tokens == tuple(gaps)
        assert (found.longest_between_tokens, found.mean_between_tokens) == (max(gaps), sum(gaps) / 10)
    whole = pp.prefill(4, 1000, 1, Costs(1))
    assert whole.longest_between_tokens == whole.time_to_first_token == 4


def test_long_messages_need_more_groups():
    """With a latency, four steps in flight do not keep four ranks busy."""
    found = pp.prefill(4, 1600, 16, Costs(16, latency=1))
    assert found.between_tokens[-1] == 7 and found.first_tokens == (16 + 3 + 3,)  # 4 + 3 on the way, seven steps


def test_memory_is_that_of_the_longest_chunk():
    found = pp.prefill(2, 100, [50, 30, 20], Costs(activation=10))
    assert found.peak_activations == (5, 5)
    assert pp.prefill(2, 100, [50, 30, 20], Costs(activation=10), placement="v").peak_activations == (2.5, 2.5)


def test_it_is_a_timeline(tmp_path):
    found = pp.prefill(2, 100, 4, Costs(1, attention=0.5, unit="s"), equal_time=True, decode=0.01)
    assert isinstance(found, pp.Timeline) and "first token 1.304 s, between tokens at most" in found.summary()
    assert found.text().count("\n") >= 2 and found.why_idle(1, 0).startswith("rank 1 waits 0–0.2635 s: 1F0 needs 0F0")
    found.save(tmp_path / "t.json")
    assert pp.Timeline.load(tmp_path / "t.json").rows[0][0].action == pp.F(0, 0)


def test_unsuitable_arguments_are_refused():
    for asked, says in (
        (lambda: pp.prefill(4, 100, [50, 40]), "the chunks have 90 tokens, and the prompt has 100"),
        (lambda: pp.prefill(4, 100, [50, 50], equal_time=True), "give the number of chunks of equal time"),
        (lambda: pp.prefill(4, 100, 2, Costs(lengths=(1, 2))), "give the lengths of chunks as chunks"),
        (lambda: pp.prefill(4, 100, 2, placement="bidirectional"), "placement must be"),
        (lambda: pp.prefill(4, 3, 4), "3 tokens cannot be cut into 4 slices"),
        (lambda: pp.prefill(4, 100, 2, decode=-1), "decode must be a time of at least 0"),
    ):
        with pytest.raises(SettingError, match=says):
            asked()
