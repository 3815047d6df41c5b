"""Activations to eight-bit floats (e4m3) before a product: alone, after the RMS norm, after a gated activation; with
one scale a row or one for each group of 128 columns. Knows rows of numbers only.

A scale brings the largest value of what it covers to the largest float8; values are divided by it in float32 and
rounded to nearest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.activation import silu
from ceiba.kernels.triton.launch import divide_up, pdl_options, power_of_two, wait_for_predecessor
from ceiba.kernels.triton.rows import add_residual

GROUP = 128
"""Columns of a group."""
FLOAT8 = torch.float8_e4m3fn


@triton.jit
def to_float8(x, inverse):
    """x · inverse as e4m3, where ``inverse`` is one over the scale; what rounding puts past the end is the end."""
    return tl.minimum(tl.maximum(x * inverse, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _store_row(x, values_at, scales_at, D: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    """x float32 [BLOCK], zero past D, to values_at [D] and its scales to scales_at."""
    d = tl.arange(0, BLOCK)
    if GROUPED:
        GROUPS: tl.constexpr = BLOCK // 128
        group = tl.arange(0, GROUPS)
        x = tl.reshape(x, (GROUPS, 128))
        scale = tl.maximum(tl.max(tl.abs(x), axis=1) / 448.0, 1e-12)
        tl.store(scales_at + group, scale, mask=group * 128 < D)
        y = tl.reshape(to_float8(x, (1.0 / scale)[:, None]), (BLOCK,))
    else:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) / 448.0, 1e-12)
        tl.store(scales_at, scale)
        y = to_float8(x, 1.0 / scale)
    tl.store(values_at + d, y, mask=d < D)


@triton.jit
def _quantize(
    x_ptr,
    values_ptr,
    scales_ptr,
    x_stride,
    scales_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    wait_for_predecessor(PDL)
    at = x_ptr + row * x_stride + d
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        x = silu(x) * tl.load(at + D, mask=inside, other=0.0).to(tl.float32)
    _store_row(x, values_ptr + row * D, scales_ptr + row * scales_stride, D, BLOCK, GROUPED)


@triton.jit
def _norm_quantize(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    values_ptr,
    scales_ptr,
    x_stride,
    part_stride,
    residual_stride,
    scales_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    at, residual_at = x_ptr + row * x_stride + d, residual_ptr + row * residual_stride + d
    x = add_residual(at, residual_at, inside, part_stride, PARTS, ADD)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
    if KEEP:
        tl.store(normed_ptr + row * D + d, y.to(normed_ptr.dtype.element_ty), mask=inside)
    _store_row(y, values_ptr + row * D, scales_ptr + row * scales_stride, D, BLOCK, GROUPED)


def _outputs(rows: int, columns: int, grouped: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(rows, columns, dtype=FLOAT8, device=device)
    scales = torch.empty(rows, divide_up(columns, GROUP) if grouped else 1, dtype=torch.float32, device=device)
    return values, scales


def _block(columns: int) -> int:
    return max(GROUP, power_of_two(columns))


def _warps(columns: int) -> int:
    return min(16, max(1, _block(columns) // 512))


def quantize(x: torch.Tensor, grouped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, D], any float dtype, rows contiguous → values float8_e4m3fn [T, D] and scales float32 [T, 1], or [T, ⌈D /
    GROUP⌉] where ``grouped``."""
    return _launch(x, x.shape[1], grouped, gated=False)


def silu_mul_quantize(x: torch.Tensor, grouped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize`` of silu(gate) · up, for x [T, 2N], gate first."""
    return _launch(x, x.shape[1] // 2, grouped, gated=True)


def _launch(x: torch.Tensor, dim: int, grouped: bool, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    values, scales = _outputs(rows, dim, grouped, x.device)
    if rows:
        _quantize[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            scales.stride(0),
            D=dim,
            BLOCK=_block(dim),
            GATED=gated,
            GROUPED=grouped,
            num_warps=_warps(dim),
            **pdl_options(x.device),
        )
    return values, scales


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grouped: bool,
    residual: torch.Tensor | None = None,
    keep: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """``add_rms_norm`` (x, weight, residual as there), then ``quantize`` of the unrounded norm. Returns the norm [T, D]
    in weight's dtype where ``keep``, values and scales."""
    parts, rows, dim = (1, *x.shape) if x.dim() == 2 else x.shape
    values, scales = _outputs(rows, dim, grouped, x.device)
    normed = torch.empty(rows, dim, dtype=weight.dtype, device=x.device) if keep else None
    if rows:
        _norm_quantize[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            x if normed is None else normed,
            values,
            scales,
            x.stride(-2),
            x.stride(0),
            0 if residual is None else residual.stride(0),
            scales.stride(0),
            eps,
            D=dim,
            BLOCK=_block(dim),
            PARTS=parts,
            ADD=residual is not None,
            KEEP=keep,
            GROUPED=grouped,
            num_warps=_warps(dim),
            **pdl_options(x.device),
        )
    return normed, values, scales
