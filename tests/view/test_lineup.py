"""The lineup: verdicts by clicks on timelines, without a browser."""

import base64
import json

import pytest

import ppedu as pp
from ppedu.course.exercises.lesson_04 import drawn
from ppedu.view.lineup import Lineup

LEGAL = "0F0 ·   ·   0B0\n·   1F0 1B0 ·"
INCOMPLETE = "0F0 0F1 ·   ·   0B0\n·   1F0 1F1 1B0 1B1"


@pytest.fixture
def suspects():
    texts = {"X": LEGAL, "Y": INCOMPLETE}
    return Lineup({name: drawn(text, name) for name, text in texts.items()}, dict.fromkeys(texts, "two stages"))


def words(suspects):
    return [case["verdict"] for case in suspects.state()["cases"]]


def marked(suspects):
    return [
        [n for n, mark in enumerate(base64.b64decode(panel["boxes"]["mark"])) if mark]
        for panel in suspects.state()["panels"]
    ]


def test_a_click_is_a_verdict_and_a_second_click_takes_it_back(suspects):
    assert suspects.verdicts == {} and words(suspects) == ["", ""]
    suspects.handle({"case": 0, "box": 3})
    assert suspects.verdicts == {"X": (1, "1B0")} and words(suspects) == ["1B0 on rank 1 is wrong", ""]
    assert marked(suspects) == [[3], []]
    suspects.handle({"case": 0, "box": 0})
    assert suspects.verdicts == {"X": (0, "0F0")} and marked(suspects) == [[0], []]
    suspects.handle({"case": 0, "box": 0})
    assert suspects.verdicts == {} and marked(suspects) == [[], []]


def test_a_timeline_can_be_judged_legal_or_incomplete(suspects):
    suspects.handle({"case": 0, "legal": True})
    suspects.handle({"case": 1, "missing": "0B1"})
    assert suspects.verdicts == {"X": "legal", "Y": (0, "0B1")}
    assert words(suspects) == ["runs as drawn", "0B1 is missing on rank 0"] and marked(suspects) == [[], []]
    assert [(case["legal"], case["missing"]) for case in suspects.state()["cases"]] == [(True, ""), (False, "0B1")]
    assert "All verdicts are given" in suspects.state()["note"]
    suspects.handle({"case": 1, "missing": ""})
    assert suspects.verdicts == {"X": "legal"}


def test_the_menu_lists_every_action_so_that_it_does_not_tell_which_is_missing(suspects):
    x, y = suspects.state()["cases"]
    assert x["actions"] == ["0F0", "1F0", "0B0", "1B0"]
    assert y["actions"] == [f"{stage}{op}{m}" for op in "FB" for stage in (0, 1) for m in (0, 1)]


def test_nothing_in_the_state_tells_the_fault(suspects):
    for panel in suspects.state()["panels"]:
        assert panel["gaps"] == [] and panel["numbers"] == [] and panel["peaks"] == []


@pytest.mark.parametrize(
    "message",
    [
        {}, {"case": 2, "legal": True}, {"case": -1, "box": 0}, {"case": 0, "box": 4}, {"case": 0, "box": -1},
        {"case": 0, "missing": "9F9"}, {"case": "0", "legal": True}, {"case": 0},
    ],
)  # fmt: skip
def test_malformed_messages_change_nothing(suspects, message):
    suspects.handle({"case": 1, "legal": True})
    suspects.handle(message)
    assert suspects.verdicts == {"Y": "legal"}


def test_without_a_kernel_there_is_a_picture(suspects):
    data, _ = suspects._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG") and "rank 1" in data["text/plain"]
    assert json.dumps(suspects.state())


def test_it_shows_simulated_timelines_too():
    made = pp.simulate(pp.schedule("interleaved", 2, 2))
    suspects = Lineup({"interleaved": made}, {"interleaved": ""})
    suspects.handle({"case": 0, "missing": "3B1"})
    assert suspects.verdicts == {"interleaved": (1, "3B1")}
