"""Lesson 8: costs and causes are right however they are found, and refused with the reason where they are not."""

from dataclasses import replace
from statistics import mean, median

import pytest

from ppedu import B, Costs, F, schedule, simulate
from ppedu.notebook.exercises.lesson_08 import made_up

# The runs that answers are tried on


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-v"])
def test_a_made_up_run_in_which_nothing_varies_is_the_simulation(name):
    costs = Costs(forward=0.25, backward=0.5, latency=0.125)  # exact in binary
    case = schedule(name, ranks=4, microbatches=8)
    times = costs.durations(case.stages, case.ranks)
    run = made_up(case, lambda action: times[action.op][action.stage], lambda: 0.125)
    assert run.rows == simulate(case, costs).rows


# Exercise 1: the costs


def spans_of(timeline):
    return [(rank, span) for rank in range(timeline.schedule.ranks) for span in timeline.spans(rank)]


def source(action):
    stage, m = action.stage, action.microbatch
    return F(stage - 1, m) if action.op == "F" else B(stage + 1, m)


def fitted(middle=median, late=median, counts=lambda made, free, start: made > free, delay=lambda made, free: made):
    """An answer put together from how it takes the middle of the times, which messages it counts, and from when."""

    def fit(timeline):
        times, delays, ended = {}, [], {}
        for _, (action, start, end) in spans_of(timeline):
            times.setdefault((action.op, action.stage), []).append(end - start)
            ended[action] = end
        for rank in range(timeline.schedule.ranks):
            free = 0
            for action, start, end in timeline.spans(rank):
                made = ended.get(source(action))
                if made is not None and counts(made, free, start):
                    delays.append(start - delay(made, free))
                free = end
        stages = range(timeline.schedule.stages)
        forward, backward = ([middle(times[op, stage]) for stage in stages] for op in "FB")
        return Costs(forward=forward, backward=backward, latency=late(delays))

    return fit


right = fitted()

FITS = {
    "idle before it was made": right,
    "idle when it came": fitted(counts=lambda made, free, start: start - free > 0.001),
    "Costs.fit, and a latency": lambda timeline: replace(Costs.fit(timeline), latency=right(timeline).latency),
    "with the unit": lambda timeline: replace(right(timeline), unit="s"),
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_costs_are_right_however_they_are_found(told, fit):
    assert told("08.1", fit).startswith("Right. Slow actions and late messages do not mislead you")


def pooled(timeline):
    """The median over all stages."""
    of = {op: [end - start for _, (a, start, end) in spans_of(timeline) if a.op == op] for op in "FB"}
    stages = timeline.schedule.stages
    return replace(right(timeline), forward=[median(of["F"])] * stages, backward=[median(of["B"])] * stages)


def one_number(timeline):
    return replace(pooled(timeline), forward=pooled(timeline).forward[0], backward=pooled(timeline).backward[0])


def swapped(timeline):
    costs = right(timeline)
    return replace(costs, forward=costs.backward, backward=costs.forward)


def without_backward(timeline):
    return replace(right(timeline), backward=None)


def from_end_to_end(timeline):
    times = {}
    for rank in range(timeline.schedule.ranks):
        before = 0
        for action, _, end in timeline.spans(rank):
            times.setdefault((action.op, action.stage), []).append(end - before)
            before = end
    stages = range(timeline.schedule.stages)
    forward, backward = ([median(times[op, stage]) for stage in stages] for op in "FB")
    return Costs(forward=forward, backward=backward, latency=right(timeline).latency)


def in_milliseconds(timeline):
    costs = right(timeline)
    forward, backward = ([1000 * time for time in each] for each in (costs.forward, costs.backward))
    return Costs(forward=forward, backward=backward, latency=1000 * costs.latency)


def everything(made, free, start):
    return True


WRONG_FITS = {
    "the mean": (
        fitted(middle=mean),
        "in a run of 1f1b with 4 ranks and 8 microbatches a forward of stage 0 takes 20 ms; your costs say 36.17 ms. "
        "That is the mean, and one of them took 8 times as long as the others. The median does not mind.",
    ),
    "the wait counted as work": (from_end_to_end, "and so the rank's wait as work; a span has a start of its own."),
    "the slowest": (fitted(middle=max), "That is the slowest of them, which came once."),
    "the fastest": (fitted(middle=min), "That is the fastest of them; the others take longer."),
    "all of them": (fitted(middle=sum), "That is all of them together; how long is one?"),
    "all stages in one": (pooled, "That is the median over all stages; each stage has its own."),
    "one number": (one_number, "One number is the time of a rank's whole share, for all alike: list each stage's own."),
    "F and B swapped": (swapped, "a forward of stage 0 takes 20 ms; your costs say 40.84 ms. Forward and backward"),
    "no backward": (without_backward, "You leave the backward out, and then it is taken to be twice the forward."),
    "milliseconds": (in_milliseconds, "The timeline counts in seconds; do so, too."),
    "latency in milliseconds": (
        lambda timeline: replace(right(timeline), latency=in_milliseconds(timeline).latency),
        "a message takes 5 ms; your costs say 5.089 s. The timeline counts in seconds; do so, too.",
    ),
    "no latency": (Costs.fit, "a message takes 5 ms; your costs say 0 ms: they have no latency yet."),
    "busy ranks, too": (
        fitted(counts=everything),
        "a message takes 5 ms; your costs say 7.136 ms. You count messages that nobody waited for: what 1F4 needs "
        "was made 549.3 ms before it started, but its rank was busy then. Compare the end of the rank's action before "
        "with the end of what is needed, not with the start.",
    ),
    "busy ranks, too, the mean": (
        fitted(late=mean, counts=everything),
        "You count messages that nobody waited for: what",
    ),
    "every pause is a wait": (
        fitted(counts=lambda made, free, start: start > free),
        "You count messages that nobody waited for: what 1F4 needs was made",
    ),
    "every pause after an action is a wait": (
        fitted(counts=lambda made, free, start: start > free > 0),
        "your costs say 7.205 ms. You count messages that nobody waited for: what 1F4 needs was made",
    ),
    "the mean latency": (fitted(late=mean), "That is the mean, and some messages took 6 times as long as the others."),
    "the fastest message": (fitted(late=min), "That is the fastest message; the others take longer."),
    "the slowest message": (fitted(late=max), "That is the slowest message, of a few late ones."),
    "the idle time": (
        fitted(delay=lambda made, free: free),
        "That is how long a rank is idle; for a part of that time, what it waits for has not been made yet.",
    ),
    "all idle time": (fitted(late=mean, counts=everything, delay=lambda made, free: free), "how long a rank is idle"),
    "known by heart": (
        lambda timeline: Costs(0.020, 0.040, latency=0.005),
        "in a run of 1f1b with 3 ranks and 6 microbatches a forward of stage 0 takes 10 ms; your costs say 20 ms. One",
    ),
    "too few stages": (
        lambda timeline: replace(right(timeline), forward=[0.020] * 4),
        "4 costs for 3 stages; give 3, one for each stage, or a single number",
    ),
    "forgets return": (lambda timeline: None, "where costs are wanted, such as pp.Costs(latency=0.005); is there a"),
    "a tuple": (lambda timeline: (0.020, 0.040), "gives (0.02, 0.04), where costs are wanted"),
    "of two arguments": (lambda timeline, latency: right(timeline), "yours takes timeline and latency"),
    "costs": (Costs(), "give a function of timeline, not Costs("),
}


@pytest.mark.parametrize(("fit", "reason"), WRONG_FITS.values(), ids=WRONG_FITS)
def test_wrong_costs_are_refused_with_what_they_are_instead(told, fit, reason):
    message = told("08.1", fit)
    assert message.startswith("Not yet: ") and reason in message


# Exercise 2: what makes a run longer than its simulation


def again(measured, latency):
    """The makespan when every action lasts as long as it did, in the order in which they started."""
    free, ended = [0] * measured.schedule.ranks, {}
    for rank, (action, start, end) in sorted(spans_of(measured), key=lambda each: each[1].start):
        needed = ended.get(source(action))
        begins = free[rank] if needed is None else max(free[rank], needed + latency)
        free[rank] = ended[action] = begins + (end - start)
    return max(free)


def explain(measured, costs):
    simulated, replayed = simulate(measured.schedule, costs).makespan, again(measured, costs.latency)
    return replayed - simulated, measured.makespan - replayed


def explain_step_by_step(measured, costs):
    """The same by going through the ranks in turn."""
    rows = [list(measured.spans(rank)) for rank in range(measured.schedule.ranks)]
    free, ended = [0] * len(rows), {}
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                action, start, end = row[0]
                needed = source(action)
                last = measured.schedule.stages - 1
                alone = (action.op, action.stage) in (("F", 0), ("B", last))
                if not alone and needed not in ended:
                    break
                begins = max(free[rank], 0 if alone else ended[needed] + costs.latency)
                free[rank] = ended[action] = begins + end - start
                row.pop(0)
    return [
        max(free) - simulate(measured.schedule, costs).makespan,
        measured.end - max(free),
    ]


@pytest.mark.parametrize("answer", [explain, explain_step_by_step])
def test_the_parts_are_right_however_they_are_found(told, answer):
    assert told("08.2", answer).startswith("Right. What is left when every action lasts as long as it did")


def the_rest(slower):
    """An answer by the part of the slower actions, with a second part that makes up the difference."""

    def function(measured, costs):
        first = slower(measured, costs, simulate(measured.schedule, costs))
        return first, measured.makespan - simulate(measured.schedule, costs).makespan - first

    return function


def worked_longer(measured, simulated):
    return [one - other for one, other in zip(measured.busy, simulated.busy, strict=True)]


WRONG_PARTS = {
    "all ranks": (
        the_rest(lambda measured, costs, simulated: sum(worked_longer(measured, simulated))),
        "in a run of 1f1b with 4 ranks and 8 microbatches slower actions make 686.3 ms of the difference and waiting "
        "86.19 ms; your function says 1.694 s and -921.8 ms. That is what all ranks together worked longer.",
    ),
    "on average": (
        the_rest(lambda measured, costs, simulated: mean(worked_longer(measured, simulated))),
        "That is what a rank worked longer, on average. But a rank also waits for the slower actions of others.",
    ),
    "the slowest rank": (
        the_rest(lambda measured, costs, simulated: max(worked_longer(measured, simulated))),
        "That is what one rank worked longer. But a rank also waits for the slower actions of others.",
    ),
    "with medians": (
        the_rest(
            lambda measured, costs, simulated: (
                simulate(measured.schedule, replace(Costs.fit(measured), latency=costs.latency)).makespan
                - simulated.makespan
            )
        ),
        "You simulate with the median of each stage. But its actions lasted unlike times",
    ),
    "without latency": (
        the_rest(lambda measured, costs, simulated: again(measured, 0) - simulated.makespan),
        "messages take no time; let each take the latency of the costs.",
    ),
    "the critical path": (
        the_rest(
            lambda measured, costs, simulated: (
                sum(span.end - span.start for _, span in measured.critical_path()) - simulated.makespan
            )
        ),
        "You add up the critical path. Without its waits the run would hang on another one.",
    ),
    "nothing waits": (
        the_rest(lambda measured, costs, simulated: measured.makespan - simulated.makespan),
        "slower actions make 686.3 ms of the difference and waiting 86.19 ms; your function says 772.5 ms and 0 ms. "
        "That is the whole difference; a part of it is waiting.",
    ),
    "everything waits": (the_rest(lambda *_: 0), "your function says 0 ms and 772.5 ms."),
    "swapped": (lambda measured, costs: explain(measured, costs)[::-1], "The two have changed places."),
    "milliseconds": (
        lambda measured, costs: [1000 * part for part in explain(measured, costs)],
        "your function says 686.3 s and 86.19 s. The timeline counts in seconds; do so, too.",
    ),
    "half the story": (
        lambda measured, costs: (explain(measured, costs)[0], 0),
        "Together they are to be all of the difference, 772.5 ms.",
    ),
    "one number": (lambda measured, costs: 0.1, "gives 0.1, where two numbers are wanted, slower and waiting."),
    "forgets return": (lambda measured, costs: None, "slower and waiting; is there a return?"),
    "a dictionary": (lambda measured, costs: {"slower": 1, "waiting": 2}, "where two numbers are wanted"),
    "of one argument": (lambda measured: (0, 0), "give a function of measured and costs; yours takes"),
}


@pytest.mark.parametrize(("function", "reason"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_wrong_parts_are_refused_with_what_they_are_instead(told, function, reason):
    message = told("08.2", function)
    assert message.startswith("Not yet: ") and reason in message


@pytest.mark.parametrize(("exercise", "function"), [("08.1", lambda run: 1 // 0), ("08.2", lambda run, costs: 1 // 0)])
def test_an_error_in_the_learners_own_code_is_told_with_its_line(told, exercise, function):
    line = function.__code__.co_firstlineno
    assert f"in a run of 1f1b with 4 ranks and 8 microbatches your function fails at line {line}," in told(
        exercise, function
    )
