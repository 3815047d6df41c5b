"""GGUF's block types as a quantization method: dequantized once at load, into the run's dtype.

Matrices that stay packed for kernels which multiply blocks directly are a second ``Weight`` behind the same method.
Never knows the model.
"""

from __future__ import annotations

from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import ExpertSpec, WeightSpec
from ceiba.layers.quant.plain import PlainExperts, PlainWeight


class GGUFMethod:
    """``gguf``: blocks in the file, plain values on the device."""

    name = "gguf"

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def create(self, spec: WeightSpec) -> PlainWeight:
        return PlainWeight(spec, self.ops)

    def create_experts(self, spec: ExpertSpec) -> PlainExperts:
        return PlainExperts(spec)
