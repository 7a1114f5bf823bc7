"""Tests for the files that list answers by exercise, which import them.

RIGHT lists right answers, with or without names. WRONG has wrong ones by name, each with a part of the feedback on it.
"""

import sys

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
