"""A sparse MLP: each token goes through the few experts its router prefers.

Experts are split over ranks by their inner dimension, so every rank routes alike. Knows nothing of tensor names above
its own module.
"""

from __future__ import annotations

import torch

from ceiba.dist import partition
from ceiba.layers.context import LayerContext
from ceiba.layers.norm import RMSNorm
from ceiba.layers.ops import Routing
from ceiba.layers.quant.base import ExpertSpec, Part, Slot, WeightSpec
from ceiba.layers.quant.plain import PlainWeight


class SparseMLP:
    """Shazeer et al., Outrageously Large Neural Networks (2017), with a softmax before the choice, as in Qwen and
    Mixtral. The router stays in the run's dtype whatever the quantization."""

    def __init__(self, ctx: LayerContext, hidden: int, inner: int, num_experts: int, routing: Routing) -> None:
        count, start = partition(inner, ctx.group, "expert features")
        self.ops, self.group, self.routing = ctx.ops, ctx.group, routing
        part = Part("", num_experts, 0, num_experts)
        self.router = PlainWeight(WeightSpec((part,), hidden, 0, hidden, ctx.dtype, ctx.device), ctx.ops)
        spec = ExpertSpec(num_experts, hidden, count, start, inner, ctx.dtype, ctx.device)
        self.experts = ctx.quant.create_experts(spec)

    def __call__(self, norm: RMSNorm, delta: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        """Of the normed residual stream, which takes ``delta`` in: a new delta, or None where it has been added."""
        experts = self.experts
        y = self.ops.norm_experts(
            delta,
            residual,
            norm.weight.value,
            norm.eps,
            self.router.value,
            experts.gate_up,
            experts.down,
            self.routing,
            self.group.size == 1,
        )
        return y if y is None or self.group.size == 1 else self.group.all_reduce(y)

    def slots(self) -> dict[str, Slot]:
        found = {f"experts.{name}": slot for name, slot in self.experts.slots().items()}
        found["gate.weight"] = Slot(self.router, "")
        return found
