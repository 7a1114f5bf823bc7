"""The model and the cluster of the lessons' running example, with its times, bytes and dollars."""

from __future__ import annotations

from dataclasses import dataclass

from ppedu.sim import Costs, Timeline

GB = 1e9
HOUR = 3600


@dataclass(frozen=True)
class Project:
    """A language model, and the cluster that trains it. Times are in seconds, sizes in bytes.

    A rank of the pipeline is a node of `node` GPUs, which split every layer among them (tensor parallel). Memory and
    messages are those of one GPU. One microbatch is one sequence. `replicas` pipelines train side by side.

    Args:
        width: The numbers that represent a token between two layers.
        speed: Achieved FLOP/s of a GPU; 400 TFLOP/s is about what Llama 3 reports for H100s (arXiv 2407.21783,
            table 4).
        link: Bytes per second and direction between a GPU and its peer in another node.
        price: Dollars per GPU and hour, an assumption.
    """

    layers: int = 64
    width: int = 8192
    vocabulary: int = 131_072
    sequence: int = 8192
    node: int = 8
    replicas: int = 32
    memory: float = 80 * GB
    speed: float = 400e12
    link: float = 6.25 * GB
    price: float = 2.0

    @property
    def layer_weights(self) -> int:
        """The weights of one layer: 12 · width², biases and norms not counted."""
        return 12 * self.width**2

    @property
    def weights(self) -> int:
        """The weights of the model: its layers, the embedding and the head."""
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.width

    @property
    def layer_time(self) -> float:
        """The time of one layer's forward for one microbatch, on a node.

        Per token: two FLOPs for each weight, and 2 · sequence · width for the attention to the tokens before it.
        """
        flops = self.sequence * (2 * self.layer_weights + 2 * self.sequence * self.width)
        return flops / (self.node * self.speed)

    @property
    def layer_activation(self) -> float:
        """The bytes that one layer keeps on a GPU for the backward of one microbatch.

        With the layer's activations split among the GPUs of the node and flash attention: 34 · sequence · width / node
        (arXiv 2205.05198, equation 4, without the attention matrix).
        """
        return 34 * self.sequence * self.width / self.node

    @property
    def message(self) -> float:
        """The bytes that a GPU sends at a cut, for one microbatch and one direction, in bf16."""
        return 2 * self.sequence * self.width / self.node

    def stage_state(self, stage: int, stages: int) -> float:
        """Return the bytes of a stage on each GPU of its node, for weights, gradients and Adam.

        The first stage has the embedding, the last one the head. In mixed precision, each weight takes 2 bytes, its
        gradient 2, and Adam 12: 4 each for an fp32 copy and two averages (arXiv 1910.02054, section 3.1).
        """
        ends = (stage == 0) + (stage == stages - 1)
        weights = self.layers / stages * self.layer_weights + ends * self.vocabulary * self.width
        return 16 * weights / self.node

    def state(self, ranks: int) -> float:
        """Return the bytes of the fullest stage, which has the embedding or the head, with a stage on each rank."""
        return self.stage_state(0, ranks)

    def peak(self, timeline: Timeline) -> float:
        """Return the GB on the fullest GPU, at its peak: its stages' state, and the activations of a timeline in GB."""
        placement = timeline.schedule.placement
        return max(
            sum(self.stage_state(stage, placement.stages) for stage in placement.stages_of(rank)) / GB + float(held)
            for rank, held in enumerate(timeline.peak_activations)
        )

    def costs(self, ranks: int) -> Costs:
        """Return the costs of a pipeline of `ranks` nodes: times in seconds, activations in GB per GPU.

        The embedding and the head are left out, and a backward takes twice as long as a forward.
        """
        layers = self.layers / ranks
        return Costs(
            forward=layers * self.layer_time,
            latency=self.message / self.link,
            activation=layers * self.layer_activation / GB,
            unit="s",
            memory_unit="GB",
        )

    def gpus(self, ranks: int) -> int:
        """Return the number of GPUs in all replicas of a pipeline of `ranks` nodes."""
        return self.replicas * ranks * self.node

    def dollars(self, ranks: int, seconds: float) -> float:
        """Return the price of all replicas for some seconds."""
        return self.gpus(ranks) * self.price * seconds / HOUR


heron = Project()
