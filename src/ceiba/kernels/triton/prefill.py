"""Attention of ragged prefill: each segment's new queries over its cached prefix (through the slot table) and over its
own new keys (contiguous, causal, aligned bottom right), in one online softmax (flash attention, Dao 2022).

The heads that share a kv head lie in one tile next to each other, so that short segments fill tiles and a tile's
diagonal is narrow. Logits are kept in base 2. Knows slots and rows as numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ceiba.kernels.triton.decode import LOG2E, _cap
from ceiba.kernels.triton.launch import power_of_two


@triton.jit
def _online(q, k, v, acc, m, total, keep, scale, softcap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax: k, v [BN, D]; ``keep`` [BM, BN] where MASKED."""
    s = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if SOFTCAP:
        s = _cap(s * scale, softcap, SOFTCAP)
        if MASKED:
            s = tl.where(keep, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
    else:
        if MASKED:
            s = tl.where(keep, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale)
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s * scale - base[:, None])
    alpha = tl.exp2(m - base)
    total = total * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="tf32x3")
    return acc, m_new, total


@triton.jit
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    k_prefix_ptr,
    v_prefix_ptr,
    k_pool_ptr,
    v_pool_ptr,
    table_ptr,
    tiles_ptr,
    sinks_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    pool_stride,
    table_stride,
    scale,
    softcap,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    POOLED: tl.constexpr,
    GATHERED: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tiles_ptr + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    q_first = tl.load(tile)  # the segment's first row in q, k and v
    t0 = tl.load(tile + 1)  # the tile's first token, counted from q_first
    length = tl.load(tile + 2)  # the segment's new tokens
    cached = tl.load(tile + 3)  # tokens before them
    row = tl.load(tile + 4).to(tl.int64)
    prefix_first = tl.load(tile + 5)  # the prefix's first row where it has been gathered
    BT: tl.constexpr = BM // G
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    token = t0 + r // G
    live = (r < BT * G) & (token < length)
    heads = kv_head * G + r % G
    q_row = (q_first + token).to(tl.int64)
    q_at = q_ptr + q_row[:, None] * q_stride + heads[:, None] * D + d[None, :]
    q = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    acc = tl.zeros((BM, BDV), tl.float32)
    m = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    last = tl.minimum(t0 + BT, length)  # end of the tile's tokens
    table_at = table_ptr + row * table_stride
    k_pool_at = k_pool_ptr + kv_head * D
    v_pool_at = v_pool_ptr + kv_head * DV
    v_pool_stride = pool_stride // D * DV

    # Positions in the pool: the cached prefix, or everything where the new keys are read from the pool as well.
    pool_end = cached
    if POOLED:
        pool_end = cached + (last if CAUSAL else length)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(cached + t0 - WINDOW + 1, 0) // BN * BN
    if GATHERED:
        # The prefix lies in contiguous rows; what its whole blocks leave over is for the loop over slots.
        whole = tl.where(prefix_first >= 0, cached // BN * BN, 0)
        for start in tl.range(0, whole, BN, num_stages=STAGES):
            k = k_prefix_ptr.load([prefix_first + start, kv_head * D])
            v = v_prefix_ptr.load([prefix_first + start, kv_head * DV])
            acc, m, total = _online(q, k, v, acc, m, total, live[:, None], scale, softcap, SOFTCAP, False)
        lowest = whole
    for start in tl.range(lowest, pool_end, BN, num_stages=1 if GATHERED else STAGES):
        at = start + tl.arange(0, BN)
        inside = at < pool_end
        slots = tl.load(table_at + at, mask=inside, other=0).to(tl.int64)
        k_mask = inside[:, None] if D == BD else inside[:, None] & (d < D)[None, :]
        v_mask = inside[:, None] if DV == BDV else inside[:, None] & (dv < DV)[None, :]
        k = tl.load(k_pool_at + slots[:, None] * pool_stride + d[None, :], mask=k_mask, other=0.0).to(q.dtype)
        v = tl.load(v_pool_at + slots[:, None] * v_pool_stride + dv[None, :], mask=v_mask, other=0.0).to(q.dtype)
        keep = inside[None, :] & (r >= 0)[:, None]
        if POOLED and CAUSAL:
            keep = keep & (at[None, :] <= (cached + token)[:, None])
        if WINDOW > 0:
            keep = keep & (at[None, :] > (cached + token)[:, None] - WINDOW)
        acc, m, total = _online(q, k, v, acc, m, total, keep, scale, softcap, SOFTCAP, True)

    if not POOLED:
        first = 0
        if WINDOW > 0:
            first = tl.maximum(t0 - WINDOW + 1, 0) // BN * BN
        end = length
        plain = length // BN * BN
        if CAUSAL:
            end = last
            plain = t0 // BN * BN
        if WINDOW > 0:
            plain = first
        plain = tl.maximum(plain, first)
        # Blocks that every query of the tile sees whole, then those that need a mask.
        for start in tl.range(first, plain, BN, num_stages=STAGES):
            if TMA:
                k = k_ptr.load([q_first + start, kv_head * D])
                v = v_ptr.load([q_first + start, kv_head * DV])
            else:
                at = (q_first + start + tl.arange(0, BN)).to(tl.int64)
                k = tl.load(k_ptr + at[:, None] * k_stride + kv_head * D + d[None, :], mask=(d < D)[None, :], other=0.0)
                v_at = v_ptr + at[:, None] * v_stride + kv_head * DV + dv[None, :]
                v = tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
            acc, m, total = _online(q, k, v, acc, m, total, live[:, None], scale, softcap, SOFTCAP, False)
        for start in tl.range(plain, end, BN, num_stages=1):
            at = start + tl.arange(0, BN)
            inside = at < length
            if TMA:
                # Rows past the segment are another's keys or zeros: finite, and masked below.
                k = k_ptr.load([q_first + start, kv_head * D])
                v = v_ptr.load([q_first + start, kv_head * DV])
            else:
                kv_row = (q_first + at).to(tl.int64)
                k_at = k_ptr + kv_row[:, None] * k_stride + kv_head * D + d[None, :]
                v_at = v_ptr + kv_row[:, None] * v_stride + kv_head * DV + dv[None, :]
                k = tl.load(k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
                v = tl.load(v_at, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            keep = inside[None, :] & (r >= 0)[:, None]
            if CAUSAL:
                keep = keep & (at[None, :] <= token[:, None])
            if WINDOW > 0:
                keep = keep & (at[None, :] > token[:, None] - WINDOW)
            acc, m, total = _online(q, k, v, acc, m, total, keep, scale, softcap, SOFTCAP, True)

    if SINKS:
        sink = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        total = total * tl.exp2(m - top) + tl.exp2(sink - top)
        acc *= tl.exp2(m - top)[:, None]
    y = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out_ptr + (q_row * (HKV * G) + heads)[:, None] * DV + dv[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])


TILE_FIELDS = 6
"""A tile, int32: the segment's first row in q, the tile's first token in the segment, the segment's new tokens, tokens
cached before them, slot-table row, the prefix's first row among all the step's prefixes back to back (negative: the
prefix is read through the slot table, also where others are gathered)."""
GATHER_TOKENS = 256
"""Mean new tokens per cached one from which gathering the prefixes first costs less than it saves."""


def plan_tiles(
    lengths: np.ndarray, cached: np.ndarray, rows: np.ndarray, group: int, tile_rows: int, first: int = 0
) -> np.ndarray:
    """Cut segments of ``lengths`` new tokens (back to back in q) into tiles, the costliest first.

    lengths, cached and rows int32 [B]; ``group`` is heads per kv head; ``tile_rows`` is the ``PrefillShape.rows`` that
    the tiles will be run with; ``first`` the row of q at which the first segment begins. Returns int32
    [n, TILE_FIELDS].
    """
    step = tile_rows // group
    counts = -(-lengths // step)
    segment = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    inner = np.arange(len(segment), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = np.cumsum(lengths) - lengths + first
    tiles = np.empty((len(segment), TILE_FIELDS), np.int32)
    tiles[:, 0] = firsts[segment]
    tiles[:, 1] = inner * step
    tiles[:, 2] = lengths[segment]
    tiles[:, 3] = cached[segment]
    tiles[:, 4] = rows[segment]
    tiles[:, 5] = (np.cumsum(cached) - cached)[segment]
    cost = tiles[:, 1] + tiles[:, 3]
    return tiles[np.argsort(-cost, kind="stable")]


@triton.jit(do_not_specialize=["rows"])
def _gather_slots(
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    used_ptr,
    k_out_ptr,
    v_out_ptr,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    if COUNTED:
        rows = tl.load(used_ptr)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row, mask=row < rows, other=0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    k_mask = (row < rows)[:, None] & (d < K)[None, :]
    v_mask = (row < rows)[:, None] & (d < V)[None, :]
    k = tl.load(k_pool_ptr + slot[:, None] * K + d[None, :], mask=k_mask, other=0.0)
    v = tl.load(v_pool_ptr + slot[:, None] * V + d[None, :], mask=v_mask, other=0.0)
    out = row.to(tl.int64)[:, None]
    tl.store(k_out_ptr + out * K + d[None, :], k.to(k_out_ptr.dtype.element_ty), mask=k_mask)
    tl.store(v_out_ptr + out * V + d[None, :], v.to(v_out_ptr.dtype.element_ty), mask=v_mask)


def gather_slots(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    dtype: torch.dtype,
    used: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``slots`` int32 [n] of the pools [slots, kv_heads, dim] as contiguous k and v [n, kv_heads, dim]. ``used``
    int32 [1]: only so many of them, the rest is left as it is."""
    count = slots.shape[0]
    k = torch.empty(count, *k_pool.shape[1:], dtype=dtype, device=k_pool.device)
    v = torch.empty(count, *v_pool.shape[1:], dtype=dtype, device=v_pool.device)
    k_width, v_width = k_pool.shape[1] * k_pool.shape[2], v_pool.shape[1] * v_pool.shape[2]
    if count:
        _gather_slots[(-(-count // 4),)](
            k_pool,
            v_pool,
            slots,
            slots if used is None else used,
            k,
            v,
            count,
            K=k_width,
            V=v_width,
            ROWS=4,
            BLOCK=power_of_two(max(k_width, v_width)),
            COUNTED=used is not None,
            num_warps=4,
        )
    return k, v


@triton.jit(do_not_specialize=["rows"])
def _merge_parts(
    a_ptr,
    a_lse_ptr,
    b_ptr,
    b_lse_ptr,
    out_ptr,
    rows,
    a_stride,
    b_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    live = row < rows
    inside = live[:, None] & (d < D)[None, :]
    lse_a = tl.load(a_lse_ptr + head * rows + row, mask=live, other=0.0)
    lse_b = tl.load(b_lse_ptr + head * rows + row, mask=live, other=0.0)
    share = 1.0 / (1.0 + tl.exp(lse_b - lse_a))
    at = row.to(tl.int64)[:, None]
    a = tl.load(a_ptr + at * a_stride + head * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at * b_stride + head * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = a * share[:, None] + b * (1.0 - share)[:, None]
    tl.store(out_ptr + at * (H * D) + head * D + d[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def merge_parts(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor, out: torch.Tensor) -> None:
    """The softmax over two sets of keys from the softmax over each: a and b [T, heads, D] (heads contiguous, any row
    stride), with natural log-sum-exp float32 [heads, T], contiguous; out [T, heads, D], contiguous."""
    rows, heads, dim = a.shape
    _merge_parts[(-(-rows // 16), heads)](
        a,
        a_lse,
        b,
        b_lse,
        out,
        rows,
        a.stride(0),
        b.stride(0),
        H=heads,
        D=dim,
        BD=power_of_two(dim),
        ROWS=16,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Query rows of a tile, positions of a step, warps, pipeline stages."""

    rows: int
    block: int
    warps: int
    stages: int


def prefill_shape(head_dim: int, itemsize: int) -> PrefillShape:
    """By head dimension and bytes of an element; measured on an H200 (docs/benchmarks.md)."""
    if itemsize > 2:
        return PrefillShape(128, 32, 8, 2) if head_dim <= 128 else PrefillShape(64, 16, 4, 1)
    return PrefillShape(64, 64, 4, 3) if head_dim <= 128 else PrefillShape(128, 64, 8, 2)


def _can_copy_tiles(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can fetch tiles of k and v."""
    if not k.is_cuda or torch.cuda.get_device_capability(k.device)[0] < 9:
        return False
    return all(
        t.dtype.itemsize == 2
        and power_of_two(t.shape[2]) == t.shape[2]
        and t.stride(0) % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in (k, v)
    )


def prefill(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    shape: PrefillShape | None = None,
    prefix_slots: torch.Tensor | None = None,
    prefix_used: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of ragged segments over their cached prefix and themselves.

    q [T, heads, D]; k [T, kv_heads, D], v [T, kv_heads, DV]: the new keys and values (heads contiguous, any row
    stride), or both None: the pool holds them already and they are read through the slot table. k_pool
    [slots, kv_heads, D], v_pool [slots, kv_heads, DV]; slot_table int32 [rows, context]; tiles int32 from
    ``plan_tiles``. window, softcap, sinks as in ``decode``; ``causal`` False: every new token sees all new tokens.
    prefix_slots int32 [sum of cached]: the slots of all cached tokens, back to back; where given (and the device can
    copy tiles, and there is no window) the prefixes are gathered first, which pays from some GATHER_TOKENS new tokens;
    prefix_used int32 [1]: how many of prefix_slots count.
    Returns [T, heads, DV]; rows that no tile covers keep what they were (``out``).
    """
    tokens, num_heads, dim = q.shape
    kv_heads, v_dim = k_pool.shape[1], v_pool.shape[2]
    group = num_heads // kv_heads
    if out is None:
        out = torch.empty(tokens, num_heads, v_dim, dtype=q.dtype, device=q.device)
    if tiles.shape[0] == 0:
        return out
    tile = shape or prefill_shape(max(dim, v_dim), q.dtype.itemsize)
    pooled = k is None or v is None
    tma = False
    k_argument: object = q
    v_argument: object = q
    if k is not None and v is not None:
        k_argument, v_argument = k, v
        tma = _can_copy_tiles(k, v)
    if tma and k is not None and v is not None:
        k_argument = TensorDescriptor(k, [tokens, kv_heads * dim], [k.stride(0), 1], [tile.block, dim])
        v_argument = TensorDescriptor(v, [tokens, kv_heads * v_dim], [v.stride(0), 1], [tile.block, v_dim])
    gathered = tma and prefix_slots is not None and not window and len(prefix_slots) > 0
    k_prefix: object = q
    v_prefix: object = q
    if gathered and prefix_slots is not None:
        k_rows, v_rows = gather_slots(k_pool, v_pool, prefix_slots, q.dtype, prefix_used)
        count = len(prefix_slots)
        k_prefix = TensorDescriptor(k_rows, [count, kv_heads * dim], [kv_heads * dim, 1], [tile.block, dim])
        v_prefix = TensorDescriptor(v_rows, [count, kv_heads * v_dim], [kv_heads * v_dim, 1], [tile.block, v_dim])
    _prefill[(tiles.shape[0], kv_heads)](
        q,
        k_argument,
        v_argument,
        k_prefix,
        v_prefix,
        k_pool,
        v_pool,
        slot_table,
        tiles,
        q if sinks is None else sinks,
        out,
        q.stride(0),
        0 if k is None else k.stride(0),
        0 if v is None else v.stride(0),
        k_pool.stride(0),
        slot_table.stride(0),
        scale * LOG2E,
        softcap * LOG2E,
        G=group,
        HKV=kv_heads,
        D=dim,
        DV=v_dim,
        BD=power_of_two(dim),
        BDV=power_of_two(v_dim),
        BM=tile.rows,
        BN=tile.block,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        SINKS=sinks is not None,
        CAUSAL=causal,
        POOLED=pooled,
        GATHERED=gathered,
        TMA=tma,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
