"""The fusable tensor operations of a decoder layer, and the one place where a device's kernels plug in.

An ``Ops`` is an immutable table of functions; layers call through the table they were built with. The functions here
are the pure torch reference of every entry; ``select_ops`` returns a table in which a device's own kernels replace
some of them. Knows no weights' names, no models and no requests.

The residual stream is passed as two tensors: ``residual`` [T, n], updated in place, and ``delta``, what is still to be
added to it: [T, n], float32 [P, T, n] whose sum over P it is (partial sums of a split product), or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ceiba.config.records import RunnerConfig
from ceiba.kernels import cpu
from ceiba.layers.rotary import RotaryStep
from ceiba.layers.scaled import Matrix, Rows, plain_matrix, plain_rows

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


def add_rms_norm(delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += delta in place, then rms_norm(residual); residual [T, n]."""
    if delta is not None:
        residual.add_(delta if delta.dim() == residual.dim() else delta.sum(0))
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
    dtype: torch.dtype = torch.float32
    """Of q, k and v."""


@dataclass(frozen=True, slots=True)
class KVTarget:
    """Where a layer's new keys and values go: pools [slots, kv_heads, d], slots int [T]."""

    k_pool: Tensor
    v_pool: Tensor
    slots: Tensor
    keep: bool
    """Whether attention also wants them as tensors of their own (prefill)."""


@dataclass(frozen=True, slots=True)
class QKV:
    """q [T, heads, d]; k and v [T, kv_heads, d], None where only the pool has them."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    written: bool = False
    """Whether k and v lie in the pool already."""


def prepare_qkv(
    qkv: Tensor,
    shape: QKVShape,
    rope: RotaryStep,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    target: KVTarget | None = None,
) -> QKV:
    """Split qkv [T, (heads + 2 kv_heads) · d] (or partial sums of it), norm q and k per head where weights [d] are
    given, and rotate them. A kernel may write k and v to ``target`` as well; the reference leaves that to attention.
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if qkv.dim() == 3:
        qkv = qkv.sum(0)
    x = qkv.to(shape.dtype).view(qkv.shape[0], heads + 2 * kv_heads, dim)
    qk, v = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        q = rotate(rms_norm(qk[:, :heads], q_norm, shape.eps), rope.cos, rope.sin)
        return QKV(q, rotate(rms_norm(qk[:, heads:], k_norm, shape.eps), rope.cos, rope.sin), v)
    qk = rotate(qk, rope.cos, rope.sin)
    return QKV(qk[:, :heads], qk[:, heads:], v)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """x [T, in] · weight [out, in]ᵀ + bias [out]."""
    return F.linear(x, plain_matrix(weight, x.dtype), bias)


def norm_linear(delta: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
    """The residual stream, normed, times weight [out, in]ᵀ → [T, out]; a kernel may return partial sums [P, T, out]."""
    return linear(add_rms_norm(delta, residual, norm, eps), weight, None)


def norm_gate_up(delta: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Rows:
    """As ``norm_linear`` with weight [2n, in] = gate rows, up rows; returns silu(gate) · up, [T, n], which a kernel may
    round to eight bits where the product that takes it would do so."""
    return silu_mul(norm_linear(delta, residual, norm, eps, weight))


def linear_residual(x: Rows, weight: Matrix, residual: Tensor) -> Tensor | None:
    """x [T, in] · weight [out, in]ᵀ as a delta of the residual stream; None where it has been added already."""
    return linear(plain_rows(x, residual.dtype), weight, None)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture of experts chooses: the ``top_k`` largest of a softmax over all experts."""

    top_k: int
    renormalize: bool
    """Whether the chosen weights are scaled to sum to 1."""


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, experts] → ids int [T, top_k], weights float32 [T, top_k], largest first."""
    weights, ids = logits.float().softmax(-1).topk(routing.top_k, dim=-1)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


def experts(x: Tensor, gate_up: Matrix, down: Matrix, ids: Tensor, weights: Tensor) -> Tensor:
    """Σ weightᵢ · downᵢ(silu(gateᵢ x) · upᵢ x) for x [T, d], gate_up [E, 2n, d] (gate rows first), down [E, d, n]."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        y = linear(silu_mul(linear(x.index_select(0, token), gate_up[expert], None)), down[expert], None)
        out.index_add_(0, token, y.float() * weights[token, choice].unsqueeze(1))
    return out.to(x.dtype)


def norm_experts(
    delta: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    gate_up: Matrix,
    down: Matrix,
    routing: Routing,
    whole: bool = True,
) -> Tensor | None:
    """The residual stream, normed and routed by router [E, d], through the experts: a delta, or None where it has been
    added already, which needs ``whole``: the experts are not split over ranks.
    """
    x = add_rms_norm(delta, residual, norm, eps)
    ids, weights = route(F.linear(x, router), routing)
    return experts(x, gate_up, down, ids, weights)


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Rows ``ids`` int [T] of table [V, n]."""
    return table.index_select(0, ids)


@dataclass(frozen=True, slots=True)
class Ops:
    """One function per operation; the defaults are the reference."""

    name: str = "torch"
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    add_rms_norm: Callable[[Tensor | None, Tensor, Tensor, float], Tensor] = add_rms_norm
    silu_mul: Callable[[Tensor], Tensor] = silu_mul
    prepare_qkv: Callable[[Tensor, QKVShape, RotaryStep, Tensor | None, Tensor | None, KVTarget | None], QKV] = (
        prepare_qkv
    )
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor] = linear
    norm_linear: Callable[[Tensor | None, Tensor, Tensor, float, Matrix], Tensor] = norm_linear
    norm_gate_up: Callable[[Tensor | None, Tensor, Tensor, float, Matrix], Rows] = norm_gate_up
    linear_residual: Callable[[Rows, Matrix, Tensor], Tensor | None] = linear_residual
    norm_experts: Callable[
        [Tensor | None, Tensor, Tensor, float, Tensor, Matrix, Matrix, Routing, bool], Tensor | None
    ] = norm_experts
    embed: Callable[[Tensor, Tensor], Tensor] = embed
    host: Any = None
    """Threads and scratch of the compiled CPU kernels, where they run (``kernels.cpu``)."""
    int8: bool = False
    """Whether the host kernels round activations to int8 where they meet quantized weights."""


def select_ops(device: torch.device, config: RunnerConfig, dtype: torch.dtype) -> Ops:
    """The table for a device and a type of activations: kernels where there are some for it, the reference everywhere
    else. Float32 activations are not rounded to bfloat16, so they meet no tiles."""
    if device.type == "cpu" and config.cpu_kernels and cpu.available:
        exact = config.deterministic or dtype == torch.float32
        host = cpu._cpu.Context(max(1, config.threads), cpu.best_set(), exact)
        return Ops(name="cpu", host=host, int8=config.int8_activations)
    if device.type == "cuda":
        from ceiba.layers.cuda_ops import cuda_ops

        return cuda_ops(device)
    return Ops()
