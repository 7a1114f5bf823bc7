"""Predictions: a control that starts empty, what it becomes, and its comparison with the outcome."""

import re
import sys
from fractions import Fraction

import pytest
from ipywidgets.widgets import widget

from ppedu import SettingError
from ppedu.course.exercises import prediction
from ppedu.notebook import outcome, predict, predictions

NONE = "You made no predictions here. Make them before you run a cell, and this shows how close they were.\n"


@pytest.fixture(autouse=True)
def no_predictions(monkeypatch):
    monkeypatch.setattr(prediction, "_predictions", {})


@pytest.fixture
def said():
    """`said(name, value)` makes a prediction, as a control does."""

    def make(name, value):
        prediction._predictions[name].value = value

    return make


@pytest.mark.parametrize(
    ("given", "question"),
    [
        ((20, 120), "your prediction, from 20 to 120?"),
        ((20, 121, 25), "your prediction, from 20 to 120?"),
        ((0, 1, 0.1), "your prediction, from 0 to 1?"),
        ((Fraction(1, 2), 2, Fraction(1, 2)), "your prediction, from 0.5 to 2?"),
        ((["rank 0", "rank 3", "all the same"],), "your prediction? Choose rank 0, rank 3 or all the same."),
        (([1, 2],), "your prediction? Choose 1 or 2."),
    ],
)
def test_without_a_page_the_question_is_printed_and_nothing_is_predicted(capsys, given, question):
    predict("it", *given)
    outcome("it", 1)
    predictions()
    assert capsys.readouterr().out == f"it: {question}\nit: you made no prediction. It is 1.\n{NONE}"


@pytest.mark.parametrize(
    "given",
    [
        (5, 5),
        (5, 1),
        (1, 5, 0),
        (1, 5, -1),
        (1, 5, 9),
        (0, 1e9),
        ("a", "b"),
        (1, 2, 3, 4),
        ([],),
        (["one"],),
        (["a"], 2),
        (),
        (12,),
        (...,),
    ],
)
def test_wrong_arguments_raise_with_what_is_allowed(given):
    with pytest.raises(SettingError, match=r"predict\('it', …\) takes the ends of a slider, as in 20, 120, or a list"):
        predict("it", *given)


@pytest.mark.parametrize(
    ("guess", "value", "verdict"),
    [
        (96, 96, ": right"),
        (96, 96.0, ": right"),
        (90, 96, ": 6 too low"),
        (100, 96, ": 4 too high"),
        (100, Fraction(193, 2), ": 3.5 too high"),
        (28, 28.5, ": right, as near as the slider goes"),
        (28, 28.75, ": 0.75 too low"),
        (96.5, 98.12345, ": 1.62 too low"),
    ],
)
def test_a_number_is_compared_with_its_outcome(capsys, said, guess, value, verdict):
    predict("it", 20, 120)
    said("it", guess)
    outcome("it", value)
    assert re.fullmatch(rf"it: you said {guess}, it is [\d.]+{verdict}\.", capsys.readouterr().out.splitlines()[1])


@pytest.mark.parametrize(("value", "end"), [("rank 3", ": right."), ("all the same", ".")])
def test_a_choice_is_compared_with_its_outcome(capsys, said, value, end):
    predict("it", ["rank 0", "rank 3", "all the same"])
    said("it", "rank 3")
    outcome("it", value)
    assert capsys.readouterr().out.splitlines()[1] == f"it: you said rank 3, it is {value}{end}"


def test_each_wrong_prediction_has_a_reply_of_its_own(capsys, said):
    predict("bytes", ["data parallel", "tensor parallel", "pipeline"])
    predict("makespan", 20, 120)
    wrong = {"data parallel": "It sends every gradient.", "tensor parallel": "It sends in each layer."}
    replies = wrong | {"pipeline": "Not with such short sequences."}  # for a value that only the run will tell
    sides = {"too low": "The ranks wait, too.", "too high": "They overlap."}
    told = []
    for choice in ("data parallel", "tensor parallel", "pipeline"):
        said("bytes", choice)
        outcome("bytes", "pipeline", replies)
    for guess in (95, 97, 96):
        said("makespan", guess)
        outcome("makespan", 96, sides)
    told = [re.split(r"(?<=[a-z\d])\. ?", line, maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert told == [*wrong.values(), "", *sides.values(), ""]


def test_a_reply_to_what_cannot_be_chosen_is_refused():
    predict("bytes", ["data parallel", "pipeline"])
    predict("makespan", 20, 120)
    with pytest.raises(SettingError, match="replies to 'data', which cannot be chosen; possible: data parallel, pipel"):
        outcome("bytes", "pipeline", {"data": "It sends every gradient."})
    with pytest.raises(SettingError, match="replies to '95', which cannot be chosen; possible: too low, too high"):
        outcome("makespan", 96, {"95": "Nearly."})


def test_a_table_shows_the_predictions_as_they_were_at_their_outcomes(capsys, said):
    for name in ("one piece", "eight", "later", "skipped"):
        predict(name, 0, 120)
    said("one piece", 24)
    said("later", 7)
    outcome("one piece", 96)
    outcome("eight", 33)
    said("one piece", 96)
    said("eight", 33)
    capsys.readouterr()
    predictions()
    assert [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()] == [
        ["you said", "it is"],
        ["one piece", "24", "96", "72 too low"],
        ["eight", "–", "33"],
        ["later", "7", "–"],
        ["skipped", "–", "–"],
    ]


def test_a_cell_that_runs_again_keeps_the_prediction_unless_the_question_changed(capsys, said):
    predict("it", 0, 10)
    said("it", 7)
    predict("it", 0, 10)
    outcome("it", 7)
    assert "you said 7" in capsys.readouterr().out
    predict("it", 0, 20)
    outcome("it", 7)
    assert "you made no prediction." in capsys.readouterr().out


def test_a_page_without_ipywidgets_names_the_missing_package(capsys, monkeypatch):
    monkeypatch.setattr(prediction, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    predict("it", 0, 10)
    assert "it: your prediction, from 0 to 10?" in (told := capsys.readouterr().out)
    assert "ipywidgets is not installed: pip install 'ppedu[lab]'" in told


@pytest.fixture
def page(folder):
    """A real kernel: `run(source)` returns a cell's outputs; `move(kind, index)` moves a control, as a page does."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook()
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}})

    class Page:
        def run(self, source):
            notebook.cells.append(nbformat.v4.new_code_cell(source))
            return client.execute_cell(notebook.cells[-1], len(notebook.cells) - 1).outputs

        def move(self, kind, index):
            [model] = [key for key, state in client.widget_state.items() if state["_model_name"] == f"{kind}Model"]
            data = {"method": "update", "state": {"index": index}, "buffer_paths": []}
            message = client.kc.session.msg("comm_msg", {"comm_id": model, "data": data})
            client.kc.shell_channel.send(message)

    with client.setup_kernel():
        yield Page()


def test_moving_a_slider_or_choosing_makes_the_prediction(page):
    [slider, choice] = page.run(
        "from ppedu.notebook import *\npredict('one piece', 20, 120)\npredict('the longest wait', ['rank 0', 'rank 3'])"
    )
    assert slider.data["text/plain"] == "one piece: your prediction, from 20 to 120?"
    assert "application/vnd.jupyter.widget-view+json" in slider.data and "text/html" not in choice.data
    results = "outcome('one piece', 96)\noutcome('the longest wait', 'rank 3')"
    for answer, before in zip(("96", "rank 3"), page.run(results), strict=True):
        assert "you made no prediction." in before.data["text/plain"], "Run All makes none"
        assert answer not in before.data["text/plain"]
        summary, folded = before.data["text/html"].split("</summary>")
        assert (
            summary.startswith("<details><summary>")
            and answer not in summary
            and folded == f"<div>It is {answer}.</div></details>"
        )
    page.move("SelectionSlider", 1)
    page.move("RadioButtons", 1)
    slid, chosen = page.run(results)
    assert slid.data["text/plain"] == "one piece: you said 20, it is 96: 76 too low."
    assert chosen.data["text/plain"] == "the longest wait: you said rank 3, it is rank 3: right."
    assert "<circle" in slid.data["text/html"] and "<svg" not in chosen.data["text/html"]
    [table] = page.run("predictions()")
    assert "<td" in table.data["text/html"] and re.search(r"one piece +20 +96 +76 too low", table.data["text/plain"])
    page.move("SelectionSlider", 0)
    page.run("predict('one piece', 20, 120)")
    assert "made no prediction" in page.run("outcome('one piece', 96)")[0].data["text/plain"], "it can be taken back"
    page.run("import os; os.environ['PPEDU_STILL'] = '1'")
    [closed] = page.run("predict('one piece', 20, 120)")
    assert closed.data["text/plain"] == "one piece: your prediction, from 20 to 120?"
    assert "Run this cell to choose." in closed.data["text/html"]


def test_stops_with_equal_labels_are_different_predictions():
    asked = prediction._asked("it", 1, 1.01, 1e-5)
    shown = prediction._control("it", asked)["application/vnd.jupyter.widget-view+json"]
    [_, slider, _] = widget._instances[shown["model_id"]].children
    for place, value in ((1, 1), (2, 1.00001), (0, None)):
        slider.index = place
        assert asked.value == value
