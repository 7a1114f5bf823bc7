"""STP (arXiv 2510.27257): the order of its authors' code, and the nine cells of the table in their README."""

import re
from fractions import Fraction
from hashlib import sha256

import pytest

import ppedu as pp
from ppedu import Costs

# The actions of github.com/MICLAB-BUPT/STP (commit ca9fa03) on 2 ranks with 5 microbatches: + joins a pair's halves.
# The code braids a W with the forward before it, too, and runs 1F2 and 1F3 as one instruction.
THEIRS = """
0F0 0F1 0F2 3F0 0F3 3F1+3I0 0F4 3W0 3F2+3B1 0B0 3F3+3I2 0B1 3F4+3I3 0B2 3B4 0B3 3W2 3W3 0B4
1F0 2F0 1F1 2F1 1F2 1F3 2F2+2B0 1F4+1B0 2F3+2I1 1B1 2F4+2I2 1B2 2B3 1B3 2B4 1B4 2W1 2W2
"""
# By ranks p: the start of the SHA-256 of its orders with 3p-1 to 5p-1 microbatches, a line for each rank, written as
# here. With fewer microbatches, its first rank runs forwards that do not exist; ours leaves these out.
DIGESTS = {2: "e6aab3615373bf60", 3: "f5e21b0a18196909", 4: "89e9de9e9349d799", 5: "8a111174c3f0c377"}


def lines(p, m):
    return [" ".join(map(str, order)) for order in pp.schedule("stp", p, m).orders]


def test_the_order_is_that_of_the_authors_code():
    assert [re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1+\2", line) for line in lines(2, 5)] == THEIRS.split("\n")[1:-1]
    for p, digest in DIGESTS.items():
        text = "\n".join(line for m in range(3 * p - 1, 5 * p) for line in lines(p, m))
        assert sha256(text.encode()).hexdigest().startswith(digest)


def chunk(f, i, w, reduce, layers):
    """Return the parts of a forward and of a backward of some layers, each attention and an MLP with an all-reduce."""
    f, i, w, reduce = (time // (2 * layers) for time in (f, i, w, reduce))
    forward = [("compute", f), ("all-reduce", reduce, "network")] * 2 * layers
    return forward, [("input", i), ("weight", w, "weight"), ("all-reduce", reduce, "network")] * 2 * layers


@pytest.mark.parametrize("layers", [1, 2])
def test_what_a_braid_hides(layers):
    """Without a W, nothing hides the last all-reduce, half a layer's. The README does not count it: layers are many."""
    for f, i, w, reduce in ((8, 8, 8, 4), (8, 12, 4, 4)):
        forward, backward = chunk(f, i, w, reduce, layers)
        weights = [part for part in backward if part[0] == "weight"]
        last = Fraction(reduce, 2 * layers)
        found = pp.braid(forward, backward).times
        assert (found["overlap"], found["overlap_input"]) == (f + i + w, f + i + last)
        assert pp.braid(forward, forward).times["overlap"] == 2 * f + last
        assert pp.braid(forward, weights).times["overlap"] == f + w
        assert (found["forward"], found["backward"], found["input"]) == (f + reduce, i + w, i + reduce)


def costs(name, p, f, i, w, reduce, braids):
    """Return the times of many layers in a chunk, as above: F takes T_F + T_AR alone, and B hides its T_AR.

    Args:
        braids: Two forwards of STP's warm-up take as long as their braid, and so do a forward and a W.
    """

    def forward(stage, m):
        first = 2 * p - stage - 1 + (stage + 1) % 2  # of the forwards in twos
        if name != "stp" or not braids or stage >= p or not first <= m < 3 * p - 1 - stage:
            return f + reduce
        return f if m >= 2 * p else (m - first + 1) % 2 * 2 * f  # the outputs of both leave at the end

    back = i + (reduce if name == "zb-v" else 0)  # STP's I are in pairs
    times = [forward, *([time] * 2 * p for time in (back + w, back, w, f + i + w))]
    return Costs(*times, overlap_input=[f + i] * 2 * p, activation=[1] * 2 * p)


def cells(name, p, m, times, braids=True):
    """Return what the table calls PP bubble, TP bubble and peak memory, of each rank.

    These are its waits between its own first and last action, its time in all-reduces that nothing hides, and the most
    chunks that it holds.
    """
    options = {"chunks": 2} if name == "interleaved" else {}
    timeline = pp.simulate(pp.schedule(name, p, m, **options), costs(name, p, *times, braids))
    spans = [row[-1].end - row[0].start for row in timeline.rows]
    waits = [span - busy for span, busy in zip(spans, timeline.busy, strict=True)]
    sent = [busy - 2 * m * sum(times[:3]) for busy in timeline.busy]
    return waits, sent, list(timeline.peak_activations)


SIZES = [(2, 9), (3, 9), (4, 16), (5, 15), (6, 24)]
EQUAL = [(4, 4, 4, 0), (4, 4, 4, 1), (4, 4, 4, 2), (4, 4, 4, 4)]  # T_F, T_B (that is I), T_W and T_AR of a chunk


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_nine_cells(p, m):
    """Seven of nine are right if T_F = T_B = T_W; the table counts two of the peaks before the rank that is fullest.

    1F1B-I holds 3p-1, because the forward after the warm-up runs before the first backward. In STP, each of the pairs
    has a forward, too, and an I frees at most what no W needs: rank r holds 3p+max(1, r) if that is nothing.
    """
    for times in EQUAL:
        f, i, w, reduce = times
        waits, sent, held = cells("interleaved", p, m // p * p, times)
        assert waits[0] == max(waits) == (p - 1) * (f + reduce + i + w)
        assert set(sent) == {2 * (m // p * p) * reduce}
        assert max(held) == 3 * p - 2 + 1

        waits, sent, held = cells("zb-v", p, m, times)
        assert waits[0] == max(waits) == (p - 1) * (f + 2 * reduce + i - 2 * w)
        assert set(sent) == {4 * m * reduce}
        assert set(held) == {2 * p}

        waits, sent, held = cells("stp", p, m, times)
        assert waits[0] == max(waits) == (p - 1) * (f + reduce + i - w) - (reduce if p % 2 == 0 else 0)
        assert sent == [(2 * p + 1 - rank % 2) * reduce for rank in range(p)]  # on every other rank all pair up
        assert held == [3 * p + max(1, rank) for rank in range(p)]

        waits, sent, _ = cells("stp", p, m, times, braids=False)  # as `stp` runs: forwards one after the other
        assert waits[0] == max(waits) == (p - 1) * (f + reduce + i - w)
        assert set(sent) == {3 * p * reduce}


def test_shorter_weight_gradients_lengthen_two_of_the_bubbles():
    """If T_W < T_F = T_B, STP's is T_F + T_B - 2T_W longer per rank than in the table, as W is all that fills it."""
    for p, m in SIZES:
        for w in (1, 2, 3):
            times = 4, 4, w, 1
            assert cells("interleaved", p, m // p * p, times)[0][0] == (p - 1) * (4 + 1 + 4 + w)
            assert cells("zb-v", p, m, times)[0][0] == (p - 1) * (4 + 2 + 4 - 2 * w)
            waits = cells("stp", p, m, times, braids=False)[0][0]
            assert waits == (p - 1) * ((4 + 1 + 4 - w) + (4 + 4 - 2 * w))


def test_with_long_all_reduces_stp_is_the_fastest_of_the_three():
    """8 ranks, 32 microbatches, an all-reduce half as long as F: ZB-V waits 256 for them in all, and STP 48."""
    found = []
    for name, options in (("interleaved", {"chunks": 2}), ("zb-v", {}), ("stp", {})):
        schedule = pp.schedule(name, 8, 32, **options)
        found.append(pp.simulate(schedule, costs(name, 8, 4, 4, 4, 2, braids=False)).makespan)
    assert found == [994, 1066, 858]
    assert pp.simulate(schedule, costs("stp", 8, 4, 4, 4, 0, False)).makespan == 2 * 32 * 12 + 7 * 4  # as ZB-V's
