"""What stands between the QKV projection and attention, in one kernel: per-head RMS norm of q and k, rotary embedding,
and the write of k and v to their KV slots. Knows a slot as a row number, nothing of who owns it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import divide_up, pdl_options, power_of_two, wait_for_predecessor
from ceiba.kernels.triton.rows import sum_parts


@triton.jit
def _qkv_norm_rope_write(
    qkv_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    qkv_stride,
    part_stride,
    q_stride,
    k_stride,
    pool_stride,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HB: tl.constexpr,
    PARTS: tl.constexpr,
    QK_NORM: tl.constexpr,
    KEEP_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HB + tl.arange(0, HB)
    d = tl.arange(0, HALF)
    half: tl.constexpr = D // 2
    column = d < half
    is_q = heads < HQ
    is_k = (heads >= HQ) & (heads < HQ + HKV)
    is_v = (heads >= HQ + HKV) & (heads < HQ + 2 * HKV)
    rotated = heads < HQ + HKV
    if QK_NORM:
        wq1 = tl.load(q_weight_ptr + d, mask=column, other=0.0).to(tl.float32)
        wq2 = tl.load(q_weight_ptr + half + d, mask=column, other=0.0).to(tl.float32)
        wk1 = tl.load(k_weight_ptr + d, mask=column, other=0.0).to(tl.float32)
        wk2 = tl.load(k_weight_ptr + half + d, mask=column, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * D + d, mask=column, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + position * D + half + d, mask=column, other=0.0).to(tl.float32)
    inside = column[None, :] & (heads < HQ + 2 * HKV)[:, None]
    at = qkv_ptr + token * qkv_stride + heads[:, None] * D + d[None, :]
    x1 = sum_parts(at, inside, part_stride, PARTS)
    x2 = sum_parts(at + half, inside, part_stride, PARTS)
    y1 = x1
    y2 = x2
    if QK_NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / D + eps)
        y1 = x1 * scale[:, None] * tl.where(is_q[:, None], wq1[None, :], wk1[None, :])
        y2 = x2 * scale[:, None] * tl.where(is_q[:, None], wq2[None, :], wk2[None, :])
    z1 = tl.where(rotated[:, None], y1 * cos[None, :] - y2 * sin[None, :], x1)
    z2 = tl.where(rotated[:, None], y2 * cos[None, :] + y1 * sin[None, :], x2)

    q_at = q_out_ptr + token * q_stride + heads[:, None] * D + d[None, :]
    q_mask = inside & is_q[:, None]
    tl.store(q_at, z1.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(q_at + half, z2.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    k_head = (heads - HQ)[:, None] * D + d[None, :]
    v_head = (heads - HQ - HKV)[:, None] * D + d[None, :]
    k_mask = inside & is_k[:, None]
    v_mask = inside & is_v[:, None]
    k_at = k_pool_ptr + slot * pool_stride + k_head
    v_at = v_pool_ptr + slot * pool_stride + v_head
    tl.store(k_at, z1.to(k_pool_ptr.dtype.element_ty), mask=k_mask)
    tl.store(k_at + half, z2.to(k_pool_ptr.dtype.element_ty), mask=k_mask)
    tl.store(v_at, z1.to(v_pool_ptr.dtype.element_ty), mask=v_mask)
    tl.store(v_at + half, z2.to(v_pool_ptr.dtype.element_ty), mask=v_mask)
    if KEEP_KV:
        k_at = k_out_ptr + token * k_stride + k_head
        v_at = v_out_ptr + token * k_stride + v_head
        tl.store(k_at, z1.to(k_out_ptr.dtype.element_ty), mask=k_mask)
        tl.store(k_at + half, z2.to(k_out_ptr.dtype.element_ty), mask=k_mask)
        tl.store(v_at, z1.to(v_out_ptr.dtype.element_ty), mask=v_mask)
        tl.store(v_at + half, z2.to(v_out_ptr.dtype.element_ty), mask=v_mask)


def qkv_norm_rope_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    num_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    keep_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Norm (where weights are given), rotate and place the heads of a fused QKV projection.

    qkv [T, (heads + 2·kv_heads)·D], q heads first, then k, then v; or float32 [P, T, ...] partial sums to add up first.
    cos_sin [context, D]: cosines of the D/2 frequencies, then sines (NeoX pairing: dimension i with i + D/2).
    positions [T] integers; slots int64 [T]; k_pool, v_pool [slots, kv_heads, D], written at ``slots`` in their dtype.
    q_weight, k_weight [D] or both None. Returns q [T, heads, D] and, with ``keep_kv``, contiguous k and v
    [T, kv_heads, D] besides (None otherwise), in ``dtype`` (default qkv's).
    """
    parts, tokens, _ = (1, *qkv.shape) if qkv.dim() == 2 else qkv.shape
    kv_heads, dim = k_pool.shape[1], k_pool.shape[2]
    dtype = dtype or qkv.dtype
    q = torch.empty(tokens, num_heads, dim, dtype=dtype, device=qkv.device)
    k = torch.empty(tokens, kv_heads, dim, dtype=dtype, device=qkv.device) if keep_kv else None
    v = torch.empty_like(k) if k is not None else None
    if tokens == 0:
        return q, k, v
    total = num_heads + 2 * kv_heads
    block = 8 if tokens < 64 else 16
    half = power_of_two(dim // 2)
    _qkv_norm_rope_write[(tokens, divide_up(total, block))](
        qkv,
        q,
        q if k is None else k,
        q if v is None else v,
        q if q_weight is None else q_weight,
        q if k_weight is None else k_weight,
        cos_sin,
        positions,
        slots,
        k_pool,
        v_pool,
        qkv.stride(-2),
        qkv.stride(0),
        q.stride(0),
        kv_heads * dim,
        k_pool.stride(0),
        eps,
        HQ=num_heads,
        HKV=kv_heads,
        D=dim,
        HALF=half,
        HB=block,
        PARTS=parts,
        QK_NORM=q_weight is not None,
        KEEP_KV=keep_kv,
        num_warps=max(1, block * half // 256),
        **pdl_options(qkv.device),
    )
    return q, k, v
