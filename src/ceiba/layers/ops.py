"""The fusable tensor operations between the matrix products, and the one place where a device's kernels plug in.

An ``Ops`` is an immutable table of functions; layers call through the table they were built with. The functions here
are the pure torch reference of every entry; ``select_ops`` returns a table in which a device's own kernels replace
some of them. Knows no weights' names, no models and no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ceiba.config.records import RunnerConfig
from ceiba.kernels import cpu

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension, x [..., n], weight [n]; computed in float32, returned in x's dtype.

    Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then rms_norm(residual); x, residual [T, n]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up for gate_up [T, 2n] = [gate | up]; returns [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, NeoX layout (pairs are i and i + r/2): x [T, heads, d], cos and sin float32 [T, r/2], r ≤ d.

    Dimensions past r pass through. Su et al., RoFormer (2021).
    """
    half = cos.shape[-1]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    out[..., :half] = first * c - second * s
    out[..., half : 2 * half] = second * c + first * s
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


@dataclass(frozen=True, slots=True)
class QKVShape:
    """How a fused projection's columns divide: heads · d of q, kv_heads · d of k, kv_heads · d of v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 0.0
    """Of the per-head norms, where the model has them."""


def prepare_qkv(
    qkv: Tensor, shape: QKVShape, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [T, (heads + 2 kv_heads) · d], norm q and k per head where weights [d] are given, and rotate them.

    Returns q [T, heads, d], k and v [T, kv_heads, d].
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    x = qkv.view(qkv.shape[0], heads + 2 * kv_heads, dim)
    qk, v = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        q = rotate(rms_norm(qk[:, :heads], q_norm, shape.eps), cos, sin)
        return q, rotate(rms_norm(qk[:, heads:], k_norm, shape.eps), cos, sin), v
    qk = rotate(qk, cos, sin)
    return qk[:, :heads], qk[:, heads:], v


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] · weight [out, in]ᵀ + bias [out]."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Ops:
    """One function per operation; the defaults are the reference."""

    name: str = "torch"
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = add_rms_norm
    silu_mul: Callable[[Tensor], Tensor] = silu_mul
    prepare_qkv: Callable[
        [Tensor, QKVShape, Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]
    ] = prepare_qkv
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    host: Any = None
    """Threads and scratch of the compiled CPU kernels, where they run (``kernels.cpu``)."""
    int8: bool = False
    """Whether the host kernels round activations to int8 where they meet quantized weights."""


def select_ops(device: torch.device, config: RunnerConfig) -> Ops:
    """The table for a device: kernels where there are some for it, the reference everywhere else."""
    if device.type == "cpu" and config.cpu_kernels and cpu.available:
        return Ops(name="cpu", host=cpu._cpu.Context(max(1, config.threads)), int8=config.int8_activations)
    return Ops()
