"""Lesson 4: verdicts on five timelines, and where a wrong formula happens to be right."""

import judge
import matplotlib
import pytest

from ppedu import B, I, ParseError, schedule, simulate
from ppedu.notebook.exercises.lesson_04 import TIMELINES, drawn, published


@pytest.fixture(autouse=True)
def no_window():
    from matplotlib import pyplot

    matplotlib.use("Agg")
    yield pyplot
    pyplot.close("all")


RIGHT = {"A": (0, "0B1"), "B": (0, "1B0"), "C": "legal", "D": (0, "0B0"), "E": (0, "0B2")}

# Written by hand: every fault that may be named.
FAULTS = {
    "A": [(0, "0B1"), (1, "1B1"), (2, "2B1")],
    "B": [(0, "1B0"), (1, "2B1"), (1, "1B0"), (0, "2B1")],
    "C": [],
    "D": [(0, "0B0"), (0, "0B1"), (1, "1F1"), (1, "1F2")],
    "E": [(0, "0B2")],
}


def verdicts(**others):
    return RIGHT | others


# Exercise 1: five timelines


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, some in FAULTS.items() for fault in some])
def test_every_fault_of_a_timeline_is_accepted(told, no_window, name, fault):
    assert told("04.1", verdicts(**{name: fault})).startswith("Right. Four of the five cannot run as drawn")
    assert len(no_window.get_fignums()) == 1, "the learner is shown when E runs"


def test_a_fault_may_be_an_action_in_a_list(told):
    assert told("04.1", verdicts(A=[1, B(1, 1)])).startswith("Right.")


def test_every_other_drawn_action_is_rejected(told):
    for name, text in TIMELINES.items():
        for rank, line in enumerate(text.splitlines()):
            for word in line.replace("·", "").split():
                if (rank, word) not in FAULTS[name]:
                    message = told("04.1", verdicts(**{name: (rank, word)}))
                    assert f"in {name} rank {rank} runs {word} in step" in message


def test_an_independent_checker_finds_only_the_orders_of_c_and_e_legal():
    found = [name for name, text in TIMELINES.items() if judge.legal(drawn(text).schedule)]
    assert found == ["C", "E"]


def test_c_runs_as_drawn_and_e_takes_one_more_step():
    c, e = (drawn(TIMELINES[name]) for name in "CE")
    assert simulate(c.schedule, c.costs).rows == c.rows
    late = [late for late, early in zip(simulate(e.schedule, e.costs).rows, e.rows, strict=True) if late != early]
    assert [(str(action), start) for action, start, _ in late[0][-1:]] == [("0B2", 9)]
    assert len(late) == 1 and late[0][:-1] == e.rows[0][:-1]
    assert e.schedule.orders == schedule("1f1b", 3, 3).orders


WRONG_VERDICTS = {
    "A for legal": ({"A": "legal"}, "A is not legal: an action never runs."),
    "B for legal": ({"B": "legal"}, "B is not legal: a rank runs an action of a stage that it does not hold."),
    "D for legal": ({"D": "legal"}, "D is not legal: an action starts before one that it depends on has ended."),
    "E for legal, as its orders are": (
        {"E": "legal"},
        "E is not legal: an action starts before one that it depends on has ended.",
    ),
    "the first wrong one": ({"D": "legal", "B": "legal"}, "B is not legal"),
    "C, as it waits so long": (
        {"C": (0, "0F2")},
        "in C rank 0 runs 0F2 in step 6, and that is legal: it holds stage 0, and it depends on no other action.",
    ),
    "C, as its backward is so early": (
        {"C": (2, "2B0")},
        "in C rank 2 runs 2B0 in step 3, and that is legal: it holds stage 2, and its dependencies have run "
        "before, 2F0 in step 2.",
    ),
    "A, what comes instead": (
        {"A": (0, "0B2")},
        "in A rank 0 runs 0B2 in step 9, and that is legal: it holds stage 0, and its dependencies have run "
        "before, 0F2 in step 2 and 1B2 in step 8.",
    ),
    "E, what 0B2 needs": (
        {"E": (1, "1B2")},
        "legal: it holds stage 1, and its dependencies have run before, 1F2 in step 5 and 2B2 in step 7.",
    ),
    "D, the other end of the cycle": ({"D": (1, "1B0")}, "in D rank 1 runs 1B0 in step 3, and that is legal:"),
    "what is lost, on the wrong rank": (
        {"A": (0, "1B1")},
        "in A rank 0 does not run 1B1, and does not have to: it holds stage 0.",
    ),
    "what another rank runs": (
        {"B": (1, "2B0")},
        "in B rank 1 does not run 2B0, and does not have to: it holds stages 1 and 3; rank 0 runs it.",
    ),
    "no such microbatch": (
        {"A": (0, "0B4")},
        "in A there is no 0B4 to run: the stages are 0 to 2, the microbatches 0 to 3, and each has an F and a B.",
    ),
    "no such op": ({"E": (0, I(0, 2))}, "in E there is no 0I2 to run"),
    "no such rank": ({"D": (2, "0B0")}, "for D: there is no rank 2; the ranks are 0 to 1."),
    "no action": (
        {"D": (0, "B0")},
        "for D: 'B0' is not an action; write the stage, F or B, and the microbatch: '0B1'.",
    ),
    "a rank as text": ({"D": ("0", "0B0")}, "for D: a rank is a number, such as 0; got '0'."),
    "no rank": ({"D": "0B0"}, "for D: give 'legal', or a rank and its action, such as (2, '2F0'), not '0B0'."),
    "not known": ({"C": None}, "for C: give 'legal', or a rank and its action, such as (2, '2F0'), not None."),
    "no such timeline": ({"F": "legal"}, "there is no timeline 'F'; the timelines are: A, B, C, D, E."),
}


def test_a_wrong_verdict_is_rejected_with_the_reason(refused):
    for wrong, reason in WRONG_VERDICTS.values():
        refused("04.1", verdicts(**wrong), reason)


def test_a_reason_does_not_name_the_faulty_action(refused):
    for name in "ABDE":
        message = refused("04.1", verdicts(**{name: "legal"}), f"{name} is not legal")
        assert not any(action in message for _, action in FAULTS[name])


@pytest.mark.parametrize("answer", [None, "legal", ["legal"] * 5])
def test_an_answer_that_is_not_a_dict_is_rejected(refused, answer):
    refused("04.1", answer, "give a dict with a verdict on each of A, B, C, D, E; got")


def test_a_missing_verdict_is_reported(refused):
    refused("04.1", {"A": RIGHT["A"]}, "your verdict on B is missing; give 'legal', or a rank and its action")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0B0\n1F0 x", "'x' is not an action"),
        (
            "0F0 1F0\n2F0 ·",
            "there are 2 lines, one per rank, and 3 stages; every rank must hold the same number of stages",
        ),
        (" · ·", "there is no action in the text; write one line per rank, such as: 0F0 0F1 · 0B0 0B1"),
    ],
)
def test_a_text_without_a_timeline_raises(text, reason):
    with pytest.raises(ParseError, match=reason):
        drawn(text)


# Exercise 2: where the published formula is right


def in_floats(ranks, microbatches):
    return simulate(schedule("1f1b", ranks, microbatches)).bubble == published(ranks, microbatches)


class LikeNumpys:
    """Return NumPy's True or False, which are not Python's."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return f"np.{self.value}_"

    def __str__(self):
        return str(self.value)


RANGES = {
    "by hand": lambda ranks, microbatches: ranks == 1 or microbatches == 1,
    "by simulation": in_floats,
    "by calculation": lambda p, m: (p - 1) * (2 * (m - 1) + p) == (p - 1) * (m + p - 1),
    "by NumPy": lambda p, m: LikeNumpys(in_floats(p, m)),
}


@pytest.mark.parametrize("function", RANGES.values(), ids=RANGES)
def test_any_way_to_find_where_the_formula_holds_is_accepted(told, function):
    assert told("04.2", function).startswith("Right. The formula is right for one rank, which never waits")


WRONG_RANGES = {
    "always": (
        lambda p, m: True,
        "with 4 ranks and 8 microbatches the formula gives 0.1667, and the simulation 0.2727; your function returns",
    ),
    "never": (
        lambda p, m: False,
        "with 4 ranks and 1 microbatch the formula gives 0.75, and the simulation 0.75, too; your function "
        "returns False. A wrong formula can be right in some cases; that",
    ),
    "one microbatch": (
        lambda p, m: m == 1,
        "with 1 rank and 8 microbatches the formula gives 0, and the simulation 0, too; your function returns False.",
    ),
    "like the overhead": (
        lambda p, m: published(p, m) == (p - 1) / m,
        "with 4 ranks and 1 microbatch the formula gives 0.75, and the simulation 0.75, too; your function "
        "returns False. You compare with (p-1)/m, which is the overhead: the makespan",
    ),
    "two microbatches": (
        lambda p, m: p == 1 or m <= 2,
        "with 2 ranks and 2 microbatches the formula gives 0.25, and the simulation 0.3333; your function returns",
    ),
    "nearly": (
        lambda p, m: abs(published(p, m) - (p - 1) / (m + p - 1)) < 0.01,
        "with 2 ranks and 200 microbatches the formula gives 0.0025, and the simulation 0.004975; your function "
        "returns True. Close is not equal: with many microbatches both are small",
    ),
    "the formula": (published, "your function returns 0.16666666666666666, not True or False."),
    "forgets return": (lambda p, m: None, "returns None, not True or False; is a return missing?"),
    "of one argument": (lambda p: True, "give a function of ranks and microbatches; yours takes"),
    "a truth": (False, "give a function of ranks and microbatches, not False."),
}


def test_a_wrong_range_is_rejected_with_a_counterexample(refused):
    for function, reason in WRONG_RANGES.values():
        refused("04.2", function, reason)
