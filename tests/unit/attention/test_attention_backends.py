"""Attention backends against a plain loop in float64: ragged steps, shuffled slots, windows, soft caps, sinks, GQA."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ceiba.attention.backends.cpu import CPUAttention
from ceiba.attention.backends.torch_native import TorchNative
from ceiba.attention.base import AttentionBackend, AttentionBatch, AttentionLayer
from ceiba.memory.pool import KVPool, KVShape

BACKENDS = [TorchNative, CPUAttention]


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, layer: AttentionLayer, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q [T, heads, d] at positions start…; k, v [L, kv, d] → [T, heads, dv], one score at a time."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=torch.float64)
    per = layer.num_heads // layer.num_kv_heads
    for i in range(q.shape[0]):
        for head in range(layer.num_heads):
            position, weights, values = start + i, [], []
            for j in range(k.shape[0]):
                if layer.causal and j > position:
                    continue
                if layer.window and position - j >= layer.window:
                    continue
                score = float(q[i, head].double() @ k[j, head // per].double()) * layer.scale
                if layer.softcap:
                    score = layer.softcap * math.tanh(score / layer.softcap)
                weights.append(math.exp(score))
                values.append(v[j, head // per].double())
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for weight, value in zip(weights, values, strict=True):
                out[i, head] += value * (weight / total)
    return out


class World:
    """A pool with history, and one step over it."""

    def __init__(self, segments: list[tuple[int, int]], prefill: int, layer: AttentionLayer, shuffle: bool) -> None:
        rng = np.random.default_rng(7)
        torch.manual_seed(7)
        dim_v = layer.v_head_dim or layer.head_dim
        slots = 400
        shape = KVShape(1, layer.num_kv_heads, layer.head_dim, dim_v, torch.float32)
        self.pool = KVPool(shape, slots, 1, "cpu")
        # What other requests left behind must never be seen, whatever it is.
        self.pool.k[0].fill_(float("nan"))
        self.pool.v[0].fill_(float("inf"))
        rows = rng.permutation(16)[: len(segments)].astype(np.int32)
        table = torch.zeros(17, 128, dtype=torch.int32)
        order = rng.permutation(slots) if shuffle else np.arange(slots)
        at, now = 0, []
        self.k, self.v, self.segments = [], [], segments
        for row, (start, length) in zip(rows, segments, strict=True):
            mine = torch.from_numpy(order[at : at + start + length].astype(np.int64))
            at += start + length
            table[row, : start + length] = mine.int()
            k = torch.randn(start + length, layer.num_kv_heads, layer.head_dim)
            v = torch.randn(start + length, layer.num_kv_heads, dim_v)
            self.pool.write(0, mine[:start], k[:start], v[:start])
            now.append(mine[start:])
            self.k.append(k)
            self.v.append(v)
        starts, lengths = (np.array(part, np.int32) for part in zip(*segments, strict=True))
        self.q = torch.randn(int(lengths.sum()), layer.num_heads, layer.head_dim)
        self.batch = AttentionBatch(
            rows=rows,
            starts=starts,
            lengths=lengths,
            num_prefill=prefill,
            slot_table=table,
            slots=torch.cat(now),
            rows_device=torch.from_numpy(rows),
            kv_lens_device=torch.from_numpy(starts + lengths),
            query_offsets_device=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        )

    def check(self, backend: AttentionBackend, layer: AttentionLayer, sinks: torch.Tensor | None = None) -> None:
        backend.plan(self.batch)
        k = torch.cat([k[s:] for k, (s, _) in zip(self.k, self.segments, strict=True)])
        v = torch.cat([v[s:] for v, (s, _) in zip(self.v, self.segments, strict=True)])
        got = backend.run(self.q, k, v, layer, self.pool, sinks)
        at = 0
        for keys, values, (start, length) in zip(self.k, self.v, self.segments, strict=True):
            wanted = naive(self.q[at : at + length], keys, values, start, layer, sinks)
            torch.testing.assert_close(got[at : at + length].double(), wanted, atol=2e-5, rtol=2e-4)
            at += length


SHAPES = {
    "mha": AttentionLayer(0, 2, 2, 8, 8**-0.5),
    "gqa": AttentionLayer(0, 6, 2, 8, 0.3),
    "wide-v": AttentionLayer(0, 4, 1, 8, 0.3, v_head_dim=12),
    "window": AttentionLayer(0, 4, 2, 8, 0.3, window=5),
    "softcap": AttentionLayer(0, 4, 2, 8, 1.0, softcap=2.0),
    "softcap-window": AttentionLayer(0, 4, 2, 8, 1.0, softcap=2.0, window=7),
    "bidirectional": AttentionLayer(0, 4, 2, 8, 0.3, causal=False),
}
STEPS = {
    "prefill": ([(0, 13), (0, 1), (9, 6)], 3),
    "decode-even": ([(4, 1), (6, 1), (5, 1)], 0),
    "decode-one": ([(11, 1)], 0),
    "mixed": ([(3, 9), (0, 4), (20, 1), (2, 1), (0, 1)], 2),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_against_the_loop(backend: type, step: str, shape: str, shuffle: bool) -> None:
    segments, prefill = STEPS[step]
    layer = SHAPES[shape]
    World(segments, prefill, layer, shuffle).check(backend(), layer)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", ["gqa", "window", "softcap"])
def test_sinks(step: str, shape: str) -> None:
    segments, prefill = STEPS[step]
    layer = SHAPES[shape]
    World(segments, prefill, layer, True).check(TorchNative(), layer, torch.randn(layer.num_heads))


def test_decode_lengths_far_apart_are_grouped_without_much_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    import ceiba.attention.backends.torch_native as module

    monkeypatch.setattr(module, "PAD_SLACK", 2)
    segments = [(3, 1), (60, 1), (9, 1), (1, 1), (64, 1), (30, 1)]
    layer = SHAPES["gqa"]
    world = World(segments, 0, layer, True)
    backend = TorchNative()
    world.check(backend, layer)
    padded = sum(group.longest * len(group.rows) for group in backend._decode)
    real = sum(start + 1 for start, _ in segments)
    assert len(backend._decode) > 1
    assert padded <= 2 * real


def test_many_queries_with_scores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import ceiba.attention.backends.torch_native as module

    monkeypatch.setattr(module, "QUERY_BLOCK", 4)
    layer = SHAPES["softcap-window"]
    World([(5, 11), (0, 9)], 2, layer, True).check(TorchNative(), layer)


def test_a_caller_that_has_written_keys_and_values_itself() -> None:
    layer = SHAPES["gqa"]
    world = World([(3, 4), (5, 1)], 1, layer, True)
    at = 0
    for k, v, (start, length) in zip(world.k, world.v, world.segments, strict=True):
        world.pool.write(0, world.batch.slots[at : at + length], k[start:], v[start:])
        at += length
    backend = TorchNative()
    backend.plan(world.batch)
    got = backend.run(world.q, None, None, layer, world.pool)
    wanted = naive(world.q[:4], world.k[0], world.v[0], 3, layer, None)
    torch.testing.assert_close(got[:4].double(), wanted, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_pool_converts_what_is_written(dtype: torch.dtype) -> None:
    pool = KVPool(KVShape(2, 2, 4, 6, dtype), 10, 2, "cpu")
    k, v, slots = torch.randn(3, 2, 4), torch.randn(3, 2, 6), torch.tensor([7, 0, 11])
    pool.write(1, slots, k, v)
    assert torch.equal(pool.k[1][slots].float(), k.to(dtype).float())
    assert torch.equal(pool.v[1][slots].float(), v.to(dtype).float())
    assert not pool.k[0].float().any()
    assert pool.k[1].shape == (12, 2, 4)
