"""Lesson 11: copies of the model and DualPipeV's idle time; what is wrong is refused with the reason."""

import pytest
import stepper

from ppedu import schedule


def held(schedule):
    return sum(len(schedule.placement.stages_of(rank)) for rank in range(schedule.ranks))


COPIES = {
    "all stages": lambda schedule: held(schedule) / schedule.stages,
    "of stage 0": lambda schedule: sum(0 in schedule.placement.stages_of(rank) for rank in range(schedule.ranks)),
    "shares on a rank": lambda s: len(s.placement.stages_of(0)) * s.ranks / s.stages,
    "looked up": lambda schedule: schedule.placement.copies,
    "by the actions": lambda s: (
        len({(a.stage, r) for r, o in enumerate(s.orders) for b in o for a in b.singles}) // s.stages
    ),
}


@pytest.mark.parametrize("function", COPIES.values(), ids=COPIES)
def test_the_copies_are_right_however_they_are_counted(told, function):
    assert told("11.1", function).startswith("Right. DualPipe's ranks hold the model twice, DualPipeV's hold it")


WRONG_COPIES = {
    "stages on a rank": (
        lambda schedule: len(schedule.placement.stages_of(0)),
        "for dualpipev on 4 ranks the model is cut into 8 stages, and together the ranks hold 8: 1 of each; your "
        "function says 2. You count the stages on a rank; into how many is the model cut?",
    ),
    "chunks": (
        lambda schedule: schedule.chunks,
        "for dualpipe on 4 ranks the model is cut into 4 stages, and together the ranks hold 8: 2 of each; your "
        "function says 1. chunks are the stages of one copy on a rank",
    ),
    "all stages on all ranks": (held, "your function says 4. You count all stages on all ranks; how many make one"),
    "part on a rank": (
        lambda schedule: len(schedule.placement.stages_of(0)) / schedule.stages,
        "for 1f1b on 4 ranks the model is cut into 4 stages, and together the ranks hold 4: 1 of each; your function "
        "says 0.25. That is the part of the model that one rank holds; take all ranks together.",
    ),
    "one": (lambda schedule: 1, "for dualpipe on 4 ranks"),
    "two for both": (lambda schedule: 1 + schedule.name.startswith("dualpipe"), "for dualpipev on 4 ranks"),
    "by name": (lambda schedule: 1 + (schedule.name == "dualpipe"), "for chimera on 6 ranks"),
    "forgets return": (lambda schedule: None, "for 1f1b on 4 ranks your function gives None, where a number is wanted"),
    "of nothing": (lambda: 1, "give a function of"),
    "a number": (2, "give a function of"),
}


@pytest.mark.parametrize(("function", "reason"), WRONG_COPIES.values(), ids=WRONG_COPIES)
def test_a_wrong_count_is_refused_with_what_was_counted(refused, function, reason):
    refused("11.1", function, reason)


# Exercise 2: DualPipeV's row


def idle(ranks, forward, backward, weight):
    stages, chunk = 2 * ranks, [time / 2 for time in (forward, backward, weight)]
    return (stages / 2 - 1) * (chunk[0] + 2 * chunk[1] - 3 * chunk[2])


@pytest.mark.parametrize(("ranks", "chunk"), [(2, (1, 2, 1)), (4, (1, 2, 1)), (3, (2, 3, 1)), (5, (3, 4, 1))])
def test_the_idle_time_is_that_of_another_clock(ranks, chunk):
    forward, backward, weight = chunk
    lasts = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    rows = stepper.run(schedule("dualpipev", ranks, 3 * ranks), lambda a: sum(lasts[part.op] for part in a.singles))
    busy = 2 * 3 * ranks * (forward + backward)
    found = {max(end for row in rows for _, _, end in row) - busy}
    assert found == {idle(ranks, *(2 * time for time in chunk))}


@pytest.mark.parametrize("formula", [idle, lambda p, f, b, w: (p - 1) * (3 * f - w) / 2])
def test_the_row_is_right_however_it_is_written(told, formula):
    assert told("11.2", formula).startswith("Right. The published row, read for p ranks")


WRONG_ROWS = {
    "as it stands": (
        lambda p, f, b, w: (p / 2 - 1) * (f + 2 * b - 3 * w),
        "with 4 ranks, F = 1, B = 2 and W = 1 each rank is idle for 3; your formula says 2. That is DualPipe's on as "
        "many ranks. In the table PP counts the stages",
    ),
    "a share's times": (lambda p, f, b, w: (p - 1) * (f + 2 * b - 3 * w), "says 6. PP is right. But the table's times"),
    "ranks for stages": (
        lambda p, f, b, w: (p / 2 - 1) * (f + 2 * b - 3 * w) / 2,
        "says 1. A stage's times are halves, that is right. But PP counts the stages, and a rank has two.",
    ),
    "pairs that hide F": (
        lambda p, f, b, w: (p - 1) * (2 * b - 3 * w) / 2,
        "says 1.5. You let the shorter part of a pair take no time; without overlap F&B is F+B.",
    ),
    "1F1B's": (lambda p, f, b, w: (p - 1) * (f + b), "each rank is idle for 3; your formula says 9. That is 1F1B's."),
    "ZB-H1's": (
        lambda p, f, b, w: (p - 1) * (f + b - 2 * w),
        "with 5 ranks, F = 4, B = 6 and W = 2 each rank is idle for 20; your formula says 24. That is ZB-H1's",
    ),
    "one size's": (lambda p, f, b, w: 3, "with 8 ranks, F = 1, B = 2 and W = 1 each rank is idle for 7"),
    "forgets return": (lambda p, f, b, w: None, "is there a return?"),
    "a number": (3, "give a function of ranks, forward, backward and weight, not 3."),
}


@pytest.mark.parametrize(("formula", "reason"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_a_wrong_row_is_refused_with_what_was_misread(refused, formula, reason):
    refused("11.2", formula, reason)
