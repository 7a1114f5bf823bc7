"""The numbers that the attention of a layer computes and keeps."""

from __future__ import annotations

from typing import NamedTuple


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
