"""Divisions of GPUs, against a plan for each of them, and against a published one."""

import math
import re
from itertools import product

import pytest

import ppedu as pp


def test_the_best_division_is_the_best_of_all_plans():
    """8 GPUs, 16 sequences of GPT-2: every way to divide them, with the one schedule."""
    sizes = {"tensor": [1, 2, 4], "context": [1, 2], "ranks": [1, 2, 4, 8], "microbatch": [1, 2]}
    found = pp.divide("gpt2", "h100", 8, 16, 512, **sizes, schedules=["1f1b"])
    speeds = {}
    for tensor, context, ranks, batch in product(*sizes.values()):
        replicas = 8 / tensor / context / ranks
        if replicas == int(replicas) and 16 % (replicas * batch) == 0:
            split = {"tensor": tensor, "context": context, "replicas": int(replicas), "batch": batch}
            count = 16 // int(replicas) // batch
            answer = pp.plan("gpt2", "h100", ranks, count, sequence=512, schedules=["1f1b"], **split)
            speeds[tensor, context, ranks, batch] = answer.best.tokens_per_second
    assert len(speeds) > 20 and len(found.rows) == len(speeds) and not found.too_large and not found.interrupted
    best = found.best
    assert best.tokens_per_second == pytest.approx(max(speeds.values()))
    assert speeds[best.tensor, best.context, best.plan.job.ranks, best.batch] == best.tokens_per_second
    assert [row.tokens_per_second for row in found.rows] == sorted(
        (row.tokens_per_second for row in found.rows), reverse=True
    )
    for row in found.rows:  # all but the first three were planned quickly
        whole = speeds[row.tensor, row.context, row.plan.job.ranks, row.batch]
        assert 0.95 * whole < row.tokens_per_second < 1.02 * whole  # which counts what comes after the pipeline, too
        assert row.tensor * row.context * row.plan.job.ranks * row.replicas == 8


def test_a_table_lists_the_divisions():
    found = pp.divide("gpt2", "h100", 4, 8, 512, tensor=[1, 2], schedules=["1f1b"], microbatch=1)
    head, first, *_ = str(found).splitlines()
    assert head.split()[:6] == ["tensor", "context", "ranks", "replicas", "microbatch", "schedule"]
    best = found.best.plan.best
    assert f"{best.tokens_per_second:,.0f}" in first and "best" in first
    assert found._repr_html_().count("<tr>") == len(found.rows) + 1
    assert "the first: bytes of a weight: 2, its gradient 4, the optimizer 12;" in str(found)
    told = []
    pp.divide("gpt2", "h100", 4, 8, 512, tensor=1, schedules=["1f1b"], progress=lambda what, part: told.append(part))
    assert told == sorted(told) and told[0] == 0 and told[-1] == 1


def test_the_reason_is_that_of_the_way_that_needs_least():
    def needed(**given):
        with pytest.raises(pp.SettingError, match="needs") as caught:
            pp.divide("deepseek-v3", "h100", 8, 32, 4096, schedules="1f1b", recompute=True, microbatch=1, **given)
        return float(re.search(r"needs ([\d.]+) GB", str(caught.value))[1])

    each = [needed(tensor=tensor, ranks=ranks) for tensor, ranks in ((1, 1), (1, 8), (8, 1))]
    assert needed(tensor=[1, 8], ranks=[1, 8]) == min(each) < max(each)


def test_a_bar_is_drawn(capsys):
    pp.divide("gpt2", "h100", 4, 8, 512, tensor=1, schedules=["1f1b"], progress=True)
    drawn = capsys.readouterr().err
    assert "\rsearching [###############               ]  50%" in drawn and drawn.endswith("100%\r\033[K")


def test_divisions_that_do_not_fit_are_counted():
    found = pp.divide("llama-2-13b", "h100", 8, 8, 2048, tensor=[1, 8], ranks=[1, 8], microbatch=1, schedules=["1f1b"])
    assert [(row.tensor, row.plan.job.ranks) for row in found.rows] in ([(8, 1), (1, 8)], [(1, 8), (8, 1)])
    assert found.too_large == 1 and "1 other division cannot run the schedules" in str(
        found
    )  # a whole model on each GPU
    with pytest.raises(pp.SettingError, match="nothing fits in 80 GB on 1 rank"):
        pp.divide("llama-2-13b", "h100", 8, 8, 2048, tensor=1, ranks=1, microbatch=1, schedules=["1f1b"])


def test_a_search_can_be_ended(monkeypatch):
    def interrupt(what, part):
        if what.startswith("division 3 of "):
            raise KeyboardInterrupt

    def stop_the_plan(what, part):
        if what == "the best divisions: 2":
            monkeypatch.setattr("ppedu.planning.planner._search", interrupt_search)

    def interrupt_search(job, tried, *others):
        tried[0].start()
        raise KeyboardInterrupt

    asked = {"tensor": [1, 2], "microbatch": 1, "ranks": [1, 2, 4, 8], "schedules": ["1f1b"]}
    found = pp.divide("gpt2", "h100", 8, 8, 128, **asked, progress=interrupt)
    assert found.interrupted and len(found.rows) == 2 and "interrupted" in str(found)
    assert pp.divide("gpt2", "h100", 8, 8, 128, **asked, seconds=0).interrupted
    found = pp.divide("gpt2", "h100", 8, 8, 128, **asked, progress=stop_the_plan)
    assert found.interrupted and len(found.rows) > 3  # Ctrl+C within a plan ends the search, too


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"gpus": 7, "tensor": 2},
            "no division uses all of 7 GPUs, splits 12 heads among tensor groups, and a batch of 8",
        ),
        ({"replicas": 2}, "divide finds replicas itself"),
        ({"microbatches": 4}, "divide finds microbatches itself"),
        ({"progress": 3}, "progress must be True or a function"),
        ({"ranks": [0]}, "ranks must be at least 1"),
        ({"model": pp.Model.measured([1, 2, 1])}, "divide needs a model by sizes"),
        ({"tensor": 0}, "tensor must be at least 1; got 0"),
        ({"gpus": math.nan}, "gpus must be a whole number"),
        ({"wat": 1}, "wat"),
    ],
)
def test_questions_that_make_no_sense(changes, problem):
    asked = {"model": "gpt2", "machine": "h100", "gpus": 8, "batch": 8, "sequence": 128}
    with pytest.raises((pp.SettingError, TypeError), match=problem):
        pp.divide(**{**asked, **changes})


@pytest.mark.slow
def test_the_published_layout_is_among_the_first():
    """Megatron-Bridge runs Llama 3 70B on 64 H100s with tensor 4, 8 ranks and 2 replicas (tests/published)."""
    found = pp.divide("llama-3-70b", "h100", 64, 256, 8192)
    first = [(row.tensor, row.context, row.plan.job.ranks, row.replicas) for row in found.rows[:3]]
    assert (4, 1, 8, 2) in first
