"""A toy GPT that can be cut into stages. A stage's weights have the names and values they have in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ppedu.core import SettingError
from ppedu.core.validate import require_count, require_instance
from ppedu.engine.names import Tie
from ppedu.engine.stages.cut import with_ends
from ppedu.engine.stages.past import Past
from ppedu.sim.partition import evenly


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT.

    Args:
        vocabulary: The number of different tokens.
        context: The length of the longest sequence, in tokens.
        layers: The number of transformer blocks.
        heads: The number of attention heads in each block.
        width: Of the residual stream, a multiple of `heads`.
        tied: Whether the head uses the weights of the token embedding (arXiv 1608.05859).

    Raises:
        SettingError: A number is below 1, or `width` is not a multiple of `heads`.
    """

    vocabulary: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 64
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            require_count(name, getattr(self, name))
        if self.width % self.heads:
            raise SettingError(
                f"width must be a multiple of the {self.heads} heads, such as {self.heads * 8}; got {self.width}"
            )

    def ties(self, stages: int) -> list[Tie]:
        """Return the pairs of tied weights in a model of `stages` stages: the argument `tied` of `Pipeline`."""
        return [((0, "embedding.token.weight"), (stages - 1, "head.linear.weight"))] if self.tied else []


class GPT(nn.Module):
    """A GPT, or the stage of a GPT that holds some of its pieces: 0 is the embedding, then come the blocks, the head.

    Blocks keep their number in the whole model, so `layers.2.…` names the same weight on every rank. Each piece is
    initialized from `seed` and its position, so that a stage starts with exactly the weights of its slice of the whole
    model.

    The first stage takes tokens, int64 of shape (batch, length); later stages take activations of shape (batch, length,
    width). The last stage returns logits of shape (batch, length, vocabulary), earlier ones activations. A stage
    without pieces returns what it takes.
    """

    chained = True  # for `ppedu.engine.stages.cut`

    def __init__(self, config: GPTConfig, pieces: range | None = None, seed: int = 0):
        super().__init__()
        require_instance("config", config, GPTConfig, "a GPTConfig, such as GPTConfig(vocabulary=97)")
        head = config.layers + 1
        pieces = range(head + 1) if pieces is None else pieces

        def part(position: int, make: Callable[[GPTConfig], nn.Module]) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed * 100_003 + position)
                return make(config)

        self.embedding = part(0, Embedding) if 0 in pieces else None
        self.layers = nn.ModuleDict({str(piece - 1): part(piece, Block) for piece in pieces if 0 < piece < head})
        self.head = part(head, Head) if head in pieces else None
        if config.tied and self.head:
            # On a stage without the embedding, the head gets an equal copy, and `Pipeline(tied=…)` keeps both equal.
            embedding = self.embedding or part(0, Embedding)
            self.head.linear.weight = embedding.token.weight

    @classmethod
    def stage(
        cls, config: GPTConfig, stage: int, stages: int, seed: int = 0, pieces: Sequence[range] | None = None
    ) -> GPT:
        """Return stage number `stage` of a GPT that is divided among `stages` stages.

        Args:
            pieces: Of each stage; by default, the blocks are divided evenly.

        Raises:
            SettingError: `stages` exceeds the number of blocks, or `stage` is not below `stages`.
        """
        require_instance("config", config, GPTConfig, "a GPTConfig, such as GPTConfig(vocabulary=97)")
        pieces = with_ends(evenly(config.layers, stages)) if pieces is None else pieces
        if require_count("stage", stage, least=0) >= stages:
            raise SettingError(f"stage must be from 0 to {stages - 1}; got {stage}")
        return cls(config, pieces[stage], seed)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        out = x if self.embedding is None else self.embedding(x, past)
        for name, layer in self.layers.items():
            out = layer(out) if past is None else layer(out, past, name)
        out = out if self.head is None else self.head(out)
        return x.view_as(x) if out is x else out  # a stage without pieces has an output of its own, too


class Embedding(nn.Module):
    """The sum of a token embedding and a position embedding: from (batch, length) to (batch, length, width)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) + (past.length if past else 0)
        return self.token(tokens) + self.position(positions)


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each with a residual connection.

    It takes and returns activations of shape (batch, length, width), of whole sequences or of slices with a `past`.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, past: Past | None = None, name: str = "") -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.attention(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mask = None
        if past:
            key, value = past.update(key, value, name)
        if past and past.length:
            # Token i of this slice attends to all tokens of the earlier slices, and to 0 to i of its own.
            mask = x.new_ones(length, key.shape[-2], dtype=torch.bool).tril(past.length)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class Head(nn.Module):
    """A layer norm and a linear layer: from (batch, length, width) to logits (batch, length, vocabulary)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits (batch, length, vocabulary) for target tokens (batch, length)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
