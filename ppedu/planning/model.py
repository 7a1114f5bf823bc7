"""Models by their sizes: parameters, FLOPs and activation bytes of each piece."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ppedu.core import SettingError, hooks
from ppedu.core.numeric import Number
from ppedu.core.validate import require_count, require_instance
from ppedu.planning.implementations import implementation_named
from ppedu.planning.pieces import FLOP, MOST, MOST_LAYERS, Piece, Pieces, Work, measured, per_weight, require_precision

RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer by its sizes.

        Model(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)  # Llama 3 8B

    kv_heads: Heads of keys and values, if fewer than `heads` (grouped-query attention, arXiv 2305.13245).
    ffn: The width of the perceptron; by default 4 · `width`.
    head_size: By default `width` / `heads`.
    gated: The perceptron has three matrices (SwiGLU, arXiv 2002.05202) in place of two.
    norm: "rms" has a scale; "layer" has a scale and a bias.
    biases: Of the linear layers: "none", those of queries, keys and values ("qkv"), or "all".
    qk_norm: Queries and keys are normalized, each with a scale per head size.
    positions: The number of learned position embeddings, 0 without.
    tied: The head uses the weights of the embedding.
    experts, active: Experts of a layer, and how many of them a token visits (mixture of experts). `ffn` is then the
        width of one expert.
    shared: Experts that every token visits.
    dropout: After attention, after both halves of a layer and on the attention matrix: it keeps masks.
    flash: Attention keeps one number per token and head in place of its matrix (arXiv 2205.14135).

    Raises:
        SettingError: A size is not possible.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    ffn: int | None = None
    head_size: int | None = None
    gated: bool = True
    norm: str = "rms"
    biases: str = "none"
    qk_norm: bool = False
    positions: int = 0
    tied: bool = False
    experts: int = 0
    active: int = 0
    shared: int = 0
    dropout: bool = False
    flash: bool = True

    def __post_init__(self) -> None:
        require_count("layers", self.layers, most=MOST_LAYERS)
        for name in ("width", "heads", "vocabulary"):
            require_count(name, getattr(self, name), most=MOST)
        for name in ("positions", "experts", "active", "shared"):
            require_count(name, getattr(self, name), least=0, most=MOST)
        for name in (each.name for each in fields(self) if each.type == "bool"):
            require_instance(name, getattr(self, name), bool, "True or False")
        if self.head_size is None and self.width % self.heads:
            near = self.heads * max(1, round(self.width / self.heads))
            raise SettingError(
                f"a width of {self.width} cannot be divided among {self.heads} heads; take a width of {near}, or give "
                "head_size"
            )
        defaults = {
            "kv_heads": self.heads,
            "ffn": 4 * self.width,
            "head_size": self.width // self.heads,
        }
        for name, default in defaults.items():
            given = getattr(self, name)
            object.__setattr__(self, name, default if given is None else require_count(name, given, 1, MOST))  # frozen
        if self.heads % self._kv_heads:
            raise SettingError(
                f"{self.heads} heads cannot share {self._kv_heads} heads of keys and values; kv_heads must divide heads"
            )
        if not isinstance(self.norm, str) or self.norm not in ("rms", "layer"):
            raise SettingError(f'norm must be "rms" or "layer"; got {self.norm!r}')
        if not isinstance(self.biases, str) or self.biases not in ("none", "qkv", "all"):
            raise SettingError(f'biases must be "none", "qkv" or "all"; got {self.biases!r}')
        if not (0 < self.active <= self.experts if self.experts else self.active == self.shared == 0):
            raise SettingError(
                f"a token visits 1 to {self.experts or 'all'} experts; got active={self.active} of {self.experts}"
            )

    measured = staticmethod(measured)

    @classmethod
    def of(cls, module: Any, example: Any, loss_fn: Any = None, bytes_per_weight: Any = 16) -> Pieces:
        """Return an `nn.Module` as pieces, with the FLOPs and bytes that torch counts; see `ppedu.engine.stages.count`.

            with torch.device("meta"):
                model = pp.Model.of(MyModel(), torch.zeros(1, 4096, dtype=torch.long))

        Raises:
            SettingError: The module is not a chain of pieces, or cannot run with the example.
        """
        return hooks.call("count", module, example, loss_fn, bytes_per_weight)

    @property
    def _kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def _queries(self) -> int:
        """The width of all queries of a token."""
        return self.heads * (self.head_size or 0)

    @property
    def _keys(self) -> int:
        """The width of all keys of a token, and of all values."""
        return self._kv_heads * (self.head_size or 0)

    @property
    def _visited(self) -> int:
        """The perceptrons that a token visits in a layer."""
        return self.active + self.shared if self.experts else 1

    @property
    def _perceptron(self) -> int:
        """The weights in the matrices of one perceptron."""
        return (3 if self.gated else 2) * self.width * (self.ffn or 0)

    @property
    def norm_parameters(self) -> int:
        """The parameters of one norm of the model's width."""
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def layer_parameters(self) -> int:
        """The parameters of a layer."""
        width, queries, keys = self.width, self._queries, self._keys
        inner = queries + 2 * keys
        attention = width * inner + queries * width
        attention += {"none": 0, "qkv": inner, "all": inner + width}[self.biases]
        attention += 2 * (self.head_size or 0) if self.qk_norm else 0
        one = self._perceptron
        if self.biases == "all":
            one += (2 if self.gated else 1) * (self.ffn or 0) + width
        perceptrons = (self.experts + self.shared) * one + width * self.experts if self.experts else one
        return attention + perceptrons + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """The parameters of the embedding."""
        return (self.vocabulary + self.positions) * self.width

    @property
    def head_parameters(self) -> int:
        """The parameters of the last norm and the output matrix, which may be the embedding's."""
        return self.norm_parameters + self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """The parameters of the model."""
        ends = self.embedding_parameters + self.head_parameters - self._shared
        return ends + self.layers * self.layer_parameters

    @property
    def _shared(self) -> int:
        return self.vocabulary * self.width if self.tied else 0

    def layer_flops(self, sequence: int) -> tuple[float, float, float]:
        """Return the FLOPs of F, I and W of a layer for one sequence.

        A matrix takes 2 FLOPs per weight and token in each of F, I and W. Attention takes 2 · `sequence` FLOPs per
        token and number of a query, half of the products being masked, and twice as many in I; it has no weights,
        so it adds nothing to W (arXiv 2205.05198, appendix A, which counts the masked half, too).
        """
        matrices = self.width * (2 * self._queries + 2 * self._keys) + self._visited * self._perceptron
        matrices += self.width * self.experts
        attention = 2.0 * sequence * self._queries
        per_token = 2 * matrices + attention, 2 * matrices + 2 * attention, 2 * matrices
        return per_token[0] * sequence, per_token[1] * sequence, per_token[2] * sequence

    def layer_work(
        self,
        sequence: int,
        batch: int = 1,
        tensor: int = 1,
        sequence_parallel: bool = False,
        element: int = 2,
        precision: str = "bf16",
    ) -> tuple[Work, Work, Work]:
        """Return what one of the GPUs that split a layer does in its F, I and W for `batch` sequences.

        The FLOPs are those of `layer_flops`. Between the matrices, F and I each read and write the inputs and outputs
        of two norms and two additions, of the rotation of queries and keys, and of the activation function. Without
        `flash`, the attention matrix is written, scaled, normalized and read. GPUs that split a layer gather its input,
        and scatter and add its output, once for the attention and once for the perceptron.
        """
        width, tokens, element_ffn = self.width, sequence * batch, element * (self.ffn or 0)
        flops = self.layer_flops(sequence)
        attention = 2.0 * sequence * self._queries * sequence
        part = tensor if sequence_parallel else 1
        shared = 10 * element * width / part  # 2 · (2 + 3): a norm has an input and an output, an addition three
        split = self._visited * element_ffn * (3 if self.gated else 2)
        split += 0 if self.positions else 2 * element * (self._queries + self._keys)
        if not self.flash:
            split += self.heads * sequence * (4 * element + (element + 1 if self.dropout else 0))
        if self.experts:  # tokens are copied to their experts, and their results are added up
            split += 4 * element * self.active * width
        moved = tokens * (shared + split / tensor)
        exchanged = 4 * element * tokens * width * (tensor - 1) / tensor
        matrices, attention = batch * flops[2] / tensor, batch * attention / tensor  # W has the matrices alone
        long, short = (0, matrices) if precision == "fp8" else (matrices, 0)
        return (
            Work(long, attention, moved, exchanged, short),
            Work(long, 2 * attention, moved, exchanged, short),
            Work(long, short=short),
        )

    def head_work(self, sequence: int, batch: int = 1, tensor: int = 1, element: int = 2) -> tuple[Work, Work, Work]:
        """Return what one of the GPUs that split the head does in its F, I and W for `batch` sequences.

        The loss in fp32 reads the logits, and reads and writes their exponentials several times; I turns these into the
        gradient of the logits.
        """
        tokens = sequence * batch
        matrices = batch * self.head_flops(sequence) / tensor
        logits = tokens * self.vocabulary / tensor
        exchanged = element * tokens * self.width * (tensor - 1) / tensor
        norm = 2 * element * tokens * self.width
        forward = Work(matrices, 0, norm + logits * (2 * element + 18), exchanged)
        return forward, Work(matrices, 0, norm + logits * (4 + 2 * element), exchanged), Work(matrices)

    def head_flops(self, sequence: int) -> float:
        """Return the FLOPs of the head for one sequence, in each of F, I and W."""
        return 2.0 * sequence * self.width * self.vocabulary

    def layer_activation(
        self,
        sequence: int,
        tensor: int = 1,
        sequence_parallel: bool = False,
        recompute: str = "none",
        element: int = 2,
        gated: int = 4,
        inputs: int | None = None,
    ) -> float:
        """Return the bytes on each GPU that a layer keeps for the backward of one sequence.

        With `dropout`, without `flash` and with a perceptron of 4 · `width` that is not gated, these are the formulas
        of arXiv 2205.05198: 34·s·h + 5·a·s² without parallelism (equation 1), s·h·(10 + 24/t) + 5·a·s²/t with tensor
        parallelism (2), all of it divided by t with sequence parallelism (4); "selective" recomputation leaves out the
        attention matrix (6), and "full" keeps the layer's input (table 2).

        tensor: GPUs that split the layer. sequence_parallel: They also split what lies between its matrices.
        recompute: "selective" is for attention that keeps its matrix, so not for `flash`.
        element: Bytes of a number.
        gated: The tensors of its own width that a gated perceptron keeps: 3 if its activation function and its product
            are one kernel.
        inputs: Bytes of a number in the inputs of matrices, if they are kept in another format.
        """
        inputs = element if inputs is None else require_count("inputs", inputs, most=MOST)
        for name, number in (("sequence", sequence), ("element", element)):
            require_count(name, number, most=MOST)
        require_instance("sequence_parallel", sequence_parallel, bool, "True or False")
        self._require(recompute, tensor)
        width, queries, keys, ffn = self.width, self._queries, self._keys, self.ffn or 0
        part = tensor if sequence_parallel else 1
        mask = width if self.dropout else 0  # a byte for each number
        if recompute == "full":
            return sequence * element * width / part
        between = 2 * (element + inputs) * width + 2 * mask  # inputs of both norms, of the attention, of the perceptron
        attention = element * (queries + 2 * keys) + inputs * queries  # queries, keys, values; the projection's input
        if self.flash:
            attention += 4 * self.heads  # the logarithm of a sum, in fp32
        elif recompute == "none":
            attention += self.heads * sequence * (2 * element + 1 if self.dropout else element)
        each = ffn * (
            element * ((gated if self.gated else 2) - 1) + inputs
        )  # the last one is the second matrix's input
        if self.experts:  # each expert gets a copy of its tokens, and its output is kept for the weighted sum
            each = each + 2 * element * width
        return sequence * (between / part + (attention + self._visited * each) / tensor)

    def head_activation(self, sequence: int, tensor: int = 1, element: int = 2) -> tuple[float, float]:
        """Return the bytes of the head and the loss for one sequence, and how many of them are logits.

        The loss is computed in fp32; in a shorter format, the logits are kept in that format, too.
        """
        logits = sequence * self.vocabulary * (4 + (element if element < 4 else 0)) / tensor
        return sequence * 2 * element * self.width + logits, logits

    def pieces(
        self,
        sequence: int,
        batch: int = 1,
        tensor: int = 1,
        sequence_parallel: bool | None = None,
        recompute: str = "none",
        bytes_per_weight: Number | tuple[Number, Number, Number] | None = None,
        element: int = 2,
        implementation: str = "megatron",
        precision: str = "bf16",
        context: int = 1,
    ) -> Pieces:
        """Return the pieces of the model for microbatches of `batch` sequences of `sequence` tokens.

        Args:
            sequence: Tokens of a sequence.
            batch: Sequences of a microbatch.
            tensor: GPUs that split every piece; FLOPs and bytes are those of one of them.
            sequence_parallel: Whether they also split what lies between the matrices; by default if there are several.
            recompute: "none"; "selective", the attention; or "full", each layer from its input. See `layer_activation`.
                What is computed again comes to I. Whole stages are recomputed by `plan(recompute=True)`.
            bytes_per_weight: By default those of the implementation.
            element: Bytes of a number.
            implementation: Of `ppedu.planning.implementations`.
            precision: Of the layers' matrices: "bf16", or "fp8", in which their inputs are kept, too.
            context: Groups of `tensor` GPUs that split each sequence. A GPU has 1 / `context` of all but the weights.
                In each layer, it gets the others' keys and values; in I, it also sends their gradients.

        Raises:
            SettingError: A number is not possible, or a name is unknown.
        """
        sequence, batch = require_count("sequence", sequence, 1, MOST), require_count("batch", batch, 1, MOST)
        self._require(recompute, tensor)
        require_count("element", element, most=MOST)
        require_count("context", context, most=sequence)
        require_precision(precision)
        kept_by = implementation_named(implementation)
        parallel = tensor > 1 if sequence_parallel is None else sequence_parallel
        require_instance("sequence_parallel", parallel, bool, "True, False or None")
        forward, first, second = self.layer_work(sequence, batch, tensor, parallel, element, precision)
        if recompute == "full":
            again = forward
        elif recompute == "selective":
            others = replace(self, flash=True).layer_work(sequence, batch, tensor, parallel, element)[0]
            again = Work(0, forward.attention, forward.moved - others.moved)
        else:
            again = Work()
        keys = 2 * element * self._keys * batch * sequence * (context - 1) / tensor  # and values
        forward, first = forward._replace(passed=keys), first.plus(again)._replace(passed=2 * keys)
        whole_layer, whole_head = (forward, first, second), self.head_work(sequence, batch, tensor, element)
        inputs = 1 if precision == "fp8" else element
        whole, kept = (
            self.layer_activation(sequence, tensor, parallel, each, element, kept_by.gated, inputs)
            for each in ("none", recompute)
        )
        part = batch / context
        embedding = Piece("embedding", 0, 0, 0, 0, -(-self.embedding_parameters // tensor), part * 8 * sequence)
        layer_work, head_work = ([each.part(context) for each in work] for work in (whole_layer, whole_head))
        layer = Piece.of_work("", layer_work, -(-self.layer_parameters // tensor), part * kept)
        size, logits = (part * each for each in self.head_activation(sequence, tensor, element))
        head = Piece.of_work("head", head_work, -(-self.head_parameters // tensor), size, logits)
        layers = [replace(layer, name=f"layer {number}") for number in range(self.layers)]
        message = part * sequence * element * self.width / (tensor if parallel else 1)
        once = 3 * (self.layers * self.layer_flops(sequence)[0] + self.head_flops(sequence))
        tied = -(-self._shared // tensor)
        sizes = per_weight(kept_by.bytes_per_weight if bytes_per_weight is None else bytes_per_weight)
        pieces = (embedding, *layers, head)
        return Pieces(
            pieces,
            FLOP,
            message,
            batch * sequence,
            sizes,
            flops=batch * once,
            tied=tied,
            tensor=tensor,
            precision=precision,
            context=context,
            implementation=implementation,
            recompute=recompute,
            restored=part * (whole - kept),
        )

    def _require(self, recompute: str, tensor: int) -> None:
        if not isinstance(recompute, str) or recompute not in RECOMPUTED:
            raise SettingError(f'recompute must be "none", "selective" or "full"; got {recompute!r}')
        if recompute == "selective" and self.flash:
            raise SettingError(
                'recompute="selective" leaves out the attention matrix, which flash attention does not keep; give the '
                'model flash=False, or take recompute="none"'
            )
        if self.heads % require_count("tensor", tensor):
            raise SettingError(f"tensor must be a divisor of the {self.heads} heads; got {tensor}")
