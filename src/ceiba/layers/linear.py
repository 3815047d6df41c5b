"""Linear layers over one or more fused parts, split over ranks by columns (outputs) or by rows (inputs).

A layer declares its shape and its parts; the quantization method decides how they are stored. Never knows tensor names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ceiba.dist import partition
from ceiba.layers.context import LayerContext
from ceiba.layers.norm import RMSNorm
from ceiba.layers.quant.base import Part, Slot, WeightSpec
from ceiba.layers.quant.plain import Vector
from ceiba.layers.scaled import Rows, plain_rows


class ColumnLinear:
    """y [T, sum of parts] = x · Wᵀ + b, each rank computing its own rows of every part. No collective.

    ``parts`` are (name, outputs, unit, replicate): a part is divided in whole units (a head's width), and with
    ``replicate`` units fewer than ranks are shared between neighbours (KV heads).
    """

    def __init__(
        self, ctx: LayerContext, in_features: int, parts: Sequence[tuple[str, int, int, bool]], bias: bool = False
    ) -> None:
        shares = []
        for name, out, unit, replicate in parts:
            count, start = partition(out // unit, ctx.group, name, replicate=replicate)
            shares.append(Part(name, count * unit, start * unit, out))
        spec = WeightSpec(tuple(shares), in_features, 0, in_features, ctx.dtype, ctx.device)
        self.ops = ctx.ops
        self.weight = ctx.quant.create(spec)
        self.bias = Vector(spec, dummy=0.0) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.apply(x, None if self.bias is None else self.bias.value)

    def after(self, norm: RMSNorm, delta: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Of the normed residual stream (``layers.ops``), which takes ``delta`` in; perhaps as partial sums."""
        if self.weight.dense is None or self.bias is not None:
            return self(norm.add(delta, residual))
        return self.ops.norm_linear(delta, residual, norm.weight.value, norm.eps, self.weight.dense)

    def gated_after(self, norm: RMSNorm, delta: torch.Tensor | None, residual: torch.Tensor) -> Rows:
        """As ``after`` for the parts (gate, up); returns silu(gate) · up."""
        if self.weight.dense is None or self.bias is not None:
            return self.ops.silu_mul(self(norm.add(delta, residual)))
        return self.ops.norm_gate_up(delta, residual, norm.weight.value, norm.eps, self.weight.dense)

    def slots(self, part: str) -> dict[str, Slot]:
        """Targets of one part's tensors, by suffix."""
        found = self.weight.slots(part)
        if self.bias is not None:
            found["bias"] = Slot(self.bias, part)
        return found


class RowLinear:
    """y [T, out] = Σ over ranks of x · Wᵀ, + b: each rank holds the columns that match its share of x."""

    def __init__(
        self, ctx: LayerContext, in_features: int, out_features: int, unit: int = 1, bias: bool = False
    ) -> None:
        count, start = partition(in_features // unit, ctx.group, "input features")
        parts = (Part("", out_features, 0, out_features),)
        self.group = ctx.group
        self.ops = ctx.ops
        spec = WeightSpec(parts, count * unit, start * unit, in_features, ctx.dtype, ctx.device)
        self.weight = ctx.quant.create(spec)
        self.bias = Vector(spec, dummy=0.0) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.value
        if self.group.size == 1:
            return self.weight.apply(x, bias)
        y = self.group.all_reduce(self.weight.apply(x, None))
        return y if bias is None else y + bias

    def into(self, x: Rows, residual: torch.Tensor) -> torch.Tensor | None:
        """What this layer adds to the residual stream (``layers.ops``), or None where it has added it."""
        if self.weight.dense is None or self.bias is not None or self.group.size > 1:
            return self(plain_rows(x, residual.dtype))
        return self.ops.linear_residual(x, self.weight.dense, residual)

    def slots(self, part: str = "") -> dict[str, Slot]:
        found = self.weight.slots(part)
        if self.bias is not None:
            found["bias"] = Slot(self.bias, part)
        return found
