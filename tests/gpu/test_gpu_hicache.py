"""The cache tiers on a CUDA device: streams, pinned memory, events, fences; the same bytes come back in each layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ceiba.config.records import HiCacheConfig
from ceiba.memory.pool import KVPool, KVShape
from ceiba.memory.tiers import TierEngine

SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.bfloat16)
PAIRS = (
    ("kernel", "page_first"),
    ("kernel", "layer_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
)

pytestmark = pytest.mark.gpu


def make(io: str, layout: str, page: int = 16, slots: int = 4096) -> tuple[TierEngine, KVPool]:
    pool = KVPool(SHAPE, slots, page, "cuda")
    for layer in (*pool.k, *pool.v):
        layer.normal_()
    config = HiCacheConfig(host_tokens=2 * slots, io_backend=io, mem_layout=layout, storage_page=64)
    return TierEngine(config, pool, {"test": 1}), pool


def pages(rng: np.random.Generator, total: int, page: int, count: int) -> np.ndarray:
    chosen = rng.permutation(total // page)[:count]
    return (chosen[:, None] * page + np.arange(page)).ravel().astype(np.int32)


@pytest.mark.parametrize(("io", "layout"), PAIRS)
def test_down_and_up_again(io, layout):
    rng = np.random.default_rng(0)
    engine, pool = make(io, layout)
    try:
        device, host, back = pages(rng, 4096, 16, 40), pages(rng, 8192, 16, 40), pages(rng, 4096, 16, 40)
        before = [layer[torch.from_numpy(device).long().cuda()].clone() for layer in (*pool.k, *pool.v)]
        torch.cuda.synchronize()
        engine.backup(device, host)
        engine.restore(host, back)
        done = engine.drain()
        assert not any(entry.error for entry in done)
        for layer, was in zip((*pool.k, *pool.v), before, strict=True):
            assert torch.equal(layer[torch.from_numpy(back).long().cuda()], was)
        engine.pack([host[:64]])
        blob = engine.drain()[0].blobs[0]
        assert blob.nbytes == 64 * SHAPE.bytes_per_token
        other = pages(rng, 8192, 16, 4)
        engine.unpack([blob], [other], [0])
        engine.restore(other, device[:64])
        assert not any(entry.error for entry in engine.drain())
        for layer, was in zip((*pool.k, *pool.v), before, strict=True):
            assert torch.equal(layer[torch.from_numpy(device[:64]).long().cuda()], was[:64])
    finally:
        engine.close()


def test_a_fence_keeps_later_kernels_behind_a_backup_and_a_restore_behind_earlier_ones():
    engine, pool = make("kernel", "page_first")
    try:
        device, host = np.arange(1024, dtype=np.int32), np.arange(1024, dtype=np.int32)
        for round_ in range(10):
            for layer in pool.k:
                layer[:1024] = float(round_)
            torch.cuda.synchronize()
            engine.fence(engine.backup(device, host))
            for layer in pool.k:
                layer[:1024] = -1.0  # the new owner, launched at once
            spin = torch.randn(2048, 2048, device="cuda")
            for _ in range(20):
                spin = spin @ spin
            for layer in pool.k:
                layer[2048:3072] = -2.0  # a step under way still writes where the restore goes
            engine.restore(host, np.arange(2048, 3072, dtype=np.int32))
            engine.drain()
            torch.cuda.synchronize()
            assert all((layer[2048:3072] == float(round_)).all() for layer in pool.k)
    finally:
        engine.close()
