"""Questions in TOML files, and the command `plan`."""

import sys

import pytest

import ppedu as pp
from ppedu.cli.main import main
from ppedu.planning.question import EXAMPLE, read

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought tomllib")


def test_the_example_is_planned(tmp_path, capsys):
    (tmp_path / "model.toml").write_text(EXAMPLE + '\nschedules = ["1f1b", "zb-v"]\n')
    csv, page = tmp_path / "best.csv", tmp_path / "best.html"
    assert main(["plan", str(tmp_path / "model.toml"), "--torch", str(csv), "--html", str(page)]) == 0
    question = read(tmp_path / "model.toml")
    assert [piece.forward for piece in question["model"].pieces] == [0.5, *[12] * 32, 29]
    best = pp.plan(**question).best
    assert f"best: {best.name}" in capsys.readouterr().out
    assert csv.read_text() == pp.export.to_torch(best.schedule)
    assert "zb-v" in page.read_text()


def test_published_names(tmp_path):
    (tmp_path / "x.toml").write_text('model = "llama-3-8b"\nmachine = "h100"\n[plan]\nranks = 4\nsequence = 2048\n')
    assert read(tmp_path / "x.toml") == {"model": "llama-3-8b", "machine": "h100", "ranks": 4, "sequence": 2048}
    (tmp_path / "x.toml").write_text(
        "[model]\nlayers = 2\nwidth = 64\nheads = 4\nvocabulary = 97\n[machine]\nmemory = 1e9\n[plan]\nranks = 2\n"
    )
    assert read(tmp_path / "x.toml")["model"] == pp.Model(2, 64, 4, 97)


TABLES = "[model]\n{}\n[machine]\n{}\n[plan]\n{}\n"
WRONG = {
    "no such file": (None, "cannot read"),
    "not TOML": ("model =", "is not TOML"),
    "a table is missing": ("[model]\nlayers = 2\n", "must have the tables model, machine and plan"),
    "an unknown size": (TABLES.format("depth = 3", "memory = 1", "ranks = 2"), "unexpected keyword argument 'depth'"),
    "an unknown machine": (
        TABLES.format("forward = [1, 2]", "ram = 1", "ranks = 2"),
        "unexpected keyword argument 'ram'",
    ),
    "a wrong number": (TABLES.format("forward = [1, -2]", "memory = 1", "ranks = 2"), "numbers of at least 0"),
    "layers in quotes": (
        TABLES.format('layers = "32"\nforward = [1, 2, 3]', "memory = 1", "ranks = 2"),
        "layers must be",
    ),
    "a machine as a number": ("model = 'gpt2'\nmachine = 5\n[plan]\nranks = 2\n", "machine is a table or a name in"),
    "a piece too few": (
        TABLES.format("forward = [1]", "memory = 1e9", "ranks = 2\nmicrobatches = 4"),
        "2 ranks are more than the 1 piece of the model",
    ),
    "no ranks": (TABLES.format("forward = [1, 2]", "memory = 1e9", "microbatches = 4"), "'ranks'"),
    "an unknown option": (TABLES.format("forward = [1, 2]", "memory = 1e9", "ranks = 2\ncolor = 1"), "'color'"),
    "it does not fit": (
        TABLES.format("forward = [1, 2]\nweights = 1000000", "memory = 1e6", "ranks = 2\nmicrobatches = 4"),
        "nothing fits",
    ),
}


@pytest.mark.parametrize(("text", "reason"), WRONG.values(), ids=WRONG)
def test_wrong_questions(tmp_path, capsys, text, reason):
    if text is not None:
        (tmp_path / "x.toml").write_text(text)
    assert main(["plan", str(tmp_path / "x.toml")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ppedu: ") and reason in error
