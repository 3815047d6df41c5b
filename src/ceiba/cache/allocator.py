"""Slots of one KV pool, handed out in pages. Owns which slots are free; knows neither tree nor requests.

A page is ``page_size`` consecutive slots; with page size 1 a page is a slot. Free pages lie on a numpy stack, so both
directions are one slice copy however many pages move.
"""

from __future__ import annotations

import numpy as np

from ceiba.cache.keys import Int32


class OutOfSlots(Exception):
    """More slots were asked for than are free. Callers make room first, so this is a bug of the caller."""


class SlotAllocator:
    """``num_slots`` slots in pages; a remainder smaller than a page is never handed out."""

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        if page_size < 1 or num_slots < page_size:
            raise ValueError(f"{num_slots} slots do not hold one page of {page_size}")
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self._stack = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._top = self.num_pages
        self._is_free = np.ones(self.num_pages, bool)
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def total(self) -> int:
        """Usable slots."""
        return self.num_pages * self.page_size

    @property
    def free(self) -> int:
        """Free slots."""
        return self._top * self.page_size

    def alloc(self, num_pages: int) -> Int32:
        """Slots of ``num_pages`` pages, int32 [num_pages * page_size], each page's slots ascending and together.

        Raises ``OutOfSlots`` and takes nothing when fewer are free.
        """
        if num_pages > self._top:
            raise OutOfSlots(f"{num_pages} pages of {self.page_size} slots wanted, {self._top} are free")
        pages = self._stack[self._top - num_pages : self._top][::-1].copy()
        self._top -= num_pages
        self._is_free[pages] = False
        if self.page_size == 1:
            return pages
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).ravel()

    def release(self, slots: Int32) -> None:
        """Take back whole pages, given as ``alloc`` gave them. ValueError on a page that is free already."""
        if len(slots) == 0:
            return
        if len(slots) % self.page_size:
            raise ValueError(f"{len(slots)} slots are not whole pages of {self.page_size}")
        pages = slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size
        if self._top + len(pages) > self.num_pages or self._is_free[pages].any():
            raise ValueError(f"slots freed twice: pages {pages[self._is_free[pages]][:8].tolist()}")
        self._is_free[pages] = True
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)

    def free_slots(self) -> Int32:
        """All free slots, for audits; O(total)."""
        pages = self._stack[: self._top]
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).ravel()
