"""Who leaves the cache first. Owns the order of victims; knows a node's statistics, never its tokens or slots.

A policy maps a node to a sort key, smallest first. The queue is a binary heap with lazy deletion: a node has at most
one entry, pushed when it becomes an unlocked leaf; an entry that turned stale is dropped or re-keyed when it surfaces.
Evicting k leaves of n costs O(k log n) plus the stale entries, each of which some earlier touch has paid for.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Victim(Protocol):
    """What a policy may look at, and the three facts that make a node evictable."""

    last_access: int
    hits: int
    priority: int
    queued: bool
    """Whether the queue holds an entry of this node; written by the queue alone."""

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that is still in the tree."""


V = TypeVar("V", bound=Victim)


class EvictionPolicy(Protocol):
    name: str

    def key(self, node: Victim) -> tuple[int, ...]:
        """Sort key, smallest evicted first. It may grow but must not shrink: re-keying is lazy."""


class LRU:
    """Least recently used first."""

    name = "lru"

    def key(self, node: Victim) -> tuple[int, ...]:
        return (node.last_access,)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU}


def make_policy(name: str) -> EvictionPolicy:
    """The policy of ``--radix-eviction-policy``; ValueError names the known ones."""
    if name not in POLICIES:
        raise ValueError(f"radix eviction policy {name!r} is not available; available: {', '.join(POLICIES)}")
    return POLICIES[name]()


class EvictionQueue(Generic[V]):
    """Evictable leaves in the policy's order."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._heap: list[tuple[tuple[int, ...], int, V]] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: V) -> None:
        """Offer an evictable leaf. Does nothing for a node that has an entry: its key is refreshed when it surfaces."""
        if not node.queued:
            node.queued = True
            self._push(self.policy.key(node), node)

    def pop(self) -> V | None:
        """Take the best victim out of the queue, or None when no node can be evicted."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if not node.evictable:
                node.queued = False
                continue
            current = self.policy.key(node)
            if current != key:
                self._push(current, node)
                continue
            node.queued = False
            return node
        return None

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()

    def _push(self, key: tuple[int, ...], node: V) -> None:
        self._ticket += 1  # nodes do not compare: the ticket breaks ties, oldest first
        heapq.heappush(self._heap, (key, self._ticket, node))
