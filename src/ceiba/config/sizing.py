"""Memory arithmetic: how much of a device goes to weights and KV, and how many tokens and requests that holds. Pure
functions of numbers; it must never ask a device or a file.

The tiers, the reserve and the request bounds are those of the system whose users move over, so that a flag tuned there
means the same here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ceiba.config.records import ModelFacts

MiB: Final = 1 << 20
GiB: Final = 1 << 30

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Tier:
    """Defaults of one class of accelerators by memory."""

    below_gib: float
    chunk: int
    """chunked_prefill_size"""
    graph_bs: int
    """Largest decode batch captured in a graph"""
    graph_bs_tp4: int
    """The same with four or more tensor-parallel ranks"""


TIERS: Final = (
    Tier(20, 2048, 8, 8),
    Tier(35, 4096, 48, 160),
    Tier(60, 4096, 32, 160),
    Tier(90, 8192, 256, 512),
    Tier(160, 8192, 256, 512),
    Tier(float("inf"), 16384, 512, 512),
)
PREFILL_GRAPH_TOKENS: Final = 2048
"""Prefills up to this size are captured: larger ones take the device longer than launching them takes the host."""
CPU_CHUNK: Final = 2048
CPU_SHARE: Final = 0.5
"""Of the free host memory, for weights and KV pool together."""
MIN_POOL_TOKENS: Final = 128
"""A pool below this serves nobody."""


def tier(memory_bytes: int) -> Tier:
    """The tier of one accelerator with ``memory_bytes`` in total."""
    return next(t for t in TIERS if memory_bytes / GiB < t.below_gib)


def graph_max_bs(memory_bytes: int, tp: int = 1) -> int:
    found = tier(memory_bytes)
    return found.graph_bs_tp4 if tp >= 4 else found.graph_bs


def reserve_bytes(memory_bytes: int, chunk: int, graph_bs: int, tp: int = 1, pp: int = 1) -> int:
    """Bytes kept free for activations and graphs: 512 MiB + 1.5 MiB a chunk token + 1 GiB per eight ranks + 2 MiB a
    graph row, and at least 10 GiB on cards of 60 GiB and more."""
    reserve = 512 * MiB + chunk * 3 * MiB // 2 + tp * pp * GiB // 8 + graph_bs * 2 * MiB
    return max(reserve, 10 * GiB) if memory_bytes >= 60 * GiB else reserve


def static_fraction(memory_bytes: int, reserve: int) -> float:
    """Share of the device's memory for weights and KV pool, three decimals, between 0.1 and 0.95."""
    share = (memory_bytes - reserve) / memory_bytes
    return round(min(max(share, 0.1), 0.95), 3)


def kv_bytes_per_token(model: ModelFacts, dtype: str) -> int:
    """Keys and values of one token over all layers; an int8 head carries its step, four bytes."""
    steps = 2 * model.num_layers * model.num_kv_heads * 4 if dtype == "int8" else 0
    return model.kv_bytes_per_token(DTYPE_BYTES[dtype]) + steps


def mla_kv_bytes_per_token(layers: int, kv_lora_rank: int, rope_dim: int, dtype_bytes: int) -> int:
    """KV of a latent-attention (MLA) model: a latent and a rotary part per layer (DeepSeek-V2, arXiv 2405.04434)."""
    return layers * (kv_lora_rank + rope_dim) * dtype_bytes


ONLINE_BITS: Final = {"int8": 8.5, "int4": 5.0}
"""A weight in a block of 32: Q8_0 has a 16-bit scale, Q4_1 a scale and an offset."""


def weight_bytes(model: ModelFacts, dtype: str, packed: bool, online: str | None = None) -> int:
    """Bytes of the weights in memory. ``packed``: quantized ones stay as stored; else all are held in ``dtype``, or in
    blocks where ``online`` quantizes them (embedding and head then take eight bits); with ``fp8`` embedding and head
    stay in ``dtype``."""
    tokens = min(2 * model.vocab_size * model.hidden_size, model.num_params)
    if online == "fp8":
        return tokens * DTYPE_BYTES[dtype] + model.num_params - tokens
    if online in ONLINE_BITS:
        rest = (model.num_params - tokens) * ONLINE_BITS[online]
        return int(tokens * ONLINE_BITS["int8"] + rest) // 8
    if model.quantized and packed:
        return model.weight_bytes
    return model.num_params * DTYPE_BYTES[dtype]


def accelerator_pool_bytes(memory: int, free: int, fraction: float, weights: int) -> int:
    """Bytes for KV: the static share, less what others hold on the device, less our weights. May be negative."""
    return int(memory * fraction) - (memory - free) - weights


def host_pool_bytes(free: int, share: float, weights: int) -> int:
    """Bytes for KV on a CPU. May be negative."""
    return int(free * share) - weights


def accelerator_running(capacity_tokens: int, context: int) -> int:
    """Default max_running_requests: capacity / context × 512 within 2048–4096, and at most half the capacity."""
    bounded = min(max(capacity_tokens * 512 // context, 2048), 4096)
    return max(1, min(bounded, capacity_tokens // 2))


def cpu_running(cores: int, capacity_tokens: int) -> int:
    """Default max_running_requests on a CPU: 32 a core, at most 256, and at most half the capacity."""
    return max(1, min(256, 32 * cores, capacity_tokens // 2))


def cpu_threads(cores: int) -> int:
    """Compute threads: all cores of a small machine (threads do not spin between steps), else all but a few that the
    HTTP side needs."""
    if cores <= 4:
        return max(1, cores)
    return cores - 1 if cores <= 16 else cores - 2


def human(count: int) -> str:
    """Bytes for people: 1.5 GiB, 340 MiB."""
    return f"{count / GiB:.2f} GiB" if abs(count) >= GiB else f"{count / MiB:.0f} MiB"
