"""Certificates: answers as programs that run elsewhere, and forgeries that are found out."""

import json
import math
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu.cli.main import main
from ppedu.course.certificates import _run, _seal, check_certificate
from ppedu.course.exercises import EXERCISES
from ppedu.course.exercises.finale import EVENT, Case, cases, finale
from ppedu.course.exercises.programs import UnwritableError, program
from ppedu.notebook import certificate, check_answer, record

ONE = 1


def less(ranks):
    return ranks - ONE


def bubble(p, m):
    """A right answer to 03.1 that uses another function, and a number."""
    return Fraction(less(p), math.comb(m + less(p), 1))


waiting = object()  # which cannot be written


def share(p, m):
    """A right answer to 03.1 with a local variable that is something else in the notebook."""
    waiting = p - 1
    return Fraction(waiting, m + waiting)


PRETEND = """
import os
for file in range(1, 9):
    try: os.write(file, b'["right", null, null]\\n')
    except OSError: pass
os._exit(0)
"""
WRONG = "def answer(p, m):\n    return (p - 1) / m\n"


def ran(source):
    names = {"__name__": "answer"}
    exec(source, names)
    return names["answer"]


def test_a_function_is_written_with_all_that_it_uses():
    assert ran(program(bubble))(4, 8) == ran(program(share))(4, 8) == Fraction(3, 11)
    assert ran(program(lambda p, m: less(p) / m))(4, 8) == 3 / 8


@pytest.mark.parametrize(
    "value",
    [
        (1, 2.5, "text", None, True, float("inf"), Fraction(1, 3)),
        {"a": [pp.F(0, 1)], (0, 1): {2}},
        pp.schedule("dualpipe", 4, 8),
        pp.lower(pp.schedule("zb-v", 2, 3)),
        pp.Costs(forward=[1, 2], latency={(0, 1): 0.5, (1, 0): 1}, unit="s"),
        Case(5).reveal(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_written_so_that_it_comes_back(value):
    assert ran(program(value)) == value


def test_an_answer_that_cannot_be_written_is_refused_with_the_reason():
    def made():
        kept = 3
        return lambda p, m: kept

    for answer, reason in (
        (made(), "was made by another function"),
        (object(), "`object` cannot be written as text"),
        (eval("lambda p: p"), "the source of `answer` is not known"),
    ):
        with pytest.raises(UnwritableError, match=reason):
            program(answer)


@pytest.fixture
def written(folder, capsys):
    """A certificate with two answers, and one that cannot be verified."""
    record(f"{EVENT} 7")
    check_answer("03.1", bubble)
    check_answer("16.1", finale().reveal())
    (folder / "progress.txt").open("a").write("15.1 solved ★★ on 2026-01-01\n")
    certificate("Ada Lovelace")
    assert "3 exercises\nnot verifiable: 15.1, its answer is not in answers.json" in capsys.readouterr().out
    return folder / "certificate.json"


def lines(path, seconds=60):
    return {line.text: line.holds for line in check_certificate(path, seconds)}


@pytest.mark.programs
def test_what_was_solved_holds_and_what_was_forged_does_not(written, capsys):
    content = json.loads(written.read_text())
    assert content["name"] == "Ada Lovelace" and set(content["exercises"]) == set(EXERCISES)
    assert (written.parent / "certificate.svg").read_text().count("<svg") == 1
    honest = lines(written)
    assert honest["the seal is whole"] and honest["03.1 ★★: right"] and honest["16.1 ★★: right"]
    assert honest["15.1 ★★: not verifiable: its answer is not in answers.json; run its cell again"] is None
    assert False not in honest.values()

    entries = content["exercises"]
    entries["03.1"]["program"] = WRONG
    entries["05.1"] = {"stars": 2, "hints": 0}
    entries["05.2"] = {"stars": 2, "hints": 3}
    entries["99.1"] = {"stars": 2, "hints": 0}
    del entries["01.1"]
    content["finale"]["cases"] = [cases()[0] + 1]
    written.write_text(json.dumps(content))
    forged = lines(written)
    assert not forged["the seal is broken: the file was edited"]
    assert not forged["05.1 ★★: its answer is missing"]
    assert not forged["05.2: 2 stars with 3 hints; it is 2 without a hint, else 1"]
    assert not forged["99.1: there is no such exercise"] and not forged["missing: 01.1"]
    assert not forged[f"16.1 ★★: it solves the case {cases()[0]}, which was not drawn in this folder"]
    [wrong] = [text for text in forged if text.startswith("03.1")]
    assert "with 4 ranks and 8 microbatches" in wrong and not forged[wrong]

    for each in list(entries):
        entries[each] = {"stars": 0} if each != "05.1" else entries[each]
    content["seal"] = _seal(content)
    written.write_text(json.dumps(content))
    assert main(["certificate", "check", str(written)]) == 1
    out = capsys.readouterr().out
    assert "ok  the seal is whole" in out and "NO  05.1 ★★: its answer is missing" in out, "a new seal does not help"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("while True: pass", "it takes longer than 2 s"),
        (PRETEND, "its process ended before it was checked"),
        ("raise SystemExit", "SystemExit: "),
    ],
)
def test_an_answer_that_does_not_come_to_an_end_is_found(source, fault):
    assert _run("03.1", source, 2 if "longer" in fault else 60) == (fault, None)


def test_nothing_is_written_before_anything_is_solved(folder, capsys):
    certificate("Ada")
    assert capsys.readouterr().out == "Not yet: nothing is solved in this folder so far.\n"
    check_answer("03.1", bubble)
    capsys.readouterr()
    certificate("")
    assert capsys.readouterr().out == "Not yet: give your name.\n"
    assert not (folder / "certificate.json").exists()
    with pytest.raises(pp.SettingError, match=r"a certificate is a \.json file"):
        certificate("Ada", "c.pdf")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "it is not JSON"), ("[]", "'format' is missing"), ('{"format": 1}', "'name' is missing")],
)
def test_a_file_that_is_not_a_certificate_is_refused(folder, capsys, text, reason):
    (folder / "c.json").write_text(text)
    assert main(["certificate", "check", "c.json"]) == 1
    assert reason in capsys.readouterr().err
