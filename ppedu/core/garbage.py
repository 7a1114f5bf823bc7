"""Making many small objects at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def without_gc(function: Function) -> Function:
    """Keep the garbage collector from looking through everything again and again while `function` runs.

    A schedule has up to a million small tuples, none of which refers to itself: reference counting frees them,
    and looking for rings among them takes as long as making them.
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
