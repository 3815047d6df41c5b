"""Keys and values in eight bits: what is written, and attention that reads it, against float64 over the stored values.
Runs in Triton's interpreter too, on the small shapes.
"""

from __future__ import annotations

import gpu_reference as ref
import numpy as np
import pytest
import torch

from ceiba.attention.shared_prefix import MAX_PARTS, plan_shared
from ceiba.core.step import PrefixGroup
from ceiba.kernels.triton.decode import DecodeWorkspace, decode, shared_tile
from ceiba.kernels.triton.gather import write_kv
from ceiba.kernels.triton.prefill import gather_slots, plan_tiles, prefill, prefill_shape
from ceiba.kernels.triton.rope import qkv_norm_rope_write

B = torch.bfloat16
INTERPRETED = ref.DEVICE == "cpu"
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
on_device = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
SHAPES = [(4, 2, 64), pytest.param(32, 8, 128, marks=on_device), pytest.param(32, 4, 128, marks=on_device)]
pytestmark = pytest.mark.parametrize("dtype", TYPES, ids=["e4m3", "e5m2"])


def on(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(ref.DEVICE)


class Cache:
    """Scattered slots in eight-bit pools; those that nobody owns hold NaN."""

    def __init__(self, kv_heads: int, dim: int, lens: list[int], dtype: torch.dtype) -> None:
        slots = sum(lens) + 20
        self.k, self.v = (torch.randn(slots, kv_heads, dim, device=ref.DEVICE).to(dtype) for _ in range(2))
        self.order = torch.randperm(slots, device=ref.DEVICE).int()
        for pool in (self.k, self.v):
            pool.view(torch.uint8)[self.order[sum(lens) :].long()] = 0x7F
        self.table = self.order[-1].expand(len(lens), max(lens) + 300).clone()
        self.lens = lens
        at = 0
        for row, n in enumerate(lens):
            self.table[row, :n] = self.order[at : at + n]
            at += n

    def of(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.table[row, : self.lens[row]].long()
        return self.k.float()[slots], self.v.float()[slots]


def test_writing_saturates(dtype: torch.dtype) -> None:
    heads, kv_heads, dim, tokens = 4, 2, 64, 3
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=ref.DEVICE).to(B)
    largest = torch.finfo(dtype).max
    qkv[1, -3], qkv[2, -1] = 4 * largest, -4 * largest
    angle = torch.rand(40, dim // 2, device=ref.DEVICE)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    positions, slots = torch.tensor([3, 0, 39], device=ref.DEVICE), torch.tensor([5, 2, 9], device=ref.DEVICE)
    pools = [torch.full((12, kv_heads, dim), 0x7F, dtype=torch.uint8, device=ref.DEVICE).view(dtype) for _ in range(2)]
    _, k, v = qkv_norm_rope_write(qkv, cos_sin, positions, slots, *pools, heads, dtype=torch.float32, keep_kv=True)
    assert k is not None
    assert v is not None
    for pool, values in zip(pools, (k, v), strict=True):
        wanted = values.clamp(-largest, largest).to(dtype).float()
        assert torch.equal(pool.float()[slots], wanted)
        assert pool.float().isnan().any(2).any(1).sum() == 9
    again = [torch.full_like(pool.view(torch.uint8), 0x7F).view(dtype) for pool in pools]
    write_kv(k, v, slots, *again)
    for a, b in zip(pools, again, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("batch", [2, pytest.param(1, marks=on_device), pytest.param(70, marks=on_device)])
def test_decode(heads: int, kv_heads: int, dim: int, batch: int, dtype: torch.dtype) -> None:
    lens = [1, 70] if INTERPRETED else np.random.default_rng().integers(1, 4000, batch).tolist()
    cache = Cache(kv_heads, dim, lens, dtype)
    q = torch.randn(batch, heads, dim, device=ref.DEVICE).to(B)
    work = DecodeWorkspace.allocate(batch, heads, kv_heads, dim, 0, q.device)
    rows, kv_lens = on(np.arange(batch, dtype=np.int32)), on(np.array(lens, np.int32))
    out = decode(q, cache.k, cache.v, cache.table, rows, kv_lens, work, dim**-0.5, out=ref.poisoned(batch, heads, dim))
    for b in range(batch):
        assert ref.error(out[b : b + 1], ref.attention(q[b : b + 1], *cache.of(b), dim**-0.5)) < ref.BF16_BOUND


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_decode_under_a_shared_prefix(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Nested; two segments share nothing, one of them as short as what is not shared of the others."""
    batch, prefix, own = (12, 400, 10) if INTERPRETED else (48, 1500, 40)
    cache = Cache(kv_heads, dim, [prefix + own] * batch, dtype)
    cache.table[:, :prefix] = cache.table[:1, :prefix]
    rows, kv_lens = np.arange(batch, dtype=np.int32), np.full(batch, prefix + own, np.int32)
    kv_lens[-2:] = own, prefix + own - 1
    groups = [PrefixGroup(prefix, rows[:-2]), PrefixGroup(prefix - 300, rows[: batch // 2])]
    plan = plan_shared(groups, 0, rows, kv_lens, shared_tile(heads // kv_heads), kv_heads, 132)
    assert plan is not None
    q = torch.randn(batch, heads, dim, device=ref.DEVICE).to(B)
    work = DecodeWorkspace.allocate(batch, heads, kv_heads, dim, MAX_PARTS, q.device)
    out = decode(
        q, cache.k, cache.v, cache.table, on(rows), on(kv_lens), work, dim**-0.5, shared=ref.shared(plan),
        out=ref.poisoned(batch, heads, dim),
    )  # fmt: skip
    for b in range(batch):
        k, v = (part[: kv_lens[b]] for part in cache.of(b))
        assert ref.error(out[b : b + 1], ref.attention(q[b : b + 1], k, v, dim**-0.5)) < ref.BF16_BOUND


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("way", ["own", "gathered", "pool"])
def test_prefill(heads: int, kv_heads: int, dim: int, way: str, dtype: torch.dtype) -> None:
    """A prefix in eight bits, before new keys in the activations' type or in eight bits as well."""
    lengths, cached = ([5, 20], [40, 0]) if INTERPRETED else ([300, 1, 700, 64], [1000, 64, 0, 333])
    cache = Cache(kv_heads, dim, [a + b for a, b in zip(lengths, cached, strict=True)], dtype)
    total, ends = sum(lengths), np.cumsum(lengths)
    q = torch.randn(total, heads, dim, device=ref.DEVICE).to(B)
    k, v = (torch.randn(total, kv_heads, dim, device=ref.DEVICE).to(B) for _ in range(2))
    rows = np.arange(len(lengths), dtype=np.int32)
    sizes = np.array(lengths, np.int32), np.array(cached, np.int32)
    tiles = on(plan_tiles(*sizes, rows, heads // kv_heads, prefill_shape(dim, 2).rows))
    held = torch.cat([cache.table[row, : cached[row]] for row in rows])
    pool = way == "pool"
    out = prefill(
        q, None if pool else k, None if pool else v, cache.k, cache.v, cache.table, tiles, dim**-0.5,
        out=ref.poisoned(total, heads, dim), prefix_slots=held if way == "gathered" else None,
    )  # fmt: skip
    for row in rows:
        mine = slice(ends[row] - lengths[row], ends[row])
        keys, values = cache.of(row)
        if not pool:
            keys, values = (torch.cat([x[: cached[row]], new[mine]]) for x, new in ((keys, k), (values, v)))
        assert ref.error(out[mine], ref.attention(q[mine], keys, values, dim**-0.5)) < ref.BF16_BOUND


def test_gathering_widens(dtype: torch.dtype) -> None:
    cache = Cache(2, 64, [17], dtype)
    slots = cache.table[0, :17]
    for got, wanted in zip(gather_slots(cache.k, cache.v, slots, B), cache.of(0), strict=True):
        assert torch.equal(got.float(), wanted)
