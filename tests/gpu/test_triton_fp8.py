"""Eight-bit weights and activations: products against float64 products of the same rounded values, so that the bounds
are those of the arithmetic; what rounding itself costs is bounded apart. Runs in Triton's interpreter too, on the small
shapes.
"""

from __future__ import annotations

import gpu_reference as ref
import pytest
import torch

from ceiba.kernels.triton.moe import GroupedShape, moe, moe_small, rounds_activations
from ceiba.kernels.triton.quantize import norm_quantize, quantize, silu_mul_quantize
from ceiba.kernels.triton.route import route
from ceiba.kernels.triton.scaled import BlocksShape, matmul_blocks, matmul_rows
from ceiba.kernels.triton.skinny import gemv, matmul_parts
from ceiba.layers.scaled import Scaled, ScaledRows, scale_rows, to_float8

INTERPRETED = ref.DEVICE == "cpu"
B = torch.bfloat16
ROUNDED_BOUND = 0.04
"""Relative error that rounding to four significant bits explains: 0.026 on normal values, 0.037 on a product's two."""
on_device = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
KINDS = ["rows", "blocks"]


def rand(*shape: int, dtype: torch.dtype = B) -> torch.Tensor:
    return torch.randn(*shape, device=ref.DEVICE).to(dtype)


def matrix(kind: str, *shape: int) -> Scaled:
    """Random values whose scales differ by much, so that a wrong one shows."""
    if kind == "rows":
        x = torch.randn(*shape, device=ref.DEVICE) * torch.rand(*shape[:-1], 1, device=ref.DEVICE).add(0.1)
        return Scaled(*scale_rows(x))
    *lead, rows, columns = shape
    values = to_float8(torch.randn(*shape, device=ref.DEVICE) * 100, torch.ones((), device=ref.DEVICE))
    scales = torch.rand(*lead, -(-rows // 128), -(-columns // 128), device=ref.DEVICE) * 0.01 + 1e-3
    return Scaled(values, scales, blocked=True)


def exact(x: torch.Tensor, w: Scaled) -> torch.Tensor:
    return x.double() @ w.plain(torch.float64).t()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dim", [96, 320, pytest.param(4096, marks=on_device), pytest.param(12288, marks=on_device)])
def test_rounding(dim: int, grouped: bool) -> None:
    rows = 5
    x = rand(rows, dim) * torch.rand(rows, 1, device=ref.DEVICE).to(B)
    x[2] = 0
    values, scales = quantize(x, grouped)
    wanted = [scale_rows(part) for part in (x.split(128, 1) if grouped else [x])]
    torch.testing.assert_close(scales, torch.stack([s for _, s in wanted], 1))
    # One over the scale in place of the scale moves a value across a border of rounding now and then.
    same = values.float() == torch.cat([v for v, _ in wanted], 1).float()
    assert same.float().mean() > 0.99
    assert ref.error(ScaledRows(values, scales).plain(torch.float32), x) < ROUNDED_BOUND


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dim", [256, pytest.param(4096, marks=on_device)])
@pytest.mark.parametrize("parts", [0, 2])
def test_rounding_after_norm_and_activation(dim: int, parts: int, grouped: bool) -> None:
    rows = 3
    x = rand(parts, rows, dim, dtype=torch.float32) if parts else rand(rows, dim)
    weight, residual = rand(dim), rand(rows, dim)
    total = residual.double() + (x.double().sum(0) if parts else x.double())
    normed, values, scales = norm_quantize(x, weight, 1e-6, grouped, residual, keep=True)
    assert ref.error(residual, total) < ref.BF16_BOUND
    wanted = ref.rms_norm(residual, weight)
    assert normed is not None
    assert ref.error(normed, wanted) < ref.BF16_BOUND
    assert ref.error(ScaledRows(values, scales).plain(torch.float32), wanted) < ROUNDED_BOUND
    both = rand(rows, 2 * dim)
    rounded = ScaledRows(*silu_mul_quantize(both, grouped)).plain(torch.float32)
    assert ref.error(rounded, ref.silu_mul(both)) < ROUNDED_BOUND


SMALL = [(256, 256), (384, 320)]
LARGE = [pytest.param(*shape, marks=on_device) for shape in ((6144, 4096), (4096, 12288), (24576, 4096), (2048, 768))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SMALL + LARGE)
def test_gemv(n: int, k: int, kind: str) -> None:
    x, norm, residual, w = rand(1, k), rand(k), rand(1, n), matrix(kind, n, k)
    plain, normed = exact(x, w), ref.rms_norm(x, norm) @ w.plain(torch.float64).t()
    assert ref.error(gemv(x, w.values, out=ref.poisoned(1, n), scales=w.scales), plain) < ref.BF16_BOUND
    out = gemv(x, w.values, norm=norm, dtype=torch.float32, scales=w.scales)
    assert ref.error(out, normed) < 1e-5
    out = gemv(x, w.values, norm=norm, residual=residual, scales=w.scales)
    assert ref.error(out, normed + residual.double()) < ref.BF16_BOUND
    if n % 256 == 0:
        out = gemv(x, w.values, norm=norm, silu_pairs=True, out=ref.poisoned(1, n // 2), scales=w.scales)
        assert ref.error(out, ref.silu_mul(normed)) < ref.BF16_BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SMALL + LARGE)
@pytest.mark.parametrize("m", [3, 17, pytest.param(64, marks=on_device)])
def test_matmul_parts(n: int, k: int, m: int, kind: str) -> None:
    x, w = rand(m, k), matrix(kind, n, k)
    expected = exact(x, w)
    parts = matmul_parts(x, w.values, scales=w.scales)
    assert ref.error(parts.sum(0), expected) < 1e-4
    assert ref.error(matmul_parts(x, w.values, single=True, scales=w.scales), expected) < ref.BF16_BOUND
    if n % 256 == 0:
        out = matmul_parts(x, w.values, silu_pairs=True, scales=w.scales)
        assert ref.error(out, ref.silu_mul(expected)) < ref.BF16_BOUND


@pytest.mark.parametrize(("n", "k"), SMALL + LARGE)
@pytest.mark.parametrize("m", [1, 70, pytest.param(700, marks=on_device)])
def test_matmul_blocks(n: int, k: int, m: int) -> None:
    w = matrix("blocks", n, k)
    x = ScaledRows(*quantize(rand(m, k), grouped=True))
    expected = exact(x.plain(torch.float64), w)
    tiles = [None] if INTERPRETED else [None, BlocksShape(128, 64, 3, 4), BlocksShape(64, 128, 4, 4)]
    for tile in tiles:
        out = matmul_blocks(x.values, x.scales, w.values, w.scales, B, tile)
        # The matrix units sum eight-bit products with fewer bits than float32.
        assert ref.error(out, expected) < ref.BF16_BOUND


@pytest.mark.parametrize(("n", "k"), [(256, 320), *LARGE])
@pytest.mark.parametrize("m", [5, 17, 70, pytest.param(3000, marks=on_device)])
def test_matmul_rows(n: int, k: int, m: int) -> None:
    w = matrix("rows", n, k)
    x = ScaledRows(*quantize(rand(m, k), grouped=False))
    out = matmul_rows(x.values, x.scales, w.values, w.scales, B)
    assert ref.error(out, exact(x.plain(torch.float64), w)) < ref.BF16_BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("experts", "dim", "inner", "top_k"), [(4, 256, 128, 2), pytest.param(128, 2048, 768, 8, marks=on_device)]
)
@pytest.mark.parametrize("tokens", [1, 6, 70, *(pytest.param(count, marks=on_device) for count in (3, 600, 4096))])
def test_experts(experts: int, dim: int, inner: int, top_k: int, tokens: int, kind: str) -> None:
    x, residual = rand(tokens, dim) * 0.1, rand(tokens, dim)
    gate_up, down = matrix(kind, experts, 2 * inner, dim), matrix(kind, experts, dim, inner)
    ids, weights = route(torch.randn(tokens, experts, device=ref.DEVICE), top_k)
    scales = gate_up.scales, down.scales
    expected = ref.experts(x, gate_up.plain(torch.float64), down.plain(torch.float64), ids, weights)
    rounded = rounds_activations(tokens * top_k, experts)
    # Three roundings: of x, on both sides of the gate, and of what the gate lets through.
    bound = 1.5 * ROUNDED_BOUND if rounded else ref.BF16_BOUND
    out = moe(x, gate_up.values, down.values, ids, weights, residual, scales=scales)
    assert ref.error(out, expected + residual.double()) < bound
    tile = GroupedShape(64, 128, 128, 3, 4, copies=True)
    out = moe(x, gate_up.values, down.values, ids, weights, residual, shapes=(tile, tile), scales=scales)
    assert ref.error(out, expected + residual.double()) < bound
    if tokens <= 4:
        out = moe_small(x, gate_up.values, down.values, ids, weights, scales=scales)
        assert ref.error(out, expected) < ref.BF16_BOUND
    assert rounded or tokens * top_k < 32 * experts  # many tokens take the other path
