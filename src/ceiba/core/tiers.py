"""The seam between the cache index and the bytes of its lower tiers: what the brain asks for and what it hears back.

Owns names and shapes; knows neither tensors nor files. Slots are int32 arrays: device slots number the KV pool, host
slots the host pool. Nothing here waits: each call returns a ticket and ``poll`` tells what became of it. Copies between
device, host and blobs are carried out strictly in the order of the calls, so a later one sees what an earlier one
wrote; work on the storage has an order of its own.

A *blob* is one storage page on its way: the KV of consecutive tokens as bytes, opaque to the brain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Int32 = np.ndarray


@dataclass(slots=True)
class CopyDone:
    """One copy has ended, for better or worse. All of its bytes arrived, or none count."""

    ticket: int
    error: str = ""
    """Empty: it worked."""
    seconds: float = 0.0
    size: int = 0
    """Bytes moved."""
    blobs: list[Any] = field(default_factory=list)
    """Of a ``pack``: one per page."""


@dataclass(slots=True)
class StorageDone:
    """News of one storage job. A fetch may report several times; ``final`` ends a job."""

    ticket: int
    final: bool
    found: int | None = None
    """Pages that the storage holds from the asked one on, once known."""
    first: int = 0
    """Index of ``blobs[0]`` among the pages that were asked for."""
    blobs: list[Any] = field(default_factory=list)
    stored: int = 0
    """Pages that a store has written, or found there already."""
    error: str = ""
    seconds: float = 0.0
    size: int = 0


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What the scheduler must know, read once."""

    host_tokens: int
    """Host slots, numbered [0, host_tokens)."""
    bytes_per_token: int
    storage_page: int
    """Tokens of one storage page, a multiple of the page size."""


@dataclass(frozen=True, slots=True)
class StorageStatus:
    """What is attached. ``state``: ``detached``, ``attaching``, ``ok``, or ``suspended`` after failures."""

    backend: str | None = None
    state: str = "detached"
    backlog: int = 0
    """Bytes that wait to be written."""
    writable: bool = True
    """Off for a while after it said that it is full."""
    detail: Mapping[str, Any] = field(default_factory=dict)


class TierIO(Protocol):
    """Implementations: ``memory.tiers.TierEngine`` and, for tests and simulation, ``FakeTiers``."""

    info: TierInfo

    def backup(self, device: Int32, host: Int32) -> int:
        """Copy KV of ``device`` slots to ``host`` slots, int32 [N] each. It waits for no forward pass: what the slots
        hold has been computed, as the tree only ever has what a result confirmed."""

    def restore(self, host: Int32, device: Int32) -> int:
        """Copy KV of ``host`` slots to ``device`` slots, after every forward pass launched so far."""

    def pack(self, pages: list[Int32]) -> int:
        """Read pages (host slots in token order, int32 [storage_page] each) into blobs."""

    def unpack(self, blobs: list[Any], host: list[Int32], skip: list[int]) -> int:
        """Write blobs to host slots; ``skip[i]`` leading tokens of blob i are left out."""

    def fence(self, ticket: int) -> None:
        """Nothing launched from now on may touch the device before this copy has left it: its slots have new owners."""

    def poll(self) -> list[CopyDone]:
        """Copies that have ended since the last call, in order."""

    def drain(self) -> list[CopyDone]:
        """Wait for every copy; what ``poll`` would give."""

    # ── storage ──────────────────────────────────────────────────────────────

    def fetch(self, namespace: str, tokens: Int32, first: int, threshold: int) -> int:
        """Look for the whole pages of ``tokens`` from page ``first`` on, and read them when there are at least
        ``threshold`` of them one after the other. Unverifiable pages end the run."""

    def store(self, namespace: str, tokens: Int32, first: int, blobs: list[Any]) -> int:
        """Write pages ``first``, ``first + 1``, … of ``tokens``."""

    def cancel(self, ticket: int) -> None:
        """Forget a storage job or an attach: no news of it will come, and nothing will be attached."""

    def poll_storage(self) -> list[StorageDone]: ...

    def attach(self, backend: str, options: Mapping[str, Any]) -> int:
        """Connect a storage in the background, in place of none. Raises CeibaError at once for what cannot work."""

    def detach(self) -> None:
        """Give the storage up; jobs under way are forgotten, what is stored stays."""

    def clear(self) -> int:
        """Delete all that this model has stored, in the background."""

    def storage(self) -> StorageStatus: ...

    def close(self) -> None: ...
