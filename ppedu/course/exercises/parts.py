"""The learner's own pipeline: the file `my_pipeline.py`, which grows by a part in several lessons.

The file is the truth. A `%%my_pipeline 02.3` cell checks its part together with the rest of the file, on real ranks,
and puts it into the file once it is right. Parts that the learner has not written are filled in with the course's
version, from the file of the same name in this folder. A comment line begins each part. In the course's version, a
later part replaces an earlier one that has the same title.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ppedu.core import RankError, SettingError
from ppedu.course.exercises.common import Exercise
from ppedu.launch.exchange import FOLDER, new_folder, read_results
from ppedu.launch.failure import DEAD_PEER
from ppedu.launch.hang import Location, describe_hang
from ppedu.launch.pool import local_pool

FILE = Path("my_pipeline.py")  # next to the notebook
COURSE = Path(__file__).with_name("my_pipeline.py")
MARK = re.compile(r"^# ---- (.+) \(exercise (\d\d\.\d)\)\n", re.MULTILINE)
GIVEN = "# The course's version. Yours replaces it once it is right.\n"
LIMIT = 5.0  # seconds that one case of a check may take, of which most take milliseconds
TIMEOUT = 60  # seconds for the whole check
MOST_PRINTED = 2000  # characters of the learner's own output


class Part(NamedTuple):
    """A part of the file: its title, the number of its exercise, and its text."""

    title: str
    number: str
    text: str

    @property
    def given(self) -> bool:
        """Whether it is the course's version, unchanged."""
        return any(self.text.strip() == (GIVEN + each.text).strip() for each in course())


def split(source: str) -> list[Part]:
    """Return the parts of a file. The first has no title: it is the text before the first mark."""
    head, *rest = MARK.split(source)
    return [Part("", "00.0", head), *(Part(*each) for each in zip(rest[::3], rest[1::3], rest[2::3], strict=True))]


def join(parts: list[Part]) -> str:
    """Return the text of a file with these parts."""
    marks = [f"# ---- {part.title} (exercise {part.number})\n" if part.title else "" for part in parts]
    texts = [mark + part.text.strip() for mark, part in zip(marks, parts, strict=True)]
    return "\n\n\n".join(filter(None, texts)) + "\n"


def course() -> list[Part]:
    """Return the parts of the course's version, in the order of the lessons."""
    return split(COURSE.read_text(encoding="utf-8"))


def own() -> list[Part]:
    """Return the parts of the learner's file.

    Raises:
        SettingError: it cannot be read, or is not Python.
    """
    try:
        source = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
        ast.parse(source)
    except SyntaxError as error:
        raise SettingError(
            f"{FILE} is not valid Python: line {error.lineno}: {error.msg}. Correct it in an editor; or rename the "
            "file, and a new one is begun"
        ) from None
    except (OSError, ValueError) as error:
        raise SettingError(f"{FILE} cannot be read: {error}") from None
    return split(source)


def filled(parts: list[Part], number: str) -> list[Part]:
    """Return the parts of a file with the course's version of all that lessons up to exercise `number` add to it.

    The learner's parts stay as they are, and so does all text that the course does not know.
    """
    here = {part.title: part for part in parts}
    for each in course():
        before = here.get(each.title)
        missing = before is None or not before.text.strip() or (before.given and before.number < each.number)
        if missing and each.number <= number:
            here[each.title] = each._replace(text=(GIVEN if each.title else "") + each.text)
    order = list(dict.fromkeys(each.title for each in course()))
    return sorted(here.values(), key=lambda part: order.index(part.title) if part.title in order else len(order))


def with_part(parts: list[Part], new: Part) -> list[Part]:
    """Return the parts of a file with one of them replaced."""
    return [new if part.title == new.title else part for part in parts]


def part_of(number: str) -> Part:
    """Return the course's version of a part.

    Raises:
        SettingError: no exercise with this number adds a part to the file.
    """
    found = {part.number: part for part in reversed(course()) if part.title}
    if number not in found:
        raise SettingError(f"no part of {FILE} has the number {number!r}; the numbers are {', '.join(sorted(found))}")
    return found[number]


def exercise(number: str, praise: str, hints: tuple[str, ...]) -> Exercise:
    """Return the exercise that adds a part to the file. Its answer is the text of the part."""
    return Exercise(lambda answer: _fault(number, answer), praise, hints=hints)


def _fault(number: str, answer: object) -> str | None:
    """Explain what is wrong with a part, by itself or together with the rest of the learner's file."""
    if not isinstance(answer, str):
        raise SettingError(f"write the part into a cell that begins with %%my_pipeline {number}; got {answer!r}")
    part = part_of(number)
    if fault := _not_finished(part, answer):
        return fault
    others = filled(own(), number)
    fault = _on_ranks(part._replace(text=answer), others)
    mine = [f"{each.title!r}" for each in others if each.title not in ("", part.title) and not each.given]
    if fault and mine and _on_ranks(part._replace(text=answer), filled([], number)) is None:
        return f"this part is right, but not together with your {' and '.join(mine)} in {FILE}: {fault}"
    return fault


def _not_finished(part: Part, answer: str) -> str | None:
    """Explain why a part cannot run: it is not Python, a function is missing, or has `...` in it."""
    try:
        written = [function.name for function in _functions(answer)]
    except SyntaxError as error:
        source = f"`{error.text.strip()}`: " if error.text and error.text.strip() else ""
        line = (error.lineno or 0) + 1  # the first is the magic
        return f"line {line} of the cell is not valid Python: {source}{error.msg}"
    except ValueError as error:  # a null character
        return f"the cell is not valid Python: {error}"
    wanted = [function.name for function in _functions(part.text)]
    if missing := [name for name in wanted if name not in written]:
        names = ", ".join(f"`{name}`" for name in wanted)
        return f"the function `{missing[0]}` is missing; this part defines {names}"
    if place := gap(answer):
        return f"`{place}` still has `...` in it; write your lines in its place"
    return None


def gap(answer: str) -> str | None:
    """Return the first function that has `...` in place of a line or a value; None if all are complete."""
    try:
        functions = _functions(answer)
    except (SyntaxError, ValueError):
        return None
    for function in functions:
        values = [each.value for each in ast.walk(function) if isinstance(each, (ast.Expr, ast.Assign))]
        if any(isinstance(value, ast.Constant) and value.value is ... for value in values):
            return function.name
    return None


def _functions(source: str) -> list[ast.FunctionDef]:
    return [each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)]


def _on_ranks(part: Part, others: list[Part]) -> str | None:
    """Check a part, together with the others, on real ranks beside one process; explain the first fault."""
    from ppedu.course.exercises.check_part import CHECKS

    ranks, folder, printed = CHECKS[part.number].ranks, new_folder(), dict[int, bytes]()
    pool, failure = local_pool(), ""
    pool.make_folder(folder)
    try:
        Path(folder, FILE.name).write_text(join(with_part(others, part._replace(text=""))), encoding="utf-8")
        Path(folder, "cell.py").write_text(f"# %%my_pipeline {part.number}\n{part.text}\n", encoding="utf-8")
        try:
            pool.run(
                "ppedu.course.exercises.check_part",
                ranks,
                [part.number, str(folder), str(LIMIT)],
                module=True,
                timeout=TIMEOUT,
                folder=folder,
                environment={FOLDER: str(folder)},
                write=lambda rank, piece: printed.update({rank: printed.get(rank, b"") + piece}),
            )
        except RankError as error:
            failure = str(error)
        reports = read_results(folder, ranks) or [None] * ranks
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for rank, text in sorted(printed.items()):
        for line in text.decode(errors="replace").replace(f"{folder}/", "")[:MOST_PRINTED].splitlines():
            print(f"[{rank}] {line}")
    return _explained(reports, failure)


def _explained(reports: list[Any], failure: str) -> str | None:
    """Return the first fault of all ranks, None if they have succeeded.

    reports: of each rank, see `check_part`. failure: the error of the run, empty if there was no error.
    """
    if not failure:
        return None
    faults = sorted((each["time"], each["fault"]) for each in reports if each and "fault" in each)
    causes = [fault for _, fault in faults if not DEAD_PEER.search(fault)]
    waiting = [Location(*each["waits"]) for each in reports if each and "waits" in each]
    if causes:
        return str(causes[0])
    if waiting:
        lines = describe_hang(waiting, {rank for rank, each in enumerate(reports) if each == {}}).splitlines()
        return f"the ranks never end: {'; '.join(lines[len(waiting) :] + lines[: len(waiting)])}"
    return f"the ranks fail: {failure.splitlines()[0]}"
