"""The feedback on answers to exercises."""

import linecache
from functools import wraps

import numpy as np
import pytest
import torch
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

import ppedu
from ppedu import B, Costs, F, SettingError, schedule, simulate
from ppedu.course.exercises import EXERCISES
from ppedu.course.exercises.parts import course
from ppedu.notebook import check_answer, is_right

RIGHT = {}
WRONG = {}


# Lesson 3: GPipe's bubble


RIGHT["03.1"] = {
    "of the paper": lambda ranks, microbatches: (ranks - 1) / (microbatches + ranks - 1),
    "what is not work": lambda p, m: 1 - m / (m + p - 1),
    "with F and B in it": lambda p, m: 3 * (p - 1) / (3 * m + 3 * (p - 1)),
    "from the overhead": lambda p, m: 1 - 1 / (1 + (p - 1) / m),
}


WRONG["03.1"] = {
    "the overhead": (
        lambda p, m: (p - 1) / m,
        "gives 0.375. That is the overhead: the makespan divided by the time that the busiest rank works, "
        "minus 1. Megatron calls",
    ),
    "naive's": (lambda p, m: 1 - 1 / p, "gives 0.75. That is naive's bubble"),
    "the working share": (lambda p, m: m / (m + p - 1), "in which a rank works; the bubble is the rest"),
    "a time": (lambda p, m: p - 1, "That is the idle time, in units of F+B; divide it by the makespan"),
    "p over all": (lambda p, m: p / (m + p), "The last rank waits only for the ranks before it, which are one fewer"),
    "p over the makespan": (
        lambda p, m: p / (m + p - 1),
        "The makespan is right, but the last rank waits only for the p-1 ranks before it.",
    ),
    "makespan one long": (
        lambda p, m: (p - 1) / (m + p),
        "The idle time is right; the makespan is just the sum of the idle time and the working",
    ),
    "the published one": (
        lambda p, m: (p - 1) / (2 * (m - 1) + p),
        "This formula has been published, but it is wrong: for the work it",
    ),
    "one wait of two": (
        lambda p, m: (p - 1) / (2 * m + p - 1),
        "9 of 33, a fraction of 0.2727; your formula gives 0.1579. For the work it counts forwards and "
        "backwards, for the wait only one of them.",
    ),
    "two waits of one": (lambda p, m: (p - 1) / (m / 2 + p - 1), "The wait is counted twice"),
    "ranks and microbatches swapped": (lambda p, m: (m - 1) / (m + p - 1), "Ranks and microbatches are swapped."),
    "the wait at the start": (
        lambda p, m: (p - 1) / (3 * (m + p - 1)),
        "That is only the wait at the start, if a backward",
    ),
    "the wait in forwards": (
        lambda p, m: 3 * (p - 1) / (m + 3 * (p - 1)),
        "It counts the wait in forwards",
    ),
    "rounded down": (lambda p, m: (p - 1) // (m + p - 1), "gives 0. The formula is right, but // rounds down"),
    "in percent": (lambda p, m: 100 * (p - 1) / (m + p - 1), "between 0 and 1, not a percentage."),
    "something else": (lambda p, m: 1 / m, "idle for 9 of 33, a fraction of 0.2727; your formula gives 0.125."),
    "one size": (lambda p, m: 3 / 11, "gives 0.2727, although it is right with 4 ranks and 8 microbatches"),
    "rounded": (lambda p, m: 0.2727, "a fraction of 0.2727; your formula gives 0.2727."),
    "for ranks and microbatches above 1": (
        lambda p, m: (p - 1) / (m - 1) * 7 / 11,
        "with 1 rank and 1 microbatch your",
    ),
    "by simulation": (
        lambda p, m: simulate(schedule("gpipe", p, m)).bubble,
        "the numbers are right, but they come from the simulator, which gives up with 100000 ranks and 1000000 "
        "microbatches. This exercise asks for a formula",
    ),
    "for small sizes": (
        lambda p, m: (p - 1) / (m + p - 1) if p < 100 else None,
        "the numbers are right, but with 100000 ranks and 1000000 microbatches your function returns None",
    ),
    "forgets return": (lambda p, m: None, "your function returns None instead of a number; is a return missing?"),
    "a text": (lambda p, m: "27 %", "your function returns '27 %' instead of a number."),
    "of three arguments": (lambda r, p, m: 0, "give a function of ranks and microbatches; yours takes r and p and m."),
    "one of Python's own": (
        max,
        "give a function of ranks and microbatches, written by you; got <built-in function max>",
    ),
}


# Lesson 3, exercise 2: GPipe's makespan with uneven stages


RIGHT["03.2"] = {
    "in units": lambda forwards, m: 3 * (sum(forwards) + (m - 1) * max(forwards)),
    "forwards, then backwards": lambda f, m: sum(f) + (m - 1) * max(f) + 2 * sum(f) + (m - 1) * 2 * max(f),
}


WRONG["03.2"] = {
    "the slowest everywhere": (lambda f, m: 3 * (m + len(f) - 1) * max(f), "as slow as the slowest"),
    "the mean": (lambda f, m: 3 * (m + len(f) - 1) * sum(f) / len(f), "cannot make up for the slow one"),
    "one by one": (lambda f, m: 3 * m * sum(f), "one microbatch at a time, as with naive"),
    "the slowest rank's work": (lambda f, m: 3 * m * max(f), "the slowest rank works; it also waits"),
    "forwards only": (lambda f, m: sum(f) + (m - 1) * max(f), "the forwards alone; the backwards follow"),
    "counted twice": (lambda f, m: 3 * (sum(f) + m * max(f)), "counted once too often"),
    "a single microbatch": (
        lambda f, m: 3 * sum(f),
        "with forwards of 2, 1, 1, 1 and 8 microbatches the makespan is 57; your formula gives 15. That is the time of "
        "a single",
    ),
    "the fastest": (lambda f, m: 3 * (sum(f) + (m - 1) * min(f)), "it cannot overtake at the slowest stage"),
    "the first": (lambda f, m: 3 * (sum(f) + (m - 1) * f[0]), "right if stage 0 is the slowest; it need not be"),
    "the last": (lambda f, m: 3 * (sum(f) + (m - 1) * f[-1]), "right if the last stage is the slowest; it need not"),
    "by simulation": (
        lambda f, m: simulate(schedule("gpipe", len(f), m), Costs(forward=f)).makespan,
        "which gives up with 10 stages and 1000000 microbatches",
    ),
}


# Lesson 9, exercise 1: in which order does a rank go through its chunks?


def dealt(rank, ranks, microbatches, chunks):
    for first in range(0, microbatches, ranks):
        for chunk in range(chunks):
            for m in range(first, first + ranks):
                yield F(chunk * ranks + rank, m)


def dealt_by_number(rank, ranks, microbatches, chunks):
    """Yield forward number k as Megatron looks it up."""
    for k in range(microbatches * chunks):
        chunk, group = k // ranks % chunks, k // (ranks * chunks)
        yield F(chunk * ranks + rank, group * ranks + k % ranks)


RIGHT["09.1"] = [dealt, dealt_by_number, lambda *sizes: list(dealt(*sizes))]


def breadth_first(rank, ranks, microbatches, chunks):
    return [F(chunk * ranks + rank, m) for chunk in range(chunks) for m in range(microbatches)]


def microbatch_by_microbatch(rank, ranks, microbatches, chunks):
    return [F(chunk * ranks + rank, m) for m in range(microbatches) for chunk in range(chunks)]


def neighboring_stages(rank, ranks, microbatches, chunks):
    return [F(rank * chunks + chunk, m) for chunk in range(chunks) for m in range(microbatches)]


def in_fours(rank, ranks, microbatches, chunks):
    for first in range(0, microbatches, 4):
        for chunk in range(chunks):
            for m in range(first, min(first + 4, microbatches)):
                yield F(chunk * ranks + rank, m)


WRONG["09.1"] = {
    "breadth first": (
        breadth_first,
        "with 4 ranks, 8 microbatches and 2 chunks, forward number 5 of rank 0 is 0F4, where depth first has "
        "4F0. Yours is breadth first",
    ),
    "one microbatch at a time": (
        microbatch_by_microbatch,
        "forward number 2 of rank 0 is 4F0, where depth first has 0F1. A microbatch only comes back after "
        "passing all other",
    ),
    "stages next to each other": (
        neighboring_stages,
        "rank 0 yields 1F0, but holds stages 0, 4: the stages are dealt out to the",
    ),
    "groups of four": (in_fours, "with 2 ranks, 4 microbatches and 3 chunks, forward number 3 of rank 0 is 0F2"),
    "groups backwards": (
        lambda *sizes: [F(stage, 7 - m if sizes[2] == 8 else m) for stage, _, m, _ in dealt(*sizes)],
        "forward number 1 of rank 0 is 0F7, where depth first has 0F0. Take 4 microbatches through the first chunk",
    ),
    "the first group": (lambda r, p, m, v: dealt(r, p, p, v), "rank 0 never yields 0F4 (and 7 more actions)"),
    "one chunk": (lambda r, p, m, v: dealt(r, p, m, 1), "rank 0 never yields 4F0 (and 7 more actions)"),
    "twice": (lambda *sizes: [*dealt(*sizes), *dealt(*sizes)], "rank 0 yields 0F0 2 times"),
    "one microbatch more": (lambda r, p, m, v: dealt(r, p, m + 1, v), "yields 0F8, but the microbatches are 0 to 7"),
    "backwards too": (
        lambda *sizes: [*dealt(*sizes), B(sizes[0], 0)],
        "rank 0 yields 0B0; yield only its forwards, the backwards are",
    ),
    "rank 0's everywhere": (lambda r, p, m, v: dealt(0, p, m, v), "rank 1 yields 0F0, but holds stages 1, 5"),
    "nothing": (lambda *sizes: [], "your generator yields nothing for rank 0"),
    "no yield": (lambda *sizes: None, "Not yet: the schedule 'yours' returned None for rank 0; it must yield actions"),
}


# Lesson 9, exercise 2: the best number of chunks


MANY = (1, 2, 3, 4, 6, 12)


def makespan_of(ranks, microbatches, latency, chunks):
    return simulate(schedule("interleaved", ranks, microbatches, chunks=chunks), Costs(latency=latency)).makespan


def best_by_simulation(ranks, microbatches, latency):
    return min(MANY, key=lambda chunks: makespan_of(ranks, microbatches, latency, chunks))


def best_by_formula(p, m, c):
    """Minimize work + bubble / v + one message for each stage that a microbatch passes, down and back up."""
    return min(MANY, key=lambda v: 3 * m + 3 * (p - 1) / v + 2 * (p * v - 1) * c)


RIGHT["09.2"] = [best_by_simulation, best_by_formula]


WRONG["09.2"] = {
    "the most": (
        lambda p, m, c: 12,
        "latency of 0.1, 12 chunks take 34.88, and 3 only 29.2. More chunks mean a smaller bubble, but also "
        "more messages,",
    ),
    "the fewest": (lambda p, m, c: 1, "1 chunk takes 33.6, and 3 only 29.2. One chunk sends the fewest messages, but"),
    "the same for all latencies": (lambda p, m, c: 3, "a latency of 0, 3 chunks take 27, and 12 only 24.75."),
    "the same for all sizes": (
        lambda p, m, c: best_by_simulation(4, 8, c),
        "with 2 ranks, 8 microbatches and a latency of 0.5, 2 chunks take 28.5, and 1 only 28. Yours is the best "
        "for 4 ranks and 8 microbatches; use ranks and microbatches.",
    ),
    "the worst": (lambda p, m, c: max(MANY, key=lambda v: makespan_of(p, m, c, v)), "12 chunks take 34.88"),
    "the makespan": (
        lambda p, m, c: min(makespan_of(p, m, c, v) for v in MANY),
        "returns 29.2, which is not one of 1, 2, 3, 4, 6, 12: that is the makespan; which number",
    ),
    "any number": (
        lambda p, m, c: min(range(1, 13), key=lambda v: makespan_of(p, m, c, v)),
        "a latency of 0.02 your function returns 8, which is not one of 1, 2, 3, 4, 6, 12.",
    ),
    "another schedule": (lambda p, m, c: schedule("1f1b", p, m, chunks=2), "the schedule '1f1b' takes"),
}


# All exercises


@pytest.mark.parametrize("name", ["", "5.1", "05.99", None])
def test_an_unknown_exercise_raises_with_the_existing_ones(name):
    with pytest.raises(
        SettingError, match=r"there is no exercise .*; the exercises are: .*03\.1, .*05\.1, 05\.2, .*09\.1"
    ):
        check_answer(name, fails)


def a_generator(*given):
    yield None


IMPLAUSIBLE = {
    "nothing": None,
    "text": "1f1b",
    "number": 4,
    "yes": True,
    "nan": float("nan"),
    "infinity": float("inf"),
    "no float": 10**400,
    "complex": 1j,
    "list": [1, 2],
    "long list": list(range(10_000)),
    "dict": {"A": None, "B": 3, "C": (None, None), "D": (0.5, []), "E": ["0", "0F0"]},
    "pair": (10**400, float("nan")),
    "schedule": schedule("1f1b", 4, 8),
    "timeline": simulate(schedule("1f1b", 2, 2)),
    "costs": Costs(forward=[1, 2], backward=[3]),
    "action": F(0, 0),
    "array": np.arange(4),
    "tensor": torch.ones(2, requires_grad=True),
    "type": dict,
    "generator": a_generator(),
    "built-in": max,
    "module": torch,
}


def is_one_sentence(message):
    return message.startswith("Not yet: ") and len(message) < 1200


def answers_with(value):
    """Return answers that are the value, return it, yield it, or hold it."""
    return value, lambda *given: value, lambda *given: iter([value]), dict.fromkeys("ABCDE", value)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_implausible_answer_or_result_gets_a_sentence(told, exercise):
    for name, value in IMPLAUSIBLE.items():
        for answer in answers_with(value):
            message = told(exercise, answer)
            assert is_one_sentence(message), name


PARTS = {part.number for part in course()}
WITH_FUNCTIONS = [name for name in EXERCISES if name not in PARTS | {"04.1", "15.1", "16.1"}]

TAKES = {
    "model and budget": "01.1",
    "ranks, sequences, length, width and bytes_each": "01.2",
    "model and microbatches": "01.3",
    "first, second, x, target and loss_fn": "02.1",
    "stage, activation, send_forward and recv_backward": "02.2",
    "ranks and microbatches": "03.1 04.2 08.3",
    "forwards and microbatches": "03.2",
    "timeline": "04.3 08.1",
    "rank, ranks and microbatches": "05.1 05.2 05.3 10.1 10.3 14.1 14.2",
    "me and microbatches": "06.1 06.2 06.4",
    "me, steps and target": "06.3",
    "me and value": "06.6",
    "losses and counts": "07.1",
    "stages and most": "07.2",
    "embedding and head": "07.3",
    "off and microbatches": "07.4",
    "measured and costs": "08.2 11.1",
    "rank, ranks, microbatches and chunks": "09.1 09.3",
    "ranks, microbatches and latency": "09.2",
    "ranks, forward, input and weight": "10.2",
    "run and cures": "11.2",
    "run": "11.3",
    "schedule": "12.1",
    "ranks, forward, backward and weight": "12.2",
    "layers": "12.3",
    "rank, ranks, microbatches and slices": "13.1",
    "slices and attention": "13.2",
    "ranks, work and each": "13.3",
    "times and ranks": "15.2",
}


def test_a_function_is_asked_for_with_the_names_of_its_parameters(refused):
    assert sorted(" ".join(TAKES.values()).split()) == sorted(WITH_FUNCTIONS)
    for names, exercises in TAKES.items():
        for exercise in exercises.split():
            refused(exercise, 4, f"give a function of {names}, not 4.")
            refused(exercise, lambda: 4, f"give a function of {names}; yours takes nothing.")


@pytest.mark.parametrize(
    "exercise", ["01.1", "01.2", "01.3", "03.1", "03.2", "05.2", "06.6", "08.3", "09.2", "10.2", "12.1", "12.2"]
)
def test_a_forgotten_return_of_a_number_is_noticed(refused, exercise):
    refused(exercise, lambda *given: None, "returns None instead of a number; is a return missing?")


@pytest.mark.parametrize("exercise", ["05.1", "05.3", "09.3", "10.1", "10.3", "14.1", "14.2"])
def test_a_generator_must_yield_actions(refused, exercise):
    case = "with 4 ranks, 8 microbatches and 2 chunks" if exercise == "09.3" else "with 4 ranks and 8 microbatches"
    refused(exercise, lambda *given: [], f"{case} your generator yields nothing.")
    reason = "the schedule 'yours' returned None for rank 0; it must yield actions: `yield` each."
    refused(exercise, lambda *given: None, reason)


class Fails:
    def __call__(self, *given):
        return no_such_name  # noqa: F821


def fails(*given):
    return no_such_name  # noqa: F821


@wraps(fails)
def wrapped(*given):
    return fails(*given)


def test_the_reported_line_is_in_the_learners_function(told):
    for exercise in WITH_FUNCTIONS:
        for function, code in (fails, fails.__code__), (wrapped, fails.__code__), (Fails(), Fails.__call__.__code__):
            where = f"your function fails at line {code.co_firstlineno + 1}, `return no_such_name`: NameError: name"
            message = told(exercise, function)
            assert where in message and is_one_sentence(message)


@pytest.mark.parametrize(
    ("error", "reason"),
    [("assert False", "`: AssertionError."), ("for m in range(microbatch): pass", "pass`: NameError: name")],
)
def test_a_reported_error_is_well_punctuated(told, error, reason):
    in_the_cell = {}
    exec(compile(f"def answer(ranks, microbatches):\n    {error}", "<a cell>", "exec"), in_the_cell)
    message = told("03.1", in_the_cell["answer"])
    assert "::" not in message and ": ." not in message
    assert "at line 2: " in message, "there is no source to show"
    with_source = own_source(error)
    assert reason in told("03.1", with_source)


FAILING = {
    "return (1).nothing": "AttributeError: 'int' object has no attribute 'nothing'",
    "return 1 + 'one'": "TypeError: unsupported operand",
    "return [][0]": "IndexError: list index out of range",
    "return {}[0]": "KeyError: 0",
    "raise ValueError": "ValueError.",
    "raise ValueError('one\\ntwo')": "ValueError: one two.",
    "return next(iter([]))": "StopIteration.",
    "return answer(*given)": "RecursionError: maximum recursion depth exceeded",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'.",
    "return torch.ones(2) @ torch.ones(3)": "RuntimeError: ",
    "return pp.schedule('1F1B', 4, 8)": "SettingError: unknown schedule '1F1B'; did you mean '1f1b'?",
    "return (lambda: no_such_name)()": "NameError: name 'no_such_name' is not defined.",
}


def test_a_learners_error_is_reported_with_its_line_in_every_exercise(told):
    for line, reason in FAILING.items():
        function = own_source(line, "*given")
        for exercise in WITH_FUNCTIONS:
            message = told(exercise, function)
            assert is_one_sentence(message)
            assert f"your function fails at line 2, `{line}`: {reason}" in message, exercise


@pytest.mark.parametrize("exercise", ["05.1", "09.1", "10.1", "14.1"])
def test_an_error_after_a_yield_is_reported_with_its_line(told, exercise):
    for line, reason in {"yield 1 // 0": "ZeroDivisionError", "yield next(iter([]))": "RuntimeError"}.items():
        message = told(exercise, own_source(f"{line}  # a comment", "*given"))
        assert message.startswith("Not yet: with ") and f"at line 2, `{line}`: {reason}: " in message


def own_source(line, parameters="ranks, microbatches"):
    """Define a function whose source is registered like that of a notebook cell."""
    name, source = f"<cell {line}>", f"def answer({parameters}):\n    {line}\n"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space = {"pp": ppedu, "torch": torch}
    exec(compile(source, name, "exec"), space)
    return space["answer"]


def test_is_right_accepts_only_right_answers_and_prints_nothing(capsys):
    assert is_right("05.2", lambda rank, ranks, m: min(ranks - rank, m)) is True
    assert is_right("05.2", fails) is False and is_right("05.2", None) is False
    assert capsys.readouterr().out == "", "it is for cells that go on with the answer"
    with pytest.raises(SettingError, match=r"there is no exercise '5\.2'"):
        is_right("5.2", fails)
