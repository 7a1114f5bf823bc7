"""Lesson 4: verdicts on five timelines, and where a wrong formula happens to be right."""

import judge
import pytest
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

from ppedu import B, F, I, ParseError, schedule, simulate
from ppedu.course.exercises.lesson_04 import SLIDE, SLOTS, TIMELINES, drawn, early_marks, lineup, published, slide

RIGHT = {}
WRONG = {}


VERDICTS = {"A": (0, "0B1"), "B": (0, "1B0"), "C": "legal", "D": (0, "0B0"), "E": (0, "0B2")}

# Written by hand: every fault that may be named.
FAULTS = {
    "A": [(0, "0B1"), (1, "1B1"), (2, "2B1")],
    "B": [(0, "1B0"), (1, "2B1"), (1, "1B0"), (0, "2B1")],
    "C": [],
    "D": [(0, "0B0"), (0, "0B1"), (1, "1F1"), (1, "1F2")],
    "E": [(0, "0B2")],
}


def verdicts(**others):
    return VERDICTS | others


# Exercise 1: five timelines


RIGHT["04.1"] = [
    *(verdicts(**{name: fault}) for name, faults in FAULTS.items() for fault in faults),
    verdicts(A=[1, B(1, 1)]),
]


def test_every_other_drawn_action_is_rejected(told):
    for name, text in TIMELINES.items():
        for rank, line in enumerate(text.splitlines()):
            for word in line.replace("·", "").split():
                if (rank, word) not in FAULTS[name]:
                    message = told("04.1", verdicts(**{name: (rank, word)}))
                    assert f"In {name} rank {rank} runs {word} in slot" in message


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


WRONG["04.1"] = {
    "A for legal": (verdicts(A="legal"), "4 of your 5 verdicts are right."),
    "C, as it waits so long": (
        verdicts(C=(0, "0F2")),
        "4 of your 5 verdicts are right. In C rank 0 runs 0F2 in slot 6, and that is legal: it holds stage 0, and it "
        "depends on no other action.",
    ),
    "C, as its backward is so early": (
        verdicts(C=(2, "2B0")),
        "In C rank 2 runs 2B0 in slot 3, and that is legal: it holds stage 2, and its dependencies have run "
        "before, 2F0 in slot 2.",
    ),
    "A, what comes instead": (
        verdicts(A=(0, "0B2")),
        "In A rank 0 runs 0B2 in slot 9, and that is legal: it holds stage 0, and its dependencies have run "
        "before, 0F2 in slot 2 and 1B2 in slot 8.",
    ),
    "E, what 0B2 needs": (
        verdicts(E=(1, "1B2")),
        "legal: it holds stage 1, and its dependencies have run before, 1F2 in slot 5 and 2B2 in slot 7.",
    ),
    "D, the other end of the cycle": (verdicts(D=(1, "1B0")), "In D rank 1 runs 1B0 in slot 3, and that is legal:"),
    "what is lost, on the wrong rank": (
        verdicts(A=(0, "1B1")),
        "In A rank 0 does not run 1B1, and does not have to: it holds stage 0.",
    ),
    "what another rank runs": (
        verdicts(B=(1, "2B0")),
        "In B rank 1 does not run 2B0, and does not have to: it holds stages 1 and 3; rank 0 runs it.",
    ),
    "no such microbatch": (
        verdicts(A=(0, "0B4")),
        "In A there is no 0B4 to run: the stages are 0 to 2, the microbatches 0 to 3, and each has an F and a B.",
    ),
    "no such op": (verdicts(E=(0, I(0, 2))), "In E there is no 0I2 to run"),
    "no such rank": (verdicts(D=(2, "0B0")), "for D: there is no rank 2; the ranks are 0 to 1."),
    "no action": (
        verdicts(D=(0, "B0")),
        "for D: 'B0' is not an action; write the stage, F or B, and the microbatch: '0B1'.",
    ),
    "a rank as text": (verdicts(D=("0", "0B0")), "for D: a rank is a number, such as 0; got '0'."),
    "no rank": (verdicts(D="0B0"), "for D: give 'legal', or a rank and its action, such as (2, '2F0'), not '0B0'."),
    "not known": (verdicts(C=None), "for C: give 'legal', or a rank and its action, such as (2, '2F0'), not None."),
    "no such timeline": (verdicts(F="legal"), "there is no timeline 'F'; the timelines are: A, B, C, D, E."),
}


def test_an_overlooked_fault_is_counted_but_neither_named_nor_described(refused):
    for name in "ABDE":
        assert refused("04.1", verdicts(**{name: "legal"}), "right") == "Not yet: 4 of your 5 verdicts are right."
    assert refused("04.1", dict.fromkeys(TIMELINES, "legal"), "right") == "Not yet: 1 of your 5 verdicts is right."
    wrong = verdicts(A="legal", D="legal", C=(0, "0F2"))
    assert refused("04.1", wrong, "2 of your 5 verdicts are right. In C rank 0 runs").count("rank") == 1


@pytest.mark.parametrize("answer", [None, "legal", ["legal"] * 5])
def test_an_answer_that_is_not_a_dict_is_rejected(refused, answer):
    refused("04.1", answer, "give a dict with a verdict on each of A, B, C, D, E; got")


def test_nothing_is_revealed_before_every_timeline_is_judged(refused):
    message = "judge all five timelines first; a verdict is missing on A, B, C, D, E"
    refused("04.1", {}, message)
    for name in VERDICTS:
        for verdict in (VERDICTS[name], "legal", (0, "0F0")):
            left = ", ".join(other for other in VERDICTS if other != name)
            refused("04.1", {name: verdict}, f"judge all five timelines first; a verdict is missing on {left}")


def test_the_lineup_starts_without_verdicts_and_its_verdicts_are_an_answer(told):
    suspects = lineup()
    assert suspects.verdicts == {} and list(suspects.timelines) == list(TIMELINES)
    suspects.handle({"case": 0, "missing": "0B1"})
    for number, action in ((1, "1B0"), (3, "0B0"), (4, "0B2")):
        boxes = suspects.panels()[number].boxes
        names = [f"{box.stage}{box.op}{box.microbatch}" for box in boxes]
        suspects.handle({"case": number, "box": names.index(action)})
    suspects.handle({"case": 2, "legal": True})
    assert suspects.verdicts == VERDICTS
    assert told("04.1", suspects.verdicts).startswith("Right.")


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


RIGHT["04.2"] = {
    "by hand": lambda ranks, microbatches: ranks == 1 or microbatches == 1,
    "by simulation": in_floats,
    "by calculation": lambda p, m: (p - 1) * (2 * (m - 1) + p) == (p - 1) * (m + p - 1),
    "by NumPy": lambda p, m: LikeNumpys(in_floats(p, m)),
}


WRONG["04.2"] = {
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
        "with 1 rank and 8 microbatches the formula gives 0, and the simulation 0, too; your function returns False. "
        "With one microbatch it is right, but there are more such cases.",
    ),
    "one rank": (
        lambda p, m: p == 1,
        "with 4 ranks and 1 microbatch the formula gives 0.75, and the simulation 0.75, too; your function "
        "returns False. With one rank it is right, but there are more such cases.",
    ),
    "one of each": (lambda p, m: p == m == 1, "your function returns False. That is one such case of many"),
    "two microbatches": (
        lambda p, m: p == 1 or m <= 2,
        "with 2 ranks and 2 microbatches the formula gives 0.25, and the simulation 0.3333; your function returns",
    ),
    "nearly": (
        lambda p, m: abs(published(p, m) - (p - 1) / (m + p - 1)) < 0.01,
        "with 2 ranks and 200 microbatches the formula gives 0.0025, and the simulation 0.004975; your function "
        "returns True. Close is not equal: with many microbatches both are small",
    ),
    "more than a thousand": (
        lambda p, m: 1 in (p, m) or m > 1000,
        "your function returns True. Close is not equal: with many microbatches both are small",
    ),
    "the formula": (published, "your function returns 0.16666666666666666, not True or False."),
    "forgets return": (lambda p, m: None, "returns None, not True or False; is a return missing?"),
}


# Exercise 3: which actions start too early


def starts_alone(timeline):
    """Compare the start of an action with the starts, and not the ends, of its dependencies."""
    starts = {each: start for row in timeline.rows for each, start, _ in row}

    def needs(each):
        stage, op, m = each[:3]
        if op == "F":
            return [F(stage - 1, m)] if stage else []
        return [F(stage, m), *([B(stage + 1, m)] if stage < timeline.schedule.stages - 1 else [])]

    return [each for each, start in starts.items() if any(starts[need] >= start for need in needs(each))]


def too_early(timeline, late=lambda end, start: end > start, wanted="FGB"):
    """Return the actions that start too early, or other actions in a wrong way.

    late: whether an action is too early, given the end of a dependency and its own start.
    wanted: F and B for the dependencies on other stages, G for that of a backward on its own forward.
    """
    spans = {span.action: span for row in timeline.rows for span in row}
    found = []
    for action, span in spans.items():
        stage, microbatch = action.stage, action.microbatch
        needs = {"F": F(stage - 1, microbatch)} if action.op == "F" else {}
        if action.op == "B":
            needs = {"G": F(stage, microbatch), "B": B(stage + 1, microbatch)}
        needs = [spans[each] for key, each in needs.items() if key in wanted and each in spans]
        if any(late(each.end, span.start) for each in needs):
            found.append(action)
    return found


def test_the_slide_has_the_orders_of_1f1b_and_ends_three_steps_too_early():
    picture = slide()
    assert picture.schedule.orders == schedule("1f1b", 4, 8).orders
    assert {row[-1].end for row in picture.rows} == {19} and simulate(picture.schedule, SLOTS).makespan == 22
    by_hand = ["0B5", "0B6", "0B7", "1B6", "1B7", "2B7"]
    assert sorted(map(str, too_early(picture))) == by_hand
    marked = [picture.schedule.orders[rank][place] for rank, place in early_marks(picture)]
    assert sorted(map(str, marked)) == by_hand
    assert [len(line.split()) for line in SLIDE.splitlines()] == [19] * 4


RIGHT["04.3"] = [
    lambda timeline, kind=kind: kind(too_early(timeline))
    for kind in (list, set, tuple, iter, lambda found: map(str, found), lambda found: found[::-1])
]


def with_missing_stages(timeline):
    """Look up the stage before the first as well, so that ends[-1F0] fails."""
    ends = {span.action: span.end for row in timeline.rows for span in row}
    return [each for row in timeline.rows for each, start, _ in row if ends[F(each.stage - 1, each.microbatch)] > start]


WRONG["04.3"] = {
    "looks up stage -1": (with_missing_stages, "KeyError: <-1F0>. Stage -1 does not exist: a forward of the first"),
    "nothing": (
        lambda t: [],
        "for the slide, your function does not list 0B5, which starts at 16, while 1B5, on which it depends, ends at "
        "17.",
    ),
    "compares starts": (
        lambda t: too_early(t, lambda end, start: end - 1 > start),
        "does not list 0B5, which starts at 16, while 1B5, on which it depends, ends at 17",
    ),
    "compares starts alone": (
        lambda t: starts_alone(t),
        "for a backward that starts before the next stage's has ended, your function does not list 0B0",
    ),
    "an end that is the start": (
        lambda t: too_early(t, lambda end, start: end >= start),
        "for the slide, your function lists 0B0, which starts at 7; what it depends on has ended, 0F0 at 1 and 1B0 at "
        "7.",
    ),
    "forwards only": (lambda t: too_early(t, wanted="F"), "for the slide, your function does not list 0B5"),
    "no forwards": (
        lambda t: too_early(t, wanted="GB"),
        "for a forward too early, your function does not list 1F0, which starts at 0, while 0F0, on which it depends, "
        "ends at 1.",
    ),
    "not its own forward": (
        lambda t: too_early(t, wanted="FB"),
        "for a backward before its own forward, your function does not list 1B0, which starts at 1, while 1F0, on "
        "which it depends, ends at 3.",
    ),
    "all": (
        lambda t: [span.action for row in t.rows for span in row],
        "for the slide, your function lists 0F0, which starts at 0; it depends on no other action.",
    ),
    "by heart": (
        lambda t: ["0B5", "0B6", "0B7", "1B6", "1B7", "2B7"],
        "for a 1F1B that is possible, your function lists 0B5, which starts at 17; what it depends on has ended, 0F5 "
        "at 11 and 1B5 at 17.",
    ),
    "no such action": (lambda t: [*too_early(t), "9F9"], "for the slide, your function lists 9F9, which does not run"),
    "a number": (lambda t: 6, "for the slide your function returns 6, not a list of actions"),
    "forgets return": (lambda t: None, "returns None, not a list of actions; is a return missing?"),
    "words": (lambda t: ["early"], "for the slide your function returns ['early'], not a list of actions"),
    "an error": (lambda t: t.spam, "your function fails"),
}
