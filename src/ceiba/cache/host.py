"""Copies of cached KV in host memory: which host slots hold a node's tokens, and which copies may go.

Owns the handle of one copy and of one operation that uses copies; the tree (``tiers``) decides when copies come and
go, and ``core.tiers`` moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from ceiba.cache.keys import CacheKey, Int32

if TYPE_CHECKING:
    from ceiba.cache.base import Node
    from ceiba.cache.tiers import TierNode

_NO_SLOTS = np.empty(0, np.int32)


class Kind(Enum):
    BACKUP = "backup"
    RESTORE = "restore"
    PACK = "pack"
    UNPACK = "unpack"


@dataclass(slots=True, eq=False)
class Operation:
    """One copy under way. Its host copies cannot be evicted before it ends."""

    kind: Kind
    ticket: int = -1
    copies: list[HostCopy] = field(default_factory=list)
    nodes: list[TierNode] = field(default_factory=list)
    """RESTORE: the nodes that come back to the device, parts of a split one in any order."""
    start: int = 0
    """RESTORE, UNPACK: tokens before the first one moved."""
    slots: Int32 = field(default_factory=lambda: _NO_SLOTS)
    """RESTORE: device slots; UNPACK: host slots. The operation's own until it ends."""
    held: Node | None = None
    """RESTORE: the lock on the device part above it."""
    cancelled: bool = False
    """RESTORE: its device slots have gone to somebody else."""
    key: CacheKey | None = None
    """PACK, UNPACK: the tokens from the root to the end of what is moved."""
    first: int = 0
    """PACK: index of the first storage page."""
    from_storage: int = 0
    """RESTORE: tokens that the storage had brought to the host."""

    @property
    def tokens(self) -> int:
        return len(self.slots)


class HostCopy:
    """Host slots of one node, int32 [len(node)]. A victim of the host's eviction queue, with the node's statistics."""

    __slots__ = ("dead", "node", "operations", "queued", "ready", "slots")

    def __init__(self, node: TierNode, slots: Int32, *, ready: bool = False) -> None:
        self.node = node
        self.slots = slots
        self.ready = ready
        """Whether the bytes have arrived."""
        self.dead = False
        """Given up while an operation was using it: its slots are free when that ends."""
        self.operations: list[Operation] = []
        self.queued = False

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def evictable(self) -> bool:
        """Nothing uses it, and no host copy lies below that could not be reached without it."""
        node = self.node
        return (
            self.ready
            and not self.operations
            and node.host is self
            and node.host_children == 0
            and node.parent is not None
        )

    @property
    def last_access(self) -> int:
        return self.node.last_access

    @property
    def hits(self) -> int:
        return self.node.hits

    @property
    def priority(self) -> int:
        return self.node.priority

    @property
    def start(self) -> int:
        return self.node.start

    @property
    def reach(self) -> int:
        return self.node.reach
