"""The Triton attention backend as the engine drives it: mixed steps, captured decode steps, sharing on and off."""

from __future__ import annotations

import random

import gpu_reference as ref
import numpy as np
import pytest
import torch

from ceiba.attention.backends.triton import TritonAttention
from ceiba.attention.base import AttentionBatch, AttentionLayer
from ceiba.core.step import PrefixGroup
from ceiba.memory.pool import KVPool, KVShape

B = torch.bfloat16


class Engine:
    """Persistent metadata as a runner holds it."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, rows: int = 128) -> None:
        self.pool = KVPool(KVShape(1, kv_heads, dim, dim, kv_dtype), 30000, 1, "cuda")
        self.pool.k[0].copy_(torch.randn_like(self.pool.k[0].float()))
        self.pool.v[0].copy_(torch.randn_like(self.pool.v[0].float()))
        self.table = torch.zeros(rows, 4096, dtype=torch.int32, device="cuda")
        self.free = torch.randperm(30000, device="cuda").int()
        self.used = 0
        self.rows = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.lens = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.slots = torch.zeros(rows, dtype=torch.int64, device="cuda")

    def take(self, n: int) -> torch.Tensor:
        self.used += n
        return self.free[self.used - n : self.used]

    def batch(
        self, starts: list[int], lengths: list[int], num_prefill: int, groups: list[PrefixGroup]
    ) -> AttentionBatch:
        rows = np.arange(len(starts), dtype=np.int32)
        starts_, lengths_ = np.array(starts, np.int32), np.array(lengths, np.int32)
        slots = torch.cat(
            [self.table[i, s : s + n] for i, (s, n) in enumerate(zip(starts, lengths, strict=True))]
        ).long()
        size = len(rows)
        self.rows[:size] = torch.from_numpy(rows)
        self.lens[:size] = torch.from_numpy(starts_ + lengths_)
        if len(slots) <= len(self.slots):
            self.slots[: len(slots)] = slots
            slots = self.slots[: len(slots)]
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths_)]).astype(np.int32)).cuda()
        return AttentionBatch(
            rows, starts_, lengths_, num_prefill, self.table, slots, self.rows[:size], self.lens[:size], offsets, groups
        )


def check(engine: Engine, batch: AttentionBatch, q: torch.Tensor, out: torch.Tensor, layer: AttentionLayer,
          bound: float = ref.BF16_BOUND) -> None:  # fmt: skip
    at = 0
    for i, (start, n) in enumerate(zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)):
        slots = engine.table[i, : start + n].long()
        k, v = engine.pool.k[0][slots].float(), engine.pool.v[0][slots].float()
        expected = ref.attention(q[at : at + n], k, v, layer.scale, layer.window, layer.softcap)
        assert ref.error(out[at : at + n], expected) < bound, (i, start, n)
        at += n


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [
        (B, B, ref.BF16_BOUND),
        (torch.float32, torch.float32, 1e-5),
        (B, torch.float8_e4m3fn, 0.04),
        (torch.float16, torch.float16, 2e-3),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_mixed_step(dtype: torch.dtype, kv_dtype: torch.dtype, bound: float, written: bool) -> None:
    engine = Engine(2, 64, dtype, kv_dtype)
    starts = [0, 300, 64] + [random.randint(1, 900) for _ in range(9)]
    lengths = [random.randint(1, 500), 129, 7] + [1] * 9
    for i, (s, n) in enumerate(zip(starts, lengths, strict=True)):
        engine.table[i, : s + n] = engine.take(s + n)
    layer = AttentionLayer(0, 6, 2, 64, 0.125)
    backend = TritonAttention()
    batch = engine.batch(starts, lengths, 3, [])
    total = sum(lengths)
    q = torch.randn(total, 6, 64, device="cuda").to(dtype)
    k, v = torch.randn(2, total, 2, 64, device="cuda").to(dtype)
    backend.plan(batch)
    if written:
        engine.pool.write(0, batch.slots, k, v)
    out = backend.run(q, k, v, layer, engine.pool, written=written)
    assert ref.error(engine.pool.k[0][batch.slots].float(), k.to(kv_dtype)) == 0
    check(engine, batch, q, out, layer, bound)
    again = backend.run(q, None, None, layer, engine.pool)
    check(engine, batch, q, again, layer, bound)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 4)])
def test_captured_decode_follows_new_plans(heads: int, kv_heads: int) -> None:
    """One graph with sharing and one without, replayed over changing lengths, rows and groups; nested prefixes."""
    engine = Engine(kv_heads, 128, B, B)
    layer = AttentionLayer(0, heads, kv_heads, 128, 128**-0.5)
    backend = TritonAttention()
    backend.prepare([layer])
    size = 40
    root, branch = engine.take(1200), engine.take(600)
    lens = [random.randint(1, 90) for _ in range(size)]
    starts = [0] * size
    for i in range(size):
        depth = [0, 1200, 1800][i % 3] if i < 30 else 0
        own = engine.take(lens[i] + 20)
        engine.table[i, :1200][:depth] = root[:depth]
        engine.table[i, 1200:1800][: max(0, depth - 1200)] = branch[: max(0, depth - 1200)]
        engine.table[i, depth : depth + lens[i] + 20] = own
        starts[i] = depth + lens[i]
    # By length alone the table of the group of 1800 is a subset of the group of 1200.
    members = np.array([i for i in range(30) if i % 3], np.int32)
    deep = np.array([i for i in range(30) if i % 3 == 2], np.int32)
    groups = [PrefixGroup(1200, members), PrefixGroup(1800, deep)]
    graphs: dict[tuple[bool, ...], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    q = torch.randn(size, heads, 128, device="cuda").to(B)
    k, v = torch.randn(2, size, kv_heads, 128, device="cuda").to(B)
    keys = []
    for step in range(6):
        use = groups if step % 2 == 0 else []
        batch = engine.batch([s + step for s in starts], [1] * size, 0, use)
        backend.plan(batch)
        keys.append(backend.graph_key)
        if backend.graph_key not in graphs:
            backend.run(q, k, v, layer, engine.pool)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = backend.run(q, k, v, layer, engine.pool)
            graphs[backend.graph_key] = (graph, out)
        graph, out = graphs[backend.graph_key]
        q.copy_(torch.randn_like(q))
        k.copy_(torch.randn_like(k))
        out.fill_(float("nan"))
        graph.replay()
        check(engine, batch, q, out, layer)
    assert keys == [(True,), (False,)] * 3
