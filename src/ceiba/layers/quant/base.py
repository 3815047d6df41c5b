"""The protocol between layers and the way their matrices are stored: a method creates weights, a weight loads parts,
multiplies and looks rows up.

A matrix is declared as named parts (q, k and v of one fused projection), each a range of rows of one stored tensor, so
that fusing and sharding are the same thing to every method. Never knows tensor names of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ceiba.checkpoint.base import RawTensor
from ceiba.core.errors import CheckpointError
from ceiba.layers.scaled import Matrix


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, start + rows) of a stored tensor that has ``stored_rows``; further ``pad`` rows stay zero."""

    name: str
    rows: int
    start: int
    stored_rows: int
    pad: int = 0


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A matrix [sum of the parts' rows and pads, cols]: columns [col_start, col_start + cols) of what is stored."""

    parts: tuple[Part, ...]
    cols: int
    col_start: int
    stored_cols: int
    dtype: torch.dtype
    device: torch.device
    vocab: bool = False
    """Rows are tokens: an embedding, an output head. Errors here show most, so a method may keep more bits."""

    @property
    def rows(self) -> int:
        return sum(part.rows + part.pad for part in self.parts)

    def part(self, name: str) -> tuple[Part, int]:
        """A part and the first row it fills."""
        offset = 0
        for part in self.parts:
            if part.name == name:
                return part, offset
            offset += part.rows + part.pad
        raise KeyError(name)


class Loadable(Protocol):
    """Anything that stored tensors are loaded into."""

    def load(self, part: str, raw: RawTensor) -> None:
        """Take this rank's share of ``raw`` as ``part``. Raises CheckpointError when the shape or kind is wrong."""

    def fill(self, generator: torch.Generator) -> None:
        """Random values of a plausible size, for ``--load-format dummy``."""


class Weight(Loadable, Protocol):
    """One stored matrix [out, in]."""

    @property
    def dense(self) -> Matrix | None:
        """The matrix as ``Ops`` multiplies it, for kernels that fuse the product; None where it is not kept so."""

    def slots(self, part: str) -> dict[str, Slot]:
        """Targets of the tensors that a checkpoint stores for one part, by suffix (``weight``)."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] → [T, out], in x's dtype."""

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [T] as [T, in] in the run's dtype."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one stored tensor goes."""

    target: Loadable
    part: str


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The gated MLPs of ``num_experts`` experts: gate and up [inner, hidden], down [hidden, inner], of which this rank
    holds inner dimensions [start, start + inner) of ``stored_inner``.
    """

    num_experts: int
    hidden: int
    inner: int
    start: int
    stored_inner: int
    dtype: torch.dtype
    device: torch.device


class ExpertWeights(Protocol):
    """All experts of a layer."""

    @property
    def gate_up(self) -> Matrix:
        """[E, 2 · inner, hidden], gate rows first"""

    @property
    def down(self) -> Matrix:
        """[E, hidden, inner]"""

    def slots(self) -> dict[str, Slot]:
        """Targets by stored name below the experts' module."""


class QuantMethod(Protocol):
    name: str

    def create(self, spec: WeightSpec) -> Weight:
        """Storage for a matrix, not yet loaded."""

    def create_experts(self, spec: ExpertSpec) -> ExpertWeights:
        """Storage for a layer's experts, not yet loaded."""


def check_shape(raw: RawTensor, expected: tuple[int, ...]) -> None:
    """Raises CheckpointError naming the tensor and both shapes."""
    if tuple(raw.shape) != expected:
        raise CheckpointError(
            f"tensor {raw.name} has shape {list(raw.shape)}, but the model's configuration says {list(expected)}: "
            "the weights and the configuration do not belong together"
        )
