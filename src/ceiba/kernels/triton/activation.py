"""Gated activations over a fused gate-and-up projection. Knows rows of numbers only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import divide_up, pdl_options, wait_for_predecessor
from ceiba.kernels.triton.rows import sum_parts


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul(x_ptr, out_ptr, x_stride, part_stride, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    wait_for_predecessor(PDL)
    at = x_ptr + row * x_stride + n
    gate = sum_parts(at, inside, part_stride, PARTS)
    up = sum_parts(at + N, inside, part_stride, PARTS)
    tl.store(out_ptr + row * N + n, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """silu(gate) · up. x [T, 2N] (gate first), or float32 [P, T, 2N] partial sums to add up first. Returns [T, N] in
    ``dtype`` (default x's). Arithmetic is float32.
    """
    parts, rows, width = (1, *x.shape) if x.dim() == 2 else x.shape
    if out is None:
        out = torch.empty(rows, width // 2, dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    block = 1024
    grid = (rows, divide_up(width // 2, block))
    _silu_mul[grid](
        x, out, x.stride(-2), x.stride(0), width // 2, PARTS=parts, BLOCK=block, num_warps=4, **pdl_options(x.device)
    )
    return out
