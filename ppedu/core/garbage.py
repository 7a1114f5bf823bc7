"""Garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def without_gc(function: Function) -> Function:
    """Decorator: disable cyclic garbage collection during each call of `function`.

    A large schedule consists of millions of small tuples without reference cycles. Reference counting frees them, and
    searching them for cycles takes as long as creating them.
    """

    @wraps(function)
    def run(*arguments: object, **options: object) -> object:
        if not gc.isenabled():
            return function(*arguments, **options)
        gc.disable()
        try:
            return function(*arguments, **options)
        finally:
            gc.enable()

    return run  # type: ignore[return-value]
