"""Garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable cyclic garbage collection in a `with` block, or, as a decorator, in each call of a function.

    A large schedule consists of millions of small tuples without reference cycles. Reference counting frees them, and
    searching them for cycles takes as long as creating them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
