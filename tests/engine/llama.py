"""A layer of Llama, with sizes of one of 8 billion weights."""

import torch
from torch import nn
from torch.nn import functional

LLAMA = {"width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "sequence": 4096}


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary embeddings and a gated perceptron."""

    def __init__(self, width, heads, kv_heads, ffn, sequence):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n * self.size, bias=False) for n in (heads, kv_heads, kv_heads))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)
        angle = torch.arange(sequence)[:, None] / 10 ** torch.arange(self.size // 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x):
        def turned(y, heads):
            a, b = y.unflatten(-1, (heads, self.size)).transpose(1, 2).chunk(2, -1)
            return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)

        y = self.norm_1(x)
        value = self.v(y).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            turned(self.q(y), self.heads), turned(self.k(y), self.kv_heads), value, is_causal=True, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))
