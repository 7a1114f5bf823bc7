"""Plans whose schedules cut sequences into slices: times and memory, against arithmetic and replays of their own."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

import ppedu as pp
from ppedu.core import Op
from ppedu.planning.choice import Workload, load
from ppedu.planning.presets import MACHINES

WIDTH, KEYS, FFN, VOCABULARY, LAYERS, SEQUENCE = 1024, 256, 2816, 32000, 6, 65536
MODEL = pp.Model(LAYERS, WIDTH, heads=8, kv_heads=2, ffn=FFN, vocabulary=VOCABULARY)
MATRICES = WIDTH * (WIDTH + 2 * KEYS) + WIDTH * WIDTH + 3 * WIDTH * FFN
MACHINE = pp.Machine(memory=80e9, flops=400e12, attention=250e12, latency=1e-5, bandwidth=20e9)
ASKED = {"ranks": 3, "microbatches": 4, "sequence": SEQUENCE, "recompute": False}
COUNTS = [2, 4, 8]


@pytest.fixture(scope="module")
def choices():
    """Choices by schedule, number of slices, and whether they recompute."""
    plans = [
        pp.plan(MODEL, MACHINE, **{**ASKED, "recompute": again}, schedules=["seq1f1b", "terapipe"])
        for again in (False, True)
    ]
    return {(each.schedule.name, len(each.slices), each.recompute): each for plan in plans for each in plan.choices}


@pytest.mark.parametrize("count", COUNTS)
def test_a_step_takes_what_its_flops_and_messages_take(choices, count):
    """A token attends to all before it, and its query and theirs are multiplied, and their values with the result."""
    choice = choices["seq1f1b", count, False]
    forward, backward = [], []
    for pieces in choice.partition:
        layers, head = sum(0 < piece <= LAYERS for piece in pieces), LAYERS + 1 in pieces
        forward.append([])
        for begin, end in pairwise(accumulate(choice.slices, initial=0)):
            matrices = 2 * (end - begin) * (layers * MATRICES + head * WIDTH * VOCABULARY) / 400e12
            pairs = sum(token + 0.5 for token in range(begin, end))
            forward[-1].append(matrices + layers * 2 * 2 * WIDTH * pairs / 250e12)
        backward.append([2 * time for time in forward[-1]] * 4)
    assert sum(choice.slices) == SEQUENCE and max(forward[1]) < 1.03 * min(forward[1])
    costs = pp.Costs([4 * each for each in forward], backward, latency=1e-5 + 2 * WIDTH * SEQUENCE / count / 20e9)
    timeline = pp.simulate(pp.schedule("seq1f1b", 3, 4, slices=count), costs)
    assert timeline.makespan == pytest.approx(choice.step_time)
    assert choice.bubble == pytest.approx(timeline.bubble)
    assert choice.tokens_per_second == pytest.approx(4 * SEQUENCE / choice.step_time)


@pytest.mark.parametrize("count", COUNTS)
def test_slices_read_weights_again_and_sum_gradients_of_keys(choices, count):
    """Beside these, all slices of a sequence take as long as the sequence."""
    machine = replace(MACHINE, memory_bandwidth=2e12)
    [choice] = (
        each
        for each in pp.plan(MODEL, machine, **ASKED, schedules=["seq1f1b"], partition=[3, 2, 3]).choices
        if len(each.slices) == count
    )
    whole = MODEL.pieces(SEQUENCE).timed(machine).pieces[3]
    weights = MODEL.layer_parameters
    read = (count - 1) * weights * 2 / 2e12  # in F; and in I; W reads and writes the sum of gradients, in fp32
    summed = 3 * 2 * 2 * KEYS * sum(accumulate(choice.slices[:-1])) / (0.45 * 2e12)
    assert sum(choice.costs.forward[1][:count]) == pytest.approx(2 * (whole.forward + read))
    more = read + (count - 1) * weights * 2 * 4 / 2e12 + summed
    assert sum(choice.costs.backward[1][:count]) == pytest.approx(2 * (whole.backward + more))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["seq1f1b", "terapipe"])
@pytest.mark.parametrize("count", COUNTS)
def test_memory_is_that_of_a_replay(choices, name, count, recompute):
    """Keys and values of a sequence are there from its first forward to its last backward; gradients from its first."""
    choice, whole = choices[name, count, recompute], MODEL.pieces(SEQUENCE).pieces
    for rank, order in enumerate(choice.schedule.orders):
        keys = 2 * 2 * KEYS * sum(0 < piece <= LAYERS for piece in choice.partition[rank])  # bytes of a token
        each = sum(whole[piece].activation for piece in choice.partition[rank]) / SEQUENCE - keys
        kept = 2 * WIDTH if recompute else each
        held = peak = 0
        for action in order:
            place = action.microbatch % count
            tokens = choice.slices[place]
            if action.op is Op.F:
                held += tokens * kept + (place == 0) * SEQUENCE * keys
            else:
                held += tokens * (each - kept) + (place == count - 1) * SEQUENCE * keys
            peak = max(peak, held)
            if action.op is Op.B:
                held -= tokens * each + (place == 0) * 2 * SEQUENCE * keys
        assert held == pytest.approx(0, abs=1)
        assert choice.kinds[rank]["activations"] + choice.kinds[rank]["logits"] == pytest.approx(peak)


def test_one_slice_is_a_microbatch():
    """Its pieces have the work of whole sequences, and seq1f1b is 1F1B."""
    for split in ({}, {"tensor": 2, "context": 2}, {"recompute": "full"}):
        whole, alone = MODEL.pieces(4096, 2, **split), MODEL.pieces(4096, 2, past=0, **split)
        assert [piece.work for piece in alone.pieces] == [piece.work for piece in whole.pieces]
        keys = [piece.keys if split.get("recompute") is None else 0 for piece in alone.pieces]
        kept = [piece.activation + own for piece, own in zip(alone.pieces, keys, strict=True)]
        assert kept == [piece.activation for piece in whole.pieces]
    job = Workload(MODEL.pieces(4096).timed(MACHINE), MACHINE, 3, 1)
    one, other = (
        job.cutting(pp.schedule(name, 3, 4, **cut), False) for name, cut in (("seq1f1b", {"slices": 1}), ("1f1b", {}))
    )
    cuts = (0, 3, 5, 8)
    assert (one.time(cuts), one.memory(cuts)) == (other.time(cuts), other.memory(cuts))


def test_slices_of_a_split_model_have_its_work():
    """Over all slices, FLOPs are those of the sequence. Keys and values are sent to GPUs with other parts once more."""
    split = {"tensor": 2, "context": 4}
    cuts = [0, 8192, 40960, SEQUENCE]
    whole = MODEL.pieces(SEQUENCE, **split)
    slices = [MODEL.pieces(end - begin, past=begin, **split) for begin, end in pairwise(cuts)]
    assert sum(each.flops for each in slices) == pytest.approx(whole.flops)
    assert sum(each.message for each in slices) == whole.message
    for op in range(3):
        works = [each.pieces[1].work[op] for each in slices]
        assert sum(work.flops for work in works) == pytest.approx(whole.pieces[1].work[op].flops)
        passed = [(op + 1) * (op < 2) * 2 * 2 * KEYS * end * 3 / 2 / 4 for end in cuts[1:]]
        assert [work.passed for work in works] == passed


def test_gradients_are_sent_from_the_first_slices_backward_on():
    """It is the last one of a microbatch: before, a rank adds to them."""
    machine = replace(MACHINE, memory_bandwidth=1e40, bandwidth=1e9)
    asked = {"ranks": 1, "microbatches": 2, "sequence": 8192, "replicas": 2, "zero": 0, "recompute": False}
    for choice in pp.plan(MODEL, machine, **asked, schedules=["1f1b", "seq1f1b"]).choices:
        last = choice.timeline().rows[0][-1]
        assert last.action.microbatch == choice.schedule.microbatches - (len(choice.slices) or 1)
        sent = choice.kinds[0]["gradients"] / (0.75 * 1e9)  # twice, of each of two holders a half
        assert choice.after == pytest.approx(sent - (last.end - last.start))


def test_slices_are_tried_if_sequences_are_long():
    asked = {**ASKED, "ranks": 2, "microbatches": 2, "partition": [4, 4]}
    assert any(each.slices for each in pp.plan(MODEL, MACHINE, **asked).choices)
    assert not any(each.slices for each in pp.plan(MODEL, MACHINE, **{**asked, "sequence": 16384}).choices)
    named = pp.plan(MODEL, MACHINE, **{**asked, "sequence": 4096}, schedules=["seq1f1b"])
    assert {len(each.slices) for each in named.choices} == {2, 4}
    for model, sequence, says in (
        (MODEL, 2047, "a GPU has 2047 tokens of a sequence"),
        (replace(MODEL, flash=False), SEQUENCE, "with flash=True"),
        (pp.Model.measured([1] * 8), None, "give the model by its sizes"),
    ):
        with pytest.raises(pp.SettingError, match=says):
            pp.plan(model, MACHINE, 3, 4, sequence=sequence, schedules=["seq1f1b"])


def test_the_answer_names_the_slices(tmp_path):
    plan = pp.plan(MODEL, MACHINE, **{**ASKED, "microbatches": [4, 8]}, schedules=["1f1b", "seq1f1b"])
    best = plan.best
    assert best.name == "seq1f1b, 16 slices" and best.microbatches == 8 and best.schedule.microbatches == 128
    said = " ".join(str(plan).split())
    assert f"Batching(slices={best.slices})" in said and "github.com/thunlp/Seq1F1B" in said
    by_count = {(each.name, each.microbatches): each for each in plan.choices}
    assert by_count["1f1b", 8].longer(best) == pytest.approx(by_count["1f1b", 8].whole / best.whole - 1)
    best.save(tmp_path / "plan.json")
    saved = load(tmp_path / "plan.json")
    assert (saved["microbatches"], saved["options"]) == (8, {"slices": 16})
    for write in (best.megatron, best.torchtitan):
        with pytest.raises(pp.SettingError, match="into slices"):
            write()


@pytest.mark.slow
def test_long_pipelines_gain_most():
    """The numbers of docs/guide.md."""
    asked = {"model": "llama-3-70b", "tensor": 8, "microbatches": 16, "sequence": 131072}
    slower = replace(MACHINES["h100"], bandwidth=MACHINES["h100"].bandwidth / 4)
    sliced, far, again, whole, behind = (
        pp.plan(machine=machine, **asked, ranks=ranks, context=context, schedules=[name]).best
        for machine, ranks, context, name in (
            ("h100", 16, 1, "seq1f1b"),
            (slower, 16, 1, "seq1f1b"),
            ("h100", 16, 1, "interleaved"),
            ("h100", 2, 8, "interleaved"),
            (slower, 2, 8, "interleaved"),
        )
    )
    assert len(sliced.slices) == 16 and again.recompute and round(again.longer(sliced), 2) == 0.5
    assert round(max(whole.memory) / 1e9, 1) == 79.6 and round(sliced.longer(whole), 2) == 0.06
    assert round(behind.longer(far), 2) == 0.12
