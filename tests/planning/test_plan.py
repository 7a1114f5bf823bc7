"""Plans for a real question, for small ones that can be solved by trying everything, and for impossible ones."""

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often
from test_partition_by_rank import drawn, every

import ppedu as pp
from ppedu.core.numeric import pretty
from ppedu.planning.fitted import fitted
from ppedu.planning.presets import MACHINES, MODELS
from ppedu.planning.reasons import above
from ppedu.zoo.registry import _entries

WIDTH, SEQUENCE, VOCABULARY = 4096, 8192, 128256
LOGITS = SEQUENCE * VOCABULARY * 6
# A model of 32 layers and 8 billion parameters, a layer of which takes 12 ms.
EIGHT_BILLION = pp.Model.measured(
    forward=[0.5, *[12] * 32, 29],
    activation=[0, *[34 * SEQUENCE * WIDTH] * 32, LOGITS],
    logits=LOGITS,
    weights=[VOCABULARY * WIDTH, *[218_112_000] * 32, VOCABULARY * WIDTH + WIDTH],
    unit="ms",
)
MACHINE = pp.Machine(memory=80e9, latency=0.5)


def test_a_search_beats_the_published_schedules_in_their_memory():
    model = pp.Model.measured(forward=[1, *[4] * 6, 9], activation=1e9, weights=10**8, unit="ms")
    plan = pp.plan(
        model, pp.Machine(memory=80e9, latency=0.5), ranks=2, microbatches=4, schedules=["zb-v", "interleaved"]
    )
    times = []
    for choice in plan.choices[:2]:
        found = plan.search(choice, time_limit=20)
        assert found.schedule.placement == choice.schedule.placement
        assert found.bound <= found.makespan <= choice.step_time
        fixed = max(choice.kinds[rank]["weights"] * 8 for rank in range(2))
        assert max(pp.simulate(found.schedule, choice.costs).peak_activations) <= 80e9 - fixed
        times.append(found.makespan)
    assert times[0] == plan.search(time_limit=20).makespan and min(times) < plan.best.step_time


@pytest.mark.parametrize(("name", "step"), [("dualpipe", "5,406"), ("1f1b", "6,670")])
def test_the_steps_of_the_readmes_plan_and_of_lesson_15(name, step):
    plan = pp.plan(EIGHT_BILLION, MACHINE, ranks=8, microbatches=32, sequence=SEQUENCE, replicas=2, schedules=[name])
    assert f"{plan.best.step_time:,.0f}" == step


@pytest.mark.slow  # the README's plan is of this model, too
def test_the_best_schedule_of_an_eight_billion_model():
    plan = pp.plan(EIGHT_BILLION, MACHINE, ranks=8, microbatches=32, sequence=SEQUENCE, replicas=2, zero=0)
    by_name = {choice.name: choice for choice in plan.choices}
    assert plan.best.step_time <= by_name["zb-v, 2 chunks"].step_time <= 5950
    assert max(plan.best.memory) <= 80e9
    assert by_name["dualpipev, 2 chunks"].step_time <= 5886.5  # found by hand, several moves from where a climb ends
    assert plan.best is by_name["dualpipe"] and f"{plan.best.step_time:,.0f}" == "5,444"
    assert by_name["1f1b"].step_time > 6600
    assert by_name["gpipe, recomputing"].excess == 0 < by_name["gpipe"].excess
    assert plan.best.tokens_per_second == pytest.approx(32 * 2 * SEQUENCE / (float(plan.best.step_time) / 1000))
    # A simulation with the costs of a choice shows the same.
    for choice in plan.choices[:5]:
        timeline = pp.simulate(choice.schedule, choice.costs)
        assert timeline.makespan == choice.step_time
        assert [piece for each in choice.partition for piece in each] == [*range(34)]
        for rank, kinds in enumerate(choice.kinds):
            stages = choice.schedule.placement.stages_of(rank)
            weights = sum(EIGHT_BILLION.pieces[p].weights for stage in stages for p in choice.partition[stage])
            assert (kinds["weights"], kinds["gradients"], kinds["optimizer"]) == (
                2 * weights,
                2 * weights,
                12 * weights,
            )
            assert kinds["activations"] + kinds["logits"] == timeline.peak_activations[rank]
    assert "shard the vocabulary first" in " ".join(str(plan).split())
    assert plan.best.name in plan._repr_html_()


@pytest.mark.parametrize("seed", range(10))
def test_small_questions_have_the_best_answer(seed):
    """Every schedule with every partition."""
    chance = random.Random(seed)
    pieces, memory = drawn(chance, 5), chance.randint(170, 400)
    names = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"]
    known = [time for name in names for time in every(pp.schedule(name, 2, 4), pieces, memory)]
    question = {"ranks": 2, "microbatches": 4, "schedules": names, "recompute": False, "zero": 0}
    if not known:
        with pytest.raises(pp.SettingError, match="nothing fits"):
            pp.plan(pieces, pp.Machine(memory, latency=1), **question)
    else:
        assert pp.plan(pieces, pp.Machine(memory, latency=1), **question).best.step_time == min(known)


def test_a_model_by_sizes_on_a_known_machine():
    plan = pp.plan("llama-3-8b", "h100", 4, 16, sequence=2048, schedules=["1f1b", "zb-v"], seconds=1)
    best, model = plan.best, MODELS["llama-3-8b"]
    assert plan.job.pieces.unit == "s"
    flops = 3 * 16 * (32 * model.layer_flops(2048)[0] + model.head_flops(2048))
    seconds = best.step_time + best.after
    assert best.mfu == pytest.approx(flops / (seconds * 4 * 989e12))
    # 4 ranks in one node, so a hop takes the time within it.
    message = 2048 * 4096 * 2
    assert best.costs.latency == pytest.approx(5e-6 + message / 450e9)
    held = max(sum(each[kind] for kind in ("weights", "gradients", "optimizer")) for each in best.kinds)
    assert best.after == pytest.approx(2 * held / MACHINES["h100"].memory_bandwidth)


def test_several_numbers_of_microbatches_are_compared_by_token():
    plan = pp.plan(EIGHT_BILLION, MACHINE, 8, [8, 32], schedules=["1f1b"], seconds=1)
    assert [choice.schedule.microbatches for choice in plan.choices] == [32, 8]
    assert "microbatches" in str(plan)


def test_what_does_not_fit_names_what_would():
    with pytest.raises(pp.SettingError) as caught:
        pp.plan(EIGHT_BILLION, pp.Machine(memory=16e9), 8, 32, seconds=1)
    for part in ("nothing fits in 16 GB on 8 ranks", "GB too many", "what would fit: 16 ranks", "a memory of"):
        assert part in str(caught.value)


def test_a_schedule_that_fits_with_uneven_stages_alone_is_too_large():
    """1F1B on 4 ranks holds 4, 3, 2 and 1 microbatches: in the memory of 20 layers, at most 5, 6, 10 and 19 layers."""
    pieces = pp.Model.measured([1] * 40, activation=1, unit="ms")
    plan = pp.plan(pieces, pp.Machine(20), 4, 32, schedules="1f1b")
    again, plain = plan.choices
    assert again.name == "1f1b, recomputing" and not again.excess
    assert plain.name == "1f1b" and plain.excess == 20 and [len(each) for each in plain.partition] == [10] * 4
    assert "too large: 1f1b (" in str(plan)
    [alone] = pp.plan(pieces, pp.Machine(20), 4, 32, schedules="1f1b", recompute=False).choices
    assert not alone.excess and alone.step_time > 1.7 * plain.step_time and max(alone.memory) <= 20


def test_of_choices_that_are_alike_the_smaller_one_is_best():
    """On 4 ranks with 400 microbatches, 2 chunks halve a bubble of 0.7%, for 5.5 microbatches in place of 4."""
    asked = {"schedules": ["1f1b", "interleaved"], "recompute": False}
    pieces = pp.Model.measured([1] * 8, activation=1e9, unit="ms")
    best, other, *_ = pp.plan(pieces, pp.Machine(80e9), 4, 400, **asked).choices
    assert (best.name, other.name) == ("1f1b", "interleaved, 2 chunks") and other.step_time < best.step_time
    assert re.fullmatch(r"takes 0\.4% less, and needs 3\.0 GB more", other.why)
    assert pp.plan(pieces, pp.Machine(80e9), 4, 40, **asked).best.name == "interleaved, 2 chunks"


def test_the_same_question_has_the_same_answer():
    """The search is limited by its work, not by the clock."""
    question = {"ranks": 4, "microbatches": 8, "schedules": ["zb-v"], "recompute": False}
    first, second = (pp.plan(EIGHT_BILLION, MACHINE, **question) for _ in range(2))
    assert first.choices == second.choices


def test_a_generator_that_changes_is_asked_again():
    """As a cell of a notebook changes what a registered generator reads, while an earlier plan is still there."""
    order = ["1f1b"]
    pp.register("read again")(lambda rank, ranks, microbatches: pp.schedule(order[0], ranks, microbatches).orders[rank])
    plans = []
    for order[0] in ("1f1b", "gpipe"):
        plans.append(pp.plan(EIGHT_BILLION, MACHINE, 4, 8, schedules=["read again"], seconds=0))
        assert plans[-1].best.schedule.orders == pp.schedule(order[0], 4, 8).orders


def test_two_copies_on_one_rank_share_nothing():
    found = pp.plan("gpt2", "h100", 1, 8, sequence=1024, schedules=["gems", "1f1b"], recompute=False)
    by_name = {choice.schedule.name: choice for choice in found.choices}
    assert by_name["gems"].kinds[0]["optimizer"] == by_name["1f1b"].kinds[0]["optimizer"]
    assert by_name["gems"].after == by_name["1f1b"].after


def test_unfinished_generators_are_left_out(unfinished):
    names = {choice.name for choice in pp.plan(EIGHT_BILLION, MACHINE, 2, 3, seconds=0).choices}
    assert "1f1b" in names and not names & {"raises", "nothing", "numbers", "stuck"}
    with pytest.raises(ZeroDivisionError):
        pp.plan(EIGHT_BILLION, MACHINE, 2, 3, schedules="raises")


def test_partitions_in_the_words_of_other_libraries():
    plan = pp.plan(EIGHT_BILLION, MACHINE, 8, 8, schedules=["1f1b", "zb-v"], recompute=False)
    by_name = {choice.name: choice for choice in plan.choices}
    stages = by_name["1f1b"].megatron().split("|")
    lengths = [
        sum(int(run.partition("*")[2] or 1) for run in re.findall(r"[EtL](?:\*\d+)?", stage)) for stage in stages
    ]
    assert lengths == [len(pieces) for pieces in by_name["1f1b"].partition]
    assert stages[0].startswith("E") and stages[-1].endswith("L")
    with pytest.raises(pp.SettingError, match="in a loop"):
        by_name["zb-v, 2 chunks"].megatron()
    names = by_name["zb-v, 2 chunks"].torchtitan()
    assert len(names) == 16
    assert [name for each in names for name in each] == [
        "tok_embeddings",
        *(f"layers.{layer}" for layer in range(32)),
        "norm",
        "output",
    ]


def test_an_interrupted_search_keeps_what_it_has():
    def interrupt(what, part):
        if what == "zb-h1":
            raise KeyboardInterrupt

    plan = pp.plan(EIGHT_BILLION, MACHINE, 4, 8, schedules=["1f1b", "zb-h1"], progress=interrupt)
    assert plan.interrupted and plan.best.name == "1f1b"
    assert "interrupted" in str(plan)
    short = pp.plan(EIGHT_BILLION, MACHINE, 4, 8, schedules=["zb-v", "interleaved"], seconds=0)
    assert short.interrupted and "its time was over" in str(short)


def test_units_are_converted():
    in_seconds = pp.Machine(memory=80e9, latency=0.0005, unit="s")
    assert in_seconds.delays(8, 0, "ms") == pytest.approx(0.5)
    far_and_near = pp.Machine(memory=1, latency=4, node=2, near_latency=1)
    assert far_and_near.delays(4, 0, "s")[0, 1] == 1 and far_and_near.delays(4, 0, "s")[1, 2] == 4
    assert pp.Machine(memory=1, latency=2, bandwidth=1e9).delays(2, 3e6, "ms") == 5


def test_questions_that_make_no_sense():
    for arguments, match in [
        (("llama-4-8b", MACHINE, 8), "unknown model 'llama-4-8b'; known: gpt2"),
        (("llama-3-8b", "b100", 8), "unknown machine 'b100'"),
        (("llama-3-8b", "h100", 8), "sequence is missing"),
        (("llama-3-8b", MACHINE, 8, 32, 2048), "positional"),
        ((32, MACHINE, 8), "model must be a Model"),
        ((EIGHT_BILLION, 80e9, 8), "machine must be a Machine"),
        ((EIGHT_BILLION, MACHINE, 40), "40 ranks are more than the 34 pieces"),
        ((EIGHT_BILLION, MACHINE, 0), "ranks must be at least 1"),
        ((EIGHT_BILLION, MACHINE, 8, 0), "microbatches must be at least 1"),
        ((EIGHT_BILLION, MACHINE, 8, []), "no schedule runs on 8 ranks"),
    ]:
        with pytest.raises((pp.SettingError, TypeError), match=match):
            pp.plan(*arguments)
    with pytest.raises(pp.SettingError, match="no speed"):
        pp.plan("gpt2", MACHINE, 2, 4, sequence=128)
    with pytest.raises(pp.SettingError, match="unknown schedule"):
        pp.plan(EIGHT_BILLION, MACHINE, 8, schedules=["2f2b"])
    for arguments, match in [
        ({"memory": 0}, "memory must be bytes"),
        ({"memory": "80 GB"}, "memory must be bytes"),
        ({"memory": 1, "latency": -1}, "latency must be a number"),
        ({"memory": 1, "near_latency": 1}, "give node="),
        ({"memory": 1, "unit": "h"}, "unit must be"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            pp.Machine(**arguments)


def test_the_order_counts_gradients_and_optimizer_in():
    asked = {"ranks": 8, "microbatches": 16, "sequence": 4096, "schedules": ["dualpipe", "zb-v"], "recompute": False}
    plan = pp.plan("llama-3-8b", "h100", replicas=8, **asked)
    assert [each.schedule.name for each in plan.choices] == ["zb-v", "dualpipe"]
    first, second = plan.choices
    assert first.step_time > second.step_time and first.whole < second.whole
    assert first.tokens_per_second > second.tokens_per_second
    assert "gradients and optimizer take" in second.why
    # Alone, its copies are within a node of eight, where links are nine times as fast.
    alone = pp.plan("llama-3-8b", "h100", **asked).best
    assert alone.schedule.name == "dualpipe" and alone.after < second.after / 3


def test_a_short_step_pays_for_its_end_more_often():
    """Four steps of 8 microbatches have four ends; a step of 32 has one."""
    plan = pp.plan("llama-3-8b", "h100", 8, [8, 32], sequence=4096, schedules=["1f1b"], seconds=1)
    best, second = plan.choices
    assert (best.schedule.microbatches, second.schedule.microbatches) == (32, 8)
    assert f"gradients and optimizer take {pretty(4 * second.after - best.after, 's')} longer" in second.why


def test_a_choice_that_does_not_fit_is_never_the_runner_up():
    plan = pp.plan(EIGHT_BILLION, MACHINE, 8, 32, schedules=["gpipe", "1f1b"], recompute=False, seconds=1)
    assert [(each.name, each.excess > 0) for each in plan.choices] == [("1f1b", False), ("gpipe", True)]
    said = " ".join(plan.findings)
    assert "too large: gpipe" in said and "runner-up" not in said


def test_a_finding_names_the_least_bubble_where_it_is_not_that_of_the_best():
    """Recomputation fills ranks with work: in 40 GB, the schedule that waits least is not the fastest."""
    activation, weights = [0, *[1.1e9] * 32, 6.3e9], [525e6, *[218e6] * 32, 525e6]
    pieces = pp.Model.measured([0.5, *[12] * 32, 29], activation=activation, weights=weights, unit="ms")
    asked = {"ranks": 8, "microbatches": 32, "schedules": ["v-min", "gis-h", "dualpipe"], "effort": 0.05}
    plan = pp.plan(pieces, pp.Machine(memory=40e9), **asked)
    least = min((each for each in plan.choices if not each.excess), key=lambda each: each.bubble)
    assert plan.choices.index(least) > 1 and least.name == "dualpipe, recomputing"
    slower, more = least.step_time / plan.best.step_time - 1, least.busiest - plan.best.busiest
    said = f"{least.name}, with the least bubble, {least.bubble:.1%}, takes {slower:.1%} longer: its busiest rank"
    assert [f"{said} works {more:g} ms longer" in each for each in plan.findings].count(True) == 1
    assert "the least bubble" not in str(pp.plan(pieces, pp.Machine(memory=80e9), **asked)), "it is the best's"


@pytest.mark.parametrize(("size", "text"), [(40.6e9, "41"), (40.04e9, "40.04"), (40e9 + 2, "40.000000002")])
def test_what_is_too_large_is_more_than_the_limit(size, text):
    assert above(size, 40e9) == text


def test_what_would_fit_fits():
    asked = {"ranks": 4, "microbatches": 16, "sequence": 4096, "schedules": ["1f1b"], "recompute": False}
    with pytest.raises(pp.SettingError, match="nothing fits in 80 GB") as caught:
        pp.plan("llama-3-70b", "h100", **asked)
    assert "recompute=True" not in str(caught.value)
    size = float(re.search(r"a memory of ([0-9.]+) GB", str(caught.value))[1])
    assert size < 450
    bigger = replace(MACHINES["h100"], memory=(size + 0.1) * 1e9)
    assert pp.plan("llama-3-70b", bigger, **asked).best.memory


def test_a_size_that_contradicts_the_pieces_is_refused():
    pieces = MODELS["llama-3-8b"].pieces(sequence=4096)
    for wrong in ({"sequence": 8192}, {"sequence": 4096, "batch": 2}):
        with pytest.raises(pp.SettingError, match="the pieces are for microbatches of 4096 tokens, not 8192"):
            pp.plan(pieces, "h100", 4, 8, schedules=["1f1b"], **wrong)
    with pytest.raises(pp.SettingError, match="batch= is for models by sizes"):
        pp.plan(pieces, "h100", 4, 8, batch=2)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"flops": 400}, "flops must be FLOP/s, such as 400e12; got 400"),
        ({"peak": 989}, "peak must be FLOP/s, such as 400e12; got 989"),
        ({"flops": 1500e12, "peak": 989e12}, "exceed the peak: 1.5e[+]15 against 9.89e[+]14"),
        ({"bandwidth": 50}, "bandwidth must be bytes per second, such as 50e9; got 50"),
    ],
)
def test_machines_in_the_wrong_unit_are_refused(given, reason):
    with pytest.raises(pp.SettingError, match=reason):
        pp.Machine(memory=80e9, **given)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", pytest.param("interleaved", marks=pytest.mark.slow), "dualpipe"])
def test_tied_weights_are_on_a_rank_once(name):
    asked = {"ranks": 4, "microbatches": 8, "sequence": 1024, "schedules": [name], "zero": 0, "recompute": False}
    tied = replace(MODELS["gpt2-xl"], layers=24)
    own = replace(tied, tied=False)
    best = pp.plan(tied, "h100", **asked).best
    pieces, shared = tied.pieces(1024), tied.vocabulary * tied.width
    assert own.pieces(1024) == replace(pieces, tied=0) and pieces.tied == shared
    for rank, kinds in enumerate(best.kinds):
        held = {piece for stage in best.schedule.placement.stages_of(rank) for piece in best.partition[stage]}
        weights = sum(pieces.pieces[piece].weights for piece in held) - (shared if held >= {0, 25} else 0)
        assert kinds["weights"] == 2 * weights
    saved = pp.plan(own, "h100", **asked).best.memory[0] - best.memory[0]
    assert saved == (18 * shared if name in ("zb-v", "dualpipe") else 0)


def test_bytes_of_a_weight_can_be_given_for_every_model():
    asked = {"ranks": 2, "microbatches": 4, "schedules": ["1f1b"]}
    for model, more in (("gpt2", {"sequence": 1024}), (EIGHT_BILLION, {})):
        whole, shared = (
            pp.plan(model, pp.Machine(memory=1e12, flops=4e14), **asked, **more, bytes_per_weight=size).best.kinds[0]
            for size in (16, (2, 2, 12 / 8))
        )
        assert shared["optimizer"] * 8 == whole["optimizer"] and shared["weights"] == whole["weights"]
    with pytest.raises(pp.SettingError, match="bytes_per_weight must be a number of at least 4"):
        pp.plan("gpt2", "h100", 2, sequence=1024, bytes_per_weight=1)


def test_findings_name_slow_messages_and_a_torn_tensor():
    slow = replace(MACHINES["h100"], latency=5, node=4, near_latency=5, unit="ms")
    found = pp.plan("gpt2", slow, 4, 8, sequence=1024, schedules=["1f1b"], tensor=6).findings
    assert re.fullmatch(r"of the \d+\.\d% bubble, \d+\.\d points are messages: .*", found[0])
    assert "the 6 GPUs that split a stage are in several nodes of 4" in found[1]
    found = pp.plan("gpt2", "h100", 4, 8, sequence=1024, schedules=["1f1b"], tensor=6).findings
    assert not any("messages:" in each or "several nodes" in each for each in found)


def test_a_finding_says_that_messages_have_no_bytes():
    asked = {"ranks": 2, "microbatches": 4, "schedules": ["1f1b"]}
    for model, machine, said in [
        (pp.Model.measured([1, 2, 1]), "h100", True),
        (pp.Model.measured([1, 2, 1], message=1e6), "h100", False),
        (pp.Model.measured([1, 2, 1]), pp.Machine(80e9), False),
    ]:
        found = pp.plan(model, machine, **asked).findings
        assert any(each.startswith("messages take their latency alone") for each in found) == said


def test_a_memory_in_gigabytes_is_pointed_out():
    with pytest.raises(pp.SettingError, match="memory of 80 bytes; 80 GB are memory=80e9"):
        pp.plan(EIGHT_BILLION, pp.Machine(memory=80), 8, 8, schedules=["1f1b"])


# --- tensor parallelism -----------------------------------------------------------------------------------------


def layout(ranks, tensor, node):
    """Return the node of each rank: nodes are filled with whole ranks, one after the other."""
    nodes, place, free = [], 0, node
    for _ in range(ranks):
        if free < tensor and free < node:
            place, free = place + 1, node
        nodes.append(place)
        free -= tensor
    return nodes


def test_pieces_of_a_tensor_group_are_planned_as_the_model_is():
    """Llama 3 8B, split by 8 GPUs: four ranks are four nodes."""
    asked = {"ranks": 4, "microbatches": 16, "replicas": 2, "schedules": ["1f1b"]}
    by_sizes = pp.plan("llama-3-8b", "h100", sequence=4096, tensor=8, **asked)
    by_pieces = pp.plan(MODELS["llama-3-8b"].pieces(4096, tensor=8), "h100", **asked)
    assert by_sizes.choices == by_pieces.choices and by_sizes.findings == by_pieces.findings
    best = by_pieces.best
    # A token takes 2 FLOPs a weight of a matrix, and 2 · 4096 a number of a query in attention, half of it masked.
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    forward = 4096 * (32 * (2 * layer + 2 * 4096 * 4096) + 2 * 4096 * 128256)
    seconds = best.step_time + best.after
    assert best.mfu == pytest.approx(3 * 16 * forward / (seconds * 4 * 8 * 989e12)) and 0.2 < best.mfu < 0.5
    assert best.tokens_per_second == pytest.approx(2 * 16 * 4096 / seconds)
    # A GPU sends an eighth of the activation to another node.
    assert best.costs.latency == pytest.approx(10e-6 + 4096 * 4096 * 2 / 8 / 50e9)
    for kinds in best.kinds:  # two replicas share the optimizer
        assert kinds["gradients"] == 2 * kinds["weights"] and kinds["optimizer"] == 12 / 2 * kinds["weights"] / 2
    assert str(by_pieces).startswith("4 ranks of 8 GPUs, 2 replicas, 80 GB each")


@often(60)
@given(
    ranks=st.integers(1, 4),
    tensor=st.sampled_from([1, 2, 4, 8]),
    replicas=st.integers(1, 3),
    node=st.integers(1, 16),
    name=st.sampled_from(["1f1b", "zb-v", "dualpipe"]),
    zero=st.sampled_from([0, 1, 2]),
)
def test_every_gpu_of_a_tensor_group_counts(ranks, tensor, replicas, node, name, zero):
    ranks += ranks % 2 if name == "dualpipe" else 0
    model = pp.Model(layers=6, width=512, heads=8, vocabulary=1000)
    machine = pp.Machine(80e9, 2e14, 1e15, 1e-5, 2e10, node, 3e-6, 3e11, 3e12, "s")
    asked = {"ranks": ranks, "microbatches": 8, "replicas": replicas, "schedules": [name], "seconds": 0, "zero": zero}
    pieces = model.pieces(512, batch=2, tensor=tensor)
    choices = pp.plan(pieces, machine, **asked).choices
    assert choices == pp.plan(model, machine, sequence=512, batch=2, tensor=tensor, **asked).choices
    best, message = choices[0], 2 * 512 * 512 * 2 / tensor
    places = layout(ranks, tensor, node)
    for here, there in ((a, b) for a in range(ranks) for b in range(ranks) if a != b):
        near = places[here] == places[there]
        wanted = 3e-6 + message / 3e11 if near else 1e-5 + message / 2e10
        assert best.costs.delay(here, there) == pytest.approx(wanted)
    copies = replicas * (2 if name == "dualpipe" else 1)
    bandwidth = 0.75 * (3e11 if ranks * tensor * replicas <= node else 2e10)
    timeline = best.timeline()
    begins, ends = [], []
    for rank, each in enumerate(best.kinds):
        weights = each["weights"] / 2
        spans = [(single, span) for span in timeline.spans(rank) for single in span.action.singles]
        last = max(single.microbatch for single, _ in spans)
        from_then = min(span.start for single, span in spans if single.microbatch == last and single.op in ("B", "I"))
        first = min(single.microbatch for single, _ in spans)
        until = max(span.end for single, span in spans if single.microbatch == first and single.op == "F")
        times = [size * weights * (copies - 1) / copies / bandwidth for size in ((8, 0), (4, 2), (4, 2))[zero]]
        ends.append(max(0, times[0] - (timeline.makespan - from_then)))
        ends[-1] += 2 * 18 * weights / 3e12 / (copies if zero else 1)
        begins.append(max(0, times[1] - until))
        assert each["optimizer"] == pytest.approx(12 * weights / (copies if zero else 1))
        assert each["gradients"] == pytest.approx(4 * weights / (copies if zero == 2 else 1))
    after = max(begins) + max(ends)
    assert best.after == pytest.approx(after)
    seconds = best.step_time + after
    assert best.tokens_per_second == pytest.approx(replicas * 8 * 2 * 512 / seconds)
    whole = 3 * 8 * 2 * (6 * model.layer_flops(512)[0] + model.head_flops(512))
    assert best.mfu == pytest.approx(whole / (seconds * 1e15 * ranks * tensor)) and best.mfu <= 1


def test_a_node_has_fewer_ranks_if_several_gpus_are_a_rank():
    links = pp.Machine(1, latency=4, node=8, near_latency=1).delays(6, 0, "s", tensor=3)
    assert {link for link, delay in links.items() if delay == 1} == {(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)}
    assert pp.Machine(1, latency=4, node=8, near_latency=1).delays(6, 0, "s", tensor=5) == 4
    assert pp.Machine(1, latency=4, node=8, near_latency=1).delays(6, 0, "s") == 1


def test_a_comparison_sends_messages_between_tensor_groups():
    pieces = MODELS["llama-3-8b"].pieces(4096, tensor=8)
    costs = fitted(pp.schedule("1f1b", 4, 8), pieces, "h100")
    assert costs.latency == pytest.approx(10e-6 + 4096 * 4096 * 2 / 8 / 50e9)


def test_measured_times_can_be_those_of_a_tensor_group():
    machine = pp.Machine(80e9, latency=4, node=8, near_latency=1)
    asked = {"ranks": 2, "microbatches": 4, "schedules": ["1f1b"]}
    alone, split = (pp.Model.measured([1, 2, 2, 1], tensor=tensor) for tensor in (1, 8))
    assert pp.plan(alone, machine, **asked).best.costs.latency == 1
    assert pp.plan(split, machine, **asked, tensor=8).best.costs.latency == 4


def test_a_tensor_size_that_contradicts_the_pieces_is_refused():
    asked = {"ranks": 2, "microbatches": 4, "schedules": ["1f1b"]}
    for pieces, tensor, match in [
        (MODELS["gpt2"].pieces(64, tensor=2), 4, r"those of tensor=2, not of tensor=4; leave out tensor, or make"),
        (MODELS["gpt2"].pieces(64, tensor=2), 1, r"those of tensor=2, not of tensor=1"),
        (pp.Model.measured([1, 2, 1]), 8, r"those of tensor=1, not of tensor=8; .* Model.measured\(…, tensor=8\)"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            pp.plan(pieces, "h100", **asked, tensor=tensor)


@pytest.mark.parametrize(
    "impossible",
    [
        lambda model: replace(model.pieces(4096, tensor=8), tensor=1),  # 8 · 400e12 FLOP/s against a peak of 989e12
        lambda model: model.pieces(4096).timed(pp.Machine(80e9, flops=1e15)),
        lambda model: replace(model.pieces(4096).timed(pp.Machine(80e9, flops=4e14)), unit="ms"),
    ],
    ids=["another tensor size", "another machine", "another unit"],
)
def test_a_utilization_above_one_is_refused(impossible):
    with pytest.raises(pp.SettingError, match=r"the pieces take .* on 1 GPU, .* would be above 1; give pieces whose"):
        pp.plan(impossible(MODELS["llama-3-8b"]), "h100", 4, 16, schedules=["1f1b"])


def test_a_gpu_at_its_peak_is_possible():
    machine = pp.Machine(80e9, flops=1e15, peak=1e15)
    best = pp.plan("gpt2", machine, 1, 4, sequence=128, tensor=3, schedules=["1f1b"]).best
    assert best.mfu == pytest.approx(1)


# --- partitions, memory and messages as libraries have them -----------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("Ett|tt|tt|ttL", [3, 2, 2, 3]),
        ("Et*2|(tt|)*2t*2L", [3, 2, 2, 3]),
        ("E|t*8||L", [1, 8, 0, 1]),
        ("Et | t*3, t | tt | tL", [2, 4, 2, 2]),
    ],
)
def test_a_partition_is_given_by_numbers_or_by_megatrons_layout(layout, counts):
    pieces = pp.Model.measured([1, *[2] * 8, 3])
    asked = {"ranks": 4, "microbatches": 8, "schedules": ["1f1b", "interleaved", "zb-v"]}
    plan, same = (pp.plan(pieces, MACHINE, partition=given, **asked) for given in (layout, counts))
    assert plan.choices == same.choices and plan.best.name == "1f1b"
    assert [len(each) for each in plan.best.partition] == counts
    assert pp.plan(pieces, MACHINE, partition=plan.best.megatron(), **asked).choices == plan.choices
    chunks = pp.plan(pieces, MACHINE, partition=[2, 1, 1, 1, 1, 1, 1, 2], **asked)
    assert {each.name for each in chunks.choices} == {"interleaved, 2 chunks", "zb-v, 2 chunks"}


def test_a_layout_is_read_as_the_schedule_that_megatron_runs_with_it():
    # By hand: on rank r of 2, Megatron-LM's loop with 2 chunks warms up for 2 * (2 - r - 1) + 2 forwards.
    orders = pp.Schedule.read("1 1 2 2 -2 -2 -1 -1\n1 1 2 -2 2 -2 -1 -1").orders
    assert pp.Schedule.read("Ett|(tt|)*2ttL", ranks=2, microbatches=2).orders == orders
    flat = pp.Schedule.read(" E t*3, | tttL", ranks=2, microbatches=3, name="ours")
    assert pp.Schedule.read("EtL", ranks=1, microbatches=2).orders == pp.schedule("1f1b", 1, 2).orders
    assert flat.name == "ours" and flat.orders == pp.Schedule.read("1 1 -1 1 -1 -1\n1 -1 1 -1 1 -1").orders


@pytest.mark.parametrize(
    ("layout", "options", "problem"),
    [
        ("Et|t|tL", {"ranks": 2, "microbatches": 4}, "2 ranks cannot share 3 stages evenly; possible: 3"),
        ("Et|t|tL", {"ranks": 3}, "the layout has 3 stages, and does not say how many ranks and"),
        (
            "Et|t",
            {"ranks": 2, "microbatches": 4},
            "a layout has an E, the embedding, then each t and each m, then",
        ),
        (
            "E|tE|L",
            {"ranks": 3, "microbatches": 4},
            "a layout has an E, the embedding, then each t and each m, then",
        ),
        (
            "tE|L",
            {"ranks": 2, "microbatches": 4},
            "a layout has an E, the embedding, then each t and each m, then",
        ),
        ("Et|tL", {"ranks": 1, "microbatches": 4}, "1 rank cannot share 2 stages evenly; possible: 2"),
        ("Et|tL", {"ranks": 0, "microbatches": 4}, "ranks must be at least 1; got 0"),
        ("Et|tL", {"ranks": 2, "microbatches": 4, "placement": "v"}, "a layout is a loop, for training; leave out"),
        ("0F0 0B0\n1F0 1B0", {"ranks": 2, "microbatches": 1}, "a layout has the letters E, t, m, L and |"),
        (Path("Et|tL"), {"ranks": 2}, "ranks is for a layout of Megatron-LM's"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(layout, options, problem):
    with pytest.raises(pp.SettingError, match=re.escape(problem)):
        pp.Schedule.read(layout, **options)


@pytest.mark.parametrize(
    ("partition", "problem"),
    [
        ([3, 3, 3], "the partition has 9 pieces and the model 10: the embedding, each layer, the head"),
        ([5, 5], "no schedule runs on 4 ranks with 8 microbatches in 2 stages"),
        ([11, -1, 0, 0], "a stage's number of pieces must be at least 0; got -1"),
        ("Ett|tt|tt|ttt", "the layout must have an E, then 8 times t, then an L"),
        ("Et*99999999999|L", "a layout has the letters"),
        ("E(t*900)*900|L", "a layout has at most 100,000 pieces and stages"),
        ("Ett|tt|tt|tL", "got 7 times t in"),
        ("Exx|tL", "a layout has the letters E, t, m, L and |"),
        ("(" * 50 + "t", "a layout has the letters"),
        ("E" + "t*99999" * 99, "the layout must have|a layout has"),
        (7, "partition must be the number of pieces of each stage"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition, problem):
    with pytest.raises(pp.SettingError, match=re.escape(problem) if "|a" not in problem else problem):
        pp.plan(pp.Model.measured([1, *[2] * 8, 3]), MACHINE, 4, 8, partition=partition)


def test_a_partition_that_needs_too_much_names_another():
    """Two ranks, of which one holds all layers of 10 bytes and 16 bytes of weights each."""
    model, machine = pp.Model.measured([1] * 6, activation=10, weights=1), pp.Machine(1e9)
    asked = {"ranks": 2, "microbatches": 4, "schedules": "1f1b", "recompute": False}
    sizes = pp.plan(model, machine, partition=[6, 0], **asked).best.memory
    assert sizes == (6 * 16 + 2 * 6 * 10, 0)
    model = replace(model, pieces=tuple(replace(piece, activation=10e6, weights=10**6) for piece in model.pieces))
    with pytest.raises(pp.SettingError, match=r"needs 0.2 GB on rank 0 .* would fit: another partition,"):
        pp.plan(model, replace(machine, memory=0.15e9), partition=[6, 0], **asked)


@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 9), message=st.integers(0, 3))
def test_messages_that_block_make_every_action_longer(ranks, microbatches, message):
    """1F1B with equal stages: (m + p - 1) · (F + B + 2c), in which a rank alone sends nothing."""
    machine = pp.Machine(80e9, latency=message)
    asked = {"schedules": "1f1b", "partition": [1] * ranks, "blocking": True}
    occupied = 2 * message if ranks > 1 else 0
    for recompute in (False, True):
        best = pp.plan(pp.Model.measured([1] * ranks), machine, ranks, microbatches, recompute=recompute, **asked).best
        assert best.step_time == (microbatches + ranks - 1) * (3 + recompute + occupied)


def test_without_a_barrier_a_step_takes_as_long_as_its_longest_rank():
    """ZB-H2 with F = I = W = 1: no rank waits, so each takes 3 · m (arXiv 2401.10241, section 2.3)."""
    model, machine = pp.Model.measured([1] * 4, input=[1] * 4, weight=[1] * 4), pp.Machine(80e9)
    asked = {"ranks": 4, "microbatches": 8, "schedules": "zb-h2", "partition": [1] * 4}
    best, waiting = (pp.plan(model, machine, barrier=barrier, **asked).best for barrier in (False, True))
    assert (best.step_time, best.bubble) == (24, 0) and waiting.step_time == 24 + 3
    searched = pp.plan(model, machine, 2, 4, schedules=["1f1b", "zb-v"], barrier=False).choices
    assert all(each.step_time == each.timeline().span for each in searched)


def test_a_model_in_8_bits_keeps_less_and_is_faster():
    """A Llama layer keeps four inputs of matrices: of two times its width, its queries, and its perceptron."""
    model = MODELS["llama-3-8b"]
    long, short = (model.pieces(4096, precision=precision).pieces[1] for precision in ("bf16", "fp8"))
    assert long.activation - short.activation == 4096 * (2 * 4096 + 4096 + 14336)
    machine = pp.Machine(80e9, flops=1e12)
    times = [model.pieces(4096, precision=each).timed(machine).pieces[1] for each in ("bf16", "fp8")]
    assert times[0].weight == 2 * times[1].weight
    attention = times[0].forward - times[0].weight
    assert times[1].forward == pytest.approx(attention + times[1].weight)


def test_gpus_that_split_a_sequence_have_its_parts_and_all_weights():
    """Of 4 groups, each gets the keys and values of the other three: of 8 heads of 128 numbers."""
    model, machine = MODELS["llama-3-8b"], pp.Machine(1e12, 4e14, 1e15, 0, 5e10, 8, near_bandwidth=4e11)
    whole, part = (model.pieces(8192, tensor=2, context=context).timed(machine) for context in (1, 4))
    sent = 8192 * 2 * 2 * 8 * 128 * 3 / 4 / 2 / (0.75 * 4e11)
    for one, other in zip(whole.pieces, part.pieces, strict=True):
        passed = sent if one.name.startswith("layer") else 0
        assert other.forward == pytest.approx(one.forward / 4 + passed)
        assert other.input == pytest.approx(one.input / 4 + 2 * passed)
        assert other.weight == pytest.approx(one.weight / 4)
        assert (other.activation, other.logits) == (one.activation / 4, one.logits / 4)
        assert other.weights == one.weights
    assert part.message == whole.message / 4 and part.flops == whole.flops and part.gpus == 8
    asked = {"ranks": 2, "microbatches": 4, "sequence": 8192, "tensor": 2, "schedules": "1f1b", "partition": [17, 17]}
    plans = [pp.plan("llama-3-8b", machine, context=context, **asked) for context in (1, 4)]
    assert str(plans[1]).startswith("2 ranks of 8 GPUs, 1 replica")
    assert plans[1].best.kinds[0]["optimizer"] * 4 == plans[0].best.kinds[0]["optimizer"]  # all four hold the weights


def test_libraries_keep_different_bytes():
    asked = {"ranks": 2, "microbatches": 4, "sequence": 1024, "schedules": ["1f1b"], "replicas": 4, "recompute": False}
    machine = replace(MACHINES["h100"], memory=1e12)
    found = {}
    for name in ("megatron", "torchtitan", "pytorch"):
        plan = pp.plan("llama-3-8b", machine, implementation=name, **asked)
        parameters = sum(MODELS["llama-3-8b"].pieces(1024).pieces[piece].weights for piece in plan.best.partition[0])
        kinds = plan.best.kinds[0]
        found[name] = [kinds[each] / parameters for each in ("weights", "gradients", "optimizer")]
        found[f"{name} says"] = " ".join(str(plan).split("\n\n")[0].split("\n")[1:])
    assert found["megatron"] == [2, 4, 12 / 4]
    assert found["torchtitan"] == [4, 4 / 4, 8 / 4]
    assert found["pytorch"] == [4, 4, 8]
    assert "; the GPUs that hold the same stage share the optimizer (ZeRO 1);" in found["megatron says"]
    assert "share gradients and optimizer (ZeRO 2);" in found["torchtitan says"]
    says = (
        "bytes of a weight: 4, its gradient 4, the optimizer 8; nine in ten runs like this take up to 12% more or less "
    )
    assert found["pytorch says"].startswith(says)


def test_a_plan_weighs_recomputation_in_the_order_of_actions():
    pieces = pp.Model.measured([1] * 4, activation=[10] * 4, message=1)
    asked = {"ranks": 4, "microbatches": 8, "schedules": ["1f1b", "mario"]}
    enough, short = (pp.plan(pieces, pp.Machine(memory), **asked) for memory in (1000, 30))
    assert [(each.name, each.step_time) for each in enough.choices] == [("1f1b", 33), ("mario", 38)]
    fit = [(each.name, each.step_time) for each in short.choices if not each.excess]
    assert fit == [("mario", 38), ("1f1b, recomputing", 44)]
    assert short.best.memory[0] == 16 + 2  # 6 inputs and the activations of one, which include its input; 2 messages
    for recompute in (False, "none"):
        with pytest.raises(pp.SettingError, match="'mario' recomputes stages; leave out recompute, or the schedule"):
            pp.plan(pieces, pp.Machine(1000), **{**asked, "schedules": "mario"}, recompute=recompute)
        [only] = pp.plan(pieces, pp.Machine(1000), 4, 8, schedules="1f1b", recompute=recompute).choices
        assert only.name == "1f1b"


def test_layers_can_be_recomputed():
    """Table 2 of arXiv 2205.05198: a layer keeps 2·s·h bytes, or 34·s·h without the attention matrix."""
    asked = {
        "ranks": 8,
        "microbatches": 8,
        "sequence": 2048,
        "schedules": "1f1b",
        "tensor": 8,
        "partition": [14, *[12] * 7],
    }
    asked["partition"] = [13, *[12] * 6, 13]
    machine = replace(MACHINES["a100"], memory=1e12)
    full, selective, none = (
        pp.plan("megatron-175b", machine, recompute=kind, **asked).best for kind in ("full", "selective", "none")
    )
    layer = 2048 * 12288 / 8
    inputs = 2048 * 8  # the embedding keeps its tokens
    matrix = 5 * 96 * 2048**2 / 8
    # One layer at a time is restored, which each rank needs once.
    assert full.kinds[0]["activations"] == 8 * (12 * 2 * layer + inputs) + 32 * layer + matrix
    assert selective.kinds[0]["activations"] == 8 * (12 * 34 * layer + inputs) + matrix
    assert none.kinds[0]["activations"] == 8 * (12 * (34 * layer + matrix) + inputs)
    assert none.busiest < selective.busiest < full.busiest
    pieces = MODELS["megatron-175b"].pieces(2048, tensor=8, recompute="full")
    del asked["sequence"]
    assert pp.plan(pieces, machine, **asked).best.costs == full.costs
    with pytest.raises(pp.SettingError, match=r"those of recompute='full', not of recompute='none'; leave out"):
        pp.plan(pieces, machine, recompute="none", **asked)
    with pytest.raises(pp.SettingError, match=r"those of implementation='megatron', not of implementation='pytorch'"):
        pp.plan(pieces, machine, implementation="pytorch", **asked)
    with pytest.raises(pp.SettingError, match=r"the pieces are those of precision='bf16', not of precision='fp8'"):
        pp.plan(pieces, machine, precision="fp8", **asked)


# --- what is accepted has an effect -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 3, 9, 10])
def test_schedules_of_one_placement_share_their_partitions(seed, monkeypatch):
    """In the little work that each may do, some find better partitions than others."""
    monkeypatch.setattr("ppedu.planning.planner.LONGER", 30_000)
    monkeypatch.setattr("ppedu.planning.planner.QUICKLY", 30_000)
    names = ["zb-v", "v-half", "dualpipev", "1f1b", "zb-h1"]
    plan = pp.plan(drawn(random.Random(seed), 24), pp.Machine(10**6, latency=1), 4, 8, schedules=names, recompute=False)
    for one in plan.choices:
        for other in plan.choices:
            if one.schedule.placement == other.schedule.placement:
                assert pp.simulate(one.schedule, other.costs).makespan >= one.step_time


def test_what_would_be_ignored_is_refused():
    for call, match in [
        (lambda: pp.Model.measured([1, 2], weights=[1.5, 2]), "weights must be whole numbers; got 1.5"),
        (lambda: pp.Model.measured(b"ab"), "forward must be a list"),
        (lambda: pp.plan(EIGHT_BILLION, MACHINE, 2, 4, schedules=[]), r"must be a list of names.*; got \[\]"),
        (lambda: pp.plan(EIGHT_BILLION, MACHINE, 2, 4, progress=1), "progress must be True or a function"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            call()


def test_a_schedule_for_inference_is_left_out_unless_it_is_named(monkeypatch):
    monkeypatch.setattr("ppedu.zoo.registry._entries", dict(_entries))
    pp.register("inference", forward_only=True)(lambda rank, ranks, microbatches: [pp.F(rank, 0)])
    names = {choice.name for choice in pp.plan(EIGHT_BILLION, MACHINE, 2, 1, seconds=0).choices}
    assert "1f1b" in names and "inference" not in names
    with pytest.raises(pp.SettingError, match="'inference' runs forwards alone, and a plan is for training"):
        pp.plan(EIGHT_BILLION, MACHINE, 2, 1, schedules=["1f1b", "inference"])


NUMBERS = {
    pp.Machine: {"memory": 80e9, "latency": 1, "node": 8},
    pp.Model: {"layers": 2, "width": 8, "heads": 2, "vocabulary": 9},
    pp.Model.measured: {"forward": [1, 2]},
}
OPTIONAL = {
    pp.Machine: "flops peak bandwidth near_latency near_bandwidth memory_bandwidth fp8 nvfp4",
    pp.Model: "kv_heads ffn head_size positions experts active shared imbalance dense dense_ffn predictions key_rank "
    "query_rank rotary",
    pp.Model.measured: "backward input weight activation weights bytes_per_weight message weight_memory logits tensor",
}
NEEDED = {"memory", "latency", "layers", "width", "heads", "vocabulary", "positions", "experts", "active", "shared"}
NEEDED |= {"forward", "activation", "weights", "bytes_per_weight", "message", "weight_memory", "logits", "tensor"}


@pytest.mark.parametrize("function", NUMBERS, ids=["Machine", "Model", "measured"])
def test_every_number_is_checked_where_it_is_given(function):
    valid = NUMBERS[function]
    for name in [*valid, *OPTIONAL[function].split()]:
        wrong = [math.nan, -1, True, "1", 1j, 10**400, 10**5000, 1e300, math.inf, [math.nan], [None, None]]
        for value in wrong + [None] * (name in NEEDED):
            with pytest.raises(pp.SettingError):
                function(**{**valid, name: value})


def test_sizes_that_would_take_forever_are_refused():
    asked = {"model": EIGHT_BILLION, "machine": MACHINE, "ranks": 2}
    for changes, match in [
        (
            {"microbatches": 10**7},
            r"schedules with 10000000 microbatches on 2 ranks are more than 4,000,000 forwards",
        ),
        ({"microbatches": range(1, 10**12)}, "more than 4,000,000 forwards"),
        ({"microbatches": 4 * 10**6, "schedules": "1f1b"}, "1 schedule with 4000000 microbatches"),
        ({"ranks": 10**9}, "ranks must be at most 512"),
        ({"replicas": 10**5000}, "replicas must be at most 1000000000; got a number of thousands of digits"),
        ({"seconds": 10**400}, "seconds must be at most 1e"),
        ({"model": "gpt2", "sequence": 10**10}, "sequence must be at most 1000000000"),
    ]:
        with pytest.raises(pp.SettingError, match=match):
            pp.plan(**{**asked, **changes})
    with pytest.raises(pp.SettingError, match="10003 pieces are too many for a plan; take at most 10000 layers"):
        pp.Model.measured([1] * 10_003)


def test_a_plan_fits_a_narrow_page():
    """In text, no line is wrapped by the page; in HTML, a name or a number stays in one line, and the table scrolls."""
    model = pp.Model(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
    names = ["1f1b", "zb-interleaved", "looped-bfs"]
    plan = pp.plan(model, "h100", ranks=4, microbatches=[8, 16], sequence=8192, schedules=names, seconds=0)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    cells = re.findall(r"<td[^>]*>[^<]*", plan._repr_html_())
    assert len(cells) > 20 and all("nowrap" in cell or cell.endswith(">best") for cell in cells)
    assert plan._repr_html_().startswith('<div style="overflow-x: auto;">')
