"""Which kernel multiplies by a weight: the GEMV for one row, the split product for few, cuBLAS for the rest, by
measurement. Knows shapes only.
"""

from __future__ import annotations

import torch

from ceiba.kernels.triton.activation import silu_mul
from ceiba.kernels.triton.quantize import quantize
from ceiba.kernels.triton.scaled import matmul_scaled
from ceiba.kernels.triton.skinny import MAX_ROWS, gemv, matmul_parts

FEW_ROWS = 16
"""Rows up to which the split product beats cuBLAS on an H200 (docs/benchmarks.md)."""
DEEP = 8192
"""Columns from which it does so up to its own limit of rows."""


SCALED_FEW_ROWS = 16
"""The same border for eight-bit weights, beyond which activations are rounded as well."""
SCALED_DEEP_ROWS = 64


def few(rows: int, columns: int, scaled: bool) -> bool:
    """Whether a product of ``rows`` with a weight of so many columns is for the split product (or the GEMV), which
    rounds no activations."""
    if scaled:
        most = SCALED_DEEP_ROWS if columns >= DEEP else SCALED_FEW_ROWS
    else:
        most = MAX_ROWS if columns >= DEEP else FEW_ROWS
    return rows == 1 or (rows <= most and columns % 64 == 0)


def _few(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None) -> bool:
    rows, columns = x.shape
    return few(rows, columns, scales is not None) and (scales is not None or w.dtype == x.dtype)


def linear_parts(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] · w [N, K]ᵀ for a reader that adds up parts (``add_rms_norm``, ``qkv_norm_rope_write``): float32
    [P, M, N] or [M, N] in x's dtype. ``scales`` of an eight-bit w, as in ``gemv``.
    """
    if x.shape[0] == 1:
        return gemv(x, w, dtype=torch.float32, scales=scales)
    if _few(x, w, scales):
        return matmul_parts(x, w, scales=scales)
    return _many(x, w, scales)


def linear(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] · w [N, K]ᵀ -> [M, N] in x's dtype."""
    if x.shape[0] == 1:
        return gemv(x, w, scales=scales)
    if _few(x, w, scales):
        return matmul_parts(x, w, single=True, scales=scales)
    return _many(x, w, scales)


def gate_up_silu(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x·gateᵀ) · (x·upᵀ) for w [2F, K], gate rows first -> [M, F] in x's dtype."""
    if x.shape[0] == 1:
        return gemv(x, w, silu_pairs=True, scales=scales)
    if _few(x, w, scales):
        return matmul_parts(x, w, silu_pairs=True, scales=scales)
    return silu_mul(_many(x, w, scales))


def _many(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return torch.mm(x, w.t())
    return matmul_scaled(*quantize(x, grouped=scales.dim() == 2), w, scales, x.dtype)
