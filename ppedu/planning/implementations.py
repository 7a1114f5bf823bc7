"""Libraries that train models: the bytes of their weights, the tensors they keep, the states that replicas share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ppedu.core.numeric import Number
from ppedu.core.validate import require_one_of


class Implementation(NamedTuple):
    """Defaults of a library that trains a model.

    Args:
        bytes_per_weight: Of the weights, the gradients and the optimizer.
        gated: The tensors of its own width that a gated perceptron keeps: the results of two matrices and their
            product, and, if this is not one kernel, the result of the activation function.
        zero: What the GPUs that hold the same stage share (arXiv 1910.02054): 0 nothing, 1 the optimizer, 2 also the
            gradients.
    """

    bytes_per_weight: tuple[Number, Number, Number]
    gated: int
    zero: int


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    # Megatron-Core with the distributed optimizer: 18 bytes, of which replicas share 12 (docs/…/dist_optimizer.md);
    # bias_swiglu_impl is one kernel.
    "megatron": Implementation((2, 4, 12), 3, 1),
    # fully_shard with its weights gathered for the whole step, as torchtitan has it in a pipeline; gradients in float32
    "torchtitan": Implementation((4, 4, 8), 3, 2),
    # autocast and DistributedDataParallel
    "pytorch": Implementation((4, 4, 8), 4, 0),
}


def implementation_named(name: Any) -> Implementation:
    """Return the implementation of a name; raise SettingError if it is unknown."""
    require_one_of("implementation", name, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[name]
