"""Which rank holds which stage, and therefore who needs what from whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppedu.core.errors import SettingError, require_count


@dataclass(frozen=True)
class Placement:
    """The map from stages to ranks.

    `holders[stage]` is the rank that holds the stage. Make one with `Placement.make("loop", ranks, chunks)`.
    """

    name: str
    ranks: int
    holders: tuple[int, ...]

    @classmethod
    def make(cls, name: str, ranks: int, chunks: int = 1) -> Placement:
        """The placement called `name`, with `chunks` stages on each of `ranks` ranks.

        Raises:
            SettingError: there is no such placement, or a number is not a whole number above 0.
        """
        require_count("ranks", ranks)
        require_count("chunks", chunks)
        if name not in _SHAPES:
            raise SettingError(f"there is no placement called {name!r}; there is: {', '.join(_SHAPES)}")
        return cls(name, ranks, tuple(_SHAPES[name](stage, ranks) for stage in range(ranks * chunks)))

    @property
    def stages(self) -> int:
        return len(self.holders)

    @property
    def chunks(self) -> int:
        """Stages held by one rank."""
        return self.stages // self.ranks

    def rank(self, stage: int, microbatch: int = 0) -> int:
        """The rank that works on `microbatch` in `stage`."""
        return self.holders[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, first to last."""
        return tuple(stage for stage, holder in enumerate(self.holders) if holder == rank)


def _loop(stage: int, ranks: int) -> int:
    return stage % ranks


_SHAPES: dict[str, Callable[[int, int], int]] = {"loop": _loop}
