"""Lesson 12: copies of the model and DualPipeV's idle time: equivalent answers are accepted, wrong ones explained."""

from dataclasses import replace

import pytest
import stepper
from answers import test_right_answers_are_accepted, test_wrong_answers_are_refused_with_the_reason  # noqa: F401

from ppedu import schedule, simulate
from ppedu.course.exercises.lesson_12 import (
    draw_streams,
    one_after_the_other,
    paired,
    parts,
    simulate_streams,
)
from ppedu.notebook import heron

RIGHT = {}
WRONG = {}


def held(schedule):
    return sum(len(schedule.placement.stages_of(rank)) for rank in range(schedule.ranks))


RIGHT["12.1"] = {
    "all stages": lambda schedule: held(schedule) / schedule.stages,
    "of stage 0": lambda schedule: sum(0 in schedule.placement.stages_of(rank) for rank in range(schedule.ranks)),
    "shares on a rank": lambda s: len(s.placement.stages_of(0)) * s.ranks / s.stages,
    "looked up": lambda schedule: schedule.placement.copies,
    "by the actions": lambda s: (
        len({(a.stage, r) for r, o in enumerate(s.orders) for b in o for a in b.singles}) // s.stages
    ),
}


WRONG["12.1"] = {
    "stages on a rank": (
        lambda schedule: len(schedule.placement.stages_of(0)),
        "for dualpipev on 4 ranks the model is cut into 8 stages, and together the ranks hold 8: 1 of each; "
        "your function returns 2. You count the stages on one rank; how many stages is the model cut into?",
    ),
    "chunks": (
        lambda schedule: schedule.chunks,
        "for dualpipe on 4 ranks the model is cut into 4 stages, and together the ranks hold 8: 2 of each; "
        "your function returns 1. chunks is the number of stages of one copy on a rank: it says",
    ),
    "all stages on all ranks": (held, "your function returns 4. You count all stages on all ranks; how many make one"),
    "part on a rank": (
        lambda schedule: len(schedule.placement.stages_of(0)) / schedule.stages,
        "for 1f1b on 4 ranks the model is cut into 4 stages, and together the ranks hold 4: 1 of each; your "
        "function returns 0.25. That is the fraction of the model that one rank holds; add up all ranks.",
    ),
    "each stage once": (
        lambda s: len({stage for rank in range(s.ranks) for stage in s.placement.stages_of(rank)}) / s.stages,
        "your function returns 1. Do you count each stage once? Count a stage twice if two ranks hold it.",
    ),
    "one": (lambda schedule: 1, "for dualpipe on 4 ranks"),
    "two for both": (lambda schedule: 1 + schedule.name.startswith("dualpipe"), "for dualpipev on 4 ranks"),
    "by name": (lambda schedule: 1 + (schedule.name == "dualpipe"), "for chimera on 6 ranks"),
}


# Exercise 2: DualPipeV's row


def idle(ranks, forward, backward, weight):
    stages, chunk = 2 * ranks, [time / 2 for time in (forward, backward, weight)]
    return (stages / 2 - 1) * (chunk[0] + 2 * chunk[1] - 3 * chunk[2])


@pytest.mark.parametrize(("ranks", "chunk"), [(2, (1, 2, 1)), (4, (1, 2, 1)), (3, (2, 3, 1)), (5, (3, 4, 1))])
def test_an_independent_simulation_confirms_the_idle_time(ranks, chunk):
    forward, backward, weight = chunk
    lasts = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    rows = stepper.run(schedule("dualpipev", ranks, 3 * ranks), lambda a: sum(lasts[part.op] for part in a.singles))
    busy = 2 * 3 * ranks * (forward + backward)
    found = {max(end for row in rows for _, _, end in row) - busy}
    assert found == {idle(ranks, *(2 * time for time in chunk))}


RIGHT["12.2"] = [idle, lambda p, f, b, w: (p - 1) * (3 * f - w) / 2]


WRONG["12.2"] = {
    "as it stands": (
        lambda p, f, b, w: (p / 2 - 1) * (f + 2 * b - 3 * w),
        "with 4 ranks, F = 1, B = 2 and W = 1 each rank is idle for 3; your formula gives 2. That is the "
        "idle time of DualPipe on the same number of ranks. In the table PP counts the stages, and the times "
        "are those of a stage: how many stages does DualPipeV",
    ),
    "a share's times": (
        lambda p, f, b, w: (p - 1) * (f + 2 * b - 3 * w),
        "gives 6. PP is right. But the table's times",
    ),
    "ranks for stages": (
        lambda p, f, b, w: (p / 2 - 1) * (f + 2 * b - 3 * w) / 2,
        "gives 1. You are right that a stage's times are halves. But PP counts the stages, and a rank has two.",
    ),
    "pairs that hide F": (
        lambda p, f, b, w: (p - 1) * (2 * b - 3 * w) / 2,
        "gives 1.5. You let the shorter half of a pair take no time; without overlap F&B is F+B.",
    ),
    "doubled times": (lambda p, f, b, w: (p - 2) * (f + 2 * b - 3 * w), "gives 4. You double the times. A rank has"),
    "1F1B's": (
        lambda p, f, b, w: (p - 1) * (f + b),
        "each rank is idle for 3; your formula gives 9. That is the idle time of 1F1B.",
    ),
    "ZB-H1's": (
        lambda p, f, b, w: (p - 1) * (f + b - 2 * w),
        "with 5 ranks, F = 4, B = 6 and W = 2 each rank is idle for 20; your formula gives 24. That is the idle time",
    ),
    "one size's": (lambda p, f, b, w: 3, "with 8 ranks, F = 1, B = 2 and W = 1 each rank is idle for 7"),
}


# Exercise 3: the two streams inside a pair


def streams(layers):
    return tuple(paired(layers).values())


def changed(change):
    """Return an answer whose lists `change` has changed."""

    def answer(layers):
        compute, network = streams(layers)
        change(compute, network)
        return compute, network

    return answer


RIGHT["12.3"] = [streams]


WRONG["12.3"] = {
    "one after the other": (
        lambda layers: tuple(one_after_the_other(layers).values()),
        "with 1 layer, the pair takes 3 units, and 2 are possible: B combine 0 could start at 0 and starts at 1",
    ),
    "of one layer": (
        lambda layers: streams(1),
        "with 2 layers, F attention 1 is never run (and 7 more parts)",
    ),
    "missing": (changed(lambda compute, network: compute.pop()), "with 1 layer, B attention 0 is never run"),
    "twice": (changed(lambda compute, network: compute.append("F attention 0")), "F attention 0 runs twice"),
    "on the other stream": (
        changed(lambda compute, network: compute.append(network.pop())),
        "F combine 0 is in the list of compute, but it runs on network",
    ),
    "no part": (changed(lambda compute, network: compute.append("F mlp 0")), "'F mlp 0' is not a part"),
    "deadlock": (
        changed(lambda compute, network: (compute.reverse(), network.reverse())),
        "the streams deadlock: B attention 0 waits for B dispatch 0 and F combine 0 waits for F experts 0",
    ),
    "forgets return": (lambda layers: None, "returns None; return two lists"),
}


def ends(spans):
    return max(end for *_, end in spans)


def test_a_pair_hides_a_third_of_its_time():
    assert ends(simulate_streams(one_after_the_other(), parts())) == 3
    assert ends(simulate_streams(paired(), parts())) == 2


def test_a_pair_is_shorter_still_if_it_splits_the_backward():
    known = parts()
    for kind in ("experts", "attention"):
        whole = known[f"B {kind} 0"]
        known[f"B {kind} 0"] = half = whole._replace(time=whole.time / 2)  # I; the next message needs no more
        known[f"W {kind} 0"] = half._replace(after=f"B {kind} 0")
    compute, network = paired().values()
    compute = [*compute[:3], "W experts 0", *compute[3:], "W attention 0"]
    spans = simulate_streams({"compute": compute, "network": network}, known)
    assert len(spans) == len(known) and ends(spans) == 1.75


def test_zb_v_is_slower_with_a_short_w():
    costs = heron.costs(8)
    short = replace(costs, input=1.5 * costs.forward, weight=0.5 * costs.forward)
    usual, slower = (simulate(schedule("zb-v", 8, 32), each).makespan for each in (costs, short))
    assert round(usual, 2) == 3.64 and round(slower, 2) == 3.79


def test_the_streams_are_drawn():
    from matplotlib import pyplot

    _, ax = pyplot.subplots()
    draw_streams(ax, simulate_streams(paired(), parts()), "a pair")
    assert ax.get_title("right") == "takes 2.00" and ax.get_xlabel() == "time" and len(ax.patches) == 8
