"""Models by their sizes: parameters, FLOPs and activation bytes of each piece."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ppedu.core import SettingError, hooks
from ppedu.core.numeric import Number
from ppedu.core.validate import require_count, require_instance, require_number
from ppedu.planning.pieces import MOST, MOST_LAYERS, Pieces, measured
from ppedu.planning.work import Attention, grouped, latent, pieces_of

RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer by its sizes.

        Model(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)  # Llama 3 8B

    Args:
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
        imbalance: The tokens of the GPU with the busiest experts, as a multiple of the mean; at most the GPUs among
            which a layer's experts are divided.
        dense, dense_ffn: The first layers that have one perceptron in place of experts, and its width.
        key_rank, query_rank, rotary: For multi-head latent attention: the numbers of a token that its keys and values,
            and its queries, are made of; and the numbers that carry the position, which each head has beside its
            `head_size`. See `ppedu.planning.work.latent`.
        predictions: Further tokens that the model predicts in training, each with a layer and the head (multi-token
            prediction, arXiv 2412.19437, section 2.2). `parameters` leaves them out, as published numbers do.
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
    imbalance: Number = 1
    dense: int = 0
    dense_ffn: int | None = None
    key_rank: int = 0
    query_rank: int = 0
    rotary: int = 0
    predictions: int = 0

    def __post_init__(self) -> None:
        limits = {"layers": (1, MOST_LAYERS), "predictions": (0, MOST_LAYERS)}
        limits |= dict.fromkeys(("width", "heads", "vocabulary"), (1, MOST))
        at_least_0 = ("positions", "experts", "active", "shared", "dense", "key_rank", "query_rank", "rotary")
        limits |= dict.fromkeys(at_least_0, (0, MOST))
        if self.dense_ffn is not None:
            limits["dense_ffn"] = 1, MOST
        for name, (least, most) in limits.items():
            # NumPy's numbers become Python's: sums of theirs overflow.
            object.__setattr__(self, name, require_count(name, getattr(self, name), least, most))  # frozen
        require_number("imbalance", self.imbalance, lambda number: 1 <= number <= MOST, "at least 1")
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
        if self.imbalance != 1 and not self.experts:
            raise SettingError(f"imbalance is for models with experts; got imbalance={self.imbalance} and experts=0")
        if (self.query_rank or self.rotary) and not self.key_rank:
            raise SettingError("query_rank and rotary are for latent attention; give key_rank, too, such as 512")
        if self.key_rank and (self.kv_heads != self.heads or self.qk_norm or self.biases != "none"):
            raise SettingError(
                "latent attention (key_rank) has as many heads of keys as of queries, and no biases or "
                "qk_norm; leave out kv_heads, biases and qk_norm"
            )
        if bool(self.dense) != (self.dense_ffn is not None) or self.dense > self.layers * bool(self.experts):
            raise SettingError(
                f"dense, the first layers without experts, must be at most the {self.layers} layers of a model with "
                f"experts, and dense_ffn is their width; got dense={self.dense} and dense_ffn={self.dense_ffn}"
            )

    measured = staticmethod(measured)
    pieces = pieces_of

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
    def attention(self) -> Attention:
        """The attention of a layer."""
        size = self.head_size or 0
        if self.key_rank:
            return latent(self.width, self.heads, size, self.rotary, self.key_rank, self.query_rank)
        rotated = not self.positions
        return grouped(self.width, self.heads, self._kv_heads, size, self.biases, self.qk_norm, rotated)

    @property
    def first(self) -> Model:
        """The model with its first, dense layers alone."""
        changes: dict[str, Any] = dict.fromkeys(("experts", "active", "shared", "dense"), 0)
        return replace(self, layers=self.dense, ffn=self.dense_ffn, dense_ffn=None, imbalance=1, **changes)

    @property
    def perceptron(self) -> int:
        """The weights in the matrices of one perceptron, or of one expert."""
        return (3 if self.gated else 2) * self.width * (self.ffn or 0)

    @property
    def norm_parameters(self) -> int:
        """The parameters of one norm of the model's width."""
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def _perceptron_parameters(self) -> int:
        biases = (2 if self.gated else 1) * (self.ffn or 0) + self.width
        return self.perceptron + (biases if self.biases == "all" else 0)

    @property
    def expert_parameters(self) -> int:
        """The parameters of those experts of a layer among which tokens choose."""
        return self.experts * self._perceptron_parameters

    @property
    def layer_parameters(self) -> int:
        """The parameters of a layer, with all its experts; of the last one, if the first layers are dense."""
        perceptrons = self.shared * self._perceptron_parameters + self.width * self.experts  # and the router
        if not self.experts:
            perceptrons = self._perceptron_parameters
        return self.attention.parameters + perceptrons + self.expert_parameters + 2 * self.norm_parameters

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
        ends = self.embedding_parameters + self.head_parameters - self.tied_parameters
        layers = (self.layers - self.dense) * self.layer_parameters
        return ends + layers + (self.dense * self.first.layer_parameters if self.dense else 0)

    @property
    def tied_parameters(self) -> int:
        """The parameters of the head that are the embedding's."""
        return self.vocabulary * self.width if self.tied else 0

    def layer_flops(self, sequence: int, past: int = 0) -> tuple[float, float, float]:
        """Return the FLOPs of F, I and W of a layer for one sequence, or for a slice with `past` tokens before it.

        A matrix takes 2 FLOPs per weight and token in each of F, I and W. Attention takes 2 · `sequence` FLOPs per
        token and number of a query, half of the products being masked, and twice as many in I; it has no weights,
        so it adds nothing to W (arXiv 2205.05198, appendix A, which counts the masked half, too). Nothing is masked of
        the products with `past` tokens.
        """
        visited = self.active + self.shared if self.experts else 1
        matrices = self.attention.matrices + visited * self.perceptron + self.width * self.experts
        attention = float((sequence + 2 * past) * self.attention.scored)
        per_token = 2 * matrices + attention, 2 * matrices + 2 * attention, 2 * matrices
        return per_token[0] * sequence, per_token[1] * sequence, per_token[2] * sequence

    def head_flops(self, sequence: int) -> float:
        """Return the FLOPs of the head for one sequence, in each of F, I and W."""
        return 2.0 * sequence * self.width * self.vocabulary

    def flops(self, sequence: int, past: int = 0) -> float:
        """Return the FLOPs of the model for one sequence or slice, forward and backward, as it needs them in training.

        The backward takes twice the forward's.
        """
        dense = self.dense * self.first.layer_flops(sequence, past)[0] if self.dense else 0
        layers = (self.layers - self.dense + self.predictions) * self.layer_flops(sequence, past)[0]
        joined = self.predictions * 4.0 * sequence * self.width**2
        return 3 * (dense + layers + joined + (1 + self.predictions) * self.head_flops(sequence))

    def layer_activation(
        self,
        sequence: int,
        tensor: int = 1,
        sequence_parallel: bool = False,
        recompute: str = "none",
        element: int = 2,
        gated: int = 4,
        inputs: Number | None = None,
    ) -> float:
        """Return the bytes on each GPU that a layer keeps for the backward of one sequence.

        With `dropout`, without `flash` and with a perceptron of 4 · `width` that is not gated, these are the formulas
        of arXiv 2205.05198: 34·s·h + 5·a·s² without parallelism (equation 1), s·h·(10 + 24/t) + 5·a·s²/t with tensor
        parallelism (2), all of it divided by t with sequence parallelism (4); "selective" recomputation leaves out the
        attention matrix (6), and "full" keeps the layer's input (table 2).

        Args:
            tensor: GPUs that split the layer. sequence_parallel: They also split what lies between its matrices.
            recompute: "selective" is for attention that keeps its matrix, so not for `flash`; or for latent attention,
                whose queries, keys and values are made again of few numbers.
            element: Bytes of a number.
            gated: The tensors of its own width that a gated perceptron keeps: 3 if its activation function and its
                product are one kernel.
            inputs: Bytes of a number in the inputs of matrices, if they are kept in another format.
        """
        inputs = element if inputs is None else inputs
        for name, number in (("sequence", sequence), ("element", element)):
            require_count(name, number, most=MOST)
        require_instance("sequence_parallel", sequence_parallel, bool, "True or False")
        self.require_split(recompute, tensor)
        width, attention = self.width, self.attention
        part = tensor if sequence_parallel else 1
        mask = width if self.dropout else 0  # a byte for each number
        if recompute == "full":
            return sequence * element * width / part
        between = 2 * (element + inputs) * width + 2 * mask  # inputs of both norms, of the attention, of the perceptron
        kept = attention.kept - (attention.remade if recompute == "selective" else 0)
        split: Number = element * kept + inputs * attention.fed
        if self.flash:
            split += 4 * self.heads  # the logarithm of a sum, in fp32
        elif recompute == "none":
            split += self.heads * sequence * (2 * element + 1 if self.dropout else element)
        # The last tensor of a perceptron is its second matrix's input.
        perceptron = (self.ffn or 0) * (element * ((gated if self.gated else 2) - 1) + inputs)
        if self.experts:  # each expert gets a copy of its tokens, and its output is kept for the weighted sum
            expert = perceptron + 2 * element * width
            split += self.active * float(self.imbalance) * expert + self.shared * perceptron
        else:
            split += perceptron
        return sequence * (between / part + split / tensor)

    def head_activation(self, sequence: int, tensor: int = 1, element: int = 2) -> tuple[float, float, float]:
        """Return the bytes of the head and the loss for one sequence, those of them that are logits, or freed by I.

        The loss is computed in fp32; in a shorter format, the logits are kept in that format, too. I turns the logits
        into their gradient, which W needs, and frees those in fp32 if there are others.
        """
        numbers = sequence * self.vocabulary / tensor
        freed = 4 * numbers if element < 4 else 0
        logits = element * numbers + freed
        return sequence * 2 * element * self.width + logits, logits, freed

    def require_split(self, recompute: str, tensor: int) -> None:
        """Raise SettingError unless the layers can be recomputed, and split among `tensor` GPUs, like this."""
        if not isinstance(recompute, str) or recompute not in RECOMPUTED:
            raise SettingError(f'recompute must be "none", "selective" or "full"; got {recompute!r}')
        if recompute == "selective" and self.flash and not self.key_rank:
            raise SettingError(
                'recompute="selective" leaves out the attention matrix, which flash attention does not keep; give the '
                'model flash=False, or take recompute="none"'
            )
        if self.heads % require_count("tensor", tensor):
            raise SettingError(f"tensor must be a divisor of the {self.heads} heads; got {tensor}")
