"""Packed masks, int32 words with bit t % 32 of word t // 32 for token t. Owns the few operations on them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ceiba.core.step import Int32


def packed(tokens: Iterable[int], words: int) -> Int32:
    """The mask of exactly these tokens, int32 [words]."""
    flags = np.zeros(words * 32, np.uint8)
    flags[np.fromiter(tokens, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<i4")


def members(bits: Int32) -> np.ndarray:
    """The tokens of a mask, int64 [N], ascending."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
