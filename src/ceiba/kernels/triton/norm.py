"""Root-mean-square norms fused with what stands before them. Knows rows of numbers only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import pdl_options, power_of_two, wait_for_predecessor
from ceiba.kernels.triton.rows import add_residual


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    part_stride,
    residual_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    wait_for_predecessor(PDL)
    at, residual_at = x_ptr + row * x_stride + d, residual_ptr + row * residual_stride + d
    x = add_residual(at, residual_at, inside, part_stride, PARTS, ADD)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(out_ptr + row * D + d, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """``residual += x`` (in place, rounded to its dtype), then the RMS norm of the sum, times weight + weight_offset.

    x [T, D], any float dtype, rows contiguous; or float32 [P, T, D], P partial sums (of a split GEMM) to add up first.
    weight [D]; residual [T, D] or None: nothing is added. Returns [T, D] in weight's dtype. Arithmetic is float32.
    """
    parts, rows, dim = (1, *x.shape) if x.dim() == 2 else x.shape
    if out is None:
        out = torch.empty(rows, dim, dtype=weight.dtype, device=x.device)
    if rows == 0:
        return out
    block = power_of_two(dim)
    _add_rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(-2),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        D=dim,
        BLOCK=block,
        PARTS=parts,
        ADD=residual is not None,
        OFFSET=weight_offset,
        num_warps=min(16, max(1, block // 512)),
        **pdl_options(x.device),
    )
    return out
