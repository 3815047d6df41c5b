"""Lazy zeros: zero, aligned, writable, and free until they are written."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from ceiba.core.lazy import lazy_bytes
from ceiba.memory.zeros import lazy_zeros

PAGE = mmap.PAGESIZE
PAGEMAP = Path("/proc/self/pagemap")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_zero_aligned_and_writable(dtype: torch.dtype) -> None:
    for shape in ((3, 5, 7), (1,), (0, 4)):
        x = lazy_zeros(*shape, dtype=dtype, device="cpu")
        assert (x.shape, x.dtype) == (torch.Size(shape), dtype)
        assert x.is_contiguous()
        assert x.data_ptr() % 64 == 0 or x.numel() == 0
        assert not x.float().any()
        x.view(torch.uint8).fill_(7)
        assert x.view(torch.uint8).eq(7).all()


def resident(x: torch.Tensor) -> int:
    """Bytes of a tensor that lie in memory, by the kernel's page map: the rest of the process comes and goes."""
    first, last = x.data_ptr() // PAGE, (x.data_ptr() + x.nbytes - 1) // PAGE
    with PAGEMAP.open("rb") as f:
        f.seek(8 * first)
        entries = np.frombuffer(f.read(8 * (last - first + 1)), np.uint64)
    return int(np.count_nonzero(entries >> 63)) * PAGE


@pytest.mark.skipif(not PAGEMAP.exists(), reason="this system does not say which pages lie in memory")
def test_memory_is_taken_as_it_is_written() -> None:
    x = lazy_zeros(1 << 14, 1 << 14, dtype=torch.int32, device="cpu")
    assert resident(x) == 0
    x[: 1 << 11].fill_(1)
    assert 128 << 20 <= resident(x) < 144 << 20


@pytest.mark.skipif(not PAGEMAP.exists(), reason="this system does not say which pages lie in memory")
def test_what_is_written_here_and_there_takes_small_pages() -> None:
    """A KV pool has as many such places as layers; a huge page each would be 128 MiB."""
    x = lazy_zeros(64, 1 << 22, dtype=torch.uint8, device="cpu")
    x[:, 0] = 1
    assert 64 * PAGE <= resident(x) < 4 << 20


def test_memory_that_is_not_there_is_said_with_its_size() -> None:
    with pytest.raises(MemoryError, match=r"281475\.0 GB"):
        lazy_bytes(1 << 48)
