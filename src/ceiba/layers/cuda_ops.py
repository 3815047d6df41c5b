"""The ``Ops`` of CUDA devices: which Triton kernels make up a layer, by the number of tokens of a step.

One token: every norm lives inside the product after it and every residual inside the product before it. A few tokens:
split products whose partial sums the next kernel adds up. More: cuBLAS, with fused kernels between. The borders were
measured (docs/benchmarks.md) and lie with the kernels. Knows shapes, never models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ceiba.kernels.triton.activation import silu_mul
from ceiba.kernels.triton.gather import gather_rows
from ceiba.kernels.triton.linear import gate_up_silu, linear, linear_parts
from ceiba.kernels.triton.moe import GEMV_TOKENS, moe, norm_route, route
from ceiba.kernels.triton.norm import add_rms_norm
from ceiba.kernels.triton.rope import qkv_norm_rope_write
from ceiba.kernels.triton.skinny import gemv
from ceiba.layers import ops as reference
from ceiba.layers.ops import QKV, KVTarget, Ops, QKVShape, Routing, Tensor
from ceiba.layers.rotary import RotaryStep

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


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight) if bias is None else F.linear(x, weight, bias)


def _norm_linear(delta: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    if len(residual) == 1 and delta is None:
        return gemv(residual, weight, norm=norm, eps=eps)
    return linear_parts(_norm(delta, residual, norm, eps), weight)


def _norm_gate_up(delta: Tensor | None, residual: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    if len(residual) == 1 and delta is None:
        return gemv(residual, weight, norm=norm, eps=eps, silu_pairs=True)
    return gate_up_silu(_norm(delta, residual, norm, eps), weight)


def _linear_residual(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
    if len(x) == 1:
        # In place: each block reads and writes its own outputs alone.
        gemv(x, weight, residual=residual, out=residual)
        return None
    return linear_parts(x, weight)


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
        gate_up: Tensor,
        down: Tensor,
        routing: Routing,
        whole: bool = True,
    ) -> Tensor | None:
        if delta is None and len(residual) <= GEMV_TOKENS:
            x, ids, weights = norm_route(residual, norm, router, eps, routing.top_k, counters, routing.renormalize)
        else:
            x = _norm(delta, residual, norm, eps)
            ids, weights = route(linear(x, router), routing.top_k, routing.renormalize)
        if whole and len(x) == 1:
            moe(x, gate_up, down, ids, weights, residual=residual, out=residual)
            return None
        return moe(x, gate_up, down, ids, weights)

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
