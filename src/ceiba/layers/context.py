"""What every layer is built with: dtype, device, ranks, kernels and quantization method. Fixed for a model's life."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ceiba.dist import Group
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import QuantMethod


@dataclass(frozen=True, slots=True)
class LayerContext:
    dtype: torch.dtype
    """Of activations and of weights that are not packed."""
    device: torch.device
    group: Group
    ops: Ops
    quant: QuantMethod
    """Of the matrices."""
    context_len: int
    """Positions [0, context_len) can occur."""
