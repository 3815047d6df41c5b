"""Matrices kept in eight-bit floats (e4m3): rounded at load with one scale a row, or as a checkpoint stores them, with
one scale a block of 128 × 128. Products round activations where their kernels do (``layers.ops``).

Embedding and output head stay plain; so do norms and routers, which no method stores. Never knows the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ceiba.checkpoint.base import RawTensor
from ceiba.core.errors import ConfigError
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import ExpertSpec, ExpertWeights, Slot, Weight, WeightSpec, check_shape
from ceiba.layers.quant.decode import slabs, view_float8, view_plain
from ceiba.layers.quant.plain import DUMMY_STD, PlainWeight
from ceiba.layers.scaled import BLOCK, Scaled, plain_matrix, scale_rows, to_float8

STORED = torch.float8_e4m3fn
PIECE = 1 << 26
"""Elements rounded at once: a quarter of a gibibyte of float32 on the side."""
SCALES = "weight_scale_inv"
"""Suffix under which checkpoints keep the scales of a blocked matrix: values times these are the weights."""


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, PIECE // columns)
    return (slice(at, min(at + step, rows)) for at in range(0, rows, step))


def round_into(target: Scaled, values: torch.Tensor) -> None:
    """``values`` [rows, columns] of any float dtype and device, with a scale a row."""
    for piece in _pieces(*values.shape):
        target.values[piece], target.scales[piece] = scale_rows(values[piece].to(target.values.device))


def fill_rows(target: Scaled, generator: torch.Generator) -> None:
    """Random values as those of a plain matrix, then rounded. Experts one by one."""
    if target.values.dim() == 3:
        for expert in range(len(target.values)):
            fill_rows(target[expert], generator)
        return
    rows, columns = target.shape
    for piece in _pieces(rows, columns):
        values = torch.empty(piece.stop - piece.start, columns, device=target.values.device)
        round_into(_rows(target, piece), values.normal_(0.0, DUMMY_STD, generator=generator))


def _rows(matrix: Scaled, rows: slice) -> Scaled:
    return Scaled(matrix.values[rows], matrix.scales[rows])


def fill_blocks(target: Scaled, generator: torch.Generator) -> None:
    """Random eight-bit values under the same scale everywhere."""
    scale = 4 * DUMMY_STD / 448
    target.scales.fill_(scale)
    flat = target.values.view(-1, target.shape[-1])
    for piece in _pieces(*flat.shape):
        values = torch.empty(flat[piece].shape, device=flat.device).normal_(0.0, DUMMY_STD, generator=generator)
        flat[piece] = to_float8(values, torch.full((), scale, device=flat.device))


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK)


def _check_aligned(what: str, *bounds: int) -> None:
    if any(bound % BLOCK for bound in bounds):
        raise ConfigError(
            f"{what} cannot stay in blocks of {BLOCK} × {BLOCK}: its parts or this rank's share begin inside a block "
            f"({', '.join(map(str, bounds))}); use a checkpoint with plain weights and --quantization fp8"
        )


class Fp8Weight:
    """A matrix [rows, cols]; see ``layers.quant.base.Weight``. Rounded when it is loaded."""

    def __init__(self, spec: WeightSpec, ops: Ops) -> None:
        self.spec, self.ops = spec, ops
        values = torch.zeros(spec.rows, spec.cols, dtype=torch.uint8, device=spec.device).view(STORED)
        self.value = Scaled(values, torch.zeros(spec.rows, dtype=torch.float32, device=spec.device))

    def load(self, part: str, raw: RawTensor) -> None:
        spec = self.spec
        what, row = spec.part(part)
        check_shape(raw, (what.stored_rows, spec.stored_cols))
        for offset, values in slabs(raw, what.start, what.rows):
            rows = slice(row + offset, row + offset + len(values))
            round_into(_rows(self.value, rows), values[:, spec.col_start : spec.col_start + spec.cols])

    def fill(self, generator: torch.Generator) -> None:
        fill_rows(self.value, generator)

    @property
    def dense(self) -> Scaled:
        return self.value

    def slots(self, part: str) -> dict[str, Slot]:
        return {"weight": Slot(self, part)}

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.ops.linear(x, self.value, bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        found = Scaled(self.value.values.view(torch.uint8)[ids.long()].view(STORED), self.value.scales[ids.long()])
        return plain_matrix(found, self.spec.dtype)


class BlockScales:
    """The scales of a blocked matrix as a target of their own: parts and shares as the matrix's, in blocks."""

    def __init__(self, spec: WeightSpec, scales: torch.Tensor) -> None:
        self.spec, self.scales = spec, scales

    def load(self, part: str, raw: RawTensor) -> None:
        spec = self.spec
        what, row = spec.part(part)
        check_shape(raw, (_blocks(what.stored_rows), _blocks(spec.stored_cols)))
        first, column = what.start // BLOCK, spec.col_start // BLOCK
        values = view_plain(raw)[first : first + _blocks(what.rows), column : column + _blocks(spec.cols)]
        self.scales[row // BLOCK : row // BLOCK + len(values)].copy_(values)

    def fill(self, generator: torch.Generator) -> None:
        """Set with the matrix."""


class BlockFp8Weight(Fp8Weight):
    """The same as a checkpoint stores it: nothing is rounded again."""

    def __init__(self, spec: WeightSpec, ops: Ops) -> None:
        starts = [spec.part(part.name)[1] for part in spec.parts]
        _check_aligned("a matrix", *starts, *(part.start for part in spec.parts), spec.col_start)
        super().__init__(spec, ops)
        shape = _blocks(spec.rows), _blocks(spec.cols)
        scales = torch.zeros(shape, dtype=torch.float32, device=spec.device)
        self.value = Scaled(self.value.values, scales, blocked=True)
        self._scales = BlockScales(spec, scales)

    def load(self, part: str, raw: RawTensor) -> None:
        spec = self.spec
        what, row = spec.part(part)
        check_shape(raw, (what.stored_rows, spec.stored_cols))
        values = view_float8(raw)[what.start : what.start + what.rows, spec.col_start : spec.col_start + spec.cols]
        self.value.values[row : row + what.rows].copy_(values)

    def fill(self, generator: torch.Generator) -> None:
        fill_blocks(self.value, generator)

    def slots(self, part: str) -> dict[str, Slot]:
        return {"weight": Slot(self, part), SCALES: Slot(self._scales, part)}

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return plain_matrix(self.value, self.spec.dtype)[ids.long()]


class Fp8Experts:
    """All experts of a layer; see ``layers.quant.base.ExpertWeights``. ``blocked``: as a checkpoint stores them, one
    tensor of values and one of scales for each expert and matrix; else rounded when they are loaded."""

    def __init__(self, spec: ExpertSpec, blocked: bool) -> None:
        self.spec, self.blocked = spec, blocked
        if blocked:
            _check_aligned("experts", spec.inner, spec.start)
        count, hidden, inner, device = spec.num_experts, spec.hidden, spec.inner, spec.device

        def make(rows: int, columns: int) -> Scaled:
            values = torch.zeros(count, rows, columns, dtype=torch.uint8, device=device).view(STORED)
            shape = (count, _blocks(rows), _blocks(columns)) if blocked else (count, rows)
            return Scaled(values, torch.zeros(shape, dtype=torch.float32, device=device), blocked)

        self.gate_up, self.down = make(2 * inner, hidden), make(hidden, inner)

    def load(self, part: str, raw: RawTensor) -> None:
        expert, what, suffix = part.split(".")
        spec, blocked = self.spec, self.blocked
        unit = BLOCK if suffix == SCALES else 1
        inner, start, stored = spec.inner // unit, spec.start // unit, -(-spec.stored_inner // unit)
        hidden = -(-spec.hidden // unit)
        matrix = (self.down if what == "down_proj" else self.gate_up)[int(expert)]
        share = slice(start, start + inner)
        if what == "down_proj":
            check_shape(raw, (hidden, stored))
            rows, cut = slice(0, hidden), (slice(None), share)
        else:
            check_shape(raw, (stored, hidden))
            first = 0 if what == "gate_proj" else inner
            rows, cut = slice(first, first + inner), (share, slice(None))
        if suffix == SCALES:
            matrix.scales[rows].copy_(view_plain(raw)[cut])
        elif blocked:
            matrix.values[rows].copy_(view_float8(raw)[cut])
        else:
            for offset, values in slabs(raw, cut[0].start or 0, rows.stop - rows.start):
                at = slice(rows.start + offset, rows.start + offset + len(values))
                round_into(_rows(matrix, at), values[:, cut[1]])

    def fill(self, generator: torch.Generator) -> None:
        for matrix in (self.gate_up, self.down):
            (fill_blocks if self.blocked else fill_rows)(matrix, generator)

    def slots(self) -> dict[str, Slot]:
        suffixes = ("weight", SCALES) if self.blocked else ("weight",)
        return {
            f"{expert}.{what}.{suffix}": Slot(self, f"{expert}.{what}.{suffix}")
            for expert in range(self.spec.num_experts)
            for what in ("gate_proj", "up_proj", "down_proj")
            for suffix in suffixes
        }


class Fp8Method:
    """``fp8``: plain weights rounded at load, a scale a row, or with ``blocked`` weights stored in blocks."""

    name = "fp8"

    def __init__(self, ops: Ops, blocked: bool = False) -> None:
        self.ops, self.blocked = ops, blocked

    def create(self, spec: WeightSpec) -> Weight:
        # Products in eight bits take columns sixteen at a time; a matrix without that is too small to matter.
        if spec.vocab or (not self.blocked and (spec.cols % 16 or spec.rows % 16)):
            return PlainWeight(spec, self.ops)
        return (BlockFp8Weight if self.blocked else Fp8Weight)(spec, self.ops)

    def create_experts(self, spec: ExpertSpec) -> ExpertWeights:
        return Fp8Experts(spec, self.blocked)


def stored_fp8(settings: Mapping[str, Any], ops: Ops) -> Fp8Method:
    """The method for a checkpoint whose ``quantization_config`` says ``fp8``. Raises ConfigError for another layout
    than dynamic activations and blocks of 128 × 128."""
    shape, scheme = settings.get("weight_block_size"), settings.get("activation_scheme", "dynamic")
    if shape is None or list(shape) != [BLOCK, BLOCK] or scheme != "dynamic":
        raise ConfigError(
            f"the checkpoint's FP8 weights have weight_block_size {shape} and {scheme} activation scales; available: "
            f"[{BLOCK}, {BLOCK}] with dynamic ones. Use the model's plain weights with --quantization fp8"
        )
    matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    apart = [name for name in settings.get("modules_to_not_convert") or () if str(name).endswith(matrices)]
    if apart:
        raise ConfigError(
            f"the checkpoint keeps {apart[0]} plain among FP8 matrices, which is not available; use the model's plain "
            "weights with --quantization fp8"
        )
    return Fp8Method(ops, blocked=True)
