"""Hooks: what objects hand over to files that know more than they do, such as drawing, saving and explaining.

A schedule draws itself with `view`, and `view` needs schedules. So that neither file has to import the other, a method
calls a hook by its name, and `ppedu/__init__.py` says which function that is. It is imported when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_functions: dict[str, str | Callable[..., Any]] = {}  # by the name of a hook: a function, or "module:function"


def register(functions: Mapping[str, str | Callable[..., Any]]) -> None:
    """Set the functions of hooks, each itself or as "module:function"."""
    _functions.update(functions)


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Call the function of a hook."""
    function = _functions[name]
    if isinstance(function, str):
        module, _, own = function.partition(":")
        function = getattr(import_module(module), own)
    return function(*arguments, **options)
