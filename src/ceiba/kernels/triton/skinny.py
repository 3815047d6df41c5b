"""Matrix products with few rows, bound by reading the weight once: a GEMV for one row with the norm before it and the
activation or residual after it fused in, and a split-K product for up to 64 rows. Larger products belong to cuBLAS.

Weights may be eight-bit floats with scales, one a row or one for each block of 128 × 128: they become the activations'
type in registers, so that only activations of more rows are ever rounded.

A split product returns float32 partial sums [P, M, N]; the kernel that reads it next (norm, rotary, activation) adds
them up, which costs nothing extra and keeps the order of additions fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.activation import silu
from ceiba.kernels.triton.launch import (
    divide_up,
    pdl_options,
    power_of_two,
    prefetch_to_l2,
    wait_for_predecessor,
)

MAX_ROWS = 64
"""Rows up to which ``matmul_parts`` accepts a product."""


def scale_kind(scales: torch.Tensor | None, matrix_dims: int = 2) -> int:
    """How a weight of ``matrix_dims`` dimensions is scaled: 0 not at all, 1 by row, 2 in blocks."""
    if scales is None:
        return 0
    return 1 if scales.dim() < matrix_dims else 2


@triton.jit
def _gemv(
    x_ptr,
    w_ptr,
    out_ptr,
    norm_ptr,
    residual_ptr,
    scale_ptr,
    N,
    w_stride,
    scale_stride,
    eps,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # All rows of a tile lie in one block of scales: BN divides 128, and up rows begin at a multiple of it.
    scale_at = scale_ptr + (tl.program_id(0) * BN // 128) * scale_stride
    scale_u_at = scale_ptr + ((N + tl.program_id(0) * BN) // 128) * scale_stride
    k = tl.arange(0, BK)
    rows = n < N
    w_at = w_ptr + n[:, None].to(tl.int64) * w_stride + k[None, :]
    u_at = w_at + N.to(tl.int64) * w_stride
    w = tl.load(w_at, mask=rows[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if SILU:
        u = tl.load(u_at, mask=rows[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_predecessor(PDL)
    acc = tl.zeros((BN, BK), tl.float32)
    if SILU:
        acc_u = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        now = w
        ahead = start + BK + k
        mask = rows[:, None] & (ahead < K)[None, :]
        w = tl.load(w_at + start + BK, mask=mask, other=0.0, eviction_policy="evict_first")
        if SILU:
            now_u = u
            u = tl.load(u_at + start + BK, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        x_u = x
        if SCALE == 2:
            if SILU:
                x_u = x * tl.load(scale_u_at + (start + k) // 128, mask=start + k < K, other=0.0)
            x *= tl.load(scale_at + (start + k) // 128, mask=start + k < K, other=0.0)
        acc += now.to(tl.float32) * x[None, :]
        if SILU:
            acc_u += now_u.to(tl.float32) * x_u[None, :]
    y = tl.sum(acc, axis=1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
    if SCALE == 1:
        y *= tl.load(scale_ptr + n, mask=rows, other=0.0)
    if SILU:
        y_u = tl.sum(acc_u, axis=1) * scale
        if SCALE == 1:
            y_u *= tl.load(scale_ptr + N + n, mask=rows, other=0.0)
        y = silu(y) * y_u
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=rows)


@dataclass(frozen=True, slots=True)
class GemvShape:
    """Tile of the GEMV: rows and columns of the weight a block takes at a time, and its warps."""

    rows: int
    columns: int
    warps: int


def gemv_shape(k: int, paired: bool, normed: bool, itemsize: int = 2) -> GemvShape:
    """The tile for weight rows of ``k`` columns, from measurements on an H200 (docs/benchmarks.md); for eight-bit
    weights by the same number of bytes, not yet measured."""
    if itemsize == 1:
        if paired:
            return GemvShape(2, 4096, 8) if normed and k >= 4096 else GemvShape(1, 2048, 4)
        return GemvShape(2, 2048, 4) if k < 4096 else GemvShape(4, 1024, 4) if normed else GemvShape(4, 2048, 8)
    if paired:
        return GemvShape(2, 4096, 8) if normed and k >= 4096 else GemvShape(1, 1024, 4)
    if k < 4096:
        return GemvShape(2, 1024, 4)
    return GemvShape(4, 512, 4) if normed else GemvShape(4, 1024, 8)


def gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    silu_pairs: bool = False,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    shape: GemvShape | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """One row times a weight: x [1, K] · w [N, K]ᵀ -> [1, N] in ``dtype`` (default x's), float32 accumulation.

    ``norm`` [K]: x stands for RMSNorm(x)·norm, computed here. ``residual`` [1, N] is added to the product.
    ``silu_pairs``: w is [2N, K], gate rows then up rows, and the result is silu(gate)·up [1, N]. ``scales`` float32, of
    w's rows [rows of w] or blocks of 128 × 128 [⌈rows / 128⌉, ⌈K / 128⌉]; for pairs in blocks N is a multiple of 128.
    """
    n, k = w.shape
    if silu_pairs:
        n //= 2
    if out is None:
        out = torch.empty(1, n, dtype=dtype or x.dtype, device=x.device)
    tile = shape or gemv_shape(k, silu_pairs, norm is not None, w.dtype.itemsize)
    _gemv[(divide_up(n, tile.rows),)](
        x,
        w,
        out,
        x if norm is None else norm,
        x if residual is None else residual,
        x if scales is None else scales,
        n,
        w.stride(0),
        0 if scales is None else scales.stride(0),
        eps,
        K=k,
        BN=tile.rows,
        BK=min(tile.columns, power_of_two(k)),
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        SILU=silu_pairs,
        SCALE=scale_kind(scales),
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _matmul_parts(
    x_ptr,
    w_ptr,
    out_ptr,
    scale_ptr,
    M,
    N,
    x_stride,
    w_stride,
    scale_stride,
    K: tl.constexpr,
    K_PART: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SILU: tl.constexpr,
    SCALE: tl.constexpr,
    LINE: tl.constexpr,
    WARM: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    first = part * K_PART
    n_read = tl.minimum(n, N - 1).to(tl.int64)
    m_read = tl.minimum(m, M - 1)
    if PDL:
        line = tl.arange(0, WARM)
        prefetch_to_l2(w_ptr + n_read[:, None] * w_stride + first + line[None, :] * LINE)
        if SILU:
            prefetch_to_l2(w_ptr + (n_read + N)[:, None] * w_stride + first + line[None, :] * LINE)
    wait_for_predecessor(PDL)
    w_at = w_ptr + n_read[None, :] * w_stride + first + k[:, None]
    x_at = x_ptr + m_read[:, None] * x_stride + first + k[None, :]
    # A step's weights lie in one block of scales: BN and BK divide 128, and so does every border of parts and pairs.
    scale_at = scale_ptr + (tl.program_id(0) * BN // 128) * scale_stride
    scale_u_at = scale_ptr + ((N + tl.program_id(0) * BN) // 128) * scale_stride
    acc = tl.zeros((BM, BN), tl.float32)
    if SILU:
        acc_u = tl.zeros((BM, BN), tl.float32)
        u_at = w_at + N.to(tl.int64) * w_stride
    for start in tl.range(0, K_PART, BK, num_stages=STAGES):
        if K % K_PART == 0 and K_PART % BK == 0:
            x = tl.load(x_at + start)
            w = tl.load(w_at + start, eviction_policy="evict_first")
            if SILU:
                u = tl.load(u_at + start, eviction_policy="evict_first")
        else:
            inside = (start + k < K_PART) & (first + start + k < K)
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            if SILU:
                u = tl.load(u_at + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        if SCALE == 2:
            block = (first + start) // 128
            acc += tl.dot(x, w.to(x.dtype), input_precision="tf32x3") * tl.load(scale_at + block)
            if SILU:
                acc_u += tl.dot(x, u.to(x.dtype), input_precision="tf32x3") * tl.load(scale_u_at + block)
        else:
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision="tf32x3")
            if SILU:
                acc_u = tl.dot(x, u.to(x.dtype), acc_u, input_precision="tf32x3")
    if SCALE == 1:
        acc *= tl.load(scale_ptr + n_read)[None, :]
        if SILU:
            acc_u *= tl.load(scale_ptr + N + n_read)[None, :]
    if SILU:
        acc = silu(acc) * acc_u
    at = out_ptr + part.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """Tile of the split product: weight rows and columns of a step, parts of K, pipeline stages, warps."""

    rows: int
    columns: int
    parts: int
    stages: int
    warps: int


def skinny_shape(m: int, n: int, k: int, paired: bool) -> SkinnyShape:
    """The tile and the split for an [n, k] weight, from measurements on an H200 (docs/benchmarks.md)."""
    if paired:
        return SkinnyShape(32, 256, 1, 4, 4) if m <= 16 else SkinnyShape(32, 128, 1, 4, 4)
    if n >= 32768:
        return SkinnyShape(64, 128, 1, 5, 4)
    if k >= 8192:
        return SkinnyShape(64, 256, 4, 3, 4) if m <= 16 else SkinnyShape(64, 128, 4, 3, 4)
    if k >= 4096:
        return SkinnyShape(32, 256, 2, 4, 4) if m <= 16 else SkinnyShape(32, 128, 2, 3, 4)
    return SkinnyShape(64, 128, 8 if k >= 2048 else 1, 3, 4)


def matmul_parts(
    x: torch.Tensor,
    w: torch.Tensor,
    silu_pairs: bool = False,
    single: bool = False,
    dtype: torch.dtype | None = None,
    shape: SkinnyShape | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] · w [N, K]ᵀ for M ≤ 64.

    Returns float32 [P, M, N] whose sum over P is the product; with ``single`` or ``silu_pairs`` (w [2N, K], gate rows
    then up rows: silu(gate)·up) the whole result [M, N] in ``dtype`` (default x's). K must be divisible by 64.
    ``scales`` as in ``gemv``. Raises ValueError for more rows.
    """
    m, k = x.shape
    n = w.shape[0] // 2 if silu_pairs else w.shape[0]
    if m > MAX_ROWS:
        raise ValueError(f"matmul_parts takes at most {MAX_ROWS} rows, not {m}; use torch.matmul")
    whole = single or silu_pairs
    tile = shape or skinny_shape(m, n, k, silu_pairs)
    columns = tile.columns // max(1, x.dtype.itemsize // 2)  # the same bytes of a step, whatever an element takes
    parts = 1 if whole else tile.parts
    kind = scale_kind(scales)
    unit = 128 if kind == 2 else 64
    part = divide_up(divide_up(k, parts), unit) * unit
    line = 128 // w.dtype.itemsize
    out = torch.empty(parts, m, n, dtype=(dtype or x.dtype) if whole else torch.float32, device=x.device)
    _matmul_parts[(divide_up(n, tile.rows), parts)](
        x,
        w,
        out,
        x if scales is None else scales,
        m,
        n,
        x.stride(0),
        w.stride(0),
        0 if scales is None else scales.stride(0),
        K=k,
        K_PART=part,
        BM=max(16, power_of_two(m)),
        BN=tile.rows,
        BK=min(columns, power_of_two(part), 128 if kind == 2 else columns),
        STAGES=tile.stages,
        SILU=silu_pairs,
        SCALE=kind,
        LINE=line,
        WARM=min(16, power_of_two(divide_up(part, line))),
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return out[0] if whole else out
