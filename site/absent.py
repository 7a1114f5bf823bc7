"""Packages that a lesson imports and the page does not have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

REFUSED = ("numpy", "ortools", "ipywidgets", "anywidget", "pydoc_data")
NAMED = ("torch",)  # which modules of ppedu name when they are imported


class Nothing(ModuleType):
    """Takes every call of matplotlib, and draws nothing: the page shows the pictures that were recorded."""

    used: ClassVar[set[str]] = set()  # names, since a cell began

    def __init__(self, name: str = "nothing") -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        Nothing.used.add(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def subplots(self, rows: int = 1, columns: int = 1, **_: Any) -> tuple[Any, Any]:
        grid = Grid(Nothing() for _ in range(rows * columns))
        return self, grid if len(grid) > 1 else grid[0]

    def __iter__(self) -> Iterator[Any]:
        return iter((self,))

    def __getitem__(self, _: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __call__


class Grid(list[Any]):
    """The axes of a picture, with what lessons use of an array."""

    @property
    def flat(self) -> Grid:
        return self

    def reshape(self, shape: tuple[int, int]) -> list[Any]:
        return [self[first : first + shape[1]] for first in range(0, len(self), shape[1])]


class Named(ModuleType):
    """Torch, as far as `ppedu.run` names it while it is imported: its source can be read, but nothing computes.

    Raises:
        ModuleNotFoundError: It is called by anything but the body of a module or class of ppedu.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.0"  # the release that ppedu.engine.ranks.versions reads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self.__name__}.{name}")

    def __call__(self, *given: Any, **_: Any) -> Any:
        caller = sys._getframe(1)
        in_body = caller.f_locals is caller.f_globals or "__module__" in caller.f_locals
        if in_body and caller.f_globals["__name__"].startswith("ppedu."):
            return given[0] if len(given) == 1 and callable(given[0]) else self
        package = self.__name__.partition(".")[0]
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, _: Any) -> bool:
        return False

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__


class Absent(MetaPathFinder, Loader):
    """Finds matplotlib, which is Nothing, and torch, which is Named; refuses REFUSED."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package in REFUSED:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return ModuleSpec(name, self, is_package=True) if package in ("matplotlib", *NAMED) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Named(spec.name) if spec.name.startswith(NAMED) else Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def package_of(error: BaseException | None) -> str | None:
    """Return the package that is missing, if this is what an error is about."""
    while error:
        if isinstance(error, ModuleNotFoundError) and error.name in REFUSED + NAMED:
            return error.name
        error = error.__cause__
    return None
