"""The text to train on, and its batches."""

import string
from itertools import pairwise
from pydoc_data import topics

import pytest
import torch

from ppedu import PipelineError, SettingError
from ppedu.course.training.data import RHYME, Text


@pytest.fixture(scope="module")
def default():
    return Text()


def test_the_default_needs_no_file_and_is_long(default):
    assert len(default.tokens) > 300_000 and 50 < len(default.characters) < 300


@pytest.mark.parametrize("other", ["", "$`", "“Straße” — 20 °C …", "\t\r\x0b\x7f\U0001f40d"])
def test_the_default_alphabet_does_not_depend_on_the_topics(monkeypatch, default, other):
    monkeypatch.setattr(topics, "topics", {"some": "topic: {1, 2}\n", "other": other})
    text = Text()
    assert text.characters == default.characters and len(text.tokens) == len(other) + len("\ntopic: {1, 2}\n")
    printable = set(string.ascii_letters + string.digits + string.punctuation + " \n")
    assert set(text.characters[:-1]) == printable and text.characters[-1] not in printable
    told = "".join(text.characters[token] for token in text.tokens)
    for mine, theirs in zip(told, f"{other}\ntopic: {{1, 2}}\n", strict=True):
        assert mine == (theirs if theirs in printable else text.characters[-1])


def test_tokens_are_the_characters_of_the_file(tmp_path):
    (tmp_path / "text").write_text("žába a báseň\n", encoding="utf-8")
    text = Text(tmp_path / "text")
    assert "".join(text.characters[token] for token in text.tokens) == "žába a báseň\n"
    assert len(set(text.characters)) == len(text.characters)


def test_the_rhyme_is_short_and_regular():
    text = Text(RHYME)
    verses = "".join(text.characters[token] for token in text.tokens).rstrip().split("\n\n")
    assert len(verses) == 11 and len(text.characters) < 30
    for before, verse in pairwise(verses):
        lines, previous = verse.splitlines(), before.removeprefix("This is ").splitlines()
        assert lines[1].endswith(previous[0]) and lines[2:] == previous[1:]


def test_targets_are_the_inputs_shifted_by_one(default):
    inputs, targets = default.batch(5, 20, seed=1)
    assert inputs.shape == targets.shape == (5, 20) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_excerpts_are_part_of_the_text(default):
    whole = "".join(default.characters[token] for token in default.tokens.tolist())
    for row in torch.cat(default.batch(8, 30, seed=2)):
        assert "".join(default.characters[token] for token in row) in whole


def test_the_seed_determines_the_batch(default):
    once, again, other = (torch.stack(default.batch(4, 16, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(once, again) and not torch.equal(once, other)


def test_a_batch_does_not_change_the_random_state(default):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    default.batch(4, 16, seed=9)
    assert torch.equal(torch.rand(4), expected)


def test_an_excerpt_may_be_the_whole_text_except_its_last_character(tmp_path):
    (tmp_path / "text").write_text("abc")
    inputs, targets = Text(tmp_path / "text").batch(2, 2, seed=0)
    assert inputs.tolist() == [[0, 1]] * 2 and targets.tolist() == [[1, 2]] * 2


@pytest.mark.parametrize("length", [3, 64])
def test_a_text_too_short_for_an_excerpt_is_refused(tmp_path, length):
    (tmp_path / "text").write_text("abc")
    with pytest.raises(
        SettingError, match=f"excerpts of {length} characters need a text of at least {length + 1}; this one has 3"
    ):
        Text(tmp_path / "text").batch(1, length, seed=0)


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "text").touch()
    with pytest.raises(SettingError, match="text' is empty"):
        Text(tmp_path / "text")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin").write_bytes("žába".encode("iso8859-2"))
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "latin"):
        with pytest.raises(PipelineError, match=f"cannot read the text '{path}'"):
            Text(str(path))
