"""The FLOPs and bytes of a model's pieces, counted while it runs; for `ppedu.Model.of`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ppedu.core import SettingError
from ppedu.core.validate import require_instance
from ppedu.engine.ranks.versions import without_memory
from ppedu.engine.stages.cut import find_chain
from ppedu.planning.pieces import FLOP, Piece, Pieces, per_weight


def count(
    module: nn.Module,
    example: torch.Tensor,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    bytes_per_weight: Any = 16,
) -> Pieces:
    """Return the pieces of a model with the FLOPs that torch counts for `example`, a microbatch, and the bytes saved.

    Nothing is computed on the meta device: create the model and the example under `with torch.device("meta")`. The
    attention of `scaled_dot_product_attention` counts in full, also its masked half, and saves what the fastest kernel
    of the device does. On the meta device, `nn.RMSNorm` saves what a GPU's kernel does.

    Args:
        module: A chain of pieces, as `ppedu.engine.stages.cut` takes it.
        loss_fn: Takes the model's output alone; its bytes count to the last piece, as logits. By default, for a chain
            with modules before and after its layers, the cross-entropy in fp32.

    Raises:
        SettingError: The model is not such a chain, or cannot run with the example.
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    require_instance("example", example, torch.Tensor, "a tensor, the input of a microbatch")
    whole = find_chain(module)
    ends = bool(whole.begin or whole.end)
    loss_fn = language_loss if ends and loss_fn is None else loss_fn
    pieces: list[Piece] = []
    messages: list[int] = []
    x = example
    for number in range(whole.pieces):
        last = number == whole.pieces - 1
        stage = whole.stage(range(number, number + 1))
        if ends and number == 0:
            name = "embedding"
        elif ends and last:
            name = "head"
        else:
            name = f"layer {number - ends}"
        try:
            piece, x = _count(stage, x, name, loss_fn if last else None)
        except (RuntimeError, TypeError, IndexError) as error:
            raise SettingError(f"{name} fails for its input of shape {[*x.shape]}: {error}") from error
        pieces.append(piece)
        messages.append(x.numel() * x.element_size())
    flops = sum(piece.forward + piece.backward for piece in pieces)
    return Pieces(tuple(pieces), FLOP, messages[0], None, per_weight(bytes_per_weight), flops)


def _count(stage: nn.Module, x: torch.Tensor, name: str, loss_fn: Any) -> tuple[Piece, torch.Tensor]:
    """Return a piece, and its output, which does not belong to its graph."""
    x = x.detach().requires_grad_(x.is_floating_point())
    weights = [weight for weight in stage.parameters() if weight.requires_grad]
    y, kept, logits = _saved(stage, x, loss_fn)

    def flops(*wanted: torch.Tensor) -> int:
        """Return the FLOPs of the forward and of the backward for these tensors."""
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            out = stage(x.view_as(x))  # the counter's hooks do not work on leaves
            if wanted and out.requires_grad:
                torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
        return int(counter.get_total_flops())

    forward = flops()
    input_half = flops(x) - forward if x.requires_grad else 0
    wanted = [*weights, x] if x.requires_grad else weights
    backward = flops(*wanted) - forward if wanted else 0
    number = sum(weight.numel() for weight in stage.parameters())
    return Piece(name, forward, backward, input_half, backward - input_half, number, kept, logits), y


def _saved(stage: nn.Module, x: torch.Tensor, loss_fn: Any) -> tuple[torch.Tensor, int, int]:
    """Return the output of a stage, the bytes that it saves for its backward, and the part that its loss saves.

    On the meta device, attention would run with a kernel that saves its whole matrix. So there, tensors without memory
    stand in for those of a CPU, whose kernel saves what flash attention does.
    """
    saved: dict[int, torch.UntypedStorage] = {}
    given: dict[str, torch.Tensor] = dict(chain(stage.named_parameters(), stage.named_buffers()))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[_storage(tensor)] = tensor.untyped_storage()  # kept, so that no other gets its number
        return tensor

    def size() -> int:
        return sum(storage.nbytes() for place, storage in saved.items() if place not in own)

    with ExitStack() as contexts:
        if x.is_meta:
            contexts.enter_context(without_memory())
            contexts.enter_context(_WholeNorms())
            given = {name: _on_cpu(each) for name, each in given.items()}
        own = {_storage(each) for each in given.values()}
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = functional_call(stage, given, (_on_cpu(x) if x.is_meta else x,))
            without_loss = size()
            result = y if loss_fn is None else loss_fn(y)
        kept = size()
        del result
    output = torch.empty(y.shape, dtype=y.dtype, device="meta") if x.is_meta else y.detach()
    return output, kept, kept - without_loss


class _WholeNorms(TorchFunctionMode):
    """RMSNorm saves its input and a number for each row, as on a GPU; a CPU saves the results of several steps."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (functional.rms_norm, torch.rms_norm):
            names = ("input", "normalized_shape", "weight", "eps")
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            return _WholeNorm.apply(*map(given.get, names))  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _WholeNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
        rows = x.new_empty(x.shape[: x.dim() - len(shape)], dtype=torch.float32)
        context.save_for_backward(x, rows, weight)
        return functional.rms_norm(x, shape, weight, eps)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


def language_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return a cross-entropy in fp32, whose values do not matter."""
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=flat.device))


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())  # one object for each storage
