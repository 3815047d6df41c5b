"""Who is admitted next. Owns the order of the queue and the rule by which a request lets its twin compute first.

A policy sees requests and the cache's ``match`` (which mutates nothing); budgets are ``admission``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from ceiba.cache.base import PrefixCache
from ceiba.scheduler.request import Request
from ceiba.scheduler.waiting import WaitingQueue

MATCH_QUEUE_LIMIT = 128
"""Above this many waiting requests, matching all of them every round would cost more than the order gains."""


class Policy(Protocol):
    name: str

    def order(self, queue: WaitingQueue, cache: PrefixCache) -> Iterable[Request]:
        """The queue in admission order. May stop being valid when the queue changes."""


class FCFS:
    """First come, first served."""

    name = "fcfs"

    def order(self, queue: WaitingQueue, cache: PrefixCache) -> Iterable[Request]:
        return queue


class LPM:
    """Longest cached prefix first, arrival order among equals (SGLang paper, arXiv 2312.07104, section 3).

    Falls back to arrival order while more than ``MATCH_QUEUE_LIMIT`` wait or when there is no cache.
    """

    name = "lpm"

    def order(self, queue: WaitingQueue, cache: PrefixCache) -> Iterable[Request]:
        if not cache.enabled or len(queue) > MATCH_QUEUE_LIMIT:
            return queue
        return sorted(queue, key=lambda request: -cache.match(request.key, request.match_limit).length)


POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS, "lpm": LPM}


def make_policy(name: str) -> Policy:
    """The policy of ``--schedule-policy``; ValueError names the known ones."""
    if name not in POLICIES:
        raise ValueError(f"schedule policy {name!r} is not available; available: {', '.join(POLICIES)}")
    return POLICIES[name]()


class TwinPrefills:
    """In-queue de-duplication: of two requests with the same beginning, one computes it and the other reuses it.

    A request with at most ``check`` cached tokens that shares its first ``share`` tokens with a prefill whose first
    result has not been applied waits for that result, once: it is never delayed beyond the one prefill it waits for.
    """

    def __init__(self, check: int, share: int, enabled: bool) -> None:
        self.check = check
        self.share = max(share, 1)
        self.enabled = enabled
        self._heads: Counter[tuple[str, bytes]] = Counter()
        self._by_rid: dict[str, tuple[str, bytes]] = {}

    def must_wait(self, request: Request, cached: int) -> bool:
        if not self.enabled or request.held or cached > self.check or not self._heads:
            return False
        head = request.key.head(self.share)
        return head is not None and head in self._heads

    def started(self, request: Request) -> None:
        """``request`` (still without a row) begins its prefill: later ones with the same beginning wait for it."""
        head = request.key.head(self.share) if self.enabled else None
        if head is not None:
            self._heads[head] += 1
            self._by_rid[request.rid] = head

    def settled(self, request: Request) -> None:
        """Its first result is in the cache, or never will be. Harmless when called again."""
        head = self._by_rid.pop(request.rid, None)
        if head is not None:
            self._heads[head] -= 1
            if not self._heads[head]:
                del self._heads[head]
