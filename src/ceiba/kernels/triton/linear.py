"""Which kernel multiplies by a weight: the GEMV for one row, the split product for few, cuBLAS for the rest, by
measurement. Knows shapes only.
"""

from __future__ import annotations

import torch

from ceiba.kernels.triton.activation import silu_mul
from ceiba.kernels.triton.skinny import MAX_ROWS, gemv, matmul_parts

FEW_ROWS = 16
"""Rows up to which the split product beats cuBLAS on an H200 (docs/benchmarks.md)."""
DEEP = 8192
"""Columns from which it does so up to its own limit of rows."""


def _few(x: torch.Tensor, w: torch.Tensor) -> bool:
    rows, columns = x.shape
    return rows <= (MAX_ROWS if columns >= DEEP else FEW_ROWS) and columns % 64 == 0 and w.dtype == x.dtype


def linear_parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K] · w [N, K]ᵀ for a reader that adds up parts (``add_rms_norm``, ``qkv_norm_rope_write``): float32
    [P, M, N] or [M, N] in x's dtype.
    """
    if x.shape[0] == 1:
        return gemv(x, w, dtype=torch.float32)
    if _few(x, w):
        return matmul_parts(x, w)
    return torch.mm(x, w.t())


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K] · w [N, K]ᵀ -> [M, N] in x's dtype."""
    if x.shape[0] == 1:
        return gemv(x, w)
    if _few(x, w):
        return matmul_parts(x, w, single=True)
    return torch.mm(x, w.t())


def gate_up_silu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """silu(x·gateᵀ) · (x·upᵀ) for w [2F, K], gate rows first -> [M, F] in x's dtype."""
    if x.shape[0] == 1:
        return gemv(x, w, silu_pairs=True)
    if _few(x, w):
        return matmul_parts(x, w, silu_pairs=True)
    return silu_mul(torch.mm(x, w.t()))
