"""Tests for the files that list answers by exercise, which import them.

RIGHT lists right answers, with or without names. WRONG has wrong ones by name, each with a part of the feedback on it.
"""

import sys

from ppedu import B, F, I, W, simulate
from ppedu.course.exercises import EXERCISES


def test_right_answers_are_accepted(request, right, told):
    """The feedback is the exercise's praise and, if there is one, a picture of the learner's schedule."""
    exercise, answers = EXERCISES[right], request.module.RIGHT[right]
    for answer in answers.values() if isinstance(answers, dict) else answers:
        assert told(right, answer) == f"Right. {' '.join(exercise.praise.split())}"
        assert len(pictures()) == bool(exercise.reward)


def test_wrong_answers_are_refused_with_the_reason(request, wrong, refused):
    for answer, reason in request.module.WRONG[wrong].values():
        refused(wrong, answer, reason)
        assert EXERCISES[wrong].draw_wrong or not pictures()


def pictures():
    pyplot = sys.modules.get("matplotlib.pyplot")
    return pyplot.get_fignums() if pyplot else []


# Answers for several lessons


def in_turn(lead, late=None):
    """Return a generator of `lead(rank, ranks)` forwards, and then a backward and a forward in turn.

    late: if given, backwards are split, and each W is delayed by `late(rank, ranks)` microbatches.
    """

    def generator(rank, ranks, microbatches):
        first, later = (min(of(rank, ranks), microbatches) if of else 0 for of in (lead, late))
        for m in range(first):
            yield F(rank, m)
        for m in range(microbatches):
            yield I(rank, m) if late else B(rank, m)
            if late and m >= later:
                yield W(rank, m - later)
            if first + m < microbatches:
                yield F(rank, first + m)
        for m in range(microbatches - later, microbatches):
            yield W(rank, m)

    return generator


def spans_of(timeline):
    return [(rank, span) for rank in range(timeline.schedule.ranks) for span in timeline.spans(rank)]


def source(action):
    """Return the action of another rank that an action needs, whether it exists or not."""
    stage, m = action.stage, action.microbatch
    return F(stage - 1, m) if action.op == "F" else B(stage + 1, m)


def worked_longer(measured, simulated):
    return [one - other for one, other in zip(measured.busy, simulated.busy, strict=True)]


def replay(measured, costs, planned=(), ops="FB"):
    """Replay a run in the order in which its actions started, with the latency of the costs; return the makespan.

    planned: the ranks on which actions of the kinds `ops` take as long as in the simulation; the others, as they did.
    """
    simulated = {span.action: span for _, span in spans_of(simulate(measured.schedule, costs))}
    free, ended = [0] * measured.schedule.ranks, {}
    for rank, (action, start, end) in sorted(spans_of(measured), key=lambda each: each[1].start):
        lasts = simulated[action].end - simulated[action].start if rank in planned and action.op in ops else end - start
        needed = ended.get(source(action))
        begins = free[rank] if needed is None else max(free[rank], needed + costs.latency)
        free[rank] = ended[action] = begins + lasts
    return max(free)
