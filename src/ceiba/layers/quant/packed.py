"""Matrices in the CPU kernels' own layout: GGUF blocks stay quantized, plain values stay in the run's dtype.

Packing happens once, at load, part by part, since one file may store the parts of a fused matrix in different types.
Never knows the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ceiba.checkpoint.base import RawTensor
from ceiba.core.errors import CheckpointError
from ceiba.kernels import cpu
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import ExpertSpec, Slot, Weight, WeightSpec, check_shape
from ceiba.layers.quant.decode import slabs
from ceiba.layers.quant.plain import DUMMY_STD, PlainExperts, PlainWeight

BLOCK_COLS = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
"""Types whose blocks the kernels multiply as they are, and the columns of a block."""
ALIGNMENT = 64


@dataclass(slots=True)
class PackedPart:
    """One part of a matrix: its bytes and the kernels' view of them."""

    kind: str
    rows: int
    cols: int
    data: np.ndarray
    matrix: Any

    def with_bias(self, bias: torch.Tensor) -> Any:
        """The same bytes with a bias [rows] added to every product."""
        padded = np.zeros(-(-self.rows // 16) * 16, np.float32)
        padded[: self.rows] = bias.float().numpy()
        return cpu._cpu.PackedMatrix(self.kind, self.rows, self.cols, self.data, padded)


def aligned_bytes(size: int) -> np.ndarray:
    """uint8 [size] that starts on a cache line."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


class PackedWeight:
    """A matrix [rows, cols] in panels, in as many pieces as it has parts. See ``layers.quant.base.Weight``."""

    def __init__(self, spec: WeightSpec, context: Any, int8: bool) -> None:
        self.spec, self.context, self.int8 = spec, context, int8
        self.parts: dict[str, PackedPart] = {}

    dense = None

    def slots(self, part: str) -> dict[str, Slot]:
        return {"weight": Slot(self, part)}

    def load(self, part: str, raw: RawTensor) -> None:
        spec = self.spec
        what, _ = spec.part(part)
        check_shape(raw, (what.stored_rows, spec.stored_cols))
        rows = slice(what.start, what.start + what.rows)
        if raw.kind in BLOCK_COLS and spec.cols % BLOCK_COLS[raw.kind] == 0:
            if raw.data.ndim != 2:
                raise CheckpointError(f"tensor {raw.name} of kind {raw.kind} is not a matrix of blocks")
            self._pack(part, raw.kind, np.ascontiguousarray(raw.data[rows]))
            return
        values = torch.empty(what.rows, spec.cols, dtype=self._plain_dtype)
        for offset, piece in slabs(raw, what.start, what.rows):
            values[offset : offset + len(piece)].copy_(piece)
        self._pack_values(part, values)

    def fill(self, generator: torch.Generator) -> None:
        for part in self.spec.parts:
            values = torch.empty(part.rows, self.spec.cols).normal_(0.0, DUMMY_STD, generator=generator)
            self._pack_values(part.name, values.to(self._plain_dtype))

    @property
    def _plain_dtype(self) -> torch.dtype:
        """Half-width values are kept as bfloat16, whatever the 16-bit dtype of the run: the kernels have no other."""
        return torch.float32 if self.spec.dtype == torch.float32 else torch.bfloat16

    def _pack_values(self, part: str, values: torch.Tensor) -> None:
        kind = "F32" if values.dtype == torch.float32 else "BF16"
        self._pack(part, kind, values.view(torch.uint8).numpy().reshape(len(values), -1))

    def _pack(self, part: str, kind: str, source: np.ndarray) -> None:
        rows, cols = len(source), self.spec.cols
        data = aligned_bytes(cpu._cpu.packed_size(kind, rows, cols))
        cpu._cpu.pack(self.context, kind, source, cols, data)
        self.parts[part] = PackedPart(kind, rows, cols, data, cpu._cpu.PackedMatrix(kind, rows, cols, data))

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        source = x.float().contiguous().numpy()
        pieces = []
        for part in self.spec.parts:
            packed = self.parts[part.name]
            out = torch.empty(len(x), packed.rows)
            cpu._cpu.linear(self.context, packed.matrix, source, out.numpy(), self.int8)
            pieces.append(out)
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        (packed,) = self.parts.values()
        out = torch.empty(len(ids), packed.cols)
        cpu._cpu.lookup(self.context, packed.matrix, ids.to(torch.int64).contiguous().numpy(), out.numpy())
        return out.to(self.spec.dtype)


class PackedMethod:
    """``packed``: what every checkpoint becomes where the compiled CPU kernels run.

    Products are exact to float32 rounding, unless ``Ops.int8`` asks for activations rounded to int8, one scale per 32
    values: faster where there is no wider integer or matrix unit, at a KL divergence of about 0.004 on SmolLM2.
    """

    name = "packed"

    def __init__(self, ops: Ops, context: Any) -> None:
        self.ops, self.context = ops, context

    def create(self, spec: WeightSpec) -> Weight:
        whole = spec.cols == spec.stored_cols and not any(part.pad for part in spec.parts)
        if spec.cols % 32 or not whole:
            return PlainWeight(spec, self.ops)
        return PackedWeight(spec, self.context, self.ops.int8)

    def create_experts(self, spec: ExpertSpec) -> PlainExperts:
        return PlainExperts(spec)
