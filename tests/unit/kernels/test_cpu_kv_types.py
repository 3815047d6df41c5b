"""Eight-bit keys and values: the kernels' bytes against torch's own conversions, attention against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ceiba.attention.backends.host import KV_TYPES, HostAttention
from ceiba.attention.base import AttentionBatch, AttentionLayer
from ceiba.kernels import cpu
from ceiba.memory.pool import KVPool, KVShape

pytestmark = pytest.mark.skipif(not cpu.available, reason="installed without a C++ compiler")

SETS = ["generic", *(cpu._cpu.instruction_sets() if cpu.available else [])]
TILED = {isa for isa in SETS if cpu.available and cpu._cpu.Context(1, isa).tiles}
ORDERS = [(isa, fixed) for isa in SETS for fixed in ([False, True] if isa in TILED else [False])]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
HEADS, KV_HEADS, DIM = 6, 2, 64


def host_step(
    isa: str, pool: KVPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, fixed: bool = True
) -> torch.Tensor:
    """One prefill segment at positions [start, start + T) of row 0, slot p + 1 for position p."""
    backend = HostAttention(cpu._cpu.Context(2, isa, fixed_order=fixed))
    count = len(q)
    table = torch.arange(1, start + count + 1, dtype=torch.int32)[None]
    ints = [np.array([n], np.int32) for n in (0, start, count)]
    device = [torch.zeros(1, dtype=torch.int32)] * 3
    slots = table[0, start:].long()
    backend.plan(AttentionBatch(*ints, 1 if count > 1 else 0, table, slots, *device))
    return backend.run(q, k, v, AttentionLayer(0, HEADS, KV_HEADS, DIM, DIM**-0.5), pool)


def new_pool(dtype: torch.dtype, slots: int) -> KVPool:
    return KVPool(KVShape(1, KV_HEADS, DIM, DIM, dtype), slots, 1, "cpu")


def values_of_every_kind(count: int) -> torch.Tensor:
    """All sizes that an eight-bit float tells apart and more, exact halves between two of them among them."""
    values = torch.randn(count, KV_HEADS, DIM) * 10.0 ** torch.empty(count, 1, 1).uniform_(-6, 6)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.cat((codes, torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()))
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    every = torch.cat((codes, ties))
    flat = values.view(-1)
    flat[: len(every)] = every
    return values


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_written_bytes_are_those_of_torch(isa: str, dtype: torch.dtype) -> None:
    values = values_of_every_kind(40)
    pool, other = new_pool(dtype, 64), new_pool(dtype, 64)
    q = torch.randn(40, HEADS, DIM)
    host_step(isa, pool, q, values, values.flip(0), 0)
    other.write(0, torch.arange(1, 41), values, values.flip(0))
    for ours, theirs in ((pool.k[0], other.k[0]), (pool.v[0], other.v[0])):
        if dtype != torch.int8:
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
            continue
        # The step may differ in its last bit, and a code where a quotient lies on the border.
        a, b = pool.values(ours, torch.float32), other.values(theirs, torch.float32)
        top = b.abs().amax(-1, keepdim=True)
        assert ((a - b).abs() <= top * (1.001 / 127)).all()
        assert ((a - b).abs() > top * 1e-5).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_values_read_back_are_close(dtype: torch.dtype) -> None:
    """Half a step of the type: 2^-4 and 2^-3 of a value in fp8, 1/254 of a head's largest value in int8."""
    pool, values = new_pool(dtype, 64), torch.randn(50, KV_HEADS, DIM) * 3
    pool.write(0, torch.arange(50), values, values)
    read = pool.values(pool.k[0][:50], torch.float32)
    if dtype == torch.int8:
        bound = values.abs().amax(-1, keepdim=True) / 254 * 1.001
    else:
        bound = values.abs() * (2**-4 if dtype == torch.float8_e4m3fn else 2**-3) + torch.finfo(dtype).smallest_normal
    assert ((read - values).abs() <= bound).all()


def test_too_large_values_saturate_and_unknown_ones_stay_unknown() -> None:
    for dtype in EIGHT_BITS:
        pool = new_pool(dtype, 8)
        values = torch.full((2, KV_HEADS, DIM), 1.0)
        values[0, 0, 3], values[0, 1, 4], values[1, 0, 5] = 1e6, -1e6, float("nan")
        for write in (
            lambda: pool.write(0, torch.arange(1, 3), values, values),  # noqa: B023 - called at once
            lambda: host_step("auto", pool, torch.randn(2, HEADS, DIM), values, values, 0),  # noqa: B023
        ):
            write()
            read = pool.values(pool.k[0][1:3], torch.float32)
            most = 1e6 if dtype == torch.int8 else torch.finfo(dtype).max
            assert read[0, 0, 3] == pytest.approx(most)
            assert read[0, 1, 4] == pytest.approx(-most)
            assert read[1, 0, 5].isnan()
            assert read[1, 1].isfinite().all()


@pytest.mark.parametrize(("isa", "fixed"), ORDERS)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 33], ids=["decode", "few", "many"])
def test_attention_over_what_is_stored(isa: str, fixed: bool, dtype: torch.dtype, count: int) -> None:
    """Against float64 attention over the pool's values as torch reads them."""
    start = 700
    pool = new_pool(dtype, start + count + 1)
    old = torch.randn(2, start, KV_HEADS, DIM) * torch.rand(2, start, KV_HEADS, 1) * 4
    pool.write(0, torch.arange(1, start + 1), old[0], old[1])
    q, k, v = torch.randn(count, HEADS, DIM), *torch.randn(2, count, KV_HEADS, DIM)
    out = host_step(isa, pool, q, k, v, start, fixed)
    keys, values = (
        pool.values(x[0][1 : start + count + 1], torch.float32).double().repeat_interleave(HEADS // KV_HEADS, 1)
        for x in (pool.k, pool.v)
    )
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * DIM**-0.5
    ahead = torch.arange(start + count)[None, :] > (start + torch.arange(count))[:, None]
    weights = scores.masked_fill(ahead[None], -torch.inf).softmax(-1)
    expected = torch.einsum("hts,shd->thd", weights, values)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error < (1e-2 if isa in TILED and not fixed else 2e-6), error


def test_the_kernels_know_every_type_of_the_backend() -> None:
    assert set(KV_TYPES.values()) == set(cpu._cpu.kv_types)
    assert HostAttention.capabilities.kv_dtypes == set(KV_TYPES)
