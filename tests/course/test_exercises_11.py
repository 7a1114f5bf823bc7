"""Lesson 11: repairs, cures and slow workers: equivalent answers are accepted, wrong ones explained."""

from statistics import fmean, median

from answers import (  # noqa: F401
    replay,
    source,
    spans_of,
    test_right_answers_are_accepted,
    test_wrong_answers_are_refused_with_the_reason,
    worked_longer,
)

from ppedu import Costs, Run, schedule, simulate
from ppedu.course.exercises.synthetic import SLOW_RANKS, cluster, profiled

RIGHT = {}
WRONG = {}


# Exercise 1: how much longer a run takes because of each rank


def blame(measured, costs):
    ranks = range(measured.schedule.ranks)
    return [replay(measured, costs) - replay(measured, costs, {rank}) for rank in ranks]


def from_the_other_side(measured, costs):
    ranks = set(range(measured.schedule.ranks))
    return [replay(measured, costs, ranks - {rank}) - replay(measured, costs, ranks) for rank in ranks]


def from_the_run(measured, costs):
    return [measured.makespan - replay(measured, costs, {rank}) for rank in range(measured.schedule.ranks)]


RIGHT["11.1"] = [blame, lambda *given: tuple(blame(*given))]


WRONG["11.1"] = {
    "longer work": (
        lambda measured, costs: worked_longer(measured, simulate(measured.schedule, costs)),
        "That is how much longer each rank worked. But another rank may be slower still",
    ),
    "one slow rank": (from_the_other_side, "You slow down one rank of the simulation. Ask the other way round"),
    "the run": (from_the_run, "You compare with the run, which also waited. Compare with a replay"),
    "forwards only": (
        lambda measured, costs: [
            replay(measured, costs) - replay(measured, costs, {rank}, "F") for rank in range(measured.schedule.ranks)
        ],
        "You changed only its forwards.",
    ),
    "negative": (lambda *given: [-each for each in blame(*given)], "The sign is wrong: time saved is positive."),
    "milliseconds": (
        lambda *given: [1000 * each for each in blame(*given)],
        "The timeline is in seconds; give seconds",
    ),
    "the worst rank": (lambda *given: max(blame(*given)), "instead of 4 numbers, one for each rank."),
    "zeros": (
        lambda *given: [0] * given[0].schedule.ranks,
        "if rank 0 alone had run at its costs; your function",
    ),
    "forgets return": (lambda *given: None, "returns None instead of 4 numbers, one for each rank; is a return"),
}


def test_the_lessons_own_run_loses_more_to_late_messages_than_to_its_two_slow_ranks():
    measured, planned = profiled()
    assert 1.06 < measured.makespan / planned.makespan < 1.07
    saved = blame(measured, planned.costs)
    fitted = Costs.fit(measured).forward
    slow = {rank for rank, time in enumerate(fitted) if time > 1.02 * planned.costs.forward}
    assert slow == set(SLOW_RANKS) and max(range(8), key=saved.__getitem__) == 5 and saved[2] < saved[5] / 10
    assert measured.makespan - replay(measured, planned.costs) > 2 * saved[5]


def own_costs(measured, costs):
    """Take the durations from the costs as if they were lists."""
    times = {"F": costs.forward, "B": costs.backward}
    planned = {action: times[action.op][action.stage] for row in measured.rows for action, *_ in row}
    return [sum(planned.values())] * measured.schedule.ranks


def test_costs_without_a_number_for_each_stage_are_explained(told):
    message = told("11.1", own_costs)
    assert "your function fails at line" in message and "'float' object is not subscriptable" in message
    assert "In costs, one number stands for all stages, and None as backward for twice the forward." in message
    elsewhere = told("11.1", lambda measured, costs: [][0])
    assert "IndexError" in elsewhere and "one number stands for" not in elsewhere


# Exercise 2: the cure that helps most


def predicted(run, cures):
    return {name: run.predict(schedule, layers=layers).makespan for name, (schedule, layers) in cures.items()}


def best_cure(run, cures):
    seconds = predicted(run, cures)
    return min(cures, key=lambda name: seconds[name] / cures[name][0].microbatches)


RIGHT["11.2"] = [best_cure]


WRONG["11.2"] = {
    "the bubble": (
        lambda _, cures: min(cures, key=lambda name: simulate(cures[name][0]).bubble),
        "chooses 'zb-h1', with which a microbatch takes 371.4 ms of a step; with 'fewer layers in the last stage' it "
        "takes 347.5 ms. That has the smallest bubble if all stages are equal.",
    ),
    "the step": (
        lambda run, cures: min(cures, key=predicted(run, cures).__getitem__),
        "for a run of equal stages your function chooses 'zb-h1', with which a microbatch takes 195.6 ms of a step; "
        "with '16 microbatches' it takes 192.3 ms. That has the shortest step.",
    ),
    "by heart": (lambda *_: "fewer layers in the last stage", "instead of one of zb-h1, 16 microbatches"),
    "the first": (lambda _, cures: next(iter(cures)), "chooses 'zb-h1'"),
    "forgets return": (lambda *_: None, "is a return missing?"),
}


def test_in_1f1b_a_heavy_last_stage_costs_more_than_a_heavy_first_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run.load(cluster())
    first, last = (
        run.predict(run.schedule, layers=([8, 8, 8, 8], layers)).makespan for layers in ([10, 9, 9, 4], [9, 9, 9, 5])
    )
    assert last > 1.02 * first
    costs = run.costs()
    of_layers = [sum(times) / 8 for times in zip(costs.forward[:1], costs.backward[:1], strict=True)]
    head = costs.forward[3] + costs.backward[3] - 8 * of_layers[0]
    assert abs(10 * of_layers[0] / (5 * of_layers[0] + head) - 1) < 0.01, "the busiest rank works as long"
    heavy = [simulate(schedule("1f1b", 4, 8), Costs([2 if s == stage else 1 for s in range(4)])) for stage in (0, 3)]
    assert heavy[0].makespan < heavy[1].makespan


# Exercise 3: the slow workers


def slow_workers(run, middle=median):
    slow = []
    for rank in range(run.schedule.ranks):
        busy = {each: middle([run.timeline(step, each).busy[rank] for step in run.steps]) for each in run.replicas}
        slow += [(each, rank) for each in run.replicas if busy[each] > 1.1 * median(busy.values())]
    return slow


def slow_by_autopsy(run):
    return [(each.replica, each.rank) for each in run.autopsy().stragglers]


RIGHT["11.3"] = [slow_workers, lambda run: slow_workers(run, fmean), slow_by_autopsy]


def slower_than_the_others(run):
    busy = {
        (each, rank): run.timeline(0, each).busy[rank] for each in run.replicas for rank in range(run.schedule.ranks)
    }
    return [worker for worker, time in busy.items() if time > 1.1 * median(busy.values())]


def slow_replicas(run):
    spans = {each: run.timeline(0, each).makespan for each in run.replicas}
    slow = [each for each in spans if spans[each] > 1.1 * median(spans.values())]
    return [(each, rank) for each in slow for rank in range(run.schedule.ranks)]


WRONG["11.3"] = {
    "the heavy stage": (slower_than_the_others, "If a rank is slow in all replicas, its stage is heavy."),
    "the whole replica": (slow_replicas, "you name rank 0 of replica 1: it works 1.695 s in a step, and rank 0 of"),
    "its whole replica": (slow_replicas, "You name its whole replica. Most of these ranks wait for the slow one"),
    "nothing": (lambda run: [], "you miss rank 2 of replica 1: it works 3.4"),
    "ranks": (lambda run: [2], "returns [2] instead of a list such as [(1, 3)]"),
    "forgets return": (lambda run: None, "is a return missing?"),
}
