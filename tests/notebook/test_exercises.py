"""Predictions, and exercises that say what is wrong and why."""

import matplotlib
import pytest

from ppedu import B, F, SettingError
from ppedu.notebook import check_answer, outcome, predict
from ppedu.notebook.exercises import EXERCISES, find_fault


@pytest.fixture(autouse=True)
def no_window():
    from matplotlib import pyplot

    matplotlib.use("Agg")
    pyplot.close("all")
    yield pyplot
    pyplot.close("all")


def told(capsys, exercise, answer):
    """What the learner reads, as one line."""
    check_answer(exercise, answer)
    return " ".join(capsys.readouterr().out.split())


# Predictions


def test_a_prediction_is_noted_and_shown_beside_what_came_out(capsys):
    predict("bubble", 4)
    outcome("bubble", 5)
    assert capsys.readouterr().out == "Noted: bubble = 4. Now run it.\nbubble: you said 4, it is 5.\n"


@pytest.mark.parametrize("value", [4, 2.5, "1f1b", (1, 2), None])
def test_a_prediction_that_came_true_is_called_right(capsys, value):
    predict("it", value)
    outcome("it", value)
    assert capsys.readouterr().out.endswith(f"you said {value}, it is {value} — right.\n")


def test_what_looks_the_same_is_called_right(capsys):
    predict("share", 0.3)
    outcome("share", 0.1 + 0.2)
    assert capsys.readouterr().out.endswith("you said 0.3, it is 0.3 — right.\n")


def test_the_last_prediction_counts(capsys):
    predict("peak", 1)
    predict("peak", 2)
    outcome("peak", 2)
    assert "you said 2, it is 2 — right." in capsys.readouterr().out


def test_what_was_not_predicted_asks_for_its_cell():
    with pytest.raises(SettingError, match="nothing was predicted for 'never said'; run its predict cell first"):
        outcome("never said", 1)


# Lesson 5, exercise 1: write 1F1B


def with_warmup(warmup):
    def generator(rank, ranks, microbatches):
        first = warmup(rank, ranks, microbatches)
        for m in range(first):
            yield F(rank, m)
        for m in range(first, microbatches):
            yield F(rank, m)
            yield B(rank, m - first)
        for m in range(microbatches - first, microbatches):
            yield B(rank, m)

    return generator


right = with_warmup(lambda rank, ranks, microbatches: min(ranks - rank - 1, microbatches))


def right_as_a_simulation(rank, ranks, microbatches):
    """Backward whenever as many are held as may be, or none are left to start."""
    order, started, ended = [], 0, 0
    while ended < microbatches:
        if started < microbatches and started - ended < ranks - rank:
            order.append(F(rank, started))
            started += 1
        else:
            order.append(B(rank, ended))
            ended += 1
    return order


def right_as_a_tuple(rank, ranks, microbatches):
    return tuple(right(rank, ranks, microbatches))


@pytest.mark.parametrize("answer", [right, right_as_a_simulation, right_as_a_tuple])
def test_1f1b_is_right_however_it_is_written(capsys, no_window, answer):
    assert told(capsys, "05.1", answer).startswith("Right. That is 1F1B")
    assert len(no_window.get_fignums()) == 1, "the learner is shown what was built"


def gpipe(rank, ranks, microbatches):
    for m in range(microbatches):
        yield F(rank, m)
    for m in range(microbatches):
        yield B(rank, m)


def one_at_a_time(rank, ranks, microbatches):
    for m in range(microbatches):
        yield F(rank, m)
        yield B(rank, m)


def no_drain(rank, ranks, microbatches):
    warmup = min(ranks - rank - 1, microbatches)
    for m in range(warmup):
        yield F(rank, m)
    for m in range(warmup, microbatches):
        yield F(rank, m)
        yield B(rank, m - warmup)


def backward_first(rank, ranks, microbatches):
    for m in range(microbatches):
        yield B(rank, m)
        yield F(rank, m)


def nothing(rank, ranks, microbatches):
    return
    yield


def endless(rank, ranks, microbatches):
    while True:
        yield F(rank, 0)


def newest_first(rank, ranks, microbatches):
    """The right warm-up, but then the backward of the forward that has just run."""
    warmup = min(ranks - rank - 1, microbatches)
    for m in range(warmup):
        yield F(rank, m)
    for m in range(warmup, microbatches):
        yield F(rank, m)
        yield B(rank, m)
    for m in range(warmup):
        yield B(rank, m)


WRONG = {
    "GPipe": (
        gpipe,
        "it is legal and no slower, but rank 0 runs 8 forwards before its first backward, where 4 would do",
    ),
    "naive": (one_at_a_time, "takes 64 slots instead of 22: rank 0 runs 1 forward before its first backward"),
    "warm-up one short": (
        with_warmup(lambda r, p, m: min(max(p - r - 2, 0), m)),
        "takes 36 slots instead of 22: rank 0 runs 3 forwards before its first backward, and then waits; 4 would",
    ),
    "warm-up one long": (with_warmup(lambda r, p, m: min(p - r, m)), "holds 5 activations instead of 4"),
    "the same warm-up everywhere": (
        with_warmup(lambda r, p, m: min(p - 1, m)),
        "takes 46 slots instead of 22, but rank 1 runs 4 forwards before its first backward, where 3 would do",
    ),
    "the newest first": (newest_first, "with peaks 4, 3, 2, 1 instead of 4, 3, 2, 1: the warm-up is right"),
    "warm-up longer than the batch": (
        with_warmup(lambda r, p, m: p - r - 1),
        "with 4 ranks and 2 microbatches, rank 0, position 2: 0F2: there is no microbatch 2",
    ),
    "no drain": (no_drain, "rank 0: 0B5 is never run (and 5 more)"),
    "backward first": (backward_first, "rank 0, position 0: 0B0 needs 0F0, which only comes at position 1"),
    "another rank's stage": (lambda r, p, m: right(0, p, m), "stage 0 is held by rank 0"),
    "nothing": (nothing, "yields nothing. Start with the warm-up"),
    "no yield": (lambda r, p, m: None, "gives None for rank 0; it must yield actions"),
    "tuples": (lambda r, p, m: [("F", r, 0)], "yields ('F', 0, 0) on rank 0; yield actions, such as F(0, 0)"),
    "texts": (lambda r, p, m: [f"{r}F0"], "yields '0F0' on rank 0; yield actions, such as F(0, 0)"),
    "endless": (endless, "yields more and more actions on rank 0; does it end?"),
    "two arguments": (lambda r, p: right(r, p, 8), "rank, ranks and microbatches"),
}


@pytest.mark.parametrize(("answer", "reason"), WRONG.values(), ids=WRONG)
def test_what_is_not_1f1b_is_refused_with_the_reason(capsys, no_window, answer, reason):
    message = told(capsys, "05.1", answer)
    assert message.startswith("Not yet: ") and reason in message
    assert no_window.get_fignums() == []


@pytest.mark.parametrize("answer", [nothing, endless, gpipe])
def test_a_reason_ends_like_a_sentence(capsys, answer):
    message = told(capsys, "05.1", answer)
    assert message[-1] in ".?)" and message[-2] not in ".?"


@pytest.mark.parametrize("answer", [None, 5, "1f1b", right(0, 4, 8)])
def test_what_is_not_a_function_is_asked_for(capsys, answer):
    assert "give a function of rank, ranks and microbatches" in told(capsys, "05.1", answer)


def test_the_names_of_the_arguments_are_the_learners(capsys):
    assert told(capsys, "05.1", lambda r, p, m: right(r, p, m)).startswith("Right.")


def test_an_error_in_the_learners_own_code_is_left_to_python():
    def broken(rank, ranks, microbatches):
        yield F(rank, 1 // 0)

    with pytest.raises(ZeroDivisionError):
        check_answer("05.1", broken)


# Exercise 2: the peak


PEAKS = {
    "written with min": lambda rank, ranks, microbatches: min(ranks - rank, microbatches),
    "written with if": lambda r, p, m: m if m < p - r else p - r,
    "as a float": lambda r, p, m: float(min(p - r, m)),
}


@pytest.mark.parametrize("formula", PEAKS.values(), ids=PEAKS)
def test_the_peak_is_the_distance_to_the_last_rank_or_the_batch(capsys, formula):
    assert told(capsys, "05.2", formula).startswith("Right.")


WRONG_PEAKS = {
    "GPipe's": (lambda r, p, m: m, "with 4 ranks and 8 microbatches, rank 0 holds 4 at its peak; your formula says 8"),
    "one short": (lambda r, p, m: min(p - r - 1, m), "rank 0 holds 4 at its peak; your formula says 3"),
    "not clamped": (lambda r, p, m: p - r, "rank 0 holds 1 at its peak; your formula says 2"),
    "the same on all": (lambda r, p, m: min(p, m), "rank 1 holds 3 at its peak; your formula says 4"),
    "forgets return": (lambda r, p, m: None, "your formula says None"),
    "a number": (4, "give a function of rank, ranks and microbatches, not 4"),
    "of two arguments": (lambda r, p: p - r, "a function of rank, ranks and microbatches"),
}


@pytest.mark.parametrize(("formula", "reason"), WRONG_PEAKS.values(), ids=WRONG_PEAKS)
def test_a_wrong_peak_is_refused_with_a_counterexample(capsys, formula, reason):
    message = told(capsys, "05.2", formula)
    assert message.startswith("Not yet: ") and reason in message


def test_one_is_singular(capsys):
    assert "with 2 ranks and 1 microbatch, rank 0" in told(capsys, "05.2", lambda r, p, m: p - r)


# All exercises


@pytest.mark.parametrize("name", ["", "5.1", "05.99", None])
def test_an_unknown_exercise_is_refused_with_those_there_are(name):
    with pytest.raises(SettingError, match=r"there is no exercise .*; there is: 05\.1, 05\.2"):
        check_answer(name, right)


@pytest.mark.parametrize("name", EXERCISES)
def test_no_exercise_is_solved_by_nothing(name):
    assert find_fault(name, None)
