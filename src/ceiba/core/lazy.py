"""Zeroed host memory that costs nothing until it is written. Owns a trick of the operating system and nothing else."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt


def lazy_bytes(size: int, *, huge_pages: bool = False) -> npt.NDArray[np.uint8]:
    """uint8 [size] of zeros at a page's border, taken from the system as it is written, a few kilobytes at a time.

    ``huge_pages``: for memory that will be written whole. numpy always asks for them, and the first byte of each takes
    and clears two megabytes: of a wide table for the first token of each row, of a KV pool for the first of each layer.
    A prompt of 1,024 tokens in 60 planes was seen to wait 150 ms for that in a virtual machine, which asks its host for
    the memory; small pages cost 14 ms, and attention is as fast. Raises MemoryError where the system refuses.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(size, np.uint8)
    try:
        memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size / 1e9:.1f} GB of memory are not to be had: {error.strerror}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages refuse the advice
            memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)


def sparse_table(rows: int, width: int) -> npt.NDArray[np.int32]:
    """Zeroed int32 [rows, width], much wider than what is used of it."""
    return lazy_bytes(rows * width * 4).view(np.int32).reshape(rows, width)
