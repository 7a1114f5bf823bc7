"""The FLOPs and bytes of a model's pieces, counted while it runs; for `ppedu.Model.of`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ppedu.core.errors import SettingError
from ppedu.core.validate import require_instance
from ppedu.planning.pieces import FLOP, Piece, Pieces, per_weight
from ppedu.run.cut import find_chain


def count(
    module: nn.Module,
    example: torch.Tensor,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    bytes_per_weight: Any = 16,
) -> Pieces:
    """Return the pieces of a model with the FLOPs that torch counts for `example`, a microbatch, and the bytes saved.

    Nothing is computed on the meta device: create the model and the example under `with torch.device("meta")`. The
    attention of `scaled_dot_product_attention` counts in full, also its masked half, and saves what the fastest kernel
    of the device does.

    module: A chain of pieces, as `ppedu.run.cut` takes it.
    loss_fn: Of the model's output; its bytes count to the last piece.

    Raises:
        SettingError: The model is not such a chain, or cannot run with the example.
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    require_instance("example", example, torch.Tensor, "a tensor, the input of a microbatch")
    whole = find_chain(module)
    ends = bool(whole.begin or whole.end)
    pieces: list[Piece] = []
    messages: list[int] = []
    x = example
    for number in range(whole.pieces):
        last = number == whole.pieces - 1
        stage = whole.stage(range(number, number + 1))
        name = (
            f"layer {number - ends}" if not ends or 0 < number < whole.pieces - 1 else "head" if last else "embedding"
        )
        try:
            piece, x = _count(stage, x, name, loss_fn if last else None)
        except (RuntimeError, TypeError, IndexError) as error:
            raise SettingError(f"{name} fails for its input of shape {[*x.shape]}: {error}") from error
        pieces.append(piece)
        messages.append(x.numel() * x.element_size())
    flops = sum(piece.forward + piece.backward for piece in pieces)
    return Pieces(tuple(pieces), FLOP, messages[0], None, per_weight(bytes_per_weight), 1, flops)


def _count(stage: nn.Module, x: torch.Tensor, name: str, loss_fn: Any) -> tuple[Piece, torch.Tensor]:
    """Return a piece, and its output, which does not belong to its graph."""
    x = x.detach().requires_grad_(x.is_floating_point())
    weights = [weight for weight in stage.parameters() if weight.requires_grad]
    own = {_storage(each) for each in (*stage.parameters(), *stage.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in own:
            saved[_storage(tensor)] = tensor.untyped_storage()  # kept, so that no other gets its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stage(x)
        result = y if loss_fn is None else loss_fn(y)
    kept = sum(storage.nbytes() for storage in saved.values())
    logits = y.numel() * 4 if name == "head" else 0

    def flops(*wanted: torch.Tensor) -> int:
        """Return the FLOPs of the forward and of the backward for these tensors."""
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            out = stage(x.view_as(x))  # the counter's hooks do not work on leaves
            if wanted and out.requires_grad:
                torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
        return int(counter.get_total_flops())

    forward = flops()
    first = flops(x) - forward if x.requires_grad else 0
    both = flops(*weights, *[x] * x.requires_grad) - forward if weights or x.requires_grad else 0
    number = sum(weight.numel() for weight in stage.parameters())
    del result
    return Piece(name, forward, both, first, both - first, number, kept, min(logits, kept)), y.detach()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
