"""Weights held as ordinary values of the run's dtype: the reference of every quantization method.

Stored values of any plain kind, and GGUF blocks, are converted once, at load. Never knows the model.
"""

from __future__ import annotations

import torch

from ceiba.checkpoint.base import RawTensor
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import ExpertSpec, Slot, WeightSpec, check_shape
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

    @property
    def dense(self) -> torch.Tensor:
        return self.value

    def slots(self, part: str) -> dict[str, Slot]:
        return {"weight": Slot(self, part)}

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.ops.embed(self.value, ids)


class PlainExperts:
    """Experts in the run's dtype. See ``layers.quant.base.ExpertWeights``.

    Stored as one tensor for each expert and matrix (``3.up_proj.weight``).
    """

    def __init__(self, spec: ExpertSpec) -> None:
        self.spec = spec
        count, hidden, inner = spec.num_experts, spec.hidden, spec.inner
        self.gate_up = torch.empty(count, 2 * inner, hidden, dtype=spec.dtype, device=spec.device)
        self.down = torch.empty(count, hidden, inner, dtype=spec.dtype, device=spec.device)

    def load(self, part: str, raw: RawTensor) -> None:
        spec = self.spec
        expert, _, what = part.partition(".")
        if what == "down_proj":
            check_shape(raw, (spec.hidden, spec.stored_inner))
            self._copy(self.down[int(expert)], raw, 0, slice(spec.start, spec.start + spec.inner))
            return
        check_shape(raw, (spec.stored_inner, spec.hidden))
        first = 0 if what == "gate_proj" else spec.inner
        self._copy(self.gate_up[int(expert), first : first + spec.inner], raw, spec.start, slice(None))

    def _copy(self, target: torch.Tensor, raw: RawTensor, start: int, columns: slice) -> None:
        for offset, values in slabs(raw, start, len(target)):
            target[offset : offset + len(values)].copy_(values[:, columns])

    def fill(self, generator: torch.Generator) -> None:
        for value in (self.gate_up, self.down):
            value.normal_(0.0, DUMMY_STD, generator=generator)

    def slots(self) -> dict[str, Slot]:
        return {
            f"{expert}.{what}.weight": Slot(self, f"{expert}.{what}")
            for expert in range(self.spec.num_experts)
            for what in ("gate_proj", "up_proj", "down_proj")
        }


class PlainMethod:
    """``plain``: cast to the run's dtype at load."""

    name = "plain"

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def create(self, spec: WeightSpec) -> PlainWeight:
        return PlainWeight(spec, self.ops)

    def create_experts(self, spec: ExpertSpec) -> PlainExperts:
        return PlainExperts(spec)


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
