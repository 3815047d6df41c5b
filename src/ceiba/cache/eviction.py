"""Who leaves the cache first. Owns the order of victims; knows a node's statistics, never its tokens or slots.

A policy maps a node to a sort key, smallest first. The queue is a binary heap with lazy deletion: a node has at most
one entry, pushed when it becomes an unlocked leaf; an entry that turned stale is dropped or re-keyed when it surfaces.
Evicting k leaves of n costs O(k log n) plus the stale entries, each of which some earlier touch has paid for.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar


class Victim(Protocol):
    """What a policy may look at, and the three facts that make a node evictable."""

    queued: bool
    """Whether the queue holds an entry of this node; written by the queue alone."""

    def __len__(self) -> int: ...

    @property
    def last_access(self) -> int: ...

    @property
    def hits(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def reach(self) -> int: ...

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that is still in the tree."""


V = TypeVar("V", bound=Victim)
_Entry = tuple[tuple[int, ...], int, int, V]
"""Key, ticket, tokens, node."""


class EvictionPolicy(Protocol):
    name: str

    def key(self, node: Victim) -> tuple[int, ...]:
        """Sort key, smallest evicted first. It may grow but must not shrink: re-keying is lazy."""

    def yields(self, node: Victim) -> int:
        """How many tokens of the node's end may go at this key; the rest is looked at again under its new one."""

    @property
    def protected_percent(self) -> int:
        """How much of what can leave may be protected; beyond that the first of the protected ones leaves."""

    def protects(self, node: Victim) -> bool:
        """Whether the node leaves after all that are not protected. Never becomes false again."""


class _OneSegment:
    """Policies that protect nothing."""

    protected_percent = 100

    def protects(self, node: Victim) -> bool:
        return False


class _Whole(_OneSegment):
    """Policies that take a node as one piece."""

    def yields(self, node: Victim) -> int:
        return len(node)


class LRU(_Whole):
    """Least recently used first."""

    name = "lru"

    def key(self, node: Victim) -> tuple[int, ...]:
        return (node.last_access,)


class LFU(_Whole):
    """Least often reused first, among equals the least recently used. What was popular once stays long."""

    name = "lfu"

    def key(self, node: Victim) -> tuple[int, ...]:
        return (node.hits, node.last_access)


class SLRU(_Whole):
    """Segmented LRU (Karedla, Love and Wherry 1994): what was never reused goes before what was, each least recently
    used first. One long read of new documents then cannot flush the prefixes that keep coming back.

    ``protected_hits``: reuses from which a prefix belongs to the protected segment. ``protected_percent``: how much of
    the tokens that can leave this segment may hold. Beyond that its own least recently used leave, so that prefixes
    which were popular once do not take the room in which new ones wait for their first reuse.
    """

    name = "slru"

    def __init__(self, protected_hits: int = 1, protected_percent: int = 80) -> None:
        self.protected_hits = protected_hits
        self.protected_percent = protected_percent

    def key(self, node: Victim) -> tuple[int, ...]:
        return (node.last_access,)

    def protects(self, node: Victim) -> bool:
        return node.hits >= self.protected_hits


class Priority(_Whole):
    """Lowest priority of any request that used it first, among equals the least recently used."""

    name = "priority"

    def key(self, node: Victim) -> tuple[int, ...]:
        return (node.priority, node.last_access)


class TLRU(_OneSegment):
    """Tail-optimized LRU (Zhang, Li, Moallemi and Peng, arXiv 2510.15152): first what no slow first token depends on.

    A conversation of L tokens whose next prompt adds about Q computes L + Q - kept tokens next time. While that is at
    most ``threshold``, its end can go without anyone waiting longer than allowed; these ends go first, the rest by
    LRU. L is the furthest the conversation has ever reached, also after its end was dropped.

    ``threshold``: tokens a turn may have to compute; ``next_prompt``: Q.
    """

    name = "tlru"

    def __init__(self, threshold: int = 1024, next_prompt: int = 128) -> None:
        self.threshold = threshold
        self.next_prompt = next_prompt

    def _spare(self, node: Victim) -> int:
        dropped = node.reach - node.start - len(node)
        return min(len(node), self.threshold - self.next_prompt - dropped)

    def key(self, node: Victim) -> tuple[int, ...]:
        return (self._spare(node) <= 0, node.last_access)

    def yields(self, node: Victim) -> int:
        spare = self._spare(node)
        return spare if spare > 0 else len(node)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "lfu": LFU, "slru": SLRU, "priority": Priority, "tlru": TLRU}

OPTIONS: dict[str, tuple[str, ...]] = {
    "slru": ("protected_hits", "protected_percent"),
    "tlru": ("threshold", "next_prompt"),
}
"""Policy -> what ``--radix-eviction-policy-config`` may set, whole numbers from 0 up."""


def make_policy(name: str, options: Mapping[str, object] | None = None) -> EvictionPolicy:
    """The policy of ``--radix-eviction-policy``; ValueError names the known ones, and the known options."""
    if name not in POLICIES:
        raise ValueError(f"radix eviction policy {name!r} is not available; available: {', '.join(POLICIES)}")
    options = options or {}
    known = OPTIONS.get(name, ())
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"radix eviction policy {name} has no option {option!r}; it has: {', '.join(known) or 'none'}"
            )
        if type(value) is not int or value < 0:
            raise ValueError(f"radix eviction policy option {option} wants a whole number from 0 up, not {value!r}")
    return POLICIES[name](**options)


class EvictionQueue(Generic[V]):
    """Evictable leaves in the policy's order, the protected ones apart."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._heaps: tuple[list[_Entry[V]], list[_Entry[V]]] = ([], [])
        """Not protected, protected."""
        self._tokens = [0, 0]
        """Of the entries, as they were pushed."""
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._heaps[0]) + len(self._heaps[1])

    def push(self, node: V) -> None:
        """Offer an evictable leaf. Does nothing for a node that has an entry: its key is refreshed when it surfaces."""
        if not node.queued:
            node.queued = True
            self._push(node)

    def pop(self) -> V | None:
        """Take the best victim out of the queue, or None when no node can be evicted."""
        while len(self):
            segment = self._next()
            key, _, size, node = heapq.heappop(self._heaps[segment])
            self._tokens[segment] -= size
            if not node.evictable:
                node.queued = False
                continue
            if self.policy.protects(node) != segment or self.policy.key(node) != key:
                self._push(node)
                continue
            node.queued = False
            return node
        return None

    def clear(self) -> None:
        for heap in self._heaps:
            for *_, node in heap:
                node.queued = False
            heap.clear()
        self._tokens = [0, 0]

    def _next(self) -> int:
        """The segment whose first entry leaves next."""
        if not (self._heaps[0] and self._heaps[1]):
            return int(not self._heaps[0])
        return int(100 * self._tokens[1] > self.policy.protected_percent * sum(self._tokens))

    def _push(self, node: V) -> None:
        self._ticket += 1  # nodes do not compare: the ticket breaks ties, oldest first
        segment = int(self.policy.protects(node))
        heapq.heappush(self._heaps[segment], (self.policy.key(node), self._ticket, len(node), node))
        self._tokens[segment] += len(node)
