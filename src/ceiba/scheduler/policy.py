"""Who is admitted next. Owns the order of the queue and the rule by which a request lets its twin compute first.

A policy sees what ``View`` shows: the queue, the cache's matches (looking mutates nothing), the running rows and the
counters; budgets are ``admission``'s, shares between tenants ``fair``'s. A larger priority goes first here: intake has
turned it round where low values come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from ceiba.cache.base import Match, Node, PrefixCache
from ceiba.cache.keys import common_prefix
from ceiba.cache.tiers import TieredCache
from ceiba.config.records import SchedulerConfig
from ceiba.scheduler.request import Request
from ceiba.scheduler.rows import RowTable
from ceiba.scheduler.stats import Counters
from ceiba.scheduler.waiting import WaitingQueue

MATCH_QUEUE_LIMIT = 128
"""Above this many waiting requests, matching all of them every round would cost more than the order gains."""

RANKED = 512
"""Policies without that limit rank this many of the queue's front; the rest follows in order of arrival."""

SHORT_SHARE = 0.25
"""Share of the chunk budget that shortest-prefill-first keeps for requests that fit into it."""


class Matches:
    """What the cache holds of waiting requests, looked up again only after the cache has changed."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def of(self, request: Request) -> Match:
        """The fresh match of a request without a row. Do not change it."""
        memo = request.match_memo
        if memo is None or memo[0] != self.cache.version:
            memo = request.match_memo = (self.cache.version, self.cache.match(request.key, request.match_limit))
        return memo[1]

    def length(self, request: Request) -> int:
        """Tokens it need not compute, wherever they are cached."""
        cache = self.cache
        if not isinstance(cache, TieredCache):
            return self.of(request).length
        memo = request.length_memo
        if memo is None or memo[0] != cache.version:
            found = cache.match_tiers(request.key, request.match_limit).length
            memo = request.length_memo = (cache.version, found)
        return memo[1]

    def uncached(self, request: Request) -> int:
        """Tokens it has to compute."""
        return len(request.tokens) - self.length(request)


@dataclass(slots=True)
class View:
    """What a policy may look at."""

    queue: WaitingQueue
    matches: Matches
    rows: RowTable
    counters: Counters


class Policy(Protocol):
    name: str
    keeps_share_for_short: bool

    def order(self, view: View) -> Iterable[Request]:
        """The queue in admission order. May stop being valid when the queue changes."""

    def stamp(self, view: View) -> object:
        """What the order depends on: while it stays equal, so does the order. None: it never does."""


class CurrentOrder:
    """A policy's order, made anew only when what it depends on has changed: while thousands wait for room, a step must
    not sort them again."""

    def __init__(self, policy: Policy, view: View) -> None:
        self._policy = policy
        self._view = view
        self._requests: list[Request] = []
        self.stamp: object = None
        """That of the last order that was asked for."""

    def __call__(self) -> Iterable[Request]:
        stamp = self._policy.stamp(self._view)
        if stamp is None:
            self.stamp = None
            return self._policy.order(self._view)
        if stamp != self.stamp:
            self._requests = list(self._policy.order(self._view))
            self.stamp = stamp
        return self._requests


class _Plain:
    keeps_share_for_short = False

    def stamp(self, view: View) -> object:
        return (view.queue.version,)


class _CacheAware(_Plain):
    def stamp(self, view: View) -> object:
        return (view.queue.version, view.matches.cache.version)


class FCFS(_Plain):
    """First come, first served."""

    name = "fcfs"

    def order(self, view: View) -> Iterable[Request]:
        return view.queue


class Static(_Plain):
    """An order that depends on the requests alone."""

    def __init__(self, name: str, key: Callable[[Request], tuple[float, ...]]) -> None:
        self.name = name
        self._key = key

    def order(self, view: View) -> Iterable[Request]:
        return sorted(view.queue, key=self._key)


class Random(_Plain):
    """Shuffled anew each round, so that nobody's bad luck lasts. Drawn as it is read: few are admitted of many."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def order(self, view: View) -> Iterable[Request]:
        requests = list(view.queue)
        for left in range(len(requests), 0, -1):  # Fisher and Yates
            at = int(self._rng.integers(left))
            requests[at], requests[left - 1] = requests[left - 1], requests[at]
            yield requests[left - 1]

    def stamp(self, view: View) -> object:
        return None


class RoutingKey(_Plain):
    """The routing key most frequent in the running batch first; requests without a key count as one key's."""

    name = "routing-key"

    def order(self, view: View) -> Iterable[Request]:
        running = self._running(view)
        return sorted(view.queue, key=lambda request: -running[request.routing_key])

    def stamp(self, view: View) -> object:
        return (view.queue.version, self._running(view))

    @staticmethod
    def _running(view: View) -> Counter[str]:
        return Counter(request.routing_key for request in view.rows.live())


class LPM(_CacheAware):
    """Longest cached prefix first, arrival order among equals (SGLang paper, arXiv 2312.07104, section 3).

    Falls back to arrival order while more than ``MATCH_QUEUE_LIMIT`` wait.
    """

    name = "lpm"

    def order(self, view: View) -> Iterable[Request]:
        if len(view.queue) > MATCH_QUEUE_LIMIT:
            return view.queue
        return sorted(view.queue, key=lambda request: -view.matches.length(request))


class HRRN(_CacheAware):
    """Highest response ratio next (Brinch Hansen 1971), counted in work instead of seconds: prefill tokens processed
    while the request waited over its own uncached length. Short ones go first, long ones gain by waiting.

    Falls back to arrival order while more than ``MATCH_QUEUE_LIMIT`` wait.
    """

    name = "hrrn"

    def order(self, view: View) -> Iterable[Request]:
        if len(view.queue) > MATCH_QUEUE_LIMIT:
            return view.queue
        done = view.counters.prefill_tokens

        def ratio(request: Request) -> float:
            return -(done - request.prefill_mark) / max(1, view.matches.uncached(request))

        return sorted(view.queue, key=ratio)

    def stamp(self, view: View) -> object:
        return (view.queue.version, view.matches.cache.version, view.counters.prefill_tokens)


class ShortestPrefillFirst(_CacheAware):
    """Fewest uncached tokens first. A long prompt in chunks leaves ``SHORT_SHARE`` of the budget to those who fit."""

    name = "shortest-prefill-first"
    keeps_share_for_short = True

    def order(self, view: View) -> Iterable[Request]:
        return _ranked(view.queue, lambda front: sorted(front, key=view.matches.uncached))


class DFSWeight(_CacheAware):
    """Requests of one subtree of the cache together, heavier subtrees first: the order of a depth-first walk in which
    a node weighs as much as there are requests waiting below it (SGLang paper, arXiv 2312.07104, section 3)."""

    name = "dfs-weight"

    def order(self, view: View) -> Iterable[Request]:
        return _ranked(view.queue, lambda front: self._walk(front, view.matches))

    @staticmethod
    def _walk(front: list[Request], matches: Matches) -> list[Request]:
        weight: Counter[Node] = Counter()
        for request in front:
            weight.update(matches.of(request).path)
        seen = {node: i for i, node in enumerate(weight)}

        def key(request: Request) -> list[tuple[int, int]]:
            # Sorting by the path from the root is the walk; a node's own requests come after those below it, and among
            # them first those that match more of it.
            match = matches.of(request)
            return [*((-weight[node], seen[node]) for node in match.path), (1, -match.length)]

        return sorted(front, key=key)


def _ranked(queue: WaitingQueue, rank: Callable[[list[Request]], list[Request]]) -> Iterable[Request]:
    waiting = iter(queue)
    front = rank(list(islice(waiting, RANKED)))
    return [*front, *waiting] if len(queue) > RANKED else front


def _by_arrival(request: Request) -> tuple[float, ...]:
    return (-request.priority,)


def _by_output(request: Request) -> tuple[float, ...]:
    return (-request.max_new,)


def _by_priority_and_output(request: Request) -> tuple[float, ...]:
    return (-request.priority, -request.max_new)


CACHE_AWARE: dict[str, type[Policy]] = {
    "lpm": LPM,
    "hrrn": HRRN,
    "dfs-weight": DFSWeight,
    "shortest-prefill-first": ShortestPrefillFirst,
}
POLICIES = ("fcfs", "lof", "random", "routing-key", "priority", *CACHE_AWARE)


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy of ``--schedule-policy``; ValueError names the known ones. Without a cache, cache-aware ones are fcfs.

    ``lof``: largest max_new_tokens first. ``priority`` is fcfs with priorities on.
    """
    name, prioritized = config.policy, config.enable_priority_scheduling
    if name not in POLICIES:
        raise ValueError(f"schedule policy {name!r} is not available; available: {', '.join(POLICIES)}")
    if name == "priority" or (name == "fcfs" and prioritized):
        return Static(name, _by_arrival)
    if name == "lof":
        return Static(name, _by_priority_and_output if prioritized else _by_output)
    if name == "random":
        return Random(config.random_seed)
    if name == "routing-key":
        return RoutingKey()
    if name == "fcfs" or config.disable_radix_cache:
        return FCFS()
    return CACHE_AWARE[name]()


class TwinPrefills:
    """In-queue de-duplication: of two requests with the same beginning, one computes it and the other reuses it.

    A request with at most ``check`` cached tokens that shares its first ``share`` tokens with a prefill that has not
    come to its end waits for that. So does one that finds the first chunks of such a prefill cached, as long as the
    rest would give it another page. It waits for one prefill only, whatever others begin meanwhile.
    """

    def __init__(self, check: int, share: int, enabled: bool, page: int = 1) -> None:
        self.page = page
        self.check = check
        self.share = max(share, 1)
        self.enabled = enabled
        self._by_head: dict[tuple[str, bytes], list[Request]] = {}
        self._heads: dict[str, tuple[str, bytes]] = {}
        self._chunked: set[str] = set()

    def must_wait(self, request: Request, cached: int) -> Request | None:
        """The prefill to wait for, if any."""
        if not self._by_head or not self.enabled:
            return None
        head = request.key.head(self.share)
        for other in self._by_head.get(head, ()) if head is not None else ():
            if request.held_for not in {"", other.rid}:
                continue
            if cached <= self.check:
                return other
            if other.rid in self._chunked and self._gains(request, other, cached):
                return other
        return None

    def _gains(self, request: Request, other: Request, cached: int) -> bool:
        return common_prefix(request.tokens[cached:], other.tokens[cached:]) >= self.page

    def started(self, request: Request) -> None:
        """``request`` (still without a row) begins its prefill: later ones with the same beginning wait for it."""
        head = request.key.head(self.share) if self.enabled else None
        if head is not None:
            self._by_head.setdefault(head, []).append(request)
            self._heads[request.rid] = head

    def advanced(self, request: Request) -> None:
        """A chunk of its prefill is in the cache, and more is to come."""
        if request.rid in self._heads:
            self._chunked.add(request.rid)

    def settled(self, request: Request) -> None:
        """Its prefill is in the cache, or never will be. Harmless when called again."""
        head = self._heads.pop(request.rid, None)
        if head is not None:
            self._chunked.discard(request.rid)
            self._by_head[head].remove(request)
            if not self._by_head[head]:
                del self._by_head[head]
