"""The ``Ops`` of CUDA devices: which Triton kernels make up a layer, by the number of tokens of a step.

One token: every norm lives inside the product after it and every residual inside the product before it. A few tokens:
split products whose partial sums the next kernel adds up. More: cuBLAS, with fused kernels between. Eight-bit weights
become activations' type in registers for few tokens; for many, the kernel before the product rounds its input to eight
bits too. The borders were measured (docs/benchmarks.md) and lie with the kernels. Knows shapes, never models.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F

from ceiba.kernels.triton.activation import silu_mul
from ceiba.kernels.triton.gather import gather_rows
from ceiba.kernels.triton.linear import few, gate_up_silu, linear, linear_parts
from ceiba.kernels.triton.moe import GEMV_TOKENS, moe
from ceiba.kernels.triton.norm import add_rms_norm
from ceiba.kernels.triton.quantize import norm_quantize, silu_mul_quantize
from ceiba.kernels.triton.rope import qkv_norm_rope_write
from ceiba.kernels.triton.route import norm_route, route
from ceiba.kernels.triton.scaled import matmul_scaled
from ceiba.kernels.triton.skinny import gemv
from ceiba.layers import ops as reference
from ceiba.layers.ops import QKV, KVTarget, Ops, QKVShape, Routing, Tensor
from ceiba.layers.rotary import RotaryStep
from ceiba.layers.scaled import Matrix, Rows, Scaled, ScaledRows

MAX_COUNTED = 64
"""Tokens that ``norm_route``'s counters are kept for; it is used for GEMV_TOKENS at most."""


def _norm(delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if delta is None:
        return add_rms_norm(residual, weight, eps)
    return add_rms_norm(delta, weight, eps, residual)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dim() != 2:
        return reference.rms_norm(x, weight, eps)
    return add_rms_norm(x, weight, eps)


def _split(weight: Matrix) -> tuple[Tensor, Tensor | None]:
    """Values, and scales of eight-bit ones."""
    return (weight.values, weight.scales) if isinstance(weight, Scaled) else (weight, None)


def _linear(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    if bias is None:
        return linear(x, *_split(weight))
    if isinstance(weight, Scaled):
        return linear(x, weight.values, weight.scales).add_(bias)
    return F.linear(x, weight, bias)


def _normed_many(delta: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Scaled) -> Tensor:
    """The product of many rows in eight bits, rounded by the norm's own kernel."""
    x, added = (residual, None) if delta is None else (delta, residual)
    _, values, scales = norm_quantize(x, norm, eps, weight.blocked, added)
    return matmul_scaled(values, scales, weight.values, weight.scales, residual.dtype)


def _is_many(weight: Matrix, rows: int) -> TypeGuard[Scaled]:
    """Whether a product rounds its activations to eight bits."""
    return isinstance(weight, Scaled) and not few(rows, weight.shape[1], True)


def _norm_linear(delta: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Tensor:
    if _is_many(weight, len(residual)):
        return _normed_many(delta, residual, norm, eps, weight)
    values, scales = _split(weight)
    if len(residual) == 1 and delta is None:
        return gemv(residual, values, norm=norm, eps=eps, scales=scales)
    return linear_parts(_norm(delta, residual, norm, eps), values, scales)


def _norm_gate_up(delta: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Matrix) -> Rows:
    if _is_many(weight, len(residual)):
        both = _normed_many(delta, residual, norm, eps, weight)
        if few(len(both), both.shape[1] // 2, True):
            return silu_mul(both)
        return ScaledRows(*silu_mul_quantize(both, weight.blocked))
    values, scales = _split(weight)
    if len(residual) == 1 and delta is None:
        return gemv(residual, values, norm=norm, eps=eps, silu_pairs=True, scales=scales)
    return gate_up_silu(_norm(delta, residual, norm, eps), values, scales)


def _linear_residual(x: Rows, weight: Matrix, residual: Tensor) -> Tensor | None:
    if isinstance(x, ScaledRows):
        grouped = x.scales.shape[1] > 1
        if isinstance(weight, Scaled) and weight.blocked == grouped:
            return matmul_scaled(x.values, x.scales, weight.values, weight.scales, residual.dtype)
        x = x.plain(residual.dtype)
    values, scales = _split(weight)
    if len(x) == 1:
        # In place: each block reads and writes its own outputs alone.
        gemv(x, values, residual=residual, out=residual, scales=scales)
        return None
    return linear_parts(x, values, scales)


def _prepare_qkv(
    qkv: Tensor,
    shape: QKVShape,
    rope: RotaryStep,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    target: KVTarget | None = None,
) -> QKV:
    covered = target is not None and rope.dim == shape.head_dim and target.k_pool.shape == target.v_pool.shape
    if target is None or not covered:
        return reference.prepare_qkv(qkv, shape, rope, q_norm, k_norm, target)
    q, k, v = qkv_norm_rope_write(
        qkv,
        rope.table,
        rope.positions,
        target.slots,
        target.k_pool,
        target.v_pool,
        shape.num_heads,
        q_norm,
        k_norm,
        shape.eps,
        dtype=shape.dtype,
        keep_kv=target.keep,
    )
    return QKV(q, k, v, written=True)


def cuda_ops(device: torch.device) -> Ops:
    """The table for ``device``. One per rank: it owns the counters that some kernels leave at zero."""
    counters = torch.zeros(MAX_COUNTED, dtype=torch.int32, device=device)

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
        if delta is None and len(residual) <= GEMV_TOKENS:
            x, ids, weights = norm_route(residual, norm, router, eps, routing.top_k, counters, routing.renormalize)
        else:
            x = _norm(delta, residual, norm, eps)
            ids, weights = route(linear(x, router), routing.top_k, routing.renormalize)
        first, second = _split(gate_up), _split(down)
        scales = None if first[1] is None or second[1] is None else (first[1], second[1])
        if whole:
            moe(x, first[0], second[0], ids, weights, residual=residual, out=residual, scales=scales)
            return None
        return moe(x, first[0], second[0], ids, weights, scales=scales)

    return Ops(
        name="triton",
        rms_norm=_rms_norm,
        add_rms_norm=_norm,
        silu_mul=silu_mul,
        prepare_qkv=_prepare_qkv,
        linear=_linear,
        norm_linear=_norm_linear,
        norm_gate_up=_norm_gate_up,
        linear_residual=_linear_residual,
        norm_experts=norm_experts,
        embed=gather_rows,
    )
