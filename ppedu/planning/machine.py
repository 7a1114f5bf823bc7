"""The machines that a pipeline runs on."""

from __future__ import annotations

from dataclasses import dataclass

from ppedu.core import SettingError
from ppedu.core.numeric import Number
from ppedu.core.validate import require_count
from ppedu.planning.pieces import MOST, SECONDS, Pieces, Work, require_amount, require_unit
from ppedu.sim.per_link import Link

# Of each amount, what it must be and the least that it can be; anything less is in the wrong unit.
SPEED, BANDWIDTH = ("FLOP/s, such as 400e12", 1e9), ("bytes per second, such as 50e9", 1e6)
LATENCY = ("a number of at least 0", 0)
TIMES_AS_FAST = ("a multiple of the speed in bf16, such as 2", 1)
# The parts of the data sheets' bandwidths that kernels between matrices, and collectives, reach: chosen to suit the
# published runs on A100s and H100s; see tests/published.
STREAMED, EXCHANGED = 0.45, 0.75
# If GPUs that split a layer exchange while they multiply, this part of the exchange takes time still. It was chosen to
# suit Megatron-Core's scaling on H100s.
LASTING = 0.5
# The speed of matrix products whose numbers have scales of their own, as a part of that with one scale for a tensor. In
# Megatron-Bridge's runs of Llama 3.1 405B, FP8 is 6 to 8% faster than MXFP8.
SCALED = {"mxfp8": 0.91, "nvfp4": 0.91}
# The part of a GPU that computes while it sends tokens to experts: 20 of an H800's 132 multiprocessors send (arXiv
# 2412.19437, section 3.2.2).
LEFT = 112 / 132
AMOUNTS = {
    "memory": ("bytes, such as 80e9", 1),
    "flops": SPEED,
    "attention": SPEED,
    "peak": SPEED,
    "latency": LATENCY,
    "bandwidth": BANDWIDTH,
    "near_latency": LATENCY,
    "near_bandwidth": BANDWIDTH,
    "memory_bandwidth": BANDWIDTH,
    "fp8": TIMES_AS_FAST,
    "nvfp4": TIMES_AS_FAST,
    "spread": ("a part of the time, such as 0.12", 0),
}


@dataclass(frozen=True)
class Machine:
    """A GPU and its links. None stands for what is unknown.

    Args:
        memory: Bytes of a GPU.
        flops: FLOP/s that a GPU achieves in large matrix products; needed for a model that is given by its sizes.
        attention: FLOP/s that it achieves in attention, counted without the masked half; by default `flops`.
        peak: FLOP/s on the data sheet, for the model FLOPs utilization (MFU).
        latency: The time that a message takes beside its bytes, in `unit`.
        bandwidth: Bytes per second and direction between two GPUs.
        node: GPUs in a node, if `near_latency` and `near_bandwidth` are those within one.
        memory_bandwidth: Bytes per second between a GPU and its own memory, as on the data sheet, for the optimizer and
            for what lies between the matrices of a model that is given by its sizes. None leaves these out.
        unit: Of the latencies: "s", "ms" or "us"; None for the model's unit.
        fp8, nvfp4: How many times as fast matrix products are in these formats, by the data sheet; None if the GPU does
            not have them. MXFP8 has the peak of FP8.
        spread: How far nine in ten runs are from their plan, as a part of its time, for models by sizes.

    Raises:
        SettingError: A number is not possible.
    """

    memory: Number
    flops: Number | None = None
    peak: Number | None = None
    latency: Number = 0
    bandwidth: Number | None = None
    node: int | None = None
    near_latency: Number | None = None
    near_bandwidth: Number | None = None
    memory_bandwidth: Number | None = None
    unit: str | None = None
    attention: Number | None = None
    fp8: Number | None = 2
    nvfp4: Number | None = None
    spread: Number | None = None

    def __post_init__(self) -> None:
        for name, (wanted, least) in AMOUNTS.items():
            given = getattr(self, name)
            if given is not None or name in ("memory", "latency"):
                require_amount(name, given, wanted, least)
        if self.flops is not None and self.peak is not None and self.flops > self.peak:
            raise SettingError(f"flops, what a GPU achieves, exceed the peak: {self.flops:g} against {self.peak:g}")
        if self.node is not None:
            require_count("node", self.node, most=MOST)
        elif self.near_latency is not None or self.near_bandwidth is not None:
            raise SettingError("give node=, the GPUs in a node, with near_latency or near_bandwidth")
        if self.unit is not None:
            require_unit(self.unit)
        if self.spread is not None and self.spread > 1:
            raise SettingError(f"spread must be a part of the time, 0 to 1, such as 0.12; got {self.spread!r}")

    def speedup(self, precision: str) -> Number:
        """Return how many times as fast matrix products are in a format as in bf16, by the data sheet.

        Raises:
            SettingError: The GPU does not have it.
        """
        name = "fp8" if precision == "mxfp8" else precision
        factor = {"bf16": 1, "fp8": self.fp8, "nvfp4": self.nvfp4}[name]
        if factor is None:
            raise SettingError(
                f"the machine has no matrix products in {precision}; if it does, give their speed as a multiple of "
                f'that in bf16, such as Machine(…, {name}=2); or take precision="bf16"'
            )
        return factor

    def seconds(self, work: Work, pieces: Pieces) -> float:
        """Return how long a GPU takes for some work: its matrices, attention, memory and links, one after the other.

        Small models are slower than large ones because what lies between the matrices grows with the width, and the
        matrices with its square. Few tokens are slower than many because the matrices themselves are read for each
        microbatch. What GPUs send each other is as fast as the links of a node if it holds them all.

        Args:
            work: Of a GPU whose `flops` are known.
            pieces: Those that it is of, for the GPUs that split them and for their format.
        """
        assert self.flops
        matrices = work.matrices
        if work.short:
            matrices += work.short / (self.speedup(pieces.precision) * SCALED.get(pieces.precision, 1))
        time = matrices / self.flops + work.attention / (self.attention or self.flops)
        if self.memory_bandwidth:
            time += (work.moved / STREAMED + work.operands) / self.memory_bandwidth
        exchanged = work.exchanged * (LASTING if pieces.tensor_overlap else 1)
        time += self._sending(exchanged, pieces.tensor) + self._sending(work.passed, pieces.gpus)
        routed = self._sending(work.routed * self._copies(pieces), pieces.expert)
        if not pieces.overlap:
            return float(time + routed)
        # While tokens are on their way, only a part of the GPU computes.
        return float(max(time + (1 - LEFT) * routed, routed))

    def _sending(self, sent: Number, gpus: int) -> Number:
        """Return how long a GPU takes to send bytes to the others of a group."""
        bandwidth = self.among(gpus)
        return sent / (EXCHANGED * bandwidth) if sent and bandwidth else 0

    def _copies(self, pieces: Pieces) -> Number:
        """Return how many copies of a token leave its place on average if it visits any of the experts.

        A place is a GPU; or a node if the experts are in several, because the links between nodes are the slow ones. An
        all-to-all sends a copy for each expert. With DeepEP, a token comes to a place only once, whichever of its
        experts it visits (github.com/deepseek-ai/DeepEP).
        """
        node = self.node or 1
        places = pieces.expert if pieces.expert <= node else -(-pieces.expert // node)
        if pieces.dispatcher == "alltoall":
            return pieces.visited * (1 - 1 / places)
        return (places - 1) * (1 - (1 - 1 / places) ** pieces.visited)

    def among(self, gpus: int) -> Number | None:
        """Return the bandwidth among neighboring GPUs: that of a node if it holds them all; None if unknown."""
        return self.near_bandwidth if self.near_bandwidth and gpus <= (self.node or 1) else self.bandwidth

    def delays(self, ranks: int, message: Number, unit: str, tensor: int = 1) -> Number | dict[Link, Number]:
        """Return the time of a message of `message` bytes in `unit`: one number, or one for each link of the ranks.

        Args:
            tensor: GPUs of a rank.
        """

        def delay(latency: Number, bandwidth: Number | None) -> Number:
            factor = 1 if self.unit in (None, unit) else SECONDS[self.unit or unit] / SECONDS[unit]
            sent = message / bandwidth / SECONDS[unit] if bandwidth and message else 0
            return latency * factor + sent

        far = delay(self.latency, self.bandwidth)
        node = max(1, (self.node or 1) // tensor)
        if node == 1:
            return far
        near = delay(
            self.latency if self.near_latency is None else self.near_latency,
            self.bandwidth if self.near_bandwidth is None else self.near_bandwidth,
        )
        if near == far or node >= ranks:
            return near
        return {
            (sender, receiver): near if sender // node == receiver // node else far
            for sender in range(ranks)
            for receiver in range(ranks)
            if sender != receiver
        }
