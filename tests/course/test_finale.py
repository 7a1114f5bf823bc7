"""The finale: of every case an independent judge finds one diagnosis, and a wrong one is refused for a reason."""

import ast
import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest
from judge import legal
from matplotlib import pyplot as plt
from stepper import parents
from strategies import sample

import ppedu as pp
from ppedu.course.exercises import faults as module
from ppedu.course.exercises import predict, prediction
from ppedu.course.exercises.faults import EVERYWHERE, FAULTS, FIXES, changed, planted
from ppedu.course.exercises.finale import EVENT, SYMPTOMS, Case, cases, finale
from ppedu.course.exercises.silent import train
from ppedu.course.map import LESSONS, course_map
from ppedu.run import MUSEUM


def makespan(job, replica):
    """Return the time of a step: the longest path through the graph of its compute actions."""
    schedule, sizes = job.schedule, len(job.lengths) // job.schedule.microbatches
    compute = [
        [action for action in order if action.op in ("F", "B", "I", "W") or action.parts] for order in schedule.orders
    ]
    places = {
        single: (rank, index)
        for rank, order in enumerate(compute)
        for index, action in enumerate(order)
        for single in action.singles
    }

    def time(single, rank):
        tokens = sum(job.lengths[single.microbatch * sizes : (single.microbatch + 1) * sizes])
        units = job.layers[single.stage] * tokens * job.slow.get((replica, rank), 1)
        stalled = single.op == "F" and rank in job.stalls and single.microbatch == STALLED
        return job.layer_time * ((2 if single.op == "B" else 1) * units + (job.stalls[rank] if stalled else 0))

    ends = {}

    def end(rank, index):
        path = [(rank, index)]
        while path:
            here = path[-1]
            if here in ends:
                path.pop()
                continue
            before = [(here[0], here[1] - 1)] if here[1] else []
            for ways in parents(compute[here[0]][here[1]], schedule.stages):
                before.append(next(places[each] for each in ways if each in places))
            if missing := [each for each in before if each not in ends and each != here]:
                path += missing
                continue
            arrivals = [ends[each] + hop(each[0], here[0]) for each in before if each != here]
            ends[here] = max(arrivals, default=0) + sum(time(s, here[0]) for s in compute[here[0]][here[1]].singles)
        return ends[rank, index]

    def hop(source, target):
        return 0 if source == target else job.cables.get((min(source, target), max(source, target)), job.hop)

    return max(end(rank, len(order) - 1) for rank, order in enumerate(compute)) + job.tail


STALLED = Random(0).randrange(module.SEQUENCES)


def keeps(job):
    """Return the most layers' activations that a rank holds at once, in GB."""
    most = 0
    for order in job.schedule.orders:
        held = 0
        for action in order:
            for single in action.singles:
                held += job.layers[single.stage] * {"F": 1, "B": -1, "W": -1}.get(single.op, 0)
                most = max(most, held)
    return most * 0.2 * len(job.lengths) / job.schedule.microbatches


def right(job):
    """Judge a job without the code that graded it: by other algorithms for legality, times and memory."""
    if not legal(job.schedule) or not legal(job.schedule, rendezvous=job.schedule.lowered):
        return False
    step = max(makespan(job, replica) for replica in range(2))
    planned = makespan(job.plan, 0)
    return step <= 1.05 * min(job.goal, planned) and keeps(job) <= job.room and not job.bug


def fitting(job):
    """Yield each fault and place whose cure makes the job right, if the fault breaks what is broken."""
    for fault in FAULTS.values():
        for where in fault.places(job) if set(fault.breaks) & set(job.failing()) else ():
            cured = changed(job, **fault.cure(job, where))
            if cured != job and right(cured):
                yield fault.name, where


def seed_of(name):
    """Return the first seed whose case has this fault."""
    return next(seed for seed in range(300) if Case.fault(seed).name == name)


@pytest.mark.parametrize("name", FAULTS)
def test_exactly_one_diagnosis_fits_a_case(name):
    for seed in sample(range(10), start=len(name)):
        job, where = planted(FAULTS[name], Random(seed))
        assert not right(job)
        assert list(fitting(job)) == [(name, where)], seed


@pytest.mark.parametrize("name", FAULTS)
def test_a_case_shows_as_much_as_its_diagnosis_needs(name):
    """The tools of the lessons lead to the place of the fault."""
    case = Case(seed_of(name))
    where = case._where
    if case.hangs:
        assert pp.check(case.schedule, transport="rendezvous") and "never finishes" in str(case)
        with pytest.raises(pp.SettingError, match="this job hangs"):
            _ = case.run
        return
    costs = case.run.costs()
    times = {row[0]: max(float(each.removesuffix(" ms")) for each in row[1:]) for row in case.times()[1:]}
    said = " ".join(map(str, case.run.autopsy().findings))
    if name == "imbalance":
        assert f"stage {where} takes" in said
    elif name == "slow node":
        assert f"rank {where[1]} of replica {where[0]}" in said
    elif name == "slow link":
        assert max(costs.latency, key=costs.latency.get) in (where, where[::-1])
        messages = [name for name in times if name.startswith("message")]
        assert max(messages, key=times.get) in [f"message, rank {one} to {two}" for one, two in (where, where[::-1])]
    elif name == "long sequence":
        rows = case.run.timeline().rows
        assert {max(row, key=lambda span: span.end - span.start).action.microbatch for row in rows} == {where}
    elif name == "two copies":
        assert "gradients of both copies" in said
    elif FAULTS[name].breaks == ("gradients",):
        off = [max(each) > 1e-4 for each in case.parity]
        assert any(off) and case.losses[-1] < case.losses[0]
    assert max(case.peaks) <= case.room or "memory" in FAULTS[name].breaks
    assert name not in str(case)
    assert case.run.timeline().costs.latency == 0, "what is measured has no costs that tell the fault"


@pytest.mark.parametrize("name", FAULTS)
def test_the_symptom_is_what_an_independent_judge_finds_first(name):
    case = Case(seed_of(name))
    job = case._job
    if not legal(job.schedule) or not legal(job.schedule, rendezvous=job.schedule.lowered):
        assert case.symptom == "it hangs"
    elif keeps(job) > job.room:
        assert case.symptom == "it runs out of memory"
    elif max(makespan(job, replica) for replica in range(2)) > 1.05 * job.goal:
        assert case.symptom == "a step takes too long"
    else:
        assert case.symptom == "the gradients are wrong"


def test_the_lesson_asks_for_each_symptom():
    [lesson] = (Path(__file__).parents[2] / "notebooks").glob("16_*.ipynb")
    source = "\n".join("".join(cell["source"]) for cell in json.loads(lesson.read_text(encoding="utf-8"))["cells"])
    [options] = re.findall(r'^predict\("what goes wrong", (\[.+?\])\)$', source, re.M | re.S)
    assert ast.literal_eval(options) == list(dict.fromkeys(SYMPTOMS.values()))


def test_a_new_case_gets_a_prediction_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    question = "what goes wrong", ["it hangs", "the gradients are wrong"]
    predict(*question)
    prediction._predictions["what goes wrong"].value = "it hangs"
    predict(*question)  # the cell runs again
    assert prediction._predictions["what goes wrong"].value == "it hangs"
    finale(another=True)
    predict(*question)
    assert prediction._predictions["what goes wrong"].value is None


def test_the_course_map_names_every_fault_once():
    ax = course_map()
    told = ", ".join(" ".join(text.get_text().split()) for text in ax.texts)
    plt.close(ax.figure)
    assert all(told.count(name) == 1 for name in FAULTS)


# Words from the lesson of each fault. The museum, which lesson 7 names, has exhibits with the names of bugs.
SAID = {
    "too few microbatches": "microbatches per rank",
    "illegal order": "pp.check",
    "too many activations": "GPipe",
    "crossed messages": "both send first",
    "gradients newest first": "newest first",
    "too many chunks": "**grows again**",
    "late weight gradients": "catch is memory",
    "imbalance": "*imbalance*",
    "slow node": "*slow worker*",
    "slow link": "*messages*",
    "interruptions": "*Pauses*",
    "long sequence": "*variation*",
    "two copies": "two copies",
}


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: str(lesson.number))
def test_the_course_map_says_what_is_in_the_lessons(lesson):
    [path] = (Path(__file__).parents[2] / "notebooks").glob(f"{lesson.number:02}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    assert [tool for tool in lesson.tools.split(", ") if tool not in text] == []
    assert all(name in MUSEUM if lesson.number == 7 else SAID[name] in text for name in lesson.faults)


@pytest.mark.parametrize("name", ["illegal order", "crossed messages", "slow link", "late weight gradients"])
def test_no_title_tells_what_a_case_suffers_from(name):
    case = Case(seed_of(name))
    ax = case.plot()
    plt.close(ax.figure)
    titles = [ax.get_title(loc=where) for where in ("left", "right")]
    assert titles == [f"{case.schedule.name}, {case.schedule.size}, recorded", ""]


def test_a_right_diagnosis_is_praised_and_a_wrong_one_refused_for_a_reason(told, refused):
    slow = Case(seed_of("slow node"))
    replica, rank = slow._where
    wrong = (1 - replica, rank)
    assert told("16.1", slow.reveal()).startswith(f"Right. It was “slow node”, on rank {rank} of replica {replica}")
    refused("16.1", 7, "give a diagnosis")
    refused("16.1", slow.answer("gremlins"), "choose what is wrong: one of illegal order")
    refused("16.1", slow.answer("illegal order"), "pp.check finds nothing wrong")
    refused("16.1", slow.answer("loss not divided", EVERYWHERE), "Gradients are those of one process")
    refused("16.1", slow.answer("imbalance", 0), "At best, a step takes")
    refused("16.1", slow.answer("two copies", EVERYWHERE), "nothing that could be cured of it")
    refused("16.1", slow.answer("slow node", 9), "a replica and a rank, such as (1, 3); yours is 9")
    refused("16.1", slow.answer("slow node", wrong), f"not there: cured at {wrong}, a step takes")
    refused("16.1", slow.answer("slow node", slow._where), "Now cure it")
    refused("16.1", slow.answer("slow node", slow._where, node=wrong), "with your cure, a step takes")
    refused("16.1", slow.answer("slow node", slow._where, nodes=1), "settings are schedule, layers")
    refused("16.1", slow.answer("slow node", slow._where, layers=[1]), "layers= takes a number for each of 4 stages")


def test_a_faster_schedule_does_not_hide_a_slow_node():
    job, where = planted(FAULTS["slow node"], Random(6))
    faster = changed(job, schedule=pp.schedule("zb-v", 4, 16))
    assert "the trouble is hidden" in replace(faster, goal=faster.step).failing()["time"]
    assert not replace(changed(faster, node=where), goal=faster.step).failing()


def test_a_faster_schedule_does_not_make_up_for_too_few_microbatches(refused):
    seeds = (seed for seed in count() if Case.fault(seed).name == "too few microbatches")
    case = next(case for case in map(Case, seeds) if case.schedule.name == "1f1b")
    faster = pp.schedule("zb-h1", case.schedule.ranks, case.schedule.microbatches)
    assert not changed(case._job, schedule=faster).failing()
    refused("16.1", case.answer("too few microbatches", EVERYWHERE, schedule=faster), "as few microbatches as before")


def test_a_case_is_kept_until_another_is_drawn(folder):
    first = finale()
    assert finale() == first and cases() == [first.seed]
    second = finale(another=True)
    assert finale() == second and cases() == [first.seed, second.seed]
    assert (folder / "progress.txt").read_text().count(EVENT) == 2
    assert str(Case(first.seed)) == str(first), "the same seed gives the same case"
    for _ in range(2 * len(FAULTS) - 2):
        finale(another=True)
    drawn = [Case.fault(seed).name for seed in cases()]
    assert set(drawn[: len(FAULTS)]) == set(drawn[len(FAULTS) :]) == set(FAULTS), "all faults before one comes again"


@pytest.mark.parametrize(
    ("bug", "where", "off"),
    [
        ("", None, "0000"),
        ("loss not divided", None, "1111"),
        ("norm per stage", None, "0000"),
        ("tied copies drift apart", None, "1001"),
        ("gradients newest first", (0, 1), "1001"),
        ("gradients newest first", (1, 2), "1101"),
        ("gradients newest first", (2, 3), "1111"),
        ("one receive buffer", 1, "0100"),
        ("one receive buffer", 2, "0010"),
        ("one receive buffer", 3, "0001"),
    ],
)
def test_a_planted_bug_shows_in_the_gradients_of_its_ranks(bug, where, off):
    """The first and the last rank share a weight, so that what is wrong with one shows in the other."""
    trained = train(4, bug, where)
    assert "".join(str(int(before > 1e-4)) for before, _ in trained.off) == off
    assert (max(after for _, after in trained.off) > 1e-4) == (bug not in ("", "loss not divided"))
    equally = {round(before, 4) for before, _ in trained.off} == {3.0}
    assert equally == (bug == "loss not divided")
    between = min(after for _, after in trained.off[1:-1])
    assert (off == "1001" and between > 0.1) == (bug == "tied copies drift apart")
    assert trained.losses[-1] < trained.losses[0], "the loss falls"
    assert not bug or bug in FIXES
