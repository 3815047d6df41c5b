"""Prefixes that stay cached although no request uses them: pins with names, an age limit and a common budget.

Owns who is pinned and who gives way; a pin is a lock on a path of the tree and knows neither tokens nor slots. Pinned
tokens are counted once, however many pins share them. The budget bounds what pins may take from everybody else; beyond
that they are a promise with an end: when a request could not run otherwise, ``give_way`` releases the oldest first.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ceiba.cache.base import Match, Node, PrefixCache


@dataclass(slots=True)
class Pin:
    node: Node
    length: int
    """Tokens from the root on."""
    expires: float
    """On the scheduler's clock; inf for ever."""
    displaceable: bool
    """Whether a newer pin may take its place in the budget."""


class PinBoard:
    """Pins of one cache. ``budget``: tokens that pins may hold together. ``clock``: what their ages are told by."""

    def __init__(self, cache: PrefixCache, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self.clock = clock
        self.budget = budget
        self.tokens = 0
        """Distinct tokens held by pins."""
        self.released = 0
        """Pins that gave way: to a newer one, or to a request."""
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def items(self) -> list[tuple[str, Pin]]:
        """Oldest first."""
        return list(self._pins.items())

    def pin(self, name: str, match: Match, *, expires: float = math.inf, displaceable: bool = False) -> bool:
        """Hold ``match`` under ``name``, in place of what that name held. ``match`` must be fresh.

        Displaceable pins make room, oldest first. False, and nothing has changed but those, when the budget is too
        small even so; the pin of that name, if any, stays as it was.
        """
        if not match.length:
            return False
        while self.tokens + self._growth(match, name) > self.budget:
            if not self._displace(name):
                return False
        node = self._cache.lock(match)
        assert node is not None
        self._add(node, 1)
        old = self._pins.pop(name, None)
        self._pins[name] = Pin(node, match.length, expires, displaceable)
        self._next_expiry = min(self._next_expiry, expires)
        if old is not None:
            self._drop(old)
        return True

    def unpin(self, name: str) -> int:
        """Release one pin; returns the tokens it held, 0 if there is none of that name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        self._drop(pin)
        return pin.length

    def clear(self) -> int:
        """Release all; returns how many there were."""
        count = len(self._pins)
        for name in list(self._pins):
            self.unpin(name)
        return count

    def expire(self, now: float) -> None:
        """Release pins whose time is over; O(1) until one is due."""
        if now < self._next_expiry:
            return
        for name, pin in list(self._pins.items()):
            if pin.expires <= now:
                self.unpin(name)
        self._next_expiry = min((pin.expires for pin in self._pins.values()), default=math.inf)

    def touch(self, name: str, expires: float) -> None:
        """Start the age of a pin anew and make it the youngest."""
        pin = self._pins.get(name)
        if pin is not None:
            pin.expires = expires
            self._pins.move_to_end(name)
            self._next_expiry = min(self._next_expiry, expires)

    def give_way(self, tokens: int) -> bool:
        """Release pins, displaceable ones first, each oldest first, until eviction can free ``tokens`` more.

        Returns whether anything was released.
        """
        wanted = self._cache.evictable + tokens
        order = sorted(self._pins, key=lambda name: not self._pins[name].displaceable)
        gone = 0
        for name in order:
            if self._cache.evictable >= wanted:
                break
            self.unpin(name)
            gone += 1
        self.released += gone
        return gone > 0

    def _growth(self, match: Match, name: str) -> int:
        """Tokens that pinning ``match`` would add to what is held, once the pin of that name is gone."""
        new = sum(len(node) for node in match.path if not node.pins)
        if match.path and not match.path[-1].pins:
            new -= sum(map(len, match.path)) - match.length
        old = self._pins.get(name)
        if old is None:
            return new
        at: Node | None = old.node
        kept = set(map(id, match.path))
        while at is not None and at.parent is not None:
            if at.pins == 1 and id(at) not in kept:
                new -= len(at)
            at = at.parent
        return new

    def _displace(self, name: str) -> bool:
        for other, pin in self._pins.items():
            if pin.displaceable and other != name:
                self.unpin(other)
                self.released += 1
                return True
        return False

    def _drop(self, pin: Pin) -> None:
        self._add(pin.node, -1)
        self._cache.unlock(pin.node)

    def _add(self, node: Node, count: int) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            before = at.pins
            at.pins += count
            if before == 0:
                self.tokens += len(at)
            elif at.pins == 0:
                self.tokens -= len(at)
            at = at.parent
