"""Values that a notebook and its ranks exchange, without a kernel: saved scripts, invalid arguments."""

import __future__

import pickle

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ppedu as pp
from ppedu.core import SettingError
from ppedu.launch.exchange import FOLDER, LIVE_FILE, with_inputs

FUTURE = st.sampled_from(["from __future__ import annotations", "from __future__ import (annotations,\n  division)"])
END = st.sampled_from(["\n", ";\n", "; ", "  # why é\n", "\n\n# é\n"])


@given(
    docstring=st.sampled_from([None, "'doc é'", '"""a\nb"""']),
    futures=st.lists(FUTURE, max_size=3),
    ends=st.lists(END, min_size=4, max_size=4),
    before=st.sampled_from(["", "\n\n", "# é\n"]),
)
def test_a_saved_cell_loads_its_inputs_before_its_own_lines(tmp_path_factory, docstring, futures, ends, before):
    folder = tmp_path_factory.mktemp("saved")
    (folder / "x.inputs").write_bytes(pickle.dumps({"size": 5, "name": "é"}))
    head = [] if docstring is None else [docstring]
    cell = before + "".join(map("".join, zip([*head, *futures], ends, strict=False))) + "made: nowhere = [size, name]\n"
    is_legal = not futures or "annotations" in cell
    assert is_legal
    if not futures:
        cell = cell.replace("made: nowhere", "made")
    script = with_inputs(cell, ["size", "name"], str(folder / "x.inputs"))
    code = compile(script, "script", "exec", dont_inherit=True)
    alone = compile(cell, "cell", "exec", dont_inherit=True)
    flag = __future__.annotations.compiler_flag
    assert code.co_flags & flag == alone.co_flags & flag
    found, expected = {}, {"size": 5, "name": "é"}
    exec(code, found)
    exec(alone, expected)
    assert (found["made"], found.get("__doc__")) == (expected["made"], expected.get("__doc__"))


TIMELINE = pp.simulate(pp.schedule("1f1b", 1, 2))


@pytest.mark.parametrize("where", ["in a cell", "elsewhere"])
@pytest.mark.parametrize(
    ("losses", "timeline", "steps"),
    [
        *((losses, TIMELINE, 3) for losses in (None, 5, "abc", [None], ["x"], [[1]], [1j], [10**400], {"a": 1})),
        *((losses, TIMELINE, 3) for losses in ([], (), numpy.zeros(0), numpy.zeros((2, 2)), torch.ones(2, 2))),
        *(([1.0], timeline, 3) for timeline in (None, 5, "t", TIMELINE.schedule, Exception)),
        *(([1.0], TIMELINE, steps) for steps in (None, 0, -1, 2.5, "3", True, float("nan"), [3])),
    ],
)
def test_invalid_arguments_of_show_live_are_refused(tmp_path, monkeypatch, losses, timeline, steps, where):
    if where == "in a cell":
        monkeypatch.setenv(FOLDER, str(tmp_path))
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingError):
        pp.show_live(losses, timeline, steps)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("losses", [[1], (1.5, float("nan")), numpy.ones(3), [numpy.float32(1)], torch.ones(2)])
def test_losses_may_be_any_kind_of_number(tmp_path, monkeypatch, capsys, losses):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    pp.show_live(losses, TIMELINE, numpy.int64(len(losses)))
    assert [file.name for file in tmp_path.iterdir()] == [LIVE_FILE]


class Odd:
    def __reduce__(self):
        raise KeyError("odd")


@pytest.mark.parametrize(
    "value",
    [iter(lambda: 0, 1), open, lambda: 0, Odd(), [[Odd()]]],
    ids=["iterator", "builtin", "lambda", "object", "nested"],
)
def test_a_value_that_cannot_be_pickled_is_refused(tmp_path, monkeypatch, value):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    if value is open:
        pp.give_back(value)
        assert pickle.loads((tmp_path / "0.result").read_bytes()) is open
    else:
        with pytest.raises(SettingError, match="the value that rank 0 gives back cannot be pickled"):
            pp.give_back(value)
        assert not any(tmp_path.iterdir())
