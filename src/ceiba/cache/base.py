"""What every prefix cache offers: match, lock, unlock, insert and evict as separate operations.

``RadixCache`` is the tree, ``NoCache`` the same interface for ``--disable-radix-cache``. A *component* is one kind of
per-request memory (full attention slots today; sliding window, recurrent state and draft KV later); a node holds one
handle array per component, and a *tier* says where the bytes lie (device today; host and storage later).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ceiba.cache.keys import CacheKey, Int32

if TYPE_CHECKING:
    from ceiba.cache.paths import PathOps

FULL = "full"
"""The component of full attention: one KV slot per token."""

Handles = Mapping[str, Int32]
"""Component name -> handles; per-token components have one int32 per token."""


class Tier(IntFlag):
    """Where a node's bytes lie; a node may be resident in several tiers at once."""

    DEVICE = 1
    HOST = 2
    STORAGE = 4


class Node:
    """An edge of the tree with its far end: a run of tokens and their handles. Mutated by the cache alone.

    Tokens are kept as int32 bytes: comparing a run is then one memcmp, whatever its length.
    """

    __slots__ = (
        "branch", "children", "data", "end_hash", "handles", "hits", "last_access", "locks", "namespace", "parent",
        "pins", "priority", "queued", "reach", "residence", "start",
    )  # fmt: skip

    def __init__(self, namespace: str, data: bytes, handles: dict[str, Int32], parent: Node | None) -> None:
        self.namespace = namespace
        self.data = data
        self.handles = handles
        self.children: dict[bytes, Node] = {}
        """First page's bytes -> child."""
        self.branch: Node | None = None
        """The child on the path that was used last, where somebody noted it: the compiled loops look there first."""
        self.parent = parent
        """None: a root, or a node that has left the tree."""
        self.locks = 0
        """How many live locks lie on this node or below it."""
        self.pins = 0
        """How many of those locks are pins, which outlive requests."""
        self.start: int = 0 if parent is None else parent.end
        """Tokens between the root and this node."""
        self.reach = self.end
        """The furthest that a cached sequence through this node has ever gone, in tokens from the root."""
        self.end_hash: int | None = None
        """Hash of all tokens up to ``end``, kept once somebody has asked (see ``history``)."""
        self.last_access = 0
        self.hits = 0
        """Requests that began with this prefix, besides the one that computed it."""
        self.priority = 0
        self.residence = Tier.DEVICE
        self.queued = False

    def __len__(self) -> int:
        return len(self.data) // 4

    @property
    def end(self) -> int:
        """Tokens between the root and this node's last token, which counts."""
        return self.start + len(self)

    @property
    def tokens(self) -> Int32:
        """The run as int32, read-only."""
        return np.frombuffer(self.data, np.int32)

    @property
    def evictable(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not None


@dataclass(slots=True)
class Match:
    """The longest cached prefix of a key. Valid until the cache changes; holds nothing until it is locked."""

    length: int = 0
    path: list[Node] = field(default_factory=list)
    """Nodes from below the root down; the last one may be used in part."""
    paths: PathOps | None = None
    """The loops of the tree that made it; None for an empty match."""

    def handles(self, component: str = FULL) -> Int32:
        """Handles of the matched tokens, int32 [length]."""
        found = np.empty(self.length, np.int32)
        if self.paths is not None and self.path:
            self.paths.gather(self.path, component, found)
        return found

    @property
    def unlocked(self) -> int:
        """Matched tokens that nobody holds: locking the match takes this many out of what can be evicted."""
        if self.paths is None or not self.path:
            return 0
        last = self.path[-1]
        unused = last.end - self.length if last.locks == 0 else 0
        return self.paths.unlocked(self.path) - unused


@dataclass(slots=True)
class Inserted:
    """What became of an insert."""

    match: Match
    """The inserted prefix, ready to be locked; length 0 when the cache keeps nothing."""
    existing: int
    """Leading tokens that were there before: the cache kept its own handles, the caller's are duplicates."""


class PrefixCache(Protocol):
    page_size: int
    enabled: bool
    version: int
    """Changes whenever a match may have become stale or could come out longer or shorter."""

    @property
    def evictable(self) -> int:
        """Cached tokens that nobody holds."""

    @property
    def locked(self) -> int:
        """Cached tokens on the path of some lock."""

    def match(self, key: CacheKey, limit: int | None = None) -> Match:
        """Longest cached prefix of at most ``limit`` tokens. Locks nothing, mutates nothing."""

    def continuation(self, key: CacheKey, most: int) -> Int32:
        """The tokens that follow the whole of ``key`` in the cache, at most ``most``; none where it does not hold all
        of it. Of several ways on the one used last. Locks nothing, mutates nothing."""

    def lock(self, match: Match, *, hit: bool = False) -> Node | None:
        """Hold the matched prefix; returns what ``unlock`` wants back. ``hit``: a request begins with it."""

    def unlock(self, node: Node | None) -> None:
        """Undo one ``lock``."""

    def insert(self, key: CacheKey, handles: Handles, priority: int = 0) -> Inserted:
        """Offer a prefix; the cache takes ownership of the handles past ``Inserted.existing``."""

    def evict(self, tokens: int, cause: str = "") -> dict[str, Int32]:
        """Drop unheld tokens until ``tokens`` are gone or none is left; returns their handles, the caller's again.

        ``cause`` names whom room is made for.
        """

    def reset(self) -> dict[str, Int32]:
        """Drop everything; RuntimeError while anything is locked. Returns all handles."""

    def handles(self, component: str = FULL) -> Int32:
        """Every handle held, for audits; O(cache)."""
