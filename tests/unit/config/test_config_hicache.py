"""The flags of the cache tiers: sizes, pairs, options, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from ceiba.config.flags import flags_from_kwargs
from ceiba.config.hicache import HostRoom, hicache
from ceiba.core.errors import ConfigError

ROOM = HostRoom(free_bytes=100 * 10**9, kv_bytes=10**5, pool_tokens=100_000)


def made(room: HostRoom = ROOM, *, cached: bool = True, generates: bool = True, **flags):
    flags.setdefault("enable_hierarchical_cache", True)
    given = flags_from_kwargs(**flags)
    return hicache(given, room, cached=cached, generates=generates, folder=Path("/kv"))


def test_off_by_default():
    assert made(enable_hierarchical_cache=False) == (None, [])


def test_sizes():
    assert made()[0].host_tokens == 200_000  # twice the pool
    assert made(hicache_ratio=0.5)[0].host_tokens == 50_000
    assert made(hicache_size=30)[0].host_tokens == 300_000
    found, notes = made(hicache_size=30, hicache_ratio=5.0)
    assert found.host_tokens == 300_000
    assert "--hicache-size 30 wins" in notes[0]
    assert made(page_size=64)[0].host_tokens == 200_000 // 64 * 64


def test_the_share_of_host_memory_bounds_the_default_and_refuses_the_rest():
    small = HostRoom(10 * 10**9, 10**5, 100_000)
    found, notes = made(small)
    assert found.host_tokens == 80_000
    assert "0.8 of" in notes[0]
    assert made(small, hicache_host_memory_fraction=0.5)[0].host_tokens == 50_000
    for flag, value in (("hicache_size", 9), ("hicache_ratio", 2.0)):
        with pytest.raises(ConfigError, match="--hicache-host-memory-fraction") as caught:
            made(small, **{flag: value})
        assert caught.value.param == f"--{flag.replace('_', '-')}"
    with pytest.raises(ConfigError, match="too few"):
        made(HostRoom(-5, 10**5, 1000))


def test_what_it_cannot_go_with_is_refused():
    with pytest.raises(ConfigError, match="--disable-radix-cache"):
        made(cached=False)
    with pytest.raises(ConfigError, match="no KV cache"):
        made(generates=False)
    for dest, value in (
        ("hicache_ratio", 2.0),
        ("hicache_storage_backend", "file"),
        ("hicache_write_policy", "write_back"),
    ):
        with pytest.raises(ConfigError, match="add --enable-hierarchical-cache"):
            made(enable_hierarchical_cache=False, **{dest: value})
    with pytest.raises(ConfigError, match="without --hicache-storage-backend"):
        made(hicache_storage_backend_extra_config={"path": "/x"})


def test_layout_and_way_of_copying_go_together():
    found, _ = made()
    assert (found.io_backend, found.mem_layout) == ("kernel", "page_first")
    found, notes = made(hicache_io_backend="direct")
    assert (found.io_backend, found.mem_layout) == ("direct", "page_first_direct")
    assert notes
    found, _ = made(hicache_mem_layout="page_first_direct")
    assert found.io_backend == "direct"
    assert made(hicache_mem_layout="layer_first", hicache_io_backend="direct")[0].mem_layout == "layer_first"
    for io, layout in (("direct", "page_first"), ("kernel", "page_first_direct")):
        with pytest.raises(ConfigError, match=layout):
            made(hicache_io_backend=io, hicache_mem_layout=layout)


def test_the_extra_configuration_is_taken_apart():
    extra = {"prefetch_threshold": 100, "prefetch_timeout_base": 2, "page_tokens": 100, "max_gb": 5}
    found, _ = made(page_size=16, hicache_storage_backend="file", hicache_storage_backend_extra_config=extra)
    assert found.storage_options == {"path": "/kv", "max_gb": 5}
    assert (found.prefetch_threshold, found.prefetch_timeout_base, found.storage_page) == (100, 2, 112)
    assert made()[0].prefetch_threshold == 256
    for extra, text in (
        ([1], "JSON object"),
        ({"prefetch_threshold": 0}, "whole number from 1"),
        ({"prefetch_timeout_base": 31}, "from 0 to 30"),
        ({"page_tokens": 1.5}, "whole number"),
        ({"prefetch_timeout_per_ki_token": True}, "a number"),
    ):
        with pytest.raises(ConfigError, match=text):
            made(hicache_storage_backend="file", hicache_storage_backend_extra_config=extra)


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("hicache_storage_backend", "hf3fs", "3FS cluster"),
        ("hicache_storage_backend", "aibrix", "aibrix-kvcache"),
        ("hicache_storage_backend", "seaweedfs", "file backend"),
        ("hicache_io_backend", "kernel_ascend", "Ascend"),
        ("hicache_mem_layout", "page_head", "tensor parallelism"),
        ("hicache_host_memory_mode", "buffer_only", "buffer"),
        ("hicache_size", -1, "at least 0|from 0"),
    ],
)
def test_values_that_do_not_work_say_what_they_need(flag, value, text):
    with pytest.raises(ConfigError, match=text):
        made(**{flag: value})


def test_a_storage_whose_package_is_missing_is_refused_before_anything_is_loaded():
    for backend in ("mooncake", "nixl"):
        with pytest.raises(ConfigError, match="not installed"):
            made(hicache_storage_backend=backend)
    given = flags_from_kwargs(enable_hierarchical_cache=True, hicache_storage_backend="mooncake")
    found, _ = hicache(given, ROOM, cached=True, generates=True, folder=Path("/kv"), packages=("mooncake",))
    assert found.storage_backend == "mooncake"
