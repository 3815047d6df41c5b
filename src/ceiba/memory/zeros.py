"""Large zeroed tensors that cost nothing until they are written: on the host, pages come from the kernel on first use.

``torch.zeros`` writes every byte at once, a second and a gibibyte for each gibibyte of a pool that may never fill.
"""

from __future__ import annotations

import math

import numpy as np
import torch

ALIGNMENT = 64


def lazy_zeros(*shape: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A zero tensor, contiguous and aligned to a cache line; its host memory is taken page by page as it is written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
