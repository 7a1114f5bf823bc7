"""A toy GPT, cut into stages by layers. A stage's weights are a slice of the whole model's, names and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from ppedu.core.errors import SettingError
from ppedu.core.partition import evenly
from ppedu.core.validate import require_count, require_instance
from ppedu.run.gradients import Tie

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT.

    vocabulary: number of tokens. context: longest sequence. layers: transformer blocks. width: of the
    residual stream, a multiple of `heads`. tied: the head's weights are those of the token embedding (arXiv
    1608.05859).

    Raises:
        SettingError: a number is below 1, or the width cannot be shared among the heads.
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
                f"width {self.width} cannot be shared among {self.heads} heads; take a multiple of {self.heads}"
            )

    def ties(self, stages: int) -> list[Tie]:
        """The weights that are one, for a `Pipeline` of so many stages: its `tied`."""
        return [((0, "embedding.token.weight"), (stages - 1, "head.linear.weight"))] if self.tied else []


class GPT(nn.Module):
    """A GPT, or the stage of one that holds the blocks `layers`.

    The stage with the first block also holds the embedding, the one with the last block the head. Blocks
    keep their number in the whole model: `layers.2.…` is the same weight on whichever rank it lives. Each
    part is initialised from `seed` and its own place, so that a stage starts as the slice it is.

    Takes tokens, int64 of shape (batch, length), or, from the second stage on, activations of shape
    (batch, length, width). Returns activations, or logits of shape (batch, length, vocabulary).
    """

    def __init__(self, config: GPTConfig, layers: range | None = None, seed: int = 0):
        super().__init__()
        require_instance("config", config, GPTConfig, "a GPTConfig, such as GPTConfig(vocabulary=97)")
        layers = range(config.layers) if layers is None else layers

        def part(place: int, make: Callable[[GPTConfig], Part]) -> Part:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed * 100_003 + place)
                return make(config)

        self.embedding = part(0, Embedding) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): part(1 + layer, Block) for layer in layers})
        self.head = part(1 + config.layers, Head) if layers.stop == config.layers else None
        if config.tied and self.head:
            # Without the embedding here, an equal weight of its own, which `Pipeline` keeps so.
            embedding = self.embedding or part(0, Embedding)
            self.head.linear.weight = embedding.token.weight

    @classmethod
    def stage(cls, config: GPTConfig, stage: int, stages: int, seed: int = 0) -> GPT:
        """Stage number `stage` of `stages`; the blocks are shared out evenly.

        Raises:
            SettingError: there are more stages than blocks, or there is no such stage.
        """
        require_instance("config", config, GPTConfig, "a GPTConfig, such as GPTConfig(vocabulary=97)")
        pieces = evenly(config.layers, stages)
        if require_count("stage", stage, least=0) >= stages:
            raise SettingError(f"there is no stage {stage}; the stages are 0 to {stages - 1}")
        return cls(config, pieces[stage], seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class Embedding(nn.Module):
    """Tokens, and where they stand, to activations."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: torch.Tensor = self.token(tokens) + self.position(places)
        return out


class Block(nn.Module):
    """Attention to what came before, then a two-layer perceptron, each added to what came in."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.attention(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class Head(nn.Module):
    """Activations to logits."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(x))
        return out


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the logits, (batch, length, vocabulary), for the tokens that follow, (batch, length)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
