"""Keys and values of sequences whose slices run one after the other, and the gradients that later slices add to them.

A later slice attends to the keys and values of earlier ones, so these outlive the forward that computed them, and their
gradients come from several backwards: from those of the later slices, which run first, and from their own. Keys have
one tensor for a whole sequence, of which each slice sees the beginning, and so have values and the gradients of both.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ppedu.core import PipelineError


class Whole:
    """The keys of a whole sequence in one layer, or its values, with room for all slices; and their gradients."""

    def __init__(self, like: torch.Tensor, tokens: int):
        *batch, _, width = like.shape
        self.values = like.new_empty(*batch, tokens, width)
        self.grads: torch.Tensor | None = None  # that later slices have added


class _Append(torch.autograd.Function):
    """Write a slice's keys or values behind those of the earlier slices, and return them all.

    Returned tensors have the memory of `kept.values`. Writing goes around autograd, which would refuse the backward of
    an earlier slice, for its tensor has changed; but what that slice has seen of it has not.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, begin: torch.Tensor | None, kept: Whole, start: int) -> torch.Tensor:
        ctx.kept, ctx.start = kept, start
        end = start + own.shape[-2]
        kept.values.data[..., start:end, :] = own
        return kept.values.data[..., :end, :]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        kept, start, end = ctx.kept, ctx.start, grad.shape[-2]
        own = grad[..., start:, :]
        if kept.grads is None:  # this is the last slice
            kept.grads = torch.zeros_like(kept.values)
        else:
            own = kept.grads[..., start:end, :] + own
        kept.grads[..., :start, :] += grad[..., :start, :]
        return own, None, None, None


class Past:
    """The keys and values of a sequence's earlier slices in one stage, which its module gets as the keyword `past`.

    Attributes:
        length: The tokens of the earlier slices, and so the position of this slice's first token.
    """

    def __init__(self, kept: dict[Hashable, tuple[Whole, Whole]], length: int, tokens: int):
        self.length = length
        self._kept, self._tokens = kept, tokens
        # Where the earlier slices enter the graph of this one. Half a backward finds in this way that it must reach
        # them, even in the first stage, where no rank waits for the gradient of its input.
        self.begin = torch.zeros((), requires_grad=True) if length and torch.is_grad_enabled() else None

    def after(self, tokens: int) -> Past:
        """Return what the next slice attends to; this one has `tokens`."""
        return Past(self._kept, self.length + tokens, self._tokens)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: Hashable = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep this slice's keys and values, and return those of all slices up to this one.

        Args:
            key, value: Of shape (…, tokens, width), as for `scaled_dot_product_attention`.
            layer: Tells the layers of a stage apart.

        Returns:
            Keys and values of shape (…, length + tokens, width). Change neither.

        Raises:
            PipelineError: There are more tokens than room for them.
        """
        room = self._tokens - self.length
        for name, each in (("keys", key), ("values", value)):
            if each.shape[-2] > room:
                raise PipelineError(
                    f"a slice has {each.shape[-2]} {name} of shape {tuple(each.shape)}, but there is room for {room}; "
                    "give past.update tensors of shape (batch, heads, tokens, width)"
                )
        if layer not in self._kept:
            self._kept[layer] = Whole(key, self._tokens), Whole(value, self._tokens)
        keys, values = self._kept[layer]
        append: Any = _Append.apply
        return append(key, self.begin, keys, self.length), append(value, self.begin, values, self.length)
