"""Root-mean-square normalization, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch

from ceiba.layers.context import LayerContext
from ceiba.layers.quant.base import Part, Slot, WeightSpec
from ceiba.layers.quant.plain import Vector


class RMSNorm:
    """y = x / rms(x) · weight over the last dimension, of size ``size``."""

    def __init__(self, ctx: LayerContext, size: int, eps: float) -> None:
        self.eps = eps
        self.ops = ctx.ops
        part = Part("", size, 0, size)
        self.weight = Vector(WeightSpec((part,), 1, 0, 1, ctx.dtype, ctx.device), dummy=1.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight.value, self.eps)

    def add(self, delta: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual += delta in place (``layers.ops``); returns the normed residual."""
        return self.ops.add_rms_norm(delta, residual, self.weight.value, self.eps)

    def slots(self, part: str = "") -> dict[str, Slot]:
        return {"weight": Slot(self.weight, part)}
