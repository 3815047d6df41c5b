"""Eight-bit floats with float32 scales: how matrices and activations look where a product takes them so. Knows layouts
and the reference arithmetic, never where a matrix came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

BLOCK = 128
"""Rows and columns of a block, and columns of a group of activations, that share a scale."""
LARGEST = 448.0
"""Of float8_e4m3fn."""
SMALLEST_SCALE = 1e-12
"""Keeps rows of zeros from dividing by zero."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix, or one for each expert: values float8_e4m3fn [..., out, in]."""

    values: Tensor
    scales: Tensor
    """float32: [..., out], one a row, or with ``blocked`` [..., ⌈out / BLOCK⌉, ⌈in / BLOCK⌉]"""
    blocked: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, expert: int) -> Scaled:
        return Scaled(self.values[expert], self.scales[expert], self.blocked)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The matrix in ``dtype``."""
        scales = self.scales.unsqueeze(-1)
        if self.blocked:
            rows, columns = self.shape[-2:]
            scales = self.scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
            scales = scales.repeat_interleave(BLOCK, -1)[..., :columns]
        return (self.values.float() * scales).to(dtype)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Activations [T, n] on their way into a product: values float8_e4m3fn, scales float32 [T, 1] or, one for each
    group of BLOCK columns, [T, ⌈n / BLOCK⌉]."""

    values: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def plain(self, dtype: torch.dtype) -> Tensor:
        columns = self.values.shape[1]
        scales = self.scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
        return (self.values.float() * scales).to(dtype)


Matrix = Tensor | Scaled
"""A matrix as the operations take it."""
Rows = Tensor | ScaledRows
"""Activations as a product takes them."""


def plain_matrix(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    return matrix.plain(dtype) if isinstance(matrix, Scaled) else matrix


def plain_rows(x: Rows, dtype: torch.dtype) -> Tensor:
    return x.plain(dtype) if isinstance(x, ScaledRows) else x


def to_float8(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales rounded to the nearest float8_e4m3fn; out of range values become the largest."""
    return (x.float() / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., out, in] of any float dtype → values float8_e4m3fn and scales float32 [..., out] that bring each row's
    largest value to the largest float8."""
    scales = (x.abs().amax(-1).float() / LARGEST).clamp_(min=SMALLEST_SCALE)
    return to_float8(x, scales.unsqueeze(-1)), scales
