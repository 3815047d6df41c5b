"""What a store of pages offers, and how it says that it cannot. A store is called from two threads at most, one that
reads and one that writes, unless its attribute ``threads`` says how many of each may come at a time. It may block them
for as long as it likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class StoreError(Exception):
    """The store failed. Whoever asked goes on as if it had nothing."""


class StoreFull(StoreError):
    """There is no room, and making some did not help."""


class PageStore(Protocol):
    """Pages by key, a short string of hex digits. What is put under a key is immutable until it is deleted."""

    def exists(self, keys: Sequence[str]) -> int:
        """How many of ``keys`` it has from the first one on without a gap."""

    def get(self, key: str) -> Buffer | None:
        """The page, or None. It may be damaged: the caller checks."""

    def put(self, key: str, parts: Sequence[Buffer]) -> int:
        """Keep ``parts``, joined, under ``key``, whole or not at all; returns the bytes written, 0 if it was there.

        Raises StoreFull, StoreError.
        """

    def delete(self, key: str) -> None:
        """Forget one page; no error if there is none."""

    def clear(self) -> int:
        """Forget all pages of this model; returns how many, as far as the store can tell."""

    def stats(self) -> dict[str, object]:
        """For people: where it is, how full."""

    def close(self) -> None: ...
