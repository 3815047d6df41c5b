"""Attention kernels against float64: decode, shared prefixes, ragged prefill. Slots are scattered, outputs poisoned."""

from __future__ import annotations

import random

import gpu_reference as ref
import numpy as np
import pytest
import torch

from ceiba.attention.shared_prefix import MAX_PARTS, plan_shared
from ceiba.core.step import PrefixGroup
from ceiba.kernels.triton.decode import DecodeWorkspace, decode, shared_tile
from ceiba.kernels.triton.prefill import merge_parts, plan_tiles, prefill, prefill_shape

B = torch.bfloat16
SHAPES = [(32, 8, 128), (32, 4, 128), (9, 3, 64), (14, 2, 64), (8, 8, 80), (8, 1, 256)]


class Cache:
    """A pool whose slots are scattered, and a slot table whose unused entries point outside of any segment."""

    def __init__(self, kv_heads: int, dim: int, lens: list[int], context: int = 6000) -> None:
        slots = sum(lens) + 100
        self.k = torch.randn(slots, kv_heads, dim, device="cuda").to(B)
        self.v = torch.randn(slots, kv_heads, dim, device="cuda").to(B)
        self.order = torch.randperm(slots, device="cuda").int()
        poison = self.order[sum(lens) :].long()
        self.k[poison] = float("nan")
        self.v[poison] = float("nan")
        self.table = self.order[-1].expand(len(lens) + 3, context).clone()
        self.rows = torch.randperm(len(lens) + 3)[: len(lens)].int()
        self.lens = lens
        used = 0
        for row, n in zip(self.rows.tolist(), lens, strict=True):
            self.table[row, :n] = self.order[used : used + n]
            used += n

    def of(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.table[self.rows[b], : self.lens[b]].long()
        return self.k[slots], self.v[slots]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("batch", [1, 5, 70, 150])
@pytest.mark.parametrize("kind", ["full", "window", "softcap", "sinks"])
def test_decode(heads: int, kv_heads: int, dim: int, batch: int, kind: str) -> None:
    lens = [random.choice([1, 63, 64, 65, random.randint(1, 5000)]) for _ in range(batch)]
    cache = Cache(kv_heads, dim, lens)
    q = torch.randn(batch, heads, dim, device="cuda").to(B)
    workspace = DecodeWorkspace.allocate(batch, heads, kv_heads, dim, 0, q.device)
    workspace.parts.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    extra = {
        "full": {},
        "window": {"window": random.randint(1, 300)},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": torch.randn(heads, device="cuda")},
    }[kind]
    lens_device = torch.tensor(lens, dtype=torch.int32, device="cuda")
    out = decode(
        q, cache.k, cache.v, cache.table, cache.rows.cuda(), lens_device, workspace, dim**-0.5,
        out=ref.poisoned(batch, heads, dim), **extra,
    )  # fmt: skip
    for b in range(batch):
        expected = ref.attention(q[b : b + 1], *cache.of(b), dim**-0.5, **extra)
        assert ref.error(out[b : b + 1], expected) < ref.BF16_BOUND, (b, lens[b])


def test_decode_of_an_empty_segment_is_zero() -> None:
    cache = Cache(8, 128, [10, 1])
    q = torch.randn(2, 32, 128, device="cuda").to(B)
    workspace = DecodeWorkspace.allocate(2, 32, 8, 128, 0, q.device)
    lens = torch.tensor([10, 0], dtype=torch.int32, device="cuda")
    out = decode(
        q, cache.k, cache.v, cache.table, cache.rows.cuda(), lens, workspace, 0.1, out=ref.poisoned(2, 32, 128)
    )
    assert not out[1].any()
    assert ref.error(out[:1], ref.attention(q[:1], *cache.of(0), 0.1)) < ref.BF16_BOUND


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES[:4])
@pytest.mark.parametrize("kind", ["full", "softcap", "sinks"])
def test_shared_prefixes_of_several_depths(heads: int, kv_heads: int, dim: int, kind: str) -> None:
    batch = random.randint(40, 90)
    lens = [random.randint(1, 200) for _ in range(batch)]
    cache = Cache(kv_heads, dim, [*lens, 4000])
    donor = cache.rows[-1].item()
    # Three levels under one root, and a second root; the members' tables begin with the same slots.
    everyone = np.arange(batch)
    levels = [(1100, everyone[: batch * 3 // 4]), (1500, everyone[5 : batch // 2]), (2777, everyone[6 : batch // 3])]
    levels.append((700, everyone[batch * 3 // 4 + 1 :]))
    starts = np.zeros(batch, int)
    for length, members in levels:
        starts[members] = length
    for b in range(batch):
        own = cache.table[cache.rows[b], : lens[b]].clone()
        source = cache.table[donor] if b < batch * 3 // 4 else cache.table[donor].flip(0)[2000:]
        cache.table[cache.rows[b], : starts[b]] = source[: starts[b]]
        cache.table[cache.rows[b], starts[b] : starts[b] + lens[b]] = own
    cache.lens = [int(s + n) for s, n in zip(starts, lens, strict=True)]
    offset = 3
    groups = [PrefixGroup(length, (members + offset).astype(np.int32)) for length, members in levels]
    random.shuffle(groups)
    kv_lens = np.array(cache.lens, np.int32)
    rows = cache.rows[:batch].numpy()
    plan = plan_shared(groups, offset, rows, kv_lens, shared_tile(heads // kv_heads), kv_heads, 132)
    assert plan is not None
    assert plan.counts.max() <= MAX_PARTS
    assert (plan.own_starts == starts).all()
    q = torch.randn(batch, heads, dim, device="cuda").to(B)
    workspace = DecodeWorkspace.allocate(batch, heads, kv_heads, dim, MAX_PARTS, q.device)
    workspace.parts.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    on = lambda a: torch.from_numpy(np.ascontiguousarray(a)).cuda()  # noqa: E731
    extra = {"full": {}, "softcap": {"softcap": 5.0}, "sinks": {"sinks": torch.randn(heads, device="cuda")}}[kind]
    out = decode(
        q, cache.k, cache.v, cache.table, on(rows), on(kv_lens), workspace, dim**-0.5, shared=ref.shared(plan),
        out=ref.poisoned(batch, heads, dim), **extra,
    )  # fmt: skip
    for b in range(batch):
        expected = ref.attention(q[b : b + 1], *cache.of(b), dim**-0.5, **extra)
        assert ref.error(out[b : b + 1], expected) < ref.BF16_BOUND, b


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("kind", ["full", "window", "softcap", "sinks", "bidirectional"])
@pytest.mark.parametrize(("pooled", "gather"), [(False, False), (False, True), (True, False)])
def test_prefill(heads: int, kv_heads: int, dim: int, kind: str, pooled: bool, gather: bool) -> None:
    batch = 6
    lengths = np.array([random.choice([1, 30, 128, random.randint(1, 900)]) for _ in range(batch)], np.int32)
    cached = np.array([random.choice([0, 64, random.randint(0, 1500)]) for _ in range(batch)], np.int32)
    extra = {
        "full": {},
        "window": {"window": random.randint(1, 300)},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": torch.randn(heads, device="cuda")},
        "bidirectional": {"causal": False},
    }[kind]
    cache = Cache(kv_heads, dim, (lengths + cached).tolist())
    total = int(lengths.sum())
    q = torch.randn(total, heads, dim, device="cuda").to(B)
    ends = np.cumsum(lengths)
    new = [cache.table[cache.rows[b], cached[b] : cached[b] + lengths[b]].long() for b in range(batch)]
    # k and v as they come out of a fused projection: rows with a stride.
    kv = torch.stack([cache.k[torch.cat(new)], cache.v[torch.cat(new)]], 1)
    k, v = kv[:, 0], kv[:, 1]
    tiles = torch.from_numpy(
        plan_tiles(lengths, cached, cache.rows.numpy(), heads // kv_heads, prefill_shape(dim, 2).rows)
    ).cuda()
    gathered = torch.cat([cache.table[cache.rows[b], : cached[b]] for b in range(batch)]) if gather else None
    out = prefill(
        q, None if pooled else k, None if pooled else v, cache.k, cache.v, cache.table, tiles, dim**-0.5,
        out=ref.poisoned(total, heads, dim), prefix_slots=gathered, **extra,
    )  # fmt: skip
    for b in range(batch):
        mine = slice(ends[b] - lengths[b], ends[b])
        expected = ref.attention(q[mine], *cache.of(b), dim**-0.5, **extra)
        assert ref.error(out[mine], expected) < ref.BF16_BOUND, (b, lengths[b], cached[b])


@pytest.mark.parametrize(("rows", "heads", "dim"), [(37, 3, 64), (16, 2, 80)])
def test_the_softmax_over_two_sets_from_the_softmax_over_each(rows: int, heads: int, dim: int) -> None:
    q = torch.randn(rows, heads, dim, device=ref.DEVICE)
    keys, values = torch.randn(2, 50, heads, dim, device=ref.DEVICE)
    parts = []
    for part in (slice(0, 31), slice(31, 50)):
        logits = torch.einsum("thd,nhd->htn", q.double(), keys[part].double())
        wide = torch.full((rows, heads + 2, dim), float("nan"), device=ref.DEVICE)  # a row stride of its own
        wide[:, :heads] = ref.attention(q, keys[part], values[part], 1.0, causal=False)
        parts += [wide[:, :heads], logits.logsumexp(-1).float()]
    out = ref.poisoned(rows, heads, dim, dtype=torch.float32)
    merge_parts(*parts, out)
    assert ref.error(out, ref.attention(q, keys, values, 1.0, causal=False)) < 1e-6
