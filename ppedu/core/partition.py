"""Which layers belong to which stage."""

from __future__ import annotations

from itertools import pairwise

from ppedu.core.errors import SettingError, require_count


def evenly(layers: int, stages: int) -> list[range]:
    """`layers` cut into `stages` consecutive pieces whose lengths differ by at most one, longer ones first.

    Raises:
        SettingError: there are more stages than layers.
    """
    require_count("layers", layers)
    require_count("stages", stages)
    if stages > layers:
        raise SettingError(
            f"{layers} layers cannot be cut into {stages} stages; take at most {layers} stages, or more layers"
        )
    short, more = divmod(layers, stages)
    starts = [stage * short + min(stage, more) for stage in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(starts)]
