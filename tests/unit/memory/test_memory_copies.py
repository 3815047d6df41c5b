"""KV that crosses between device pool, host pool and blobs stays what it was, in every layout and way of copying."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from ceiba.memory.copies import Copier, runs
from ceiba.memory.host_pool import HostPool, device_planes
from ceiba.memory.pool import KVPool, KVShape

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
SHAPES = (
    KVShape(num_layers=3, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype=torch.bfloat16),
    KVShape(num_layers=2, num_kv_heads=1, head_dim=6, v_head_dim=6, dtype=torch.float32),
    KVShape(num_layers=2, num_kv_heads=1, head_dim=16, v_head_dim=0, dtype=torch.float8_e4m3fn),
    KVShape(num_layers=2, num_kv_heads=3, head_dim=8, v_head_dim=8, dtype=torch.int8),
)


def filled(shape: KVShape, slots: int, page: int, seed: int) -> KVPool:
    pool = KVPool(shape, slots, page, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for layer in (*pool.k, *pool.v):
        if layer.numel():
            raw = layer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def content(pool: KVPool, slots: np.ndarray) -> list[torch.Tensor]:
    """The bytes of some slots, read the plain way."""
    index = torch.from_numpy(slots.astype(np.int64))
    return [layer.view(torch.uint8)[index].clone() for layer in (*pool.k, *pool.v) if layer.numel()]


def some_slots(rng: np.random.Generator, total: int, page: int, pages: int) -> np.ndarray:
    chosen = rng.permutation(total // page)[:pages]
    return (chosen[:, None] * page + np.arange(page)).ravel().astype(np.int32)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("io", ["kernel", "direct"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", [1, 4])
def test_down_and_up_again(layout, io, page):
    rng = np.random.default_rng(page)
    for shape in SHAPES:
        pool, host = filled(shape, 64, page, 1), HostPool(shape, 96, page, layout)
        copier = Copier(pool, host, io)
        device, there = some_slots(rng, 64, page, 8 // page * 2), some_slots(rng, 96, page, 8 // page * 2)
        before = content(pool, device)
        others = np.setdiff1d(np.arange(64), device).astype(np.int32)
        untouched = content(pool, others)
        copier.backup(device, there)
        if io == "direct":  # on a CPU both are one: what a GPU would do is tried beside it
            host.planes[0].array[:] = 0
            copier._straight(device, there, to_host=True)
        assert same(content(pool, device), before)  # the source stays
        for layer in (*pool.k, *pool.v):
            layer.view(torch.uint8)[torch.from_numpy(device.astype(np.int64))] = 0
        copier.restore(there, device)
        assert same(content(pool, device), before)
        if io == "direct":
            for layer in (*pool.k, *pool.v):
                layer.view(torch.uint8)[torch.from_numpy(device.astype(np.int64))] = 0
            copier._straight(device, there, to_host=False)
            assert same(content(pool, device), before)
        assert same(content(pool, others), untouched)
        elsewhere = some_slots(rng, 64, page, len(device) // page)
        copier.restore(there, elsewhere)
        assert same(content(pool, elsewhere), before)


def test_a_blob_is_the_same_whatever_the_layout_and_goes_into_any_other():
    shape = SHAPES[0]
    pool = filled(shape, 32, 4, 7)
    device, there = np.arange(8, 24, dtype=np.int32), np.arange(4, 20, dtype=np.int32)
    blobs = []
    for layout in LAYOUTS:
        host = HostPool(shape, 32, 4, layout)
        copier = Copier(pool, host, "direct")
        copier.backup(device, there)
        blobs.append(copier.pack(there))
    assert blobs[0].tobytes() == blobs[1].tobytes() == blobs[2].tobytes()
    assert blobs[0].nbytes == 16 * shape.bytes_per_token
    expected = content(pool, device[4:])
    for layout in LAYOUTS:
        target = KVPool(shape, 32, 4, "cpu")
        host = HostPool(shape, 32, 4, layout)
        copier = Copier(target, host, "kernel")
        copier.unpack(blobs[0], there[4:], skip=4)  # the first page of tokens is known already
        copier.restore(there[4:], device[4:])
        assert same(content(target, device[4:]), expected)


def test_a_blob_of_another_size_is_refused():
    shape = SHAPES[1]
    host = HostPool(shape, 32, 1, "page_first")
    copier = Copier(KVPool(shape, 8, 1, "cpu"), host, "kernel")
    with pytest.raises(ValueError, match="bytes for 4 tokens"):
        copier.unpack(np.zeros(3 * shape.bytes_per_token, np.uint8), np.arange(4, dtype=np.int32), 0)


def test_runs_are_the_stretches_in_which_both_sides_count_up():
    a = np.array([3, 4, 5, 9, 10, 2], np.int32)
    b = np.array([7, 8, 9, 10, 20, 21], np.int32)
    assert list(runs(a, b)) == [(3, 7, 3), (9, 10, 1), (10, 20, 1), (2, 21, 1)]
    assert list(runs(a[:0], b[:0])) == []


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_the_addresses_that_a_gpu_is_told_are_those_of_the_rows(layout):
    pytest.importorskip("triton")
    rng = np.random.default_rng(5)
    for shape in SHAPES:
        pool, host = filled(shape, 64, 1, 2), HostPool(shape, 96, 1, layout)
        copier = Copier(pool, host, "kernel")
        device, there = some_slots(rng, 64, 1, 16), some_slots(rng, 96, 1, 16)
        copier.backup(device, there)
        for plane, layers in zip(host.planes, device_planes(pool), strict=True):
            below, above, width = copier._addresses(plane, layers)
            rows = plane.read(there)
            for layer, (a, b) in enumerate(zip(below.addresses.tolist(), above.addresses.tolist(), strict=True)):
                for i in range(16):
                    wanted = rows[i, layer].tobytes()
                    assert ctypes.string_at(a + int(device[i]) * below.stride, width) == wanted
                    assert ctypes.string_at(b + int(there[i]) * above.stride, width) == wanted
