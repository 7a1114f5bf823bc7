"""Answers as programs: a learner's source with everything that it uses, to run again elsewhere."""

from __future__ import annotations

import ast
import dis
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from textwrap import dedent
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ppedu.core import Action, Placement, Schedule
from ppedu.course.exercises.finale import Answer
from ppedu.sim import Costs

NAME = "answer"  # what a program calls its answer

# For the expressions in a program.
IMPORTS = """\
from fractions import Fraction
from ppedu import Action, Costs, Placement, Schedule
from ppedu.course.exercises.finale import Answer, Case
"""


class UnwritableError(Exception):
    """An answer uses something that cannot be written as text; the message is a reason, without a full stop."""


def program(answer: Any) -> str:
    """Return a program that defines NAME as an equal answer. Values are those of now, not those of the cell.

    Raises:
        UnwritableError: the answer, or something that it uses, cannot be written as a program.
    """
    written: dict[str, str] = {}  # by name, in an order in which each definition follows those that it uses
    begun: set[str] = set()

    def define(name: str, value: Any) -> None:
        if name not in begun:
            begun.add(name)
            text = _definition(name, value, define)
            written[name] = text

    if isinstance(answer, FunctionType) and answer.__name__ != "<lambda>":
        define(answer.__name__, answer)
        written[NAME] = f"{NAME} = {answer.__name__}" if answer.__name__ != NAME else ""
    else:
        define(NAME, answer)
    return IMPORTS + "\n".join(filter(None, written.values())) + "\n"


def _definition(name: str, value: Any, define: Callable[[str, Any], None]) -> str:
    if isinstance(value, ModuleType):
        if not _everywhere(value.__name__):
            raise UnwritableError(f"it uses the module `{value.__name__}`, which ppedu does not install")
        return f"import {value.__name__} as {name}"
    module, own = str(getattr(value, "__module__", None)), str(getattr(value, "__name__", None))
    if _everywhere(module) and getattr(sys.modules.get(module), own, None) is value:
        return f"from {module} import {own} as {name}"
    if isinstance(value, FunctionType):
        return _function(name, value, define)
    return f"{name} = {expression(value)}"


def _everywhere(module: str) -> bool:
    """Return whether a module exists wherever the lessons run."""
    top = module.partition(".")[0]
    return top != "__main__" and (top in sys.stdlib_module_names or top in ("ppedu", "torch", "numpy", "matplotlib"))


def _function(name: str, function: FunctionType, define: Callable[[str, Any], None]) -> str:
    if function.__closure__:
        raise UnwritableError(f"`{name}` was made by another function, and uses its variables")
    try:
        source = dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, SyntaxError):
        raise UnwritableError(f"the source of `{name}` is not known") from None
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    if function.__name__ == "<lambda>":
        if len(lambdas) != 1:
            raise UnwritableError(f"`{name}` is one of several lambdas in a line")
        tree, source = ast.Module([ast.Expr(lambdas[0])], []), f"{name} = {ast.unparse(lambdas[0])}"
    for used in sorted({*_in_head(tree.body[0]), *_loaded(function.__code__)}):
        if used in function.__globals__ and function.__globals__[used] is not function:
            define(used, function.__globals__[used])
    alias = "" if function.__name__ in (name, "<lambda>") else f"\n{name} = {function.__name__}"
    return source.rstrip() + alias


def _in_head(definition: ast.stmt) -> Iterator[str]:
    """Yield the names in a definition's decorators, defaults and annotations."""
    if isinstance(definition, ast.FunctionDef):
        head = (*definition.decorator_list, definition.args, *filter(None, (definition.returns,)))
        yield from (node.id for part in head for node in ast.walk(part) if isinstance(node, ast.Name))


def _loaded(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function uses; a local one may be called as something else in the notebook."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _loaded(inner)


def expression(value: Any) -> str:
    """Return a Python expression for a value.

    Raises:
        UnwritableError: there is not one.
    """
    if isinstance(value, str):  # also an Op
        return str.__repr__(value)
    if isinstance(value, float):  # also one from NumPy
        return float.__repr__(value) if math.isfinite(value) else f"float('{value}')"
    if value is None or isinstance(value, bool | int | Fraction):
        return repr(value)
    if isinstance(value, Action):
        return f"Action.of({str(value)!r})"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__}([{', '.join(map(expression, value))}])"
    if isinstance(value, Mapping):  # also the latencies of links
        return f"{{{', '.join(f'{expression(key)}: {expression(each)}' for key, each in value.items())}}}"
    if isinstance(value, Answer):
        given = [expression(value.what), expression(value.where)]
        given += [f"{name}={expression(each)}" for name, each in value.cure.items()]
        return f"Case({value.case.seed}).answer({', '.join(given)})"
    if isinstance(value, Schedule | Costs | Placement) and is_dataclass(value):
        given = [f"{each.name}={_field(getattr(value, each.name))}" for each in fields(value)]
        return f"{type(value).__name__}({', '.join(given)})"
    raise UnwritableError(f"`{type(value).__name__}` cannot be written as text")


def _field(value: Any) -> str:
    """Return an expression for a field of a schedule or of costs: actions of a schedule as short as in a CSV file."""
    if isinstance(value, tuple) and value and not isinstance(value, Action):
        if all(isinstance(each, Action) for each in value):
            return repr([str(each) for each in value])
        return f"[{', '.join(map(_field, value))}]"
    return expression(value)
