"""Mixture-of-experts kernels against float64."""

from __future__ import annotations

import gpu_reference as ref
import pytest
import torch

from ceiba.kernels.triton.moe import GroupedShape, moe, moe_small
from ceiba.kernels.triton.route import norm_route, route

B = torch.bfloat16


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(B)


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2)])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [77, 1021, 2051])
def test_route(experts: int, top_k: int, renormalize: bool, tokens: int) -> None:
    logits = torch.randn(tokens, experts, device="cuda")
    logits[5] = 0.25
    ids, weights = route(logits, top_k, renormalize)
    p = logits.double().softmax(-1)
    expected, order = p.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids.long(), order[:, :top_k])
    expected = expected[:, :top_k]
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert ref.error(weights, expected) < 1e-5


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_norm_route(tokens: int) -> None:
    x, norm, router = rand(tokens, 2048), rand(2048), rand(128, 2048)
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    for _ in range(3):
        normed, ids, weights = norm_route(x, norm, router, 1e-6, 8, counters)
    assert not counters.any()
    assert ref.error(normed, ref.rms_norm(x, norm)) < ref.BF16_BOUND
    logits = normed.double() @ router.double().t()
    values, order = logits.topk(8, -1)
    assert torch.equal(ids.long(), order)
    assert ref.error(weights, values.softmax(-1)) < 1e-4


@pytest.mark.parametrize(("experts", "dim", "inner", "top_k"), [(128, 2048, 768, 8), (8, 512, 320, 2)])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 64, 300, 1500])
def test_moe(experts: int, dim: int, inner: int, top_k: int, tokens: int) -> None:
    x, residual = rand(tokens, dim), rand(tokens, dim)
    gate_up, down = rand(experts, 2 * inner, dim) * 0.05, rand(experts, dim, inner) * 0.05
    ids, weights = route(torch.randn(tokens, experts, device="cuda"), top_k)
    expected = ref.experts(x, gate_up, down, ids, weights)
    assert ref.error(moe(x, gate_up, down, ids, weights), expected) < ref.BF16_BOUND
    out = moe(x, gate_up, down, ids, weights, residual)
    assert ref.error(out, expected + residual.double()) < ref.BF16_BOUND
    if tokens <= 8:
        assert ref.error(moe_small(x, gate_up, down, ids, weights), expected) < ref.BF16_BOUND
    for tile in (GroupedShape(64, 64, 64, 3, 4), GroupedShape(64, 64, 64, 3, 4, copies=True)):
        assert ref.error(moe(x, gate_up, down, ids, weights, shapes=(tile, tile)), expected) < ref.BF16_BOUND
