"""Lesson 8: costs, causes and messages: equivalent answers are accepted, wrong ones explained."""

from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

import pytest
from answers import (  # noqa: F401
    replay,
    source,
    spans_of,
    test_right_answers_are_accepted,
    test_wrong_answers_are_refused_with_the_reason,
    worked_longer,
)

from ppedu import Costs, schedule, simulate
from ppedu.course.exercises.synthetic import synthetic_run

RIGHT = {}
WRONG = {}

# The synthetic runs with which answers are checked


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-v"])
def test_a_synthetic_run_without_noise_equals_the_simulation(name):
    costs = Costs(forward=0.25, backward=0.5, latency=0.125)  # exact in binary
    case = schedule(name, ranks=4, microbatches=8)
    times = costs.durations(case.stages, case.ranks)
    run = synthetic_run(case, lambda action: times[action.op][action.stage], lambda: 0.125)
    assert run.rows == simulate(case, costs).rows


# Exercise 1: the costs


def fitted(middle=median, late=median, counts=lambda made, free, start: made > free, delay=lambda made, free: made):
    """Return an answer composed of: how to average times and delays, which messages to count, and from when."""

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

RIGHT["08.1"] = {
    "idle before it was made": right,
    "idle when it came": fitted(counts=lambda made, free, start: start - free > 0.001),
    "Costs.fit, and a latency": lambda timeline: replace(Costs.fit(timeline), latency=right(timeline).latency),
    "with the unit": lambda timeline: replace(right(timeline), unit="s"),
}


def pooled(timeline):
    """Fit one median over all stages."""
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


WRONG["08.1"] = {
    "the mean": (
        fitted(middle=mean),
        "in a run of 1f1b with 4 ranks and 8 microbatches a forward of stage 0 takes 20 ms; your costs say "
        "36.17 ms. That is the mean, and one of them took about 8 times as long as the others. The median ignores "
        "it.",
    ),
    "the wait counted as work": (
        from_end_to_end,
        "and 8 microbatches a forward of stage 1 takes 20 ms; your costs say 21.3 ms. You measure from the "
        "end of the previous action, which",
    ),
    "the slowest": (fitted(middle=max), "That is the slowest of them, an exception."),
    "the fastest": (fitted(middle=min), "Jitter moves the minimum with every run; take the median."),
    "all of them": (fitted(middle=sum), "That is the sum of all of them; how long does one take?"),
    "all stages in one": (pooled, "That is the median over all stages; each stage has its own."),
    "one number": (
        one_number,
        "single number is the time of a rank's whole share, the same on all ranks: give a list with the time "
        "of each stage.",
    ),
    "F and B swapped": (swapped, "a forward of stage 0 takes 20 ms; your costs say 40.84 ms. Forward and backward"),
    "no backward": (without_backward, "You leave out the backward, and then it is assumed to be twice the forward."),
    "milliseconds": (in_milliseconds, "The timeline is in seconds; give seconds, too."),
    "seconds that are called milliseconds": (
        lambda timeline: replace(right(timeline), unit="ms"),
        "your costs have the unit 'ms', but the timeline is in seconds: give seconds, with unit='s'.",
    ),
    "latency in milliseconds": (
        lambda timeline: replace(right(timeline), latency=in_milliseconds(timeline).latency),
        "a message takes 5 ms; your costs say 5.089 s. The timeline is in seconds; give seconds, too.",
    ),
    "Costs.fit": (
        Costs.fit,
        "in a run of 1f1b with 4 ranks and 8 microbatches your costs have a latency for each link, like those of "
        "pp.Costs.fit. Here all links are alike, and few messages travel on each: give one number",
    ),
    "no latency": (
        lambda timeline: replace(Costs.fit(timeline), latency=0),
        "a message takes 5 ms; your costs say 0 ms: they have no latency yet.",
    ),
    "busy ranks, too": (
        fitted(counts=everything),
        "a message takes 5 ms; your costs say 7.136 ms. You count messages for which no rank was waiting: "
        "the input of 1F4 was sent 549.3 ms before 1F4 started, but its rank was busy then. Count a message only if "
        "the rank's previous action had ended before the action that sends it.",
    ),
    "busy ranks, too, the mean": (
        fitted(late=mean, counts=everything),
        "You count messages for which no rank was waiting: the input of 1F4 was sent 549.3 ms before 1F4 "
        "started, but its rank was busy then.",
    ),
    "every pause is a wait": (
        fitted(counts=lambda made, free, start: start > free),
        "You count messages for which no rank was waiting: the input of 1F4 was sent 549.3 ms before 1F4 "
        "started, but its rank was busy then.",
    ),
    "every pause after an action is a wait": (
        fitted(counts=lambda made, free, start: start > free > 0),
        "your costs say 7.205 ms. You count messages for which no rank was waiting: the input of 1F4 was "
        "sent 549.3 ms before 1F4 started, but its rank was busy then.",
    ),
    "the mean latency": (fitted(late=mean), "That is the mean, and some messages took 6 times as long as the others."),
    "the fastest message": (
        fitted(late=min),
        "Jitter moves the minimum with every run; take the median where the rank was idle",
    ),
    "the slowest message": (fitted(late=max), "That is the slowest message, an exception."),
    "the idle time": (
        fitted(delay=lambda made, free: free),
        "That is how long a rank is idle; for part of that time, the message it waits for has not been sent yet.",
    ),
    "all idle time": (fitted(late=mean, counts=everything, delay=lambda made, free: free), "how long a rank is idle"),
    "known by heart": (
        lambda timeline: Costs(0.020, 0.040, latency=0.005),
        "in a run of 1f1b with 3 ranks and 6 microbatches a forward of stage 0 takes 10 ms; your costs say "
        "20 ms. A single number",
    ),
    "too few stages": (
        lambda timeline: replace(right(timeline), forward=[0.020] * 4),
        "4 costs for 3 stages; give 3, one for each stage, or a single number",
    ),
    "forgets return": (lambda timeline: None, "of costs, such as pp.Costs(latency=0.005); is a return missing?"),
    "a tuple": (
        lambda timeline: (0.020, 0.040),
        "returns (0.02, 0.04) instead of costs, such as pp.Costs(latency=0.005)",
    ),
}


# Exercise 2: why a run takes longer than its simulation


def explain(measured, costs):
    simulated, replayed = simulate(measured.schedule, costs).makespan, replay(measured, costs)
    return replayed - simulated, measured.makespan - replayed


def explain_step_by_step(measured, costs):
    """Compute the same by going through the ranks in turn."""
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


RIGHT["08.2"] = [explain, explain_step_by_step]


def the_rest(slower):
    """Return an answer whose first part is `slower(measured, costs)`, and whose second part is the remainder."""

    def function(measured, costs):
        first = slower(measured, costs, simulate(measured.schedule, costs))
        return first, measured.makespan - simulate(measured.schedule, costs).makespan - first

    return function


WRONG["08.2"] = {
    "all ranks": (
        the_rest(lambda measured, costs, simulated: sum(worked_longer(measured, simulated))),
        "in a run of 1f1b with 4 ranks and 8 microbatches slower actions make up 686.3 ms of the difference "
        "and waiting 86.19 ms; your function returns 1.694 s and -921.8 ms. That is how much longer all "
        "ranks together worked. They work at",
    ),
    "on average": (
        the_rest(lambda measured, costs, simulated: mean(worked_longer(measured, simulated))),
        "That is how much longer a rank worked on average. But a rank also waits for the slower actions of "
        "the other ranks.",
    ),
    "the slowest rank": (
        the_rest(lambda measured, costs, simulated: max(worked_longer(measured, simulated))),
        "That is how much longer one rank worked. But a rank also waits for the slower actions of the other ranks.",
    ),
    "with medians": (
        the_rest(
            lambda measured, costs, simulated: (
                simulate(measured.schedule, replace(Costs.fit(measured), latency=costs.latency)).makespan
                - simulated.makespan
            )
        ),
        "You replay with one time per stage; each action has its own length, and a slow one delays what comes after",
    ),
    "with the answer to exercise 1": (
        the_rest(
            lambda measured, costs, simulated: (
                simulate(measured.schedule, right(measured)).makespan - simulated.makespan
            )
        ),
        "You replay with one time per stage",
    ),
    "with means": (
        the_rest(
            lambda measured, costs, simulated: (
                simulate(measured.schedule, replace(fitted(mean)(measured), latency=costs.latency)).makespan
                - simulated.makespan
            )
        ),
        "You replay with one time per stage",
    ),
    "all idle time": (
        lambda measured, costs: (explain(measured, costs)[0], sum(measured.idle)),
        "The idle times of all ranks add up, as work does; the ranks wait at the same time.",
    ),
    "without latency": (
        the_rest(lambda measured, costs, simulated: replay(measured, replace(costs, latency=0)) - simulated.makespan),
        "messages take no time; let each take the latency of the costs.",
    ),
    "the critical path": (
        the_rest(
            lambda measured, costs, simulated: (
                sum(span.end - span.start for _, span in measured.critical_path()) - simulated.makespan
            )
        ),
        "You add up the critical path. Without its waits, a different path would be critical.",
    ),
    "nothing waits": (
        the_rest(lambda measured, costs, simulated: measured.makespan - simulated.makespan),
        "slower actions make up 686.3 ms of the difference and waiting 86.19 ms; your function returns 772.5 "
        "ms and 0 ms. That is the whole difference; part of it is waiting.",
    ),
    "everything waits": (the_rest(lambda *_: 0), "your function returns 0 ms and 772.5 ms."),
    "swapped": (lambda measured, costs: explain(measured, costs)[::-1], "The two are swapped."),
    "milliseconds": (
        lambda measured, costs: [1000 * part for part in explain(measured, costs)],
        "your function returns 686.3 s and 86.19 s. The timeline is in seconds; give seconds, too.",
    ),
    "half the story": (
        lambda measured, costs: (explain(measured, costs)[0], 0),
        "Together they must add up to the whole difference, 772.5 ms.",
    ),
    "one number": (lambda measured, costs: 0.1, "instead of two numbers, slower and waiting."),
    "forgets return": (lambda measured, costs: None, "slower and waiting; is a return missing?"),
    "a dictionary": (lambda measured, costs: {"slower": 1, "waiting": 2}, "of two numbers, slower and waiting."),
}


# Exercise 3: the messages on 1F1B's critical path


def messages(ranks, microbatches):
    return 2 * (ranks + microbatches - 3 - (microbatches - 2) // ranks)


def messages_counted(ranks, microbatches):
    """Count the steps from rank to rank on a critical path."""
    timeline = simulate(schedule("1f1b", ranks, microbatches), Costs(1000, 2000, latency=1))
    path = [rank for rank, _ in timeline.critical_path()]
    return sum(one != other for one, other in pairwise(path))


RIGHT["08.3"] = [messages, messages_counted]


WRONG["08.3"] = {
    "GPipe's": (lambda ranks, _: 2 * (ranks - 1), "has 16 messages; your formula gives 6. Those are GPipe's"),
    "two each": (lambda _, microbatches: 2 * microbatches, "with 4 ranks and 1 microbatch the critical path has 6"),
    "all the way": (lambda p, m: 2 * (p - 1) * -(-m // p), "all the way down and up for every group"),
    "naive": (lambda p, m: 2 * (p - 1) * m, "as in naive"),
    "without pauses": (lambda p, m: 2 * (p + m - 2), "now and then, one more microbatch adds nothing"),
    "known by heart": (lambda *_: 16, "with 4 ranks and 1 microbatch"),
    "text": (lambda *_: "16", "returns '16' instead of a number"),
}


ERRORS = [("08.1", lambda run: 1 // 0), ("08.2", lambda run, costs: 1 // 0)]


@pytest.mark.parametrize(("exercise", "function"), ERRORS)
def test_an_error_in_the_learners_code_is_reported_with_its_line(told, exercise, function):
    line = function.__code__.co_firstlineno
    assert f"in a run of 1f1b with 4 ranks and 8 microbatches your function fails at line {line}," in told(
        exercise, function
    )
