"""`run_schedule` and `Pipeline` give the same gradients and loss, bit for bit, for every single-copy schedule."""

import inspect
import json
from pathlib import Path

import pytest
from strategies import sample

import ppedu as pp
from ppedu.run import run_schedule

PROGRAM = (Path(__file__).with_name("tiny_beside_pipeline.py")).read_text(encoding="utf-8")


def legal_microbatches(name, ranks):
    """An uneven number of microbatches where the schedule allows one, else a multiple of the ranks; None if neither."""
    for microbatches in (2 * ranks + 1, 2 * ranks, 4 * ranks, 6 * ranks):
        try:
            pp.schedule(name, ranks, microbatches).validate()
        except pp.PipelineError:
            continue
        return microbatches
    return None


def cases(ranks):
    numbers = {name: legal_microbatches(name, ranks) for name in pp.schedules()}
    found = [
        (name, microbatches, {}, None)
        for name, microbatches in numbers.items()
        if microbatches and (made := pp.schedule(name, ranks, microbatches)).placement.alone and made.slices == 1
        if not made.updated and not made.placement.barriers
    ]
    assert len(found) > 11
    return [
        *(found if ranks == 2 else sample(found, 2)),  # all in a full run
        ("interleaved", 2 * ranks, {"chunks": 3}, None),
        ("zb-v", 2 * ranks, {}, {"receive": "late"}),
        ("zb-v", 2 * ranks, {}, {"fsdp": True, "resident": 1}),
    ]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def reports(request, ranks):
    """For every case, what each rank reports of it."""
    given = cases(request.param)
    output = ranks(PROGRAM, request.param, json.dumps(given))
    by_case = zip(*([json.loads(line) for line in text.splitlines()] for text in output), strict=True)
    return list(zip(given, by_case, strict=True))


def test_gradients_are_those_of_the_pipeline_bit_for_bit(reports):
    wrong = {str(case) for case, found in reports for each in found if each["different"] or each["all zero"]}
    assert not wrong


def test_the_loss_is_the_pipelines_on_the_rank_with_the_last_stage_and_0_elsewhere(reports):
    for case, found in reports:
        assert [each["loss"] for each in found] == [each["expected loss"] for each in found], case
        assert sum(each["loss"] > 0 for each in found) == 1, case


def test_two_copies_of_the_model_are_refused():
    with pytest.raises(pp.SettingError, match="seq1f1b trains several slices"):
        run_schedule(pp.schedule("seq1f1b", 2, 2), {}, [], [], (), lambda y, target: y)
    with pytest.raises(pp.SettingError, match="dualpipe trains several copies of the model"):
        run_schedule(pp.schedule("dualpipe", 4, 8), {}, [], [], (), lambda y, target: y)


def test_an_illegal_schedule_is_refused():
    schedule = pp.schedule("gpipe", 2, 4)
    backwards_first = tuple(order[::-1] for order in schedule.orders)
    with pytest.raises(pp.ScheduleError):
        run_schedule(pp.Schedule("mine", schedule.placement, 4, backwards_first), {}, [], [], (), None)


def test_the_interpreter_can_be_read_in_one_sitting():
    source, doc = inspect.getsource(run_schedule), inspect.getdoc(run_schedule)
    assert len(source.splitlines()) - len(doc.splitlines()) < 70
