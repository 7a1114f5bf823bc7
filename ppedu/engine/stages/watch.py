"""Tensors that a stage's module or loss must not change in place, because they have another use."""

from __future__ import annotations

from typing import Any

import torch

from ppedu.engine.ranks.versions import tree_leaves, tree_map_only, version


class Watched:
    """The tensors in `value`; `changed` says whether any has been changed in place since."""

    def __init__(self, value: Any):
        self._value, self._before = value, _versions(value)

    @property
    def changed(self) -> bool:
        return _versions(self._value) != self._before


def watchable(value: Any) -> Any:
    """Return `value` with clones of those tensors of torch.inference_mode, whose changes cannot be detected."""
    if not any(leaf.is_inference() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)):
        return value  # rebuilding it would take several times as long
    return tree_map_only(torch.Tensor, lambda each: each.clone() if each.is_inference() else each, value)


def storages(value: Any) -> dict[int, int]:
    """Return the memory behind all tensors in `value`: by address, its bytes."""
    found = (each.untyped_storage() for each in tree_leaves(value) if isinstance(each, torch.Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _versions(value: Any) -> list[int]:
    """Return the versions of all tensors in `value`, which autograd counts up with every change in place."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_inference() else [version(value)]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [version for each in value for version in _versions(each)]
