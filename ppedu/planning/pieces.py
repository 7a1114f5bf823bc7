"""A model as a row of pieces, each of which belongs to one stage: the embedding, each layer, the head with the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from ppedu.core import SettingError
from ppedu.core.numeric import Number
from ppedu.core.validate import require_count, require_number, require_one_of, shown
from ppedu.planning.implementations import implementation_named

if TYPE_CHECKING:
    from ppedu.planning.machine import Machine

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}  # in a unit of time
FLOP = "FLOP"
# Seconds in which a host starts the kernels of the F, I and W of a layer with experts, one by one. In published runs on
# H100s and B200s whose GPUs would be faster (tests/published), F and B of such a layer take 9 to 12 ms together.
STARTED = 3.2e-3, 4.3e-3, 2e-3
# Bytes of a number in each format of the matrices. Among 32 numbers in MXFP8, and 16 in NVFP4, one byte is their scale.
INPUT_BYTES = {"bf16": 2, "fp8": 1, "mxfp8": 1.03125, "nvfp4": 0.5625}
# How tokens come to their experts: a copy for each expert, or one for each GPU or node.
DISPATCHERS = "deepep", "alltoall"
TIMES, SIZES = ("forward", "backward", "input", "weight"), ("activation", "logits", "freed")  # of a piece
MOST_LAYERS = 10_000
MOST = 10**9  # of everything else that is counted, such as tokens and GPUs
LARGEST = 1e50  # of every amount: sums and products of a plan's amounts still fit a float


class Work(NamedTuple):
    """The work of one GPU for a microbatch, in the F, I or W of a piece. `Machine.seconds` is its time.

    Args:
        matrices, attention: FLOPs in 16 bits. short: FLOPs of matrices in 8 or 4 bits, which are faster.
        moved: Bytes that everything else reads and writes: norms, additions, activation functions, the loss.
        exchanged: Bytes that the GPU sends to those that split the piece with it. passed: Those that it sends to GPUs
            with other parts of the sequence. routed: Those of its tokens, sent to one expert each, and of their
            results. operands: Those of the matrices, and of the numbers that they are multiplied with and give.
    """

    matrices: Number = 0
    attention: Number = 0
    moved: Number = 0
    exchanged: Number = 0
    short: Number = 0
    passed: Number = 0
    routed: Number = 0
    operands: Number = 0

    @property
    def flops(self) -> Number:
        return self.matrices + self.attention + self.short

    def plus(self, other: Work) -> Work:
        """Return the work of both."""
        return Work(*map(add, self, other))

    def part(self, count: int) -> Work:
        """Return one of `count` equal parts."""
        return Work(*(amount / count for amount in self))


@dataclass(frozen=True)
class Piece:
    """A part of the model that is not cut.

    Args:
        forward, backward, input, weight: What F, B, I and W of a microbatch take, in the unit of the `Pieces`.
        weights: The number of parameters. experts: Those of them that are of experts.
        activation: Bytes of a microbatch from the forward to the end of the backward.
        logits: The part of `activation` that is logits.
        freed: The part of `activation` that I frees; the rest is kept until W.
        keys: Bytes of the keys and values of a slice, not in `activation`: all slices of a sequence need them.
        work: Of F, I and W, if the unit is "FLOP" and the work is known; `forward` and the others are then its FLOPs.
    """

    name: str
    forward: Number
    backward: Number
    input: Number
    weight: Number
    weights: int = 0
    activation: Number = 0
    logits: Number = 0
    work: tuple[Work, Work, Work] | None = None
    experts: int = 0
    freed: Number = 0
    keys: Number = 0

    @classmethod
    def of_work(cls, work: Sequence[Work], name: str = "", **numbers: Any) -> Piece:
        """Return a piece whose times are the FLOPs of its work in F, I and W, with its other numbers."""
        forward, first, second = work
        times = forward.flops, first.flops + second.flops, first.flops, second.flops
        return cls(name, *times, work=(forward, first, second), **numbers)

    @property
    def freed_logits(self) -> Number:
        """The part of the logits that I frees: it frees them before all else."""
        return min(self.freed, self.logits)


@dataclass(frozen=True)
class Pieces:
    """A model as a row of pieces, at one size of a microbatch.

    Args:
        unit: Of the pieces' times: "s", "ms" or "us"; or "FLOP", which a machine's speed turns into seconds.
        message: Bytes that a stage sends to the next for a microbatch; the gradient that comes back has as many.
        tokens: Of a microbatch; None if unknown.
        bytes_per_weight: Bytes per parameter of the weights, the gradients and the optimizer.
        expert_bytes: Those of experts, if they differ.
        flops: Of a microbatch, forward and backward, as the model needs them, without recomputation; None if unknown.
        tied: The parameters of the last piece that are also the first one's. A rank that holds both has them once.
        tensor: GPUs that split every piece. context: GPUs, or groups of them, that split every sequence, each with all
            of a piece's weights. Times, weights, activations and messages are those of one GPU; `tokens` and `flops`
            are those of all.
        precision: Of the layers' matrices: "bf16", "fp8", "mxfp8" or "nvfp4". implementation: Of
            `ppedu.planning.implementations`.
        recompute: The part of each layer that its backward computes again: "none", "selective" or "full". restored: Its
            bytes, of one layer at a time.
        expert: GPUs, of all that hold a stage, among which its experts are divided. visited: The experts of a layer
            that a token visits. overlap: Whether tokens are on their way to experts while another microbatch computes.
            dispatcher: How they come there: "deepep" or "alltoall".
        tensor_overlap: Whether the GPUs that split the pieces multiply matrices while they exchange.
        shard_vocabulary: Whether the embedding and the head are divided among the ranks.
        graphs: Whether CUDA graphs start the kernels of layers with experts.

    Raises:
        SettingError: A number is not possible, or there are too many pieces.
    """

    pieces: tuple[Piece, ...]
    unit: str = "s"
    message: Number = 0
    tokens: int | None = None
    bytes_per_weight: tuple[Number, Number, Number] = (2, 2, 12)
    flops: Number | None = None
    tied: int = 0
    tensor: int = 1
    precision: str = "bf16"
    context: int = 1
    implementation: str = "megatron"
    recompute: str = "none"
    restored: Number = 0
    expert: int = 1
    visited: int = 0
    overlap: bool = False
    dispatcher: str = DISPATCHERS[0]
    tensor_overlap: bool = False
    shard_vocabulary: bool = False
    graphs: bool = False
    expert_bytes: tuple[Number, Number, Number] | None = None

    def __post_init__(self) -> None:
        _require_few(self.pieces)
        require_amount("message", self.message, "bytes of at least 0")
        require_count("tied", self.tied, least=0)
        require_count("tensor", self.tensor, most=MOST)
        require_count("context", self.context, most=MOST)
        require_count("expert", self.expert, most=MOST)
        require_one_of("precision", self.precision, INPUT_BYTES)
        require_one_of("dispatcher", self.dispatcher, DISPATCHERS)
        implementation_named(self.implementation)
        require_amount("restored", self.restored, "bytes of at least 0")
        if self.tokens is not None:
            require_count("tokens", self.tokens)
        if self.flops is not None:
            require_amount("flops", self.flops, "FLOPs of at least 0")

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def bytes_per_expert(self) -> tuple[Number, Number, Number]:
        return self.expert_bytes or self.bytes_per_weight

    @property
    def gpus(self) -> int:
        """The GPUs of a rank."""
        return self.tensor * self.context

    @property
    def parameters(self) -> int:
        """The number of parameters that the pieces hold. A head that shares the embedding's weights has a copy."""
        return sum(piece.weights for piece in self.pieces)

    def timed(self, machine: Machine | None) -> Pieces:
        """Return the pieces with times on a machine in place of FLOPs.

        Raises:
            SettingError: The pieces have FLOPs, and the machine is None or has no speed.
        """
        if self.unit != FLOP:
            return self
        if machine is None or machine.flops is None:
            raise SettingError(
                "the model's sizes give FLOPs, and the machine has no speed; give its achieved FLOP/s, such as "
                "Machine(flops=600e12), or measured times: Model.measured"
            )
        return replace(self, pieces=tuple(self._timed(piece, machine) for piece in self.pieces), unit="s")

    def _timed(self, piece: Piece, machine: Machine) -> Piece:
        work = piece.work or (Work(piece.forward), Work(piece.input), Work(piece.weight))
        times = [machine.seconds(each, self) for each in work]
        if piece.experts and not self.graphs:
            of_f, of_i, of_w = STARTED
            again = of_f if self.recompute == "full" else 0
            times = [*map(max, times, (of_f, of_i + again, of_w))]
        forward, first, second = times
        backward = first + second if piece.work else machine.seconds(Work(piece.backward), self)
        return replace(piece, forward=forward, backward=backward, input=first, weight=second, work=None)


def measured(
    forward: Sequence[Number],
    backward: Sequence[Number] | None = None,
    input: Sequence[Number] | None = None,
    weight: Sequence[Number] | None = None,
    activation: Sequence[Number] | Number = 0,
    weights: Sequence[int] | int = 0,
    bytes_per_weight: Number | tuple[Number, Number, Number] = 16,
    unit: str = "s",
    message: Number = 0,
    weight_memory: Number = 1,
    logits: Number = 0,
    tensor: int = 1,
) -> Pieces:
    """Return a model by measured times. Each list has an entry for each piece: embedding, layers, head with loss.

    Args:
        forward: The times of a microbatch's forward in `unit`: "s", "ms" or "us".
        backward: By default the sum of its halves, or twice the forward.
        input, weight: Its halves, I and W. By default half of the backward each.
        activation: Bytes of a microbatch that a piece keeps for the backward.
        weights: The numbers of parameters.
        bytes_per_weight: Of the weights, the gradients and the optimizer; a number is their sum, with 2 bytes for a
            weight and 2 for its gradient: 16 for Adam in mixed precision (arXiv 1910.02054, section 3.1).
        message: Bytes that a stage sends to the next for a microbatch.
        weight_memory: The part of the activations that is kept until W, as in `ppedu.Costs`.
        logits: The bytes of the head's activation that are logits.
        tensor: GPUs that split each piece; times, bytes and parameters are those of one of them.

    Raises:
        SettingError: The lists do not fit each other, or a number is not possible.
    """
    require_unit(unit)
    times = _row("forward", forward)
    count = len(times)
    if count < 1:
        raise SettingError("forward must have a time for each piece: the embedding, each layer, the head with the loss")
    if (input is None) != (weight is None):
        raise SettingError("give both input and weight, or neither: the two halves of a split backward")
    whole = [2 * time for time in times]
    if input is not None:
        first, second = _row("input", input, count), _row("weight", weight, count)
        whole = [*map(add, first, second)]
    if backward is not None:
        whole = _row("backward", backward, count)
    if input is None:
        first = second = [time / 2 for time in whole]
    kept, parameters = _row("activation", activation, count), _row("weights", weights, count)
    for number in parameters:
        require_number("weights", number, lambda number: number == int(number), "whole numbers")
    require_number("logits", logits, lambda size: 0 <= size <= kept[-1], "bytes of the last piece's activation")
    names = ["embedding", *(f"layer {layer}" for layer in range(count - 2)), "head"] if count > 2 else ["first", "last"]
    rows = zip(names, times, whole, first, second, map(int, parameters), kept, strict=False)
    require_number("weight_memory", weight_memory, lambda part: 0 <= part <= 1, "a part, 0 to 1")
    pieces = [replace(piece, freed=piece.activation * (1 - weight_memory)) for piece in starmap(Piece, rows)]
    pieces[-1] = replace(pieces[-1], logits=logits)
    return Pieces(tuple(pieces), unit, message, None, per_weight(bytes_per_weight), tensor=tensor)


def require_unit(unit: Any) -> None:
    """Raise SettingError unless `unit` is a unit of time."""
    if not isinstance(unit, str) or unit not in SECONDS:
        raise SettingError(f'unit must be "s", "ms" or "us"; got {unit!r}')


def per_weight(given: Any) -> tuple[Number, Number, Number]:
    """Return the bytes per parameter of weights, gradients and optimizer: a number is their sum, of which 2 and 2.

    Raises:
        SettingError: It is neither a number of at least 4 nor three numbers.
    """
    if not _is_list(given):
        wanted = "a number of at least 4, such as 16, or three: (weights, gradients, optimizer)"
        require_amount("bytes_per_weight", given, wanted, 4)
        return 2, 2, given - 4
    if len(given) != 3:
        raise SettingError(f"bytes_per_weight has three parts: weights, gradients, optimizer; got {given!r}")
    for size in given:
        require_amount("bytes_per_weight", size, "numbers of at least 0")
    return given[0], given[1], given[2]


def require_amount(name: str, value: Any, wanted: str, least: float = 0) -> None:
    """Raise SettingError unless `value` is a number from `least` to LARGEST. `wanted` describes such numbers."""
    require_number(name, value, lambda number: least <= number, wanted)
    require_number(name, value, lambda number: number <= LARGEST, f"at most {LARGEST:g}")


def _require_few(pieces: Sequence[Any]) -> None:
    if len(pieces) > MOST_LAYERS + 2:
        raise SettingError(
            f"{len(pieces)} pieces are too many for a plan; take at most {MOST_LAYERS} layers, the embedding and the "
            "head, or several layers as one piece"
        )


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def _row(name: str, given: Any, count: int | None = None) -> list[Any]:
    """Return one number for each of `count` pieces, by default of any number of pieces."""
    if hasattr(given, "tolist"):  # from NumPy or torch
        given = given.tolist()
    if count is not None and not isinstance(given, Sequence):
        given = [given] * count
    if not _is_list(given):
        wanted = "a list with a number for each piece: embedding, each layer, head"
        raise SettingError(f"{name} must be {wanted}; got {shown(given)}")
    _require_few(given)
    for number in given:
        require_amount(name, number, "numbers of at least 0")
    if count is not None and len(given) != count:
        raise SettingError(f"forward has {count} pieces and {name} {len(given)}; give one number for each piece")
    return [*given]
