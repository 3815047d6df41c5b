"""Large zeroed tensors that cost nothing until they are written: on the host, pages come from the kernel on first use.

``torch.zeros`` writes every byte at once, a second and a gibibyte for each gibibyte of a pool that may never fill.
"""

from __future__ import annotations

import math

import torch

from ceiba.core.lazy import lazy_bytes


def lazy_zeros(*shape: int, dtype: torch.dtype, device: torch.device | str, huge_pages: bool = False) -> torch.Tensor:
    """A zero tensor, contiguous and aligned to a page; its host memory is taken page by page as it is written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = lazy_bytes(math.prod(shape) * dtype.itemsize, huge_pages=huge_pages)
    return torch.from_numpy(data).view(dtype).view(shape)
