"""Tables much wider than what is used of them. Owns one trick of the operating system and nothing else."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from ceiba.cache.keys import Int32


def sparse_table(rows: int, width: int) -> Int32:
    """Zeroed int32 [rows, width] that takes memory only where it has been written, a few kilobytes at a time.

    numpy asks for huge pages, which would back two megabytes for the first token of each row; this must not.
    """
    size = max(rows * width * 4, mmap.PAGESIZE)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if hasattr(mmap, "MAP_PRIVATE") else None
    if memory is None:
        return np.zeros((rows, width), np.int32)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages refuse the advice
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32, rows * width).reshape(rows, width)
