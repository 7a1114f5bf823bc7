"""Published models and machines by name. Their sizes are those of the sources beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppedu.core import SettingError
from ppedu.core.validate import require_instance
from ppedu.planning.machine import Machine
from ppedu.planning.model import Model
from ppedu.planning.pieces import Pieces

_GPT: dict[str, Any] = {"gated": False, "norm": "layer", "biases": "all"}

# Each with its number of parameters as its authors or its checkpoint give it; tests compare them.
MODELS: Mapping[str, Model] = {
    # GPT-2: openai.com, "Language Models are Unsupervised Multitask Learners", table 2
    "gpt2": Model(12, 768, 12, 50257, positions=1024, tied=True, **_GPT),
    "gpt2-xl": Model(48, 1600, 25, 50257, positions=1024, tied=True, **_GPT),
    # arXiv 2205.05198, table 3: Megatron's models, with a vocabulary of 51,200
    "megatron-22b": Model(48, 6144, 64, 51200, positions=2048, tied=True, dropout=True, flash=False, **_GPT),
    "megatron-175b": Model(96, 12288, 96, 51200, positions=2048, tied=True, dropout=True, flash=False, **_GPT),
    "megatron-530b": Model(105, 20480, 128, 51200, positions=2048, tied=True, dropout=True, flash=False, **_GPT),
    "megatron-1t": Model(128, 25600, 160, 51200, positions=2048, tied=True, dropout=True, flash=False, **_GPT),
    # Llama 2: arXiv 2307.09288
    "llama-2-7b": Model(32, 4096, 32, 32000, ffn=11008),
    "llama-2-13b": Model(40, 5120, 40, 32000, ffn=13824),
    "llama-2-70b": Model(80, 8192, 64, 32000, kv_heads=8, ffn=28672),
    # Llama 3: arXiv 2407.21783, table 3
    "llama-3-8b": Model(32, 4096, 32, 128256, kv_heads=8, ffn=14336),
    "llama-3-70b": Model(80, 8192, 64, 128256, kv_heads=8, ffn=28672),
    "llama-3-405b": Model(126, 16384, 128, 128256, kv_heads=8, ffn=53248),
    # Mistral 7B: arXiv 2310.06825, table 1; Mixtral 8x7B: arXiv 2401.04088, table 1
    "mistral-7b": Model(32, 4096, 32, 32000, kv_heads=8, ffn=14336),
    "mixtral-8x7b": Model(32, 4096, 32, 32000, kv_heads=8, ffn=14336, experts=8, active=2),
    # Gemma 7B: arXiv 2403.08295, table 1
    "gemma-7b": Model(28, 3072, 16, 256000, head_size=256, ffn=24576, tied=True),
    # Qwen2.5: arXiv 2412.15115; Qwen3: arXiv 2505.09388, table 2
    "qwen2.5-7b": Model(28, 3584, 28, 152064, kv_heads=4, ffn=18944, biases="qkv"),
    "qwen3-30b-a3b": Model(
        48, 2048, 32, 151936, kv_heads=4, head_size=128, ffn=768, experts=128, active=8, qk_norm=True
    ),
    "qwen3-235b-a22b": Model(
        94, 4096, 64, 151936, kv_heads=4, head_size=128, ffn=1536, experts=128, active=8, qk_norm=True
    ),
    # Kimi K2: github.com/MoonshotAI/Kimi-K2, README
    "kimi-k2": Model(
        61,
        7168,
        64,
        163840,
        ffn=2048,
        head_size=128,
        experts=384,
        active=8,
        shared=1,
        dense=1,
        dense_ffn=18432,
        key_rank=512,
        query_rank=1536,
        rotary=64,
    ),
    # DeepSeek-V3: arXiv 2412.19437, section 4.2; add predictions=1 for its training
    "deepseek-v3": Model(
        61,
        7168,
        128,
        129280,
        ffn=2048,
        head_size=128,
        experts=256,
        active=8,
        shared=1,
        dense=3,
        dense_ffn=18432,
        key_rank=512,
        query_rank=1536,
        rotary=64,
    ),
}

# Bandwidths are those of one direction; data sheets often give the sum of both. The achieved FLOP/s, of matrix products
# and of attention, contain neither bubbles nor messages. They are fitted to published runs (tests/published): those of
# A100s to all rows of A100s, those of H100s to Megatron-Core's weak scaling, those of GB200s to Megatron-Bridge's
# Llama. The speeds of other GPUs are the same part of their peaks. Nine in ten of all runs are within the spread.
# Latencies are assumptions. Override what you know.
_HOPPER: dict[str, Any] = {
    "flops": 615e12,
    "attention": 300e12,
    "peak": 989e12,
    "latency": 10e-6,
    "bandwidth": 50e9,
    "node": 8,
    "near_latency": 5e-6,
    "near_bandwidth": 450e9,
    "unit": "s",
    "spread": 0.12,
}
_BLACKWELL: dict[str, Any] = _HOPPER | {
    "flops": 1485e12,
    "attention": 617e12,
    "peak": 2250e12,
    "near_bandwidth": 900e9,
    "memory_bandwidth": 8e12,
    "nvfp4": 4,
}
_RACK: dict[str, Any] = _BLACKWELL | {"flops": 1650e12, "attention": 685e12, "peak": 2500e12, "node": 72}
MACHINES: Mapping[str, Machine] = {
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16 dense, 2.039 TB/s, NVLink 600 GB/s in both directions
    "a100": Machine(
        80e9, 260e12, 312e12, 10e-6, 25e9, 8, 5e-6, 300e9, 2.039e12, unit="s", attention=70e12, fp8=None, spread=0.12
    ),
    # NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 3.35 TB/s, NVLink 900 GB/s in both directions
    "h100": Machine(80e9, memory_bandwidth=3.35e12, **_HOPPER),
    # NVIDIA H200 SXM data sheet: as H100, with 141 GB at 4.8 TB/s
    "h200": Machine(141e9, memory_bandwidth=4.8e12, **_HOPPER),
    # NVIDIA HGX B200 and B300, GB200 NVL72 and GB300 NVL72: peaks in bf16, fp8 and NVFP4, and memory as in
    # github.com/stas00/ml-engineering, compute/accelerator/README.md, which names the data sheets; the network as in
    # the submissions to MLPerf training 5.1. Attention on the 300s is twice as fast (developer.nvidia.com, "Inside
    # NVIDIA Blackwell Ultra").
    "b200": Machine(180e9, **_BLACKWELL),
    "b300": Machine(270e9, **_BLACKWELL | {"attention": 1233e12, "bandwidth": 100e9, "nvfp4": 6}),
    "gb200": Machine(186e9, **_RACK),
    "gb300": Machine(279e9, **_RACK | {"attention": 1370e12, "bandwidth": 100e9, "nvfp4": 6}),
    # AMD Instinct MI300X: 1307 TFLOP/s bf16 dense and 5.3 TB/s (rocm.docs.amd.com, "MI300 microarchitecture"), 448 GB/s
    # among the 8 GPUs of a node and 50 GB/s beyond (AMD-AGI/Primus, hardware_configs/mi300x.yaml). The speed is three
    # quarters of the largest measured by stas00/ml-engineering, as an H100's is; no run was compared.
    "mi300x": Machine(192e9, 500e12, 1307e12, 10e-6, 50e9, 8, 5e-6, 448e9, 5.3e12, unit="s", attention=250e12),
}


def model_named(given: Model | Pieces | str) -> Model | Pieces:
    """Return a model, or the published one of this name; raise SettingError if it is neither."""
    return _named(
        "model", given, MODELS, (Model, Pieces), "a Model, Model.measured(…), or the name of a published model"
    )


def machine_named(given: Machine | str) -> Machine:
    """Return a machine, or the one of this name; raise SettingError if it is neither."""
    return _named(
        "machine", given, MACHINES, Machine, 'a Machine, such as Machine(memory=80e9), or a name, such as "h100"'
    )


def _named(what: str, given: Any, known: Mapping[str, Any], kind: Any, such_as: str) -> Any:
    if not isinstance(given, str):
        require_instance(what, given, kind, such_as)
        return given
    if given.lower() not in known:
        raise SettingError(f"unknown {what} {given!r}; known: {', '.join(known)}; or give its sizes")
    return known[given.lower()]
