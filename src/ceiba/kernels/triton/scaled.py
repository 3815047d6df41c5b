"""Products of eight-bit activations with eight-bit weights, for many rows: the library's where both have a scale a row,
a kernel of our own where weights have one for each block of 128 × 128 and activations one for each group of 128.
Knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import divide_up, pdl_options, wait_for_predecessor


@triton.jit(do_not_specialize=["M"])
def _matmul_blocks(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    M,
    N,
    x_scale_stride,
    w_scale_stride,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Tiles in bands of GROUP_M rows of tiles, so that those that run together share columns and rows in the L2.
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_band = GROUP_M * tiles_n
    band = tl.program_id(0) // per_band
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    tile_m = band * GROUP_M + tl.program_id(0) % per_band % height
    tile_n = tl.program_id(0) % per_band // height
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    m_read = tl.minimum(m, M - 1).to(tl.int64)
    n_read = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, 128)
    x_at = x_ptr + m_read[:, None] * K + k[None, :]
    w_at = w_ptr + n_read[None, :] * K + k[:, None]
    w_scale_at = w_scale_ptr + (tile_n * BN // 128) * w_scale_stride
    x_scale_at = x_scale_ptr + m_read * x_scale_stride
    wait_for_predecessor(PDL)
    acc = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(0, tl.cdiv(K, 128), num_stages=STAGES):
        start = block * 128
        if K % 128 == 0:
            x = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            x = tl.load(x_at + start, mask=(start + k < K)[None, :], other=0.0)
            w = tl.load(w_at + start, mask=(start + k < K)[:, None], other=0.0)
        scale = tl.load(x_scale_at + block) * tl.load(w_scale_at + block)
        acc += tl.dot(x, w) * scale[:, None]
    at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class BlocksShape:
    """Tile of the product in blocks: rows, columns, pipeline stages, warps."""

    rows: int
    columns: int
    stages: int
    warps: int


def blocks_shape(m: int, n: int) -> BlocksShape:
    """The tile for m rows and n columns. Chosen by arithmetic (a tile's accumulators, and the sums they are added to,
    fit the registers), not yet by measurement."""
    if m <= 64:
        return BlocksShape(64, 64, 4, 4)
    if m <= 512 or n <= 2048:
        return BlocksShape(64, 128, 4, 4)
    return BlocksShape(128, 128, 3, 8)


def matmul_blocks(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype,
    shape: BlocksShape | None = None,
) -> torch.Tensor:
    """x float8 [M, K], scales float32 [M, ⌈K / 128⌉], times w float8 [N, K]ᵀ, scales float32 [⌈N / 128⌉, ⌈K / 128⌉] →
    [M, N] in ``dtype``. Each group of 128 columns is summed by itself and scaled in float32."""
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if m == 0:
        return out
    tile = shape or blocks_shape(m, n)
    _matmul_blocks[(divide_up(m, tile.rows) * divide_up(n, tile.columns),)](
        x,
        x_scales,
        w,
        w_scales,
        out,
        m,
        n,
        x_scales.stride(0),
        w_scales.stride(0),
        K=k,
        BM=tile.rows,
        BN=tile.columns,
        GROUP_M=8,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
    return out


def matmul_rows(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x float8 [M, K], scales float32 [M, 1], times w float8 [N, K]ᵀ, scales float32 [N] → [M, N] in ``dtype``. The
    library writes bfloat16 alone; K and N must be multiples of 16."""
    if not x.is_cuda:
        return ((x.float() * x_scales) @ (w.float() * w_scales[:, None]).t()).to(dtype)
    out = torch._scaled_mm(
        x, w.t(), scale_a=x_scales, scale_b=w_scales[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out if dtype == torch.bfloat16 else out.to(dtype)


def matmul_scaled(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The product for the way ``w`` is scaled; x must have been scaled to match (``grouped`` for blocks)."""
    return (matmul_blocks if w_scales.dim() == 2 else matmul_rows)(x, x_scales, w, w_scales, dtype)
