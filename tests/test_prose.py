"""`tools/prose.py` finds the constructions that the style avoids, at their line, and leaves plain English alone."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools/prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "sentence",
    [
        "The peer is told.",
        "If it fails, it says so.",
        "What a rank still needs.",
        "Who waits is stopped.",
        "Nobody reads it.",
        "3 is no rank.",
        "Of problems it has none.",
        "It waits until the message is there.",
        "A form for people.",
        "The number is taken to be 2.",
        "`check` is the way in.",
        "Returns so many ranks.",
        "A list of as many as there are.",
        "It waits for ever.",
        "W is put off.",
        "Messages under way.",
        "A gradient comes by.",
        "Mend the loop.",
        "Each room imports only from those above.",
        "This stage and its like.",
        "The words, in short.",
        "Warm-up and drain.",
        "PATIENCE",
        "Every rank, for itself, is right.",
        "A list of what was sent.",
    ],
)
def test_a_construction_to_avoid_is_found_once(prose, sentence):
    assert len(list(prose.findings(sentence))) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no rank 3, and the order is no longer legal.",
        "There is room for one more microbatch.",
        "What does this rank wait for? Who sends it?",
        "What to remember",
        "What I'd pick, and why",
        "The colours can be told apart.",
        "The value is None.",
        "A recommendation that depends on the floor of m / p.",
        "House style",
    ],
)
def test_plain_english_is_left_alone(prose, sentence):
    assert not list(prose.findings(sentence))


def test_comments_docstrings_messages_and_names_are_read_with_their_lines(prose, tmp_path):
    file = tmp_path / "module.py"
    lines = [
        '"""Right.',
        "",
        "Nobody.",
        '"""',
        "# Right, and",
        "# under",
        "# way.",
        "patience = 1",
        'f"{patience} is no number"',
        'f"{patience} is no {x}"',
    ]
    file.write_text("\n".join(lines))
    found = [(first + line, phrase) for _, first, text in prose.texts(file) for line, phrase, _ in prose.findings(text)]
    assert sorted(found) == [(3, "Nobody"), (6, "under way"), (8, "patience"), (9, "is no number"), (10, "is no")]


def test_cells_of_a_notebook_are_read_without_their_outputs(prose, tmp_path):
    file = tmp_path / "lesson.ipynb"
    cells = [{"source": ["# Right\n", "Nobody."]}, {"source": ["x = 1  # for ever"], "outputs": [{"text": "in short"}]}]
    file.write_text(json.dumps({"cells": cells}))
    found = [(cell, phrase) for cell, _, text in prose.texts(file) for _, phrase, _ in prose.findings(text)]
    assert found == [("cell 0:", "Nobody"), ("cell 1:", "for ever")]


def test_the_examples_of_the_style_guide_are_found_and_their_replacements_are_not(prose):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = guide.partition("| instead of | write |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) >= 8
    for avoid, write in (row.strip("| ").split(" | ") for row in rows):
        assert all(list(prose.findings(example)) for example in avoid.split(";")), avoid
        assert not list(prose.findings(write)), write
