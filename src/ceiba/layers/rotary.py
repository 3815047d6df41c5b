"""Rotary position embeddings: frequencies under every supported scaling, and the table of cosines and sines.

Frequencies are computed in float32 in the order the reference implementations use, since models were trained with
those roundings. Knows configuration keys of the Hugging Face layout, never a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ceiba.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One model's rotary embedding. ``dim`` is how many of a head's dimensions rotate."""

    dim: int
    theta: float
    kind: str
    params: Mapping[str, Any]
    max_position: int
    """``max_position_embeddings`` of the model."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RopeSpec:
        """From config.json's ``rope_parameters`` (new) or ``rope_theta`` with ``rope_scaling`` (old).

        Raises ConfigError for a scaling we do not have.
        """
        params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = str(params.get("rope_type") or params.get("type") or "default")
        if kind not in SCALINGS:
            raise ConfigError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
        theta = params.get("rope_theta") or config.get("rope_theta") or 10000.0
        partial = params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        max_position = int(config.get("max_position_embeddings") or 2048)
        return cls(int(head_dim * float(partial)), float(theta), kind, params, max_position)

    def need(self, key: str) -> float:
        if self.params.get(key) is None:
            raise ConfigError(f"RoPE scaling {self.kind!r} needs {key!r} in rope_scaling")
        return float(self.params[key])

    @property
    def original_position(self) -> float:
        """The context the model was trained at before its scaling."""
        return float(self.params.get("original_max_position_embeddings") or self.max_position)


def _base_frequencies(dim: int, theta: float) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _default(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    return _base_frequencies(spec.dim, spec.theta), 1.0


def _linear(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    return _base_frequencies(spec.dim, spec.theta) / spec.need("factor"), 1.0


def _dynamic(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling for the whole context length: cached keys cannot be rotated again as a text grows, so the base
    is the one of the longest text the server accepts, and does not change while it runs."""
    factor, original = spec.need("factor"), spec.original_position
    if context_len <= original:
        return _base_frequencies(spec.dim, spec.theta), 1.0
    stretch = factor * context_len / original - (factor - 1)
    return _base_frequencies(spec.dim, spec.theta * stretch ** (spec.dim / (spec.dim - 2))), 1.0


def _llama3(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a linear blend between."""
    base = _base_frequencies(spec.dim, spec.theta)
    factor, low, high = spec.need("factor"), spec.need("low_freq_factor"), spec.need("high_freq_factor")
    original = spec.need("original_max_position_embeddings")
    wavelength = 2 * math.pi / base
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * base / factor + blend * base, 1.0


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(spec: RopeSpec, context_len: int) -> tuple[torch.Tensor, float]:
    """Peng et al., YaRN: Efficient Context Window Extension of Large Language Models (2023), with the attention
    temperature folded into cosines and sines."""
    original, dim, params = spec.original_position, spec.dim, spec.params
    factor = float(params.get("factor") or spec.max_position / original)
    scale = params.get("attention_factor")
    if scale is None:
        mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
        if mscale and mscale_all:
            scale = _yarn_magnitude(factor, float(mscale)) / _yarn_magnitude(factor, float(mscale_all))
        else:
            scale = _yarn_magnitude(factor)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension_of(float(params.get("beta_fast") or 32))
    high = dimension_of(float(params.get("beta_slow") or 1))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    base = _base_frequencies(dim, spec.theta)
    return base / factor * ramp + base * (1 - ramp), float(scale)


SCALINGS: Mapping[str, Callable[[RopeSpec, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


class Rotary:
    """Cosines and sines for positions [0, context_len), shared by the layers of a model."""

    def __init__(self, spec: RopeSpec, context_len: int, device: torch.device) -> None:
        frequencies, magnitude = SCALINGS[spec.kind](spec, context_len)
        angles = torch.outer(torch.arange(context_len, dtype=torch.float32), frequencies)
        self.table = torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=1).to(device)
        """float32 [context_len, dim]: cosines, then sines"""
        half = self.table.shape[1] // 2
        self.cos, self.sin = self.table[:, :half], self.table[:, half:]

    def at(self, positions: torch.Tensor) -> RotaryStep:
        """positions int [T]; once per forward."""
        return RotaryStep(self.table, positions)


class RotaryStep:
    """One step's rotations: kernels take the table and the positions, the reference the gathered rows."""

    def __init__(self, table: torch.Tensor, positions: torch.Tensor) -> None:
        self.table, self.positions = table, positions
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def dim(self) -> int:
        """Rotated dimensions of a head."""
        return self.table.shape[1]

    @property
    def cos(self) -> torch.Tensor:
        """float32 [T, dim / 2]"""
        return self._rows()[0]

    @property
    def sin(self) -> torch.Tensor:
        return self._rows()[1]

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._gathered is None:
            cos, sin = self.table.index_select(0, self.positions).chunk(2, dim=1)
            self._gathered = cos, sin
        return self._gathered
