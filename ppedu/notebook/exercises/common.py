"""What the exercises of several lessons use: `Exercise` itself, and ways to question a learner's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature, unwrap
from numbers import Real
from traceback import extract_tb
from typing import Any

from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.core.schedule import Schedule
from ppedu.core.timeline import Timeline
from ppedu.zoo.registry import Entry, build

Others = Sequence[tuple[Callable[..., Any], str]]  # well-known wrong answers, each with what it is instead


@dataclass(frozen=True)
class Exercise:
    """`wrong(answer)` gives the reason, or None if the answer is right; `reward(answer)` a timeline to draw."""

    wrong: Callable[[Any], str | None]
    praise: str
    reward: Callable[[Any], Timeline] | None = None


# Fewer, as many and more microbatches than ranks; the lesson's own case first.
CASES = [(4, 8), (1, 1), (2, 1), (4, 2), (3, 3), (5, 4), (8, 20)]


def require_function(answer: Any, *of: str) -> None:
    *first, last = of
    before = f"{', '.join(first)} and " if first else ""
    wanted = f"give a function of {before}{last}"
    if not callable(answer):
        raise SettingError(f"{wanted}, not {answer!r}")
    try:
        takes = signature(answer)
    except ValueError:  # some of Python's own do not tell
        raise SettingError(f"{wanted}, written by you; got {answer!r}") from None
    try:
        takes.bind(*of)
    except TypeError:
        raise SettingError(f"{wanted}; yours takes {' and '.join(takes.parameters) or 'nothing'}") from None


def with_sizes(ranks: int, microbatches: int, *others: str) -> str:
    *first, last = plural(ranks, "rank"), plural(microbatches, "microbatch"), *others
    return f"with {', '.join(first)} and {last}"


@contextmanager
def own_line(function: Any, case: str) -> Iterator[None]:
    """Report an error of the learner's `function` with the learner's own line, in place of a traceback.

    case: what the function was tried on, such as "with 4 ranks and 8 microbatches"; it begins the sentence.

    Raises:
        SettingError: the function fails in here.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        fails = f"{case} your function fails{_line_of(function, error)}".lstrip()
        raise SettingError(f"{fails}: {type(error).__name__}{f': {error}' if str(error) else ''}") from None


def _line_of(function: Any, error: Exception) -> str:
    """Where in the learner's function the error arose; nothing if the function is not written in Python."""
    written = unwrap(function)
    code = getattr(written, "__code__", None) or getattr(type(written).__call__, "__code__", None)
    own = [each for each in extract_tb(error.__traceback__) if code and each.filename == code.co_filename]
    if not own:
        return ""
    source = str(own[-1].line).partition("  #")[0].strip()
    return f" at line {own[-1].lineno}" + (f", `{source}`" if source else "")


def call(function: Any, case: str, *given: Any) -> Any:
    """Return what a learner's function returns."""
    with own_line(function, case):
        return function(*given)


def ask(function: Any, case: str, *sizes: Any) -> Any:
    """Return the number that a learner's function returns.

    Raises:
        SettingError: it returns something else, or fails.
    """
    answer = call(function, case, *sizes)
    if isinstance(answer, bool) or not isinstance(answer, Real):
        forgotten = "; is there a return?" if answer is None else ""
        raise SettingError(f"{case} your function gives {answer!r}, where a number is wanted{forgotten}")
    if too_large(answer):
        raise SettingError(f"{case} your function gives a number of more than 300 digits")
    return answer


def too_large(number: Any) -> bool:
    """Return whether a number is too large for a float, as 10**400 is; then it cannot be compared with one."""
    try:
        float(number)
    except OverflowError:
        return True
    return False


def unlike(number: Any, other: Any) -> str:
    """The number as people write it, but with all its digits where it would look like the other."""
    return str(number) if pretty(number) == pretty(other) else pretty(number)


def equal(one: Any, other: Any) -> bool:
    return bool(abs(one - other) < 1e-9)


def listed(values: Any) -> str:
    return ", ".join(map(str, values))


def learners(generator: Any, ranks: int, microbatches: int) -> Schedule:
    with own_line(generator, with_sizes(ranks, microbatches)):
        return build("yours", Entry(generator, "loop"), ranks, microbatches, {})


def not_legal(yours: Schedule, case: str, hint: str = "") -> str | None:
    """What is wrong with a learner's schedule, whatever it is meant to be."""
    if not any(yours.orders):
        return f"{case} your generator yields nothing{hint}"
    if yours.problems:
        more = len(yours.problems) - 1
        return f"{case}, {yours.problems[0]}" + (f" (and {more} more)" if more else "")
    return None


def mistake(
    said: Sequence[Any], cases: Sequence[Sequence[Any]], others: Others, same: Callable[[Any, Any], bool] = equal
) -> str:
    """Why it is wrong, as the end of a sentence, if all that was said is what one of the others gives; else nothing."""
    for other, why in others:
        if all(same(yours, other(*case)) for yours, case in zip(said, cases, strict=True)):
            return f". {why}"
    return ""


def not_the_idle_time(
    formula: Any, letters: Mapping[str, str], times: Sequence[Sequence[int]], right: Callable[..., Any], others: Others
) -> str | None:
    """What is wrong with a formula for the idle time of each rank.

    letters: its arguments after the ranks, and how the lesson writes them. times: what it is tried on.
    """
    require_function(formula, "ranks", *letters)
    cases = []
    for ranks, *given in times:
        *first, last = (f"{letter} = {size}" for letter, size in zip(letters.values(), given, strict=True))
        cases.append(f"with {plural(ranks, 'rank')}, {', '.join(first)} and {last}")
    said = [ask(formula, case, *sizes) for case, sizes in zip(cases, times, strict=True)]
    for case, value, sizes in zip(cases, said, times, strict=True):
        idle = right(*sizes)
        if not equal(value, idle):
            fault = f"{case} each rank is idle for {pretty(idle)}; your formula says {unlike(value, idle)}"
            return fault + mistake(said, times, others)
    return None
