"""Matrices in the CPU kernels' own layout: GGUF blocks stay quantized, plain values stay in the run's dtype or, where
that is asked for, become blocks.

Packing happens once, at load, part by part, since one file may store the parts of a fused matrix in different types.
Never knows the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ceiba.checkpoint.base import RawTensor
from ceiba.checkpoint.packed_cache import PackedCache
from ceiba.core.errors import CheckpointError, ConfigError
from ceiba.kernels import cpu
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import ExpertSpec, Slot, Weight, WeightSpec, check_shape
from ceiba.layers.quant.decode import slabs
from ceiba.layers.quant.plain import DUMMY_STD, PlainExperts, PlainWeight

BLOCK_COLS = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
"""Types whose blocks the kernels multiply as they are, and the columns of a block."""
BLOCK_BYTES = {"Q8_0": 34, "Q4_1": 20}
"""Types that plain values can be quantized to, and the bytes of a block."""
ONLINE_BLOCKS = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}
"""--quantization for plain weights: the block type of matrices, and of embeddings and heads."""
QUANTIZE_ELEMENTS = 4 << 20
"""Values quantized at once: 16 MiB of float32 on the side."""
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16}
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


def _bytes(values: torch.Tensor) -> np.ndarray:
    """values [rows, n] as uint8 [rows, bytes per row], not copied."""
    return values.view(torch.uint8).numpy().reshape(len(values), -1)


def aligned_bytes(size: int) -> np.ndarray:
    """uint8 [size] that starts on a cache line."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


class PackedWeight:
    """A matrix [rows, cols] in panels, in as many pieces as it has parts. See ``layers.quant.base.Weight``."""

    def __init__(
        self,
        spec: WeightSpec,
        context: Any,
        int8: bool,
        online: str | None = None,
        cache: PackedCache | None = None,
    ) -> None:
        """``online``: the block type that plain values are quantized to; None: they stay plain."""
        self.spec, self.context, self.int8, self.online, self.cache = spec, context, int8, online, cache
        self.parts: dict[str, PackedPart] = {}

    dense = None

    def slots(self, part: str) -> dict[str, Slot]:
        return {"weight": Slot(self, part)}

    def load(self, part: str, raw: RawTensor) -> None:
        spec = self.spec
        what, _ = spec.part(part)
        check_shape(raw, (what.stored_rows, spec.stored_cols))
        blocks = raw.kind in BLOCK_COLS and spec.cols % BLOCK_COLS[raw.kind] == 0
        kind = raw.kind if blocks else self.online or self._plain_kind
        name = f"{raw.name}[{what.start}:{what.start + what.rows}] {kind}"
        if self.cache is not None:
            data = self.cache.take(name, cpu._cpu.packed_size(kind, what.rows, spec.cols))
            if data is not None:
                self._hold(part, kind, what.rows, data)
                return
        if blocks:
            if raw.data.ndim != 2:
                raise CheckpointError(f"tensor {raw.name} of kind {raw.kind} is not a matrix of blocks")
            self._pack(part, kind, np.ascontiguousarray(raw.data[what.start : what.start + what.rows]))
        elif self.online is not None:
            self._pack(part, kind, self._quantize(slabs(raw, what.start, what.rows), what.rows))
        else:
            values = torch.empty(what.rows, spec.cols, dtype=PLAIN[kind])
            for offset, piece in slabs(raw, what.start, what.rows):
                values[offset : offset + len(piece)].copy_(piece)
            self._pack(part, kind, _bytes(values))
        if self.cache is not None:
            self.cache.keep(name, self.parts[part].data)

    def fill(self, generator: torch.Generator) -> None:
        for part in self.spec.parts:
            values = torch.empty(part.rows, self.spec.cols).normal_(0.0, DUMMY_STD, generator=generator)
            if self.online is not None:
                self._pack(part.name, self.online, self._quantize([(0, values)], part.rows))
            else:
                self._pack(part.name, self._plain_kind, _bytes(values.to(PLAIN[self._plain_kind])))

    def _quantize(self, pieces: Iterable[tuple[int, torch.Tensor]], rows: int) -> np.ndarray:
        """(first row, values [n, cols]) pieces to the blocks of the whole: uint8 [rows, bytes per row]."""
        assert self.online is not None
        cols = self.spec.cols
        blocks = np.empty((rows, cols // BLOCK_COLS[self.online] * BLOCK_BYTES[self.online]), np.uint8)
        step = max(1, QUANTIZE_ELEMENTS // cols)
        for offset, piece in pieces:
            for at in range(0, len(piece), step):
                source = piece[at : at + step].float().contiguous().numpy()
                target = blocks[offset + at : offset + at + len(source)]
                cpu._cpu.quantize(self.context, self.online, source, target)
        return blocks

    @property
    def _plain_kind(self) -> str:
        """Half-width values are kept as bfloat16, whatever the 16-bit dtype of the run: the kernels have no other."""
        return "F32" if self.spec.dtype == torch.float32 else "BF16"

    def _pack(self, part: str, kind: str, source: np.ndarray) -> None:
        rows, cols = len(source), self.spec.cols
        data = aligned_bytes(cpu._cpu.packed_size(kind, rows, cols))
        cpu._cpu.pack(self.context, kind, source, cols, data)
        self._hold(part, kind, rows, data)

    def _hold(self, part: str, kind: str, rows: int, data: np.ndarray) -> None:
        cols = self.spec.cols
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

    Plain weights multiply in float32; blocks meet activations rounded to 16 bits, one scale per 32 values, or to int8
    where ``Ops.int8`` asks for it: faster, at a KL divergence of about 0.004 on SmolLM2 instead of 4e-8.
    ``online`` (of ``ONLINE_BLOCKS``) quantizes plain matrices while they are loaded: int8 is within half a step of
    max / 127 in each block of 32, int4 keeps a scale and an offset that are searched for in each block.
    """

    name = "packed"

    def __init__(self, ops: Ops, context: Any, online: str | None = None, cache: PackedCache | None = None) -> None:
        """``cache``: where packed parts are found and kept."""
        self.ops, self.context, self.online, self.cache = ops, context, online, cache
        kinds: tuple[str | None, str | None] = ONLINE_BLOCKS[online] if online else (None, None)
        self.matrices, self.tokens = kinds

    def create(self, spec: WeightSpec) -> Weight:
        whole = spec.cols == spec.stored_cols and not any(part.pad for part in spec.parts)
        if spec.cols % 32 or not whole:
            if self.online is not None:
                names = "/".join(part.name for part in spec.parts if part.name) or "output"
                raise ConfigError(
                    f"--quantization {self.online}: the {names} matrix of a layer has {spec.cols} columns, and blocks "
                    "take 32 at a time. Leave it out."
                )
            return PlainWeight(spec, self.ops)
        online = self.tokens if spec.vocab else self.matrices
        return PackedWeight(spec, self.context, self.ops.int8, online, self.cache)

    def create_experts(self, spec: ExpertSpec) -> PlainExperts:
        if self.online is not None:
            raise ConfigError(f"--quantization {self.online}: experts cannot be quantized here yet. Leave it out.")
        return PlainExperts(spec)
