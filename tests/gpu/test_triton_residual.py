"""What a layer adds to the residual stream, by the device's operations: in place or as a delta, the sum is the
reference's. Runs in Triton's interpreter too.
"""

from __future__ import annotations

import gpu_reference as ref
import pytest
import torch

from ceiba.layers import cuda_ops
from ceiba.layers import ops as reference
from ceiba.layers.ops import Routing

B = torch.bfloat16


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=ref.DEVICE).to(B)


def added(residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """The stream, float64."""
    if delta is None:
        return residual.double()
    return residual.double() + (delta if delta.dim() == 2 else delta.double().sum(0))


@pytest.mark.parametrize("tokens", [1, 3, 20, 70])
@pytest.mark.parametrize("delta", [False, True])
def test_experts(tokens: int, delta: bool) -> None:
    experts, dim, inner, routing = 8, 128, 64, Routing(2, True)
    ops = cuda_ops.cuda_ops(torch.device(ref.DEVICE))
    stream, norm, router = rand(tokens, dim), rand(dim), rand(experts, dim)
    gate_up, down = rand(experts, 2 * inner, dim) * 0.15, rand(experts, dim, inner) * 0.15
    before = rand(tokens, dim) if delta else None
    residual, expected = stream.clone(), stream.double()
    ours = ops.norm_experts(before, residual, norm, 1e-6, router, gate_up, down, routing, True)
    wide = [t.double() for t in (norm, router, gate_up, down)]
    more = reference.norm_experts(
        None if before is None else before.double(), expected, wide[0], 1e-6, *wide[1:], routing, True
    )
    assert more is not None
    # Where the second and the third expert are near each other, rounding may turn their order.
    logits = (reference.rms_norm(expected, wide[0], 1e-6) @ wide[1].t()).sort(dim=1, descending=True).values
    clear = logits[:, 1] - logits[:, 2] > 0.02 * logits.abs().amax(1)
    near = (added(residual, ours) - expected - more).norm(dim=1) / (expected + more).norm(dim=1)
    assert tokens < 20 or near.median() < 1.5 * ref.BF16_BOUND
    # A row whose logits are rounded weighs its experts a little otherwise; one without its residual would be far off.
    assert (near[clear] < 0.1).all()
    assert more.norm() > 0.3 * stream.double().norm()
    split = stream.clone()
    part = ops.norm_experts(before, split, norm, 1e-6, router, gate_up, down, routing, False)
    assert part is not None  # of one rank among several: a sum over ranks comes first
    same = (added(split, part) - added(residual, ours)).norm(dim=1) / added(split, part).norm(dim=1)
    assert same.max() < ref.BF16_BOUND


@pytest.mark.parametrize("tokens", [1, 24, 70])
def test_products(tokens: int) -> None:
    ops = cuda_ops.cuda_ops(torch.device(ref.DEVICE))
    x, weight, stream = rand(tokens, 128), rand(64, 128), rand(tokens, 64)
    residual = stream.clone()
    delta = ops.linear_residual(x, weight, residual)
    assert (delta is None) == (tokens == 1)
    assert ref.error(added(residual, delta), stream.double() + x.double() @ weight.double().t()) < ref.BF16_BOUND
