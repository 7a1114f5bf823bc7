"""Shared by the exercises of several lessons: `Exercise`, and functions that call and check a learner's answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature, unwrap
from numbers import Real
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from ppedu.core import PipelineError, Schedule, SettingError
from ppedu.core.numeric import plural, pretty
from ppedu.sim import Timeline
from ppedu.zoo.registry import Registered, build

if TYPE_CHECKING:  # the package must import without torch
    from torch import Tensor

Mistakes = Sequence[tuple[Callable[..., Any], str]]  # common wrong answers, each with an explanation


@dataclass(frozen=True)
class Exercise:
    """An exercise of a lesson.

    Args:
        wrong: `wrong(answer)` explains what is wrong with an answer, or returns None if it is right.
        praise: printed after "Right."; or `praise(answer)` returns it.
        reward: `reward(answer)` returns the timeline to draw for a right answer.
        hints: further hints for learners who are stuck, from a nudge to almost the answer; `hint` shows them in turn.
        draw_wrong: `draw_wrong(answer, reason)` draws a wrong answer with its fault outlined, if it can be drawn; see
            `wrong_schedule`. `reason` is what `wrong` returned.
        score: `score(answer)` compares a right answer with the best one, by case; 1 is the best. For leaderboards.
    """

    wrong: Callable[[Any], str | None]
    praise: str | Callable[[Any], str]
    reward: Callable[[Any], Timeline] | None = None
    hints: tuple[str, ...] = ()
    draw_wrong: Callable[[Any, str], None] | None = None
    score: Callable[[Any], dict[str, float | None]] | None = None


# (ranks, microbatches): fewer, equally many and more microbatches than ranks; the lesson's own case first.
CASES = [(4, 8), (1, 1), (2, 1), (4, 2), (3, 3), (5, 4), (8, 20)]


def require_function(answer: Any, *parameters: str) -> None:
    """Raise SettingError unless `answer` is a function that can be called with these parameters."""
    wanted = f"give a function of {enumerated(parameters)}"
    if not callable(answer):
        raise SettingError(f"{wanted}, not {answer!r}")
    try:
        takes = signature(answer)
    except ValueError:  # some built-in functions have no signature
        raise SettingError(f"{wanted}, written by you; got {answer!r}") from None
    try:
        takes.bind(*parameters)
    except TypeError:
        raise SettingError(f"{wanted}; yours takes {' and '.join(takes.parameters) or 'nothing'}") from None


def enumerated(words: Iterable[str]) -> str:
    """Join words for reading: "1, 2 and 3"."""
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def with_sizes(ranks: int, microbatches: int, *others: int | str, cut: str = "chunks") -> str:
    """Describe a case: "with 4 ranks and 8 microbatches". `others` are numbers of chunks or slices, or any text."""
    more = (plural(each, cut.removesuffix("s")) if isinstance(each, int) else each for each in others)
    return f"with {enumerated([plural(ranks, 'rank'), plural(microbatches, 'microbatch'), *more])}"


@contextmanager
def own_line(function: Any, case: str) -> Iterator[None]:
    """Turn an error in the learner's `function` into a SettingError with the line of the error.

    case: the arguments of the function, such as "with 4 ranks and 8 microbatches"; it begins the message.

    Raises:
        SettingError: the function raised an error.
    """
    try:
        yield
    except Exception as error:
        where = _line_of(function, error)
        if isinstance(error, PipelineError) and not where:  # a check of the answer
            raise
        fails = f"{case} your function fails{where}".lstrip()
        raise SettingError(f"{fails}: {type(error).__name__}{f': {error}' if str(error) else ''}") from None


def _line_of(function: Any, error: Exception) -> str:
    """Describe the line of the learner's function that raised the error; empty if it is not written in Python."""
    written = unwrap(function)
    code = getattr(written, "__code__", None) or getattr(type(written).__call__, "__code__", None)
    raised = [error, *filter(None, [error.__cause__])]  # of a StopIteration, Python makes a RuntimeError
    frames = [frame for each in raised for frame in extract_tb(each.__traceback__)]
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    if not own:
        return ""
    source = str(own[-1].line).partition("  #")[0].strip().removesuffix(":")  # a colon follows the quoted line
    return f" at line {own[-1].lineno}" + (f", `{source}`" if source else "")


def call(function: Any, case: str, *given: Any) -> Any:
    """Call the learner's function and return its result; an error in it is reported with its line."""
    with own_line(function, case):
        return function(*given)


def ask(function: Any, case: str, *sizes: Any) -> Any:
    """Call the learner's function, which should return a number.

    Raises:
        SettingError: it returns something else, or raises an error.
    """
    answer = call(function, case, *sizes)
    if isinstance(answer, bool) or not isinstance(answer, Real):
        raise SettingError(f"{case} your function returns {answer!r} instead of a number{missing_return(answer)}")
    if too_large(answer):
        raise SettingError(f"{case} your function returns a number of more than 300 digits")
    return answer


def missing_return(answer: Any) -> str:
    """Suggest a return, as the end of a sentence, if the learner's function returned None or is a generator."""
    if isinstance(answer, Generator):
        return "; write return in place of yield"
    return "; is a return missing?" if answer is None else ""


def too_large(number: Any) -> bool:
    """Return whether a number, such as 10**400, is too large to be compared with a float."""
    try:
        float(number)
    except OverflowError:
        return True
    return False


def unlike(number: Any, other: Any) -> str:
    """Format a number for reading, with all its digits if it would otherwise look the same as `other`."""
    return str(number) if pretty(number) == pretty(other) else pretty(number)


def equal(one: Any, other: Any) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return bool(abs(one - other) < 1e-9)


def multiple_of(one: Tensor, other: Tensor) -> str | None:
    """Return the factor by which `one` is a multiple of `other`, formatted; None if it is not a multiple."""
    from torch import allclose

    if one.shape != other.shape:
        return None
    factor = (one * other).sum() / (other * other).sum()
    return pretty(round(factor.item(), 4)) if allclose(one, factor * other, rtol=1e-4) else None


def listed(values: Any) -> str:
    return ", ".join(map(str, values))


def learner_schedule(generator: Any, ranks: int, microbatches: int, *pieces: int, cut: str = "chunks") -> Schedule:
    """Build the schedule "yours" from the learner's generator, with the stages dealt out to the ranks in turn.

    Args:
        pieces: the number of stages on a rank, or of slices of a sequence, if the generator takes one.
        cut: "chunks" or "slices".
    """

    sizes = ranks, microbatches, *pieces

    def order(rank: int, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Any:
        return generator(rank, *sizes)

    with own_line(generator, with_sizes(*sizes, cut=cut)):
        options = {cut: pieces[0]} if pieces else {}
        return build("yours", Registered(order, "loop"), ranks, microbatches, options)


def not_legal(yours: Schedule, case: str, hint: str = "") -> str | None:
    """Explain why a learner's schedule is not legal; return None if it is."""
    if not any(yours.orders):
        return f"{case} your generator yields nothing{hint}"
    if yours.problems:
        more = len(yours.problems) - 1
        return f"{case}, {yours.problems[0]}" + (f" (and {plural(more, 'more problem')})" if more else "")
    return None


def formulas(letters: str, mistakes: Mapping[str, str], **functions: Callable[..., Any]) -> Mistakes:
    """Turn common wrong formulas, written as text, into functions: `formulas("p, m", {"(p - 1) / m": "That is …"})`.

    Args:
        letters: the parameters of the formulas.
        mistakes: the formulas, each with its explanation.
        functions: what the formulas may call, in addition to the functions of the module `math`.
    """
    names = vars(math) | functions
    return [(eval(f"lambda {letters}: {formula}", names), why) for formula, why in mistakes.items()]


def explain_mistake(
    answers: Sequence[Any], cases: Sequence[Sequence[Any]], mistakes: Mistakes, same: Callable[[Any, Any], bool] = equal
) -> str:
    """Return the explanation of the common mistake that gives all these answers, as a new sentence; else ""."""
    for mistake, why in mistakes:
        if all(same(yours, mistake(*case)) for yours, case in zip(answers, cases, strict=True)):
            return f". {why}"
    return ""


def tried_on(
    cases: Sequence[Sequence[Any]],
    parameters: Sequence[str],
    named: Callable[..., str],
    fault_of: Callable[..., str | None],
    mistakes: Mistakes = (),
    answer_of: Callable[..., Any] = ask,
    same: Callable[[Any, Any], bool] = equal,
    otherwise: str = "",
) -> Callable[[Any], str | None]:
    """Return the `wrong` of an exercise whose answer is a function: it explains the first case in which that is wrong.

    It raises SettingError if the answer is not such a function, or if the function raises an error.

    Args:
        cases: the arguments to try.
        parameters: of the learner's function.
        named: `named(*case)` describes a case, such as "with 4 ranks and 8 microbatches".
        fault_of: `fault_of(name, answer, *case)` explains what is wrong with an answer, or returns None if it is right.
        mistakes: explained if one of them gives the same answers in all cases, compared with `same`.
        answer_of: `answer_of(function, name, *case)` calls the function and returns its answer.
        otherwise: added to the explanation if none of the mistakes does.
    """

    def wrong(function: Any) -> str | None:
        require_function(function, *parameters)
        answers = []
        for case in cases:
            answers.append(answer_of(function, named(*case), *case))
            if fault := fault_of(named(*case), answers[-1], *case):
                if mistakes:
                    answers += [answer_of(function, named(*rest), *rest) for rest in cases[len(answers) :]]
                    fault += explain_mistake(answers, cases, mistakes, same) or otherwise
                return fault
        return None

    return wrong


def idle_time(
    letters: Mapping[str, str], times: Sequence[Sequence[int]], right: Callable[..., Any], mistakes: Mistakes
) -> Callable[[Any], str | None]:
    """Return the `wrong` of an exercise that asks for a formula of each rank's idle time.

    Args:
        letters: the formula's arguments after the ranks, and their symbols in the lesson.
        times: the arguments with which it is checked.
        right: returns the idle time for these arguments.
    """

    def named(ranks: int, *sizes: int) -> str:
        pairs = [f"{letter} = {size}" for letter, size in zip(letters.values(), sizes, strict=True)]
        return f"with {enumerated([plural(ranks, 'rank'), *pairs])}"

    def fault_of(case: str, answer: Any, *sizes: int) -> str | None:
        idle = right(*sizes)
        if equal(answer, idle):
            return None
        return f"{case} each rank is idle for {pretty(idle)}; your formula gives {unlike(answer, idle)}"

    return tried_on(times, ["ranks", *letters], named, fault_of, mistakes)
