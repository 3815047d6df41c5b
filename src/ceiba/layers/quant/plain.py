"""Weights held as ordinary values of the run's dtype: the reference of every quantization method.

Stored values of any plain kind, and GGUF blocks, are converted once, at load. Never knows the model.
"""

from __future__ import annotations

import torch

from ceiba.checkpoint.base import RawTensor
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import WeightSpec, check_shape
from ceiba.layers.quant.decode import slabs

DUMMY_STD = 0.02


class PlainWeight:
    """A matrix [rows, cols] in the run's dtype."""

    def __init__(self, spec: WeightSpec, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        make = torch.zeros if any(part.pad for part in spec.parts) else torch.empty
        self.value = make(spec.rows, spec.cols, dtype=spec.dtype, device=spec.device)

    def load(self, part: str, raw: RawTensor) -> None:
        spec = self.spec
        what, row = spec.part(part)
        check_shape(raw, (what.stored_rows, spec.stored_cols))
        for offset, values in slabs(raw, what.start, what.rows):
            target = self.value[row + offset : row + offset + len(values)]
            target.copy_(values[:, spec.col_start : spec.col_start + spec.cols])

    def fill(self, generator: torch.Generator) -> None:
        self.value.normal_(0.0, DUMMY_STD, generator=generator)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.ops.linear(x, self.value, bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.value.index_select(0, ids)


class PlainMethod:
    """``plain``: cast to the run's dtype at load."""

    name = "plain"

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def create(self, spec: WeightSpec) -> PlainWeight:
        return PlainWeight(spec, self.ops)


class Vector:
    """A vector made of parts (a norm's weight, a fused bias), always held plain.

    ``dummy`` is what ``fill`` sets it to: ones for norms, zeros for biases.
    """

    def __init__(self, spec: WeightSpec, dummy: float) -> None:
        self.spec = spec
        self.dummy = dummy
        self.value = torch.zeros(spec.rows, dtype=spec.dtype, device=spec.device)

    def load(self, part: str, raw: RawTensor) -> None:
        what, row = self.spec.part(part)
        check_shape(raw, (what.stored_rows,))
        for offset, values in slabs(raw, what.start, what.rows):
            self.value[row + offset : row + offset + len(values)].copy_(values)

    def fill(self, generator: torch.Generator) -> None:
        self.value.fill_(self.dummy)
