"""Grouped products of experts under uneven routing, with the tiles of the table and with blocks of which only half the
rows are computed, against float64. Runs in Triton's interpreter too, on the small shape.
"""

from __future__ import annotations

import gpu_reference as ref
import pytest
import torch

from ceiba.kernels.triton.moe import TILES, GroupedShape, grouped_shapes, moe

B = torch.bfloat16
on_device = pytest.mark.skipif(ref.DEVICE == "cpu", reason="too large for the interpreter")
LARGE = pytest.param(128, 2048, 768, 8, marks=on_device)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=ref.DEVICE).to(B)


def uneven(counts: list[int], top_k: int, experts: int) -> torch.Tensor:
    """int32 [T, top_k] that gives the first experts exactly these counts, one choice of each token; the other choices
    are distinct experts after them."""
    first = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    first = first[torch.randperm(len(first))]
    others = torch.rand(len(first), experts - len(counts)).topk(top_k - 1, -1).indices + len(counts)
    return torch.cat((first[:, None], others), 1).int().to(ref.DEVICE)


@pytest.mark.parametrize(("experts", "dim", "inner", "top_k"), [(6, 128, 64, 2), LARGE])
@pytest.mark.parametrize("rows", [32, pytest.param(64, marks=on_device), 128])
@pytest.mark.parametrize("copies", [False, pytest.param(True, marks=on_device)])
@pytest.mark.parametrize("fill", [-1, 0, 1])
def test_half_blocks(experts: int, dim: int, inner: int, top_k: int, rows: int, copies: bool, fill: int) -> None:
    """Experts whose last block is half full, one row less, one more; full; with one row; and one without rows."""
    half = rows // 2
    counts = [half + fill, rows + half + fill, rows, 1, 0] if experts > 6 else [half + fill, rows, 0]
    ids = uneven(counts, top_k, experts)
    tokens = len(ids)
    x, residual = rand(tokens, dim), rand(tokens, dim)
    gate_up, down = rand(experts, 2 * inner, dim) * 0.05, rand(experts, dim, inner) * 0.05
    weights = torch.rand(tokens, top_k, device=ref.DEVICE)
    expected = ref.experts(x, gate_up, down, ids, weights) + residual.double()
    warps = 8 if rows == 128 else 4
    first = GroupedShape(rows, 64, 64, 3, warps, copies, halves=True)
    for second in (first, GroupedShape(rows, 128, 64, 3, warps)):
        out = moe(x, gate_up, down, ids, weights, residual, shapes=(first, second))
        assert ref.error(out, expected) < ref.BF16_BOUND


@on_device
@pytest.mark.parametrize("tokens", [5, 64, 200, 512, 1100, 2500, 8192])
def test_table(tokens: int) -> None:
    """The tiles that a step takes, where the fullest expert has ten times the mean."""
    experts, dim, inner, top_k = 128, 2048, 768, 8
    scores = torch.randn(experts, device=ref.DEVICE) * 1.6 + torch.randn(tokens, experts, device=ref.DEVICE)
    ids = scores.topk(top_k, -1).indices.int()
    x = rand(tokens, dim)
    gate_up, down = rand(experts, 2 * inner, dim) * 0.05, rand(experts, dim, inner) * 0.05
    weights = torch.rand(tokens, top_k, device=ref.DEVICE)
    expected = ref.experts(x, gate_up, down, ids, weights)
    assert ref.error(moe(x, gate_up, down, ids, weights), expected) < ref.BF16_BOUND


def test_table_covers_every_mean() -> None:
    borders = [most for most, _, _ in TILES]
    assert borders == sorted(set(borders))
    assert borders[-1] == float("inf")
    for pairs in (1, 8 * 128, 8 * 128 + 1, 100 * 128, 10**6):
        first, second = grouped_shapes(pairs, 128)
        assert first.rows == second.rows
