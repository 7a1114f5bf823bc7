"""Certificates: what a learner has solved, with the answers as programs, so that an instructor can check them again.

A certificate is a JSON file. Its seal, a checksum, breaks when the file is edited. Anyone who reads this code can make
a new seal, so `check_certificate` does not rely on it: it runs every answer again. What cannot be computed again is the
learner's word: the name, hints and predictions. An answer runs in the process that judges it, and one that was written
to attack the judge is not stopped; it can be read in the file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from hashlib import sha256
from importlib.metadata import version
from io import BytesIO
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ppedu.core import ParseError, SettingError
from ppedu.core.files import opened, write_bytes, write_text
from ppedu.core.numeric import plural
from ppedu.course.exercises import EXERCISES, stars_by_exercise
from ppedu.course.exercises.feedback import has_page, publish
from ppedu.course.exercises.finale import cases
from ppedu.course.progress_file import KEPT, kept, recorded, stars

FORMAT = 1
PARTS: dict[str, type] = {"format": int, **dict.fromkeys(("name", "date", "version", "seal"), str)}
PARTS |= dict.fromkeys(("exercises", "predictions", "finale"), dict)

# Run in a fresh process. The answer's own output goes nowhere, and the verdict carries a word that is drawn for it.
CHECK = """
import json, os, sys
exercise, program, word = json.load(sys.stdin)
verdict = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
from ppedu.course.exercises import find_fault
try:
    names = {"__name__": "answer"}
    exec(program, names)
    fault = find_fault(exercise, names["answer"])
    case = getattr(getattr(names["answer"], "case", None), "seed", None)
except BaseException as error:
    fault, case = f"{type(error).__name__}: {error}", None
print(json.dumps([word, fault, case]), file=verdict, flush=True)
os._exit(0)
"""


def certificate(name: str, path: str | os.PathLike[str] = "certificate.json") -> None:
    """Write a certificate of the exercises solved in this folder, and its picture as an SVG file of the same name.

    In a notebook the picture is shown, too. If nothing is solved yet, or `name` is empty, a sentence is printed.

    Raises:
        SettingError: `name` is not text, or `path` does not end in .json.
        PipelineError: A file cannot be written.
    """
    if not isinstance(name, str):
        raise SettingError(f'a certificate has a name, as in certificate("Ada Lovelace"); got {name!r}')
    target = Path(path)
    if target.suffix != ".json":
        raise SettingError(f"a certificate is a .json file; got {str(path)!r}")
    content = _content(name.strip())
    solved = {number: each for number, each in content["exercises"].items() if each["stars"]}
    if not solved or not name.strip():
        print(f"Not yet: {'give your name' if solved else 'nothing is solved in this folder so far'}.")
        return
    write_text(target, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    svg = _picture(content)
    write_bytes(target.with_suffix(".svg"), svg)
    if has_page():
        publish({"image/svg+xml": svg.decode(), "text/plain": f"the certificate of {content['name']}"})
    unverifiable = [number for number, each in solved.items() if "program" not in each]
    print(
        f"{target} and {target.with_suffix('.svg')} written: {plural(len(solved), 'exercise')}"
        + "".join(f"\nnot verifiable: {number}, {solved[number]['not verifiable']}" for number in unverifiable)
    )


def _content(name: str) -> dict[str, Any]:
    known, events = kept(), recorded()
    exercises: dict[str, Any] = {exercise: {"stars": 0} for exercise in EXERCISES}
    for exercise, earned in stars_by_exercise(events).items():
        hints = sum(event.startswith(f"{exercise} hint") for event in events)
        lost = {"not verifiable": f"its answer is not in {KEPT}; run its cell again"}
        exercises[exercise] = {"stars": earned, "hints": hints, **known["answers"].get(exercise, lost)}
    content: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "date": str(date.today()),
        "version": version("ppedu"),
        "exercises": exercises,
        "predictions": known["predictions"],
        "finale": {"cases": cases()},
    }
    return {**content, "seal": _seal(content)}


def _seal(content: dict[str, Any]) -> str:
    unsealed = {part: value for part, value in content.items() if part != "seal"}
    return sha256(json.dumps(unsealed, sort_keys=True).encode()).hexdigest()


def _picture(content: dict[str, Any]) -> bytes:
    """Return the certificate as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.set(xlim=(0, 12), ylim=(0, 12))
    ax.axis("off")
    gray: dict[str, Any] = {"color": "#666666", "ha": "center"}
    ax.text(6, 11.2, "Pipeline parallelism, by hand", size=13, **gray)
    ax.text(6, 9.9, content["name"], size=26, ha="center", color="#1d4e80", parse_math=False)
    earned = {exercise: each["stars"] for exercise, each in content["exercises"].items()}
    rows = [(head, list(names)) for head, names in groupby(earned, key=lambda exercise: exercise[:2])]
    for place, (lesson, names) in enumerate(rows):
        row, column = divmod(place, 4)
        text = "  ".join(stars(earned[each], 2) for each in names)
        ax.text(0.2 + 3 * column, 8.4 - 1.5 * row, f"lesson {int(lesson)}", size=8, color="#666666")
        ax.text(0.2 + 3 * column, 7.8 - 1.5 * row, text, size=9, color="#c2701c")
    right = sum(bool(each.get("right")) for each in content["predictions"].values())
    solved = sum(map(bool, earned.values()))
    made = plural(len(content["predictions"]), "prediction")
    ax.text(6, 1.6, f"{solved} of {len(earned)} exercises; {right} right of {made}; ppedu {content['version']}", **gray)
    ax.text(6, 0.9, f"{content['date']} · checked with: ppedu certificate check FILE", size=9, **gray)
    ax.text(6, 0.3, content["seal"][:16], size=8, family="monospace", **gray)
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


class Line(NamedTuple):
    """A line of a report.

    Args:
        holds: None if it cannot be known.
    """

    holds: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "NO", None: "? "}[self.holds]
        return f"{mark}  {self.text}"


def check_certificate(path: str | os.PathLike[str], seconds: float = 60) -> Iterator[Line]:
    """Yield what holds of a certificate: its form, its seal, and each answer, which runs again in a fresh process.

    Answers are programs that learners wrote. Each runs as this user, in an empty folder; read them first if you do not
    know the learner.

    Args:
        seconds: The time limit for an answer.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: It is not a certificate.
    """
    content = _read(path)
    yield Line(True, f"{content['name']}, {content['date']}, ppedu {content['version']}")
    if content["version"] != version("ppedu"):
        yield Line(None, f"written with another release; ppedu {version('ppedu')} may judge otherwise")
    sealed = content["seal"] == _seal(content)
    yield Line(sealed, "the seal is whole" if sealed else "the seal is broken: the file was edited")
    for exercise, entry in content["exercises"].items():
        if exercise not in EXERCISES:
            yield Line(False, f"{exercise}: there is no such exercise")
        elif entry.get("stars"):
            yield _verdict(exercise, entry, content["finale"], seconds)
        elif entry.get("stars") != 0:
            yield Line(False, f"{exercise}: it has no number of stars")
    if missing := [exercise for exercise in EXERCISES if exercise not in content["exercises"]]:
        yield Line(False, f"missing: {', '.join(missing)}")
    right = sum(bool(isinstance(each, dict) and each.get("right")) for each in content["predictions"].values())
    made = plural(len(content["predictions"]), "prediction")
    yield Line(None, f"{made}, {right} of them right, and the hints: the learner's word")


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    with opened(path) as file:
        text = file.read()
    try:
        content: dict[str, Any] = json.loads(text)
    except ValueError:
        raise ParseError(f"{str(path)!r} is not a certificate: it is not JSON") from None
    for part, kind in PARTS.items():
        if not isinstance(content, dict) or not isinstance(content.get(part), kind):
            raise ParseError(f"{str(path)!r} is not a whole certificate: {part!r} is missing or damaged")
    if content["format"] != FORMAT:
        raise ParseError(f"{str(path)!r} has the format {content['format']}; this ppedu reads {FORMAT}")
    if not all(isinstance(each, dict) for each in content["exercises"].values()):
        raise ParseError(f"{str(path)!r} is not a whole certificate: an exercise is damaged")
    return content


def _verdict(exercise: str, entry: dict[str, Any], finale: dict[str, Any], seconds: float) -> Line:
    hints = entry.get("hints")
    if type(hints) is not int or entry["stars"] != (1 if hints else 2):
        return Line(False, f"{exercise}: {entry['stars']} stars with {hints} hints; it is 2 without a hint, else 1")
    head = f"{exercise} {stars(entry['stars'], 2)}"
    if why := entry.get("not verifiable"):
        return Line(None, f"{head}: not verifiable: {why}")
    if not isinstance(source := entry.get("program"), str):
        return Line(False, f"{head}: its answer is missing")
    fault, case = _run(exercise, source, seconds)
    if fault is None and case is not None and case not in finale.get("cases", []):
        fault = f"it solves the case {case}, which was not drawn in this folder"
    return Line(fault is None, f"{head}: {fault or 'right'}")


def _run(exercise: str, source: str, seconds: float) -> tuple[str | None, int | None]:
    """Check an answer in a fresh process, and return what is wrong with it, and the case that it is about, if any."""
    word = token_hex()
    with TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", CHECK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
            text=True,
        )
        try:
            said, _ = process.communicate(json.dumps([exercise, source, word]), timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it takes longer than {seconds:g} s", None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
    with suppress(ValueError, IndexError):
        given, fault, case = json.loads(said.splitlines()[-1])
        if given == word:
            return fault and re.sub(r"\s+", " ", str(fault)), case
    return "its process ended before it was checked", None
