"""Lazy zeros: zero, aligned, writable, and free until they are written."""

from __future__ import annotations

import psutil
import pytest
import torch

from ceiba.memory.zeros import lazy_zeros


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


def test_memory_is_taken_as_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    x = lazy_zeros(1 << 14, 1 << 14, dtype=torch.int32, device="cpu")
    assert process.memory_info().rss - before < 64 << 20
    x[: 1 << 11].fill_(1)
    assert process.memory_info().rss - before >= 100 << 20
