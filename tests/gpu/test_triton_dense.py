"""Norms, activations, rotary and few-row products against float64, over random shapes, into poisoned outputs."""

from __future__ import annotations

import random

import gpu_reference as ref
import pytest
import torch

from ceiba.kernels.triton.activation import silu_mul
from ceiba.kernels.triton.gather import gather_rows
from ceiba.kernels.triton.norm import add_rms_norm
from ceiba.kernels.triton.rope import qkv_norm_rope_write
from ceiba.kernels.triton.skinny import gemv, matmul_parts

B = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = B) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dim", [64, 576, 2048, 4096, 5120])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_add_rms_norm(dim: int, parts: int) -> None:
    rows = random.randint(1, 70)
    x = rand(parts, rows, dim, dtype=torch.float32) if parts else rand(rows, dim)
    weight, residual = rand(dim), rand(rows, dim)
    before = residual.double()
    total = x.double().sum(0) if parts else x.double()
    out = add_rms_norm(x, weight, 1e-6, residual, out=ref.poisoned(rows, dim))
    assert ref.error(residual, before + total) < ref.BF16_BOUND
    assert ref.error(out, ref.rms_norm(residual, weight)) < ref.BF16_BOUND
    alone = add_rms_norm(x, weight, 1e-6, out=ref.poisoned(rows, dim))
    assert ref.error(alone, ref.rms_norm(total, weight)) < ref.BF16_BOUND


@pytest.mark.parametrize("width", [96, 1536, 12288])
def test_silu_mul(width: int) -> None:
    x = rand(random.randint(1, 50), 2 * width)
    assert ref.error(silu_mul(x, out=ref.poisoned(x.shape[0], width)), ref.silu_mul(x)) < ref.BF16_BOUND
    x = rand(3, 5, 2 * width, dtype=torch.float32)
    assert ref.error(silu_mul(x, dtype=B), ref.silu_mul(x.sum(0))) < ref.BF16_BOUND


def test_gather_rows_outside_the_table_gives_zeros() -> None:
    table = rand(300, 576)
    index = torch.randint(0, 300, (40,), device="cuda")
    index[3], index[7] = -1, 300
    out = gather_rows(table, index, out=ref.poisoned(40, 576))
    expected = table[index.clamp(0, 299)]
    expected[3] = expected[7] = 0
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (32, 4, 128), (9, 3, 64), (14, 2, 64), (4, 4, 80)]
)
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("normed", [True, False])
def test_qkv_norm_rope_write(heads: int, kv_heads: int, dim: int, parts: int, normed: bool) -> None:
    tokens = random.choice([1, 7, 130])
    width = (heads + 2 * kv_heads) * dim
    qkv = rand(parts, tokens, width, dtype=torch.float32) if parts else rand(tokens, width)
    angle = rand(500, dim // 2, dtype=torch.float32)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    positions = torch.randint(0, 500, (tokens,), device="cuda")
    slots = torch.randperm(300, device="cuda")[:tokens]
    k_pool, v_pool = ref.poisoned(300, kv_heads, dim), ref.poisoned(300, kv_heads, dim)
    weights = (rand(dim), rand(dim)) if normed else (None, None)
    q, k, v = qkv_norm_rope_write(
        qkv, cos_sin, positions, slots, k_pool, v_pool, heads, *weights, dtype=B, keep_kv=True
    )
    x = (qkv.double().sum(0) if parts else qkv.double()).view(tokens, -1, dim)
    eq, ek, ev = x.split([heads, kv_heads, kv_heads], 1)
    if normed:
        eq, ek = ref.rms_norm(eq, weights[0]), ref.rms_norm(ek, weights[1])
    eq, ek = ref.rotate(eq, cos_sin[positions]), ref.rotate(ek, cos_sin[positions])
    for out, expected in ((q, eq), (k, ek), (v, ev), (k_pool[slots], ek), (v_pool[slots], ev)):
        assert ref.error(out, expected) < ref.BF16_BOUND
    assert k_pool.isnan().any((1, 2)).sum() == v_pool.isnan().any((1, 2)).sum() == 300 - tokens


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1000, 576), (128, 768), (50257, 2048)])
def test_gemv(n: int, k: int) -> None:
    x, w, norm, residual = rand(1, k), rand(n, k), rand(k), rand(1, n)
    plain = x.double() @ w.double().t()
    normed = ref.rms_norm(x, norm) @ w.double().t()
    assert ref.error(gemv(x, w, out=ref.poisoned(1, n)), plain) < ref.BF16_BOUND
    assert ref.error(gemv(x, w, norm=norm, residual=residual), normed + residual.double()) < ref.BF16_BOUND
    assert ref.error(gemv(x, w, norm=norm, dtype=torch.float32), normed) < 1e-5
    if n % 2 == 0:
        half = ref.silu_mul(normed)
        out = gemv(x, w, norm=norm, silu_pairs=True, out=ref.poisoned(1, n // 2))
        assert ref.error(out, half) < ref.BF16_BOUND


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1000, 576), (2048, 768), (50257, 2048)])
@pytest.mark.parametrize("m", [1, 2, 7, 16, 17, 33, 64])
def test_matmul_parts(n: int, k: int, m: int) -> None:
    x, w = rand(m, k), rand(n, k)
    expected = x.double() @ w.double().t()
    parts = matmul_parts(x, w)
    assert parts.dtype == torch.float32
    assert ref.error(parts.sum(0), expected) < 1e-5
    assert ref.error(matmul_parts(x, w, single=True), expected) < ref.BF16_BOUND
    if n % 2 == 0:
        assert ref.error(matmul_parts(x, w, silu_pairs=True), ref.silu_mul(expected)) < ref.BF16_BOUND


def test_matmul_parts_refuses_many_rows() -> None:
    with pytest.raises(ValueError, match="64"):
        matmul_parts(rand(65, 64), rand(64, 64))
