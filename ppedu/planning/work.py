"""The pieces of a model by its sizes: the work of each GPU, and the bytes that it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ppedu.core import SettingError
from ppedu.core.numeric import Number, plural
from ppedu.core.validate import require_count, require_instance, require_one_of
from ppedu.planning.implementations import implementation_named
from ppedu.planning.layout import PREDICTION
from ppedu.planning.pieces import DISPATCHERS, FLOP, INPUT_BYTES, MOST, Piece, Pieces, Work, per_weight

if TYPE_CHECKING:
    from ppedu.planning.model import Model

Works = tuple[Work, Work, Work]  # of F, I and W
FP32 = 4  # bytes


class Attention(NamedTuple):
    """The attention of a layer, by the numbers it has for each token.

    Args:
        parameters: Of its matrices, biases and norms. matrices: Of its matrices alone.
        scored: Numbers that are multiplied for every other token of the sequence: of its queries, and of its values.
        kept: Numbers that its backward needs. fed: Further ones, which are inputs of matrices; the layer's own input is
            not among them.
        shared: Numbers of its keys and values, which parts of a sequence send each other.
        moved: Numbers that kernels between its matrices read and write.
        remade: Those of `kept` that selective recomputation makes again, if the attention makes them of fewer numbers.
        remaking: Of the matrices for it.
    """

    parameters: int
    matrices: int
    scored: int
    kept: int
    fed: int
    shared: int
    moved: int
    remade: int = 0
    remaking: int = 0


def grouped(width: int, heads: int, kv_heads: int, size: int, biases: str, norms: bool, rotated: bool) -> Attention:
    """Return attention whose heads of queries share fewer heads of keys and values (arXiv 2305.13245).

    Args:
        biases: "none", "qkv" or "all". norms: Of queries and keys. rotated: Queries and keys carry positions.
    """
    queries, keys = heads * size, kv_heads * size
    inner = queries + 2 * keys
    matrices = width * inner + queries * width
    parameters = matrices + {"none": 0, "qkv": inner, "all": inner + width}[biases] + (2 * size if norms else 0)
    moved = 2 * (queries + keys) if rotated else 0
    return Attention(parameters, matrices, 2 * queries, inner, queries, 2 * keys, moved)


def latent(width: int, heads: int, size: int, rotary: int, key_rank: int, query_rank: int) -> Attention:
    """Return attention that makes keys and values of few numbers, and queries, too (arXiv 2405.04434, section 2.1).

    Args:
        size: Of a head's values, and of its queries and keys without the `rotary` numbers that carry the position; the
            keys of all heads share those.
        query_rank: 0 if queries are made of the input itself.
    """
    queries = keys = heads * (size + rotary)
    values = heads * size
    down = width * (query_rank + key_rank + rotary)
    up = (query_rank or width) * queries + key_rank * 2 * values
    matrices = down + up + values * width
    ranks = query_rank + key_rank  # they are normalized, each before its second matrix
    kept = ranks + rotary + queries + keys + values
    moved = 2 * (ranks + (heads + 1) * rotary + keys)
    return Attention(
        matrices + ranks,
        matrices,
        queries + values,
        kept,
        ranks + values,
        keys + values,
        moved,
        remade=queries + keys + values,
        remaking=up,
    )


def pieces_of(
    model: Model,
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
    expert: int = 1,
    overlap: bool = False,
    dispatcher: str = DISPATCHERS[0],
    tensor_overlap: bool = False,
    shard_vocabulary: bool = False,
    graphs: bool = False,
    past: int | None = None,
) -> Pieces:
    """Return the pieces of the model for microbatches of `batch` sequences of `sequence` tokens.

    Args:
        sequence: Tokens of a sequence.
        batch: Sequences of a microbatch.
        tensor: GPUs that split every piece; FLOPs and bytes are those of one of them.
        sequence_parallel: Whether they also split what lies between the matrices; by default if there are several.
        recompute: "none"; "selective", the attention, as in `Model.layer_activation`; or "full", each layer from its
            input. What is computed again comes to I. Whole stages are recomputed by `plan(recompute=True)`.
        bytes_per_weight: By default those of the implementation.
        element: Bytes of a number.
        implementation: Of `ppedu.planning.implementations`.
        precision: Of the layers' matrices: "bf16", "fp8", "mxfp8" or "nvfp4". Their inputs are kept in it, too.
        context: Groups of `tensor` GPUs that split each sequence. A GPU has 1 / `context` of all but the weights.
            In each layer, it gets the others' keys and values; in I, it also sends their gradients.
        expert: GPUs, of all that hold a stage, among which each layer's experts are divided: every GPU has whole
            experts, and tokens are sent to them. With 1, each tensor group has all experts and splits each of them.
        overlap: What is sent to experts and back is on its way while another microbatch computes, so that F and I take
            as long as the longer of the two. While they are on their way, 20 of 132 multiprocessors send and do not
            compute (arXiv 2412.19437, sections 3.2.1 and 3.2.2).
        dispatcher: With "alltoall", a token is sent once for each of its experts; with "deepep", once to each GPU, or
            to each node if experts are on several.
        tensor_overlap: The GPUs of a tensor group multiply matrices in parts, and exchange those that are ready
            meanwhile (Megatron-LM's --tp-comm-overlap): half of the exchange takes no time.
        shard_vocabulary: Every rank has an equal part of the embedding and of the head, and works on it with the
            others (arXiv 2411.05288). It is counted in equal parts with the layers.
        graphs: CUDA graphs start the kernels of layers with experts. Without, the host starts one after the other, and
            F and B of such a layer take at least 9.5 ms, however fast the GPU.
        past: The `sequence` tokens are a slice of longer sequences, with this many tokens before them. They attend to
            those, too: GPUs with other parts send their keys and values for each slice, and I adds to the sums of
            their gradients.

    Raises:
        SettingError: A number is not possible, or a name is unknown.
    """
    sequence, batch = require_count("sequence", sequence, 1, MOST), require_count("batch", batch, 1, MOST)
    tensor, element = require_count("tensor", tensor, 1, MOST), require_count("element", element, 1, MOST)
    context, expert = require_count("context", context, 1, sequence), require_count("expert", expert, 1, MOST)
    model.require_split(recompute, tensor)
    before = 0 if past is None else require_count("past", past, 0, MOST)
    if past is not None and not model.flash:
        raise SettingError("slices are for attention that does not keep its matrix; give the model flash=True")
    require_one_of("precision", precision, INPUT_BYTES)
    require_one_of("dispatcher", dispatcher, DISPATCHERS)
    flags = {"overlap": overlap, "tensor_overlap": tensor_overlap, "graphs": graphs}
    for name, flag in (flags | {"shard_vocabulary": shard_vocabulary}).items():
        require_instance(name, flag, bool, "True or False")
    if max(model.experts, 1) % expert:
        has = f"the {plural(model.experts, 'expert')} of a layer" if model.experts else "1: the model has no experts"
        raise SettingError(f"expert must be a divisor of {has}; got {expert}")
    parallel = tensor > 1 if sequence_parallel is None else sequence_parallel
    require_instance("sequence_parallel", parallel, bool, "True, False or None")
    if model.imbalance > expert:  # one of these GPUs has all tokens
        model = replace(model, imbalance=expert)
    kept_by = implementation_named(implementation)
    inputs = _input_bytes(precision, element)
    tokens, part = batch * sequence, batch / context

    def layer_of(sized: Model) -> tuple[Piece, Number]:
        """Return a layer, and the bytes of it that are restored in its backward."""
        split = expert if sized.experts else 1
        forward, first, second = layer_work(sized, sequence, batch, tensor, parallel, element, precision, split, before)
        first = first.plus(_again(sized, forward, recompute, sequence, batch, tensor, parallel, element))
        shared = element * sized.attention.shared  # bytes of a token's keys and values
        passed = shared * batch * (before + sequence) * (context - 1) / tensor  # those of the sequence's other parts
        all_parts = forward._replace(passed=passed), first._replace(passed=2 * passed), second
        works = [each.part(context) for each in all_parts]
        whole, kept = (
            sized.layer_activation(sequence, tensor, parallel, each, element, kept_by.gated, inputs)
            for each in ("none", recompute)
        )
        experts = sized.expert_parameters // split if split > 1 else -(-sized.expert_parameters // tensor)
        others = -(-(sized.layer_parameters - sized.expert_parameters) // tensor)
        piece = Piece.of_work(works, weights=others + experts, activation=part * kept, experts=experts)
        if past is not None:
            keys = part * shared * sequence / tensor
            piece = replace(piece, activation=piece.activation - (keys if recompute == "none" else 0), keys=keys)
        return piece, part * (whole - kept)

    layer, restored = layer_of(model)
    first, of_first = layer_of(model.first) if model.dense else (layer, restored)
    layers = [first if number < model.dense else layer for number in range(model.layers)]
    embedding = Piece("embedding", 0, 0, 0, 0, -(-model.embedding_parameters // tensor), part * 8 * sequence)
    size, logits, freed = (part * each for each in model.head_activation(sequence, tensor, element))
    works = [each.part(context) for each in head_work(model, sequence, batch, tensor, element)]
    weights = -(-model.head_parameters // tensor)
    head = Piece.of_work(works, "head", weights=weights, activation=size, logits=logits, freed=freed)
    more = [_prediction(model, layer, head, tokens, tensor, context, element) for _ in range(model.predictions)]
    tied = -(-model.tied_parameters // tensor)
    if shard_vocabulary:
        shares = model.layers + model.predictions
        layers, more = ([_with_share(each, embedding, head, shares, tied) for each in row] for row in (layers, more))
        embedding, head, tied = replace(embedding, weights=0, activation=0), Piece("head", 0, 0, 0, 0), 0
    layers = [replace(piece, name=f"layer {number}") for number, piece in enumerate(layers)]
    more = [replace(piece, name=PREDICTION) for piece in more]
    return Pieces(
        (embedding, *layers, *more, head),
        FLOP,
        part * sequence * element * model.width / (tensor if parallel else 1),
        tokens,
        per_weight(kept_by.bytes_per_weight if bytes_per_weight is None else bytes_per_weight),
        flops=batch * model.flops(sequence, before),
        tied=tied,
        tensor=tensor,
        precision=precision,
        context=context,
        implementation=implementation,
        recompute=recompute,
        restored=max(restored, of_first),
        expert=expert,
        visited=model.active,
        overlap=overlap,
        dispatcher=dispatcher,
        tensor_overlap=tensor_overlap,
        shard_vocabulary=shard_vocabulary,
        graphs=graphs,
    )


def layer_work(
    model: Model,
    sequence: int,
    batch: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    element: int = 2,
    precision: str = "bf16",
    expert: int = 1,
    past: int = 0,
) -> Works:
    """Return what one of the GPUs that split a layer does in its F, I and W for `batch` sequences.

    The FLOPs are those of `Model.layer_flops`. Between the matrices, F and I each read and write the inputs and outputs
    of two norms and two additions, of the rotation of queries and keys, and of the activation function. F, I and W read
    the matrices, and the numbers that they multiply, for every microbatch, so few tokens use a GPU worse than many.
    Without `flash`, the attention matrix is written, scaled, normalized and read. GPUs that split a layer gather its
    input, and scatter and add its output, once for the attention and once for the perceptron. With `expert` GPUs, each
    sends its tokens to their experts and gets the results; an expert that every token visits is split all the same.
    With `past` tokens before these, I reads the sums of the gradients of their keys and values, and what it adds, and
    writes the sums.
    """
    width, tokens = model.width, sequence * batch
    flops = model.layer_flops(sequence)
    scored = float((sequence + 2 * past) * model.attention.scored) * tokens / tensor
    part = tensor if sequence_parallel else 1
    visits = float(model.active * model.imbalance) + (model.shared if model.experts else 1)
    shared = 10 * element * width / part  # 2 · (2 + 3): a norm has an input and an output, an addition three
    split = element * model.attention.moved + visits * element * (model.ffn or 0) * (3 if model.gated else 2)
    if not model.flash:
        split += model.heads * sequence * (4 * element + (element + 1 if model.dropout else 0))
    if model.experts:  # tokens are copied to their experts, and their results are added up
        split += 4 * element * model.active * width
    moved = tokens * (shared + split / tensor)
    summed = 3 * element * model.attention.shared * batch * past / tensor
    sent = element * tokens * width
    routed = 2 * sent * float(model.imbalance) / tensor if expert > 1 else 0
    exchanged = (4 if model.shared or not routed else 2) * sent * (tensor - 1) / tensor
    uneven = 2 * tokens * model.active * float(model.imbalance - 1) * model.perceptron
    matrices = (batch * flops[2] + uneven) / tensor  # W has the matrices alone
    long, short = (matrices, 0) if precision == "bf16" else (0, matrices)
    weights = (model.layer_parameters - model.expert_parameters) / tensor
    weights += model.expert_parameters / (expert if expert > 1 else tensor)
    times = visits if model.experts else 1  # that a token goes through a perceptron
    inner = model.attention.kept + model.attention.fed + times * (model.ffn or 0) * (3 if model.gated else 2)
    numbers = tokens * (2 * width * (1 + times) + inner / tensor)  # about as many come into matrices as out of them
    size = _input_bytes(precision, element)
    read = numbers * (size + element) / 2 + weights * size
    added = numbers * size + weights * 2 * FP32  # W reads the sum of the gradients, and writes it
    return (
        Work(long, scored, moved, exchanged, short, routed=routed, operands=read),
        Work(long, 2 * scored, moved + summed, exchanged, short, routed=routed, operands=read),
        Work(long, short=short, operands=added),
    )


def _input_bytes(precision: str, element: int) -> Number:
    """Return the bytes of a number in the inputs and weights of a layer. Everything else has `element` bytes."""
    return element if precision == "bf16" else INPUT_BYTES[precision]


def head_work(model: Model, sequence: int, batch: int = 1, tensor: int = 1, element: int = 2) -> Works:
    """Return what one of the GPUs that split the head does in its F, I and W for `batch` sequences.

    The loss in fp32 reads the logits, and reads and writes their exponentials several times; I turns these into the
    gradient of the logits.
    """
    tokens = sequence * batch
    matrices = batch * model.head_flops(sequence) / tensor
    logits = tokens * model.vocabulary / tensor
    exchanged = element * tokens * model.width * (tensor - 1) / tensor
    norm = 2 * element * tokens * model.width
    weights = model.width * model.vocabulary / tensor
    numbers = tokens * model.width + logits
    read, added = element * (numbers + weights), element * numbers + 2 * FP32 * weights
    return (
        Work(matrices, 0, norm + logits * (2 * element + 18), exchanged, operands=read),
        Work(matrices, 0, norm + logits * (4 + 2 * element), exchanged, operands=read),
        Work(matrices, operands=added),
    )


def _again(
    model: Model, forward: Work, recompute: str, sequence: int, batch: int, tensor: int, parallel: bool, element: int
) -> Work:
    """Return what a layer's backward computes again of its `forward`."""
    if recompute == "full":
        return forward
    if recompute == "none":
        return Work()
    remaking = 2 * sequence * batch * model.attention.remaking / tensor
    again = Work(short=remaking) if forward.short else Work(remaking)
    if model.flash:
        return again
    others = layer_work(replace(model, flash=True), sequence, batch, tensor, parallel, element)[0]
    return again.plus(Work(0, forward.attention, forward.moved - others.moved))


def _prediction(model: Model, layer: Piece, head: Piece, tokens: int, tensor: int, context: int, element: int) -> Piece:
    """Return the piece that predicts a further token: a matrix of two widths to one, a layer, and the head again.

    Embedding and head are those of the model.
    """
    assert layer.work and head.work
    matrix = 2 * model.width**2
    joined = Work(2 * tokens * matrix / tensor / context, 0, 8 * element * tokens * model.width / tensor / context)
    works = [work.plus(of_head).plus(joined) for work, of_head in zip(layer.work, head.work, strict=True)]
    weights = layer.weights + -(-(matrix + 3 * model.norm_parameters) // tensor)
    kept = layer.activation + head.activation + 4 * element * tokens * model.width / tensor / context
    piece = Piece.of_work(works, weights=weights, activation=kept, experts=layer.experts)
    return replace(piece, logits=head.logits, freed=head.freed, keys=layer.keys)


def _with_share(piece: Piece, embedding: Piece, head: Piece, shares: int, tied: int) -> Piece:
    """Return a layer with one of `shares` equal parts of the embedding and the head."""
    assert piece.work and head.work
    works = [mine.plus(whole.part(shares)) for mine, whole in zip(piece.work, head.work, strict=True)]
    weights = piece.weights + -(-(embedding.weights + head.weights - tied) // shares)
    kept = piece.activation + (embedding.activation + head.activation) / shares
    logits, freed = piece.logits + head.logits / shares, piece.freed + head.freed / shares
    return replace(
        Piece.of_work(works, weights=weights, activation=kept, experts=piece.experts),
        logits=logits,
        freed=freed,
        keys=piece.keys,
    )
