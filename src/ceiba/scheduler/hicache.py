"""HiCache: when cached KV moves between device, host memory and storage, and who waits for it.

Owns the write and prefetch policies and the requests that wait for a transfer; the tree (``cache.tiers``) owns where
things lie, ``core.tiers.TierIO`` moves them. Nothing here blocks the loop: a request that needs a restore stands back
for a round or two, everybody else goes on. What a waiting request had brought to the device is held for it, counted
against the room that admission promises, and given up when a running request cannot go on otherwise.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ceiba.cache.base import Match, Node
from ceiba.cache.host import Kind, Operation
from ceiba.cache.keys import CacheKey, Int32, ceil_page
from ceiba.cache.lease import LeaseTable
from ceiba.cache.tiers import TieredCache, TierNode
from ceiba.config.records import HiCacheConfig
from ceiba.core.tiers import CopyDone, StorageDone, TierIO
from ceiba.scheduler.costs import StepCosts
from ceiba.scheduler.hicache_cost import CostGate
from ceiba.scheduler.hicache_stats import TierCounters
from ceiba.scheduler.request import Request

log = logging.getLogger("ceiba.hicache")

MAX_BACKUPS = 2
"""Backups under way at a time."""
BACKUP_TOKENS = 2048
"""Of one backup, as far as nodes go: more would hold up a restore behind it."""
PACK_PAGES = 16
"""Storage pages of one read from the host."""
STORE_BACKLOG = 256 << 20
"""Bytes that may wait to be written; what comes on top stays in the queue of nodes."""
MAX_TO_STORE = 65536
MAX_TIMEOUT = 30.0
"""Seconds, the longest that a request waits for the storage under ``timeout``."""
LOOK_SECONDS = 2.0
"""How long an explanation waits for the storage."""
NO_NEWS = 30.0
"""Seconds without news from the storage after which even ``wait_complete`` stops waiting."""


@dataclass(slots=True, eq=False)
class Hold:
    """A waiting request whose KV is coming, or has come, from the host."""

    request: Request
    operation: Operation | None
    owner: bool
    """Whether the restore was made for it."""
    reserve: int
    """KV slots it will still take once it is admitted."""
    node: Node | None = None
    """The lock on what has come."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A waiting request's look into the storage."""

    request: Request
    ticket: int
    key: CacheKey
    """Its tokens, whole storage pages."""
    first: int
    """First page asked for."""
    started: float
    deadline: float
    heard: float
    found: int = 0
    """Pages the storage has."""
    arrived: int = 0
    """Of those, pages that were read."""
    taken: int = 0
    """Tokens that went into the host."""
    blobs: list[Any] = field(default_factory=list)
    """Pages read that have no host slots yet, the last ones of ``arrived``."""
    end: int = 0
    """Tokens from the root up to which pages were given host slots."""
    final: bool = False
    unpacking: set[int] = field(default_factory=set)
    attempts: int = 0
    retry_in: int = 0


class HiCache:
    """``future`` tells how many slots a request's output is expected to take."""

    def __init__(
        self,
        config: HiCacheConfig,
        cache: TieredCache,
        leases: LeaseTable,
        future: Callable[[Request], int],
        costs: StepCosts,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.cache = cache
        self.leases = leases
        self.io: TierIO = cache.io
        self.clock = clock
        self.cost = CostGate(costs)
        self.counters = TierCounters()
        self._future = future
        self._holds: dict[str, Hold] = {}
        self._fetches: dict[str, Fetch] = {}
        self._by_ticket: dict[int, Fetch] = {}
        self._credit: dict[str, tuple[int, int]] = {}
        """Request -> tokens that came for it from the host, and of those from the storage."""
        self._barred: set[str] = set()
        """Requests whose restore failed: they compute."""
        self._begun: dict[int, float] = {}
        self._to_store: deque[tuple[TierNode, int]] = deque()
        self._stores: dict[int, tuple[list[TierNode], bool]] = {}
        """Ticket -> nodes, and whether these were their last pages."""
        self.prefetch_policy = config.prefetch_policy
        self.write_policy = config.write_policy
        self.threshold = config.prefetch_threshold
        self.timeout = (config.prefetch_timeout_base, config.prefetch_timeout_per_ki_token)
        self._expected: dict[int, tuple[float, Callable[[StorageDone], None]]] = {}
        """Ticket -> until when somebody waits for that news, and who."""

    @property
    def waiting(self) -> int:
        """Requests in the queue that stand back for a transfer."""
        return len(self._fetches) + sum(hold.operation is not None for hold in self._holds.values())

    @property
    def busy(self) -> bool:
        """Whether something is under way or due, so that the loop should look again soon."""
        if self.cache.operations or self._fetches or self._stores or self.cache.touched or self._expected:
            return True
        return bool(self._to_store) and self._takes_pages()

    def _takes_pages(self) -> bool:
        status = self.io.storage()
        return status.state == "ok" and status.writable and status.backlog < STORE_BACKLOG

    def set_write_policy(self, policy: str) -> None:
        self.write_policy = policy  # type: ignore[assignment]
        self.cache.write_back = policy == "write_back"

    # ── each round ───────────────────────────────────────────────────────────

    def poll(self, now: float) -> None:
        """Take note of what has ended and begin what is due. O(1) when nothing is."""
        if self.cache.operations:
            for done in self.io.poll():
                self._settle(done, now)
        if self._by_ticket or self._stores or self._expected:
            for news in self.io.poll_storage():
                self._hear(news, now)
        if self._expected:
            self._expire(now)
        if self._fetches:
            for fetch in list(self._fetches.values()):
                if fetch.blobs:
                    self._take(fetch)
        if self.cache.touched:
            self._write_down()
        if self._to_store:
            self._write_out()

    def drain(self) -> None:
        """Wait until no copy is under way, so that the cache can be flushed."""
        while self.cache.operations:
            for done in self.io.drain():
                self._settle(done, self.clock())
        self._to_store.clear()

    # ── requests ─────────────────────────────────────────────────────────────

    def arrived(self, request: Request, now: float) -> None:
        """A new request: look into the storage when enough of it is neither on the device nor on the host."""
        if self.io.storage().state != "ok":
            return
        page = self.io.info.storage_page
        pages = request.match_limit // page
        known = self.cache.match_tiers(request.key, request.match_limit).length
        first = known // page
        if (pages - first) * page < self.threshold or pages <= first:
            return
        key = CacheKey(request.namespace, request.tokens[: pages * page])
        base, per_ki = self.timeout
        wait = min(MAX_TIMEOUT, base + per_ki * (pages - first) * page / 1024)
        ticket = self.io.fetch(request.namespace, key.tokens, first, -(-self.threshold // page))
        fetch = Fetch(request, ticket, key, first, now, now + wait, now, end=known)
        self._fetches[request.rid] = self._by_ticket[ticket] = fetch

    def waits(self, request: Request) -> bool:
        """Whether ``request`` waits for lower tiers, as far as is known."""
        return request.rid in self._fetches or request.rid in self._holds

    def fetching(self, request: Request, now: float) -> bool:
        """Whether ``request``, which could be admitted as far as order goes, still waits for the storage."""
        fetch = self._fetches.get(request.rid)
        if fetch is None:
            return False
        if not fetch.final:
            match self.prefetch_policy:
                case "best_effort":
                    self._stop(fetch)
                case "timeout" if now >= fetch.deadline:
                    self._stop(fetch)
                case "wait_complete" if now - fetch.heard >= NO_NEWS:
                    self._stop(fetch)
        if not fetch.final or fetch.blobs or fetch.unpacking:
            return True
        self._close_fetch(fetch)
        return False

    def restoring(self, request: Request) -> bool:
        """Whether KV is under way for ``request``."""
        hold = self._holds.get(request.rid)
        return hold is not None and hold.operation is not None

    def loading(self, request: Request, match: Match, now: float) -> int | None:
        """None: admit ``request`` now. Else a restore has begun that it waits for, and the number says how many slots
        it will take on top. There must be room for it; ``match`` is its match on the device."""
        if request.rid in self._holds or request.rid in self._barred:
            return None
        tiers = self.cache.match_tiers(request.key, request.match_limit)
        if tiers.host <= 0 or tiers.host > self.leases.available - match.unlocked:
            return None
        rest = ceil_page(len(request.tokens) - tiers.length, self.leases.page_size) + self._future(request)
        if tiers.waits_for is not None:
            hold = Hold(request, tiers.waits_for, owner=False, reserve=rest)
        elif not self.cost.worth(tiers.host):
            return None
        else:
            self.leases.cause = request.rid
            operation = self.cache.begin_restore(tiers, self.leases.lend)
            self._begun[operation.ticket] = now
            hold = Hold(request, operation, owner=True, reserve=rest)
        self._credit[request.rid] = (tiers.host, 0)
        self._holds[request.rid] = hold
        return rest

    def reserved(self) -> int:
        """Slots promised to requests that wait for KV."""
        return sum(hold.reserve for hold in self._holds.values()) if self._holds else 0

    def reserved_for(self, request: Request) -> int:
        hold = self._holds.get(request.rid)
        return 0 if hold is None else hold.reserve

    def admitted(self, request: Request, cached: int) -> dict[str, int]:
        """``request`` has a row, and holds its prefix itself; returns where its ``cached`` tokens came from."""
        hold = self._holds.pop(request.rid, None)
        if hold is not None:
            self.cache.unlock(hold.node)
        self._barred.discard(request.rid)
        host, storage = self._credit.pop(request.rid, (0, 0))
        storage = min(storage, cached)
        host = min(host - storage, cached - storage)
        split = {"device": cached - host - storage, "host": host, "storage": storage}
        return {tier: tokens for tier, tokens in split.items() if tokens > 0}

    def forget(self, request: Request) -> None:
        """``request`` leaves, by whatever way. Harmless when called again."""
        hold = self._holds.pop(request.rid, None)
        if hold is not None:
            self.cache.unlock(hold.node)
        fetch = self._fetches.get(request.rid)
        if fetch is not None:
            self._stop(fetch)
            self._close_fetch(fetch)
        self._credit.pop(request.rid, None)
        self._barred.discard(request.rid)

    def give_way(self, tokens: int, spare: Request | None = None) -> bool:
        """Give up what is held for waiting requests but ``spare``, youngest first, until ``tokens`` more are available.

        Returns whether anything was given up.
        """
        wanted = self.leases.available + tokens
        gave = False
        for hold in reversed(list(self._holds.values())):
            if self.leases.available >= wanted:
                break
            if hold.request is spare or hold.request.rid not in self._holds:
                continue
            operation = hold.operation
            if operation is None:
                self.cache.unlock(hold.node)
                del self._holds[hold.request.rid]
            else:
                slots = self.cache.cancel_restore(operation)
                self.leases.settle(len(slots), slots)
                self._drop_holds(operation)
            gave = True
        return gave

    # ── what has ended ───────────────────────────────────────────────────────

    def _settle(self, done: CopyDone, now: float) -> None:
        operation, spare = self.cache.finish(done)
        counters = self.counters
        if done.error:
            log.warning("a KV copy (%s) failed: %s", operation.kind.value, done.error)
            counters.failed_copies += 1
        match operation.kind:
            case Kind.BACKUP:
                counters.backed_up(sum(map(len, operation.copies)), done)
                if self.io.storage().state != "detached":
                    self._to_store.extend((node, 0) for node in operation.nodes)
            case Kind.RESTORE:
                waited = now - self._begun.pop(done.ticket, now)
                if not operation.cancelled:
                    self._restored(operation, done, spare, waited)
            case Kind.PACK:
                self._packed(operation, done)
            case Kind.UNPACK:
                self._unpacked(operation, done)

    def _restored(self, operation: Operation, done: CopyDone, spare: Int32, waited: float) -> None:
        tokens = operation.tokens
        self.leases.settle(tokens, spare)
        if not done.error:
            self.cost.copied(tokens, done.seconds, waited)
            self.counters.restored(tokens, done)
        for hold in [hold for hold in self._holds.values() if hold.operation is operation]:
            rid = hold.request.rid
            if done.error:
                self._barred.add(rid)
                self._credit.pop(rid, None)
            elif hold.owner:
                used = tokens - len(spare)  # somebody computed the others meanwhile
                self._credit[rid] = (used, min(operation.from_storage, used))
                hold.operation = None
                hold.node = self.cache.lock(self.cache.match(hold.request.key, hold.request.match_limit))
                continue
            del self._holds[rid]  # a follower looks again, in this round: there may be more to restore

    def _drop_holds(self, operation: Operation) -> None:
        for rid in [rid for rid, hold in self._holds.items() if hold.operation is operation]:
            del self._holds[rid]
            self._credit.pop(rid, None)

    # ── device to host to storage ────────────────────────────────────────────

    def _write_down(self) -> None:
        """Back up what was inserted or hit, as the write policy wants it, parents first."""
        touched = self.cache.touched
        if self.write_policy == "write_back":
            self._requeue(touched)
            return
        under_way = sum(operation.kind is Kind.BACKUP for operation in self.cache.operations.values())
        if under_way >= MAX_BACKUPS:
            return
        least_hits = 1 if self.write_policy == "write_through_selective" else 0
        chosen: dict[TierNode, None] = {}
        tokens = 0
        while touched and tokens < BACKUP_TOKENS:
            at: Node | None = touched.popleft()
            line: list[TierNode] = []
            while isinstance(at, TierNode) and at.parent is not None and at.host is None:
                if at.on_device and at.hits >= least_hits:
                    line.append(at)
                at = at.parent
            for node in reversed(line):
                if node not in chosen:
                    chosen[node] = None
                    tokens += len(node)
            if not line and isinstance(at, TierNode) and at.parent is not None:
                self._queue_store(at)
        if chosen:
            self.cache.begin_backup(list(chosen))

    def _requeue(self, touched: deque[TierNode]) -> None:
        while touched:
            self._queue_store(touched.popleft())

    def _queue_store(self, node: TierNode) -> None:
        """A hit on what the storage has not taken yet is a reason to offer it again."""
        if not node.stored and node.hosted and self.io.storage().state == "ok" and len(self._to_store) < MAX_TO_STORE:
            self._to_store.append((node, 0))

    def _write_out(self) -> None:
        """Give the storage what the host has, as fast as it takes it."""
        if self.io.storage().state == "detached":
            self._to_store.clear()
            return
        packing = any(operation.kind is Kind.PACK for operation in self.cache.operations.values())
        if packing or not self._takes_pages():
            while len(self._to_store) > MAX_TO_STORE:
                self.counters.storage_dropped_tokens += len(self._to_store.popleft()[0])
            return
        while self._to_store:
            node, first = self._to_store.popleft()
            if node.parent is None or not node.hosted or node.stored:
                continue
            if self.cache.begin_pack(node, self.io.info.storage_page, first, PACK_PAGES) is not None:
                return

    def _packed(self, operation: Operation, done: CopyDone) -> None:
        if done.error or self.io.storage().state != "ok":
            return
        assert operation.key is not None
        page, node = self.io.info.storage_page, operation.nodes[0]
        end = operation.first + len(done.blobs)
        last = end >= node.end // page
        if not last:
            self._to_store.appendleft((node, end))
        ticket = self.io.store(operation.key.namespace, operation.key.tokens, operation.first, done.blobs)
        self._stores[ticket] = (operation.nodes, last)

    # ── storage to host ──────────────────────────────────────────────────────

    def _hear(self, news: StorageDone, now: float) -> None:
        fetch = self._by_ticket.get(news.ticket)
        if fetch is not None:
            self._fetched(fetch, news, now)
        elif news.ticket in self._expected and (news.final or news.found is not None):
            self._expected.pop(news.ticket)[1](news)
        elif news.final and news.ticket in self._stores:
            nodes, last = self._stores.pop(news.ticket)
            self.counters.stored(news, self.io.info.storage_page)
            if last and not news.error:
                for node in nodes:
                    node.stored = True
                    node.mark()

    def _fetched(self, fetch: Fetch, news: StorageDone, now: float) -> None:
        page = self.io.info.storage_page
        fetch.heard = now
        if news.found is not None:
            fetch.found = news.found
            self.counters.prefetch_hit_tokens += news.found * page
            base, per_ki = self.timeout
            fetch.deadline = fetch.started + min(MAX_TIMEOUT, base + per_ki * news.found * page / 1024)
        if news.blobs:
            fetch.blobs += news.blobs
            fetch.arrived += len(news.blobs)
            self.counters.fetched(news, page)
        if news.final:
            fetch.final = True
            self._by_ticket.pop(fetch.ticket, None)
            if news.error:
                self.counters.storage_errors += 1

    def _take(self, fetch: Fetch) -> None:
        """Give the pages that were read host slots, if there are any; try again later if not."""
        if fetch.retry_in > 0:
            fetch.retry_in -= 1
            return
        page = self.io.info.storage_page
        end = (fetch.first + fetch.arrived) * page
        begin = end - len(fetch.blobs) * page
        key = CacheKey(fetch.key.namespace, fetch.key.tokens[:end])
        start = max(begin, fetch.end)
        if not fetch.unpacking:
            known = self.cache.match_tiers(key).length
            if known < begin:  # what they would go on from has been evicted
                self._give_up(fetch)
                return
            start = max(begin, known)
        if start >= end:
            fetch.blobs = []
            return
        operation = self.cache.begin_unpack(key, start, fetch.blobs, page)
        if operation is None:
            fetch.attempts += 1
            fetch.retry_in = self.config.prefetch_retry_interval
            self.counters.prefetch_deferred_tokens += end - start
            if fetch.attempts > self.config.prefetch_retry_attempts:
                self._give_up(fetch)
            return
        fetch.blobs = []
        fetch.end = end
        fetch.unpacking.add(operation.ticket)

    def _unpacked(self, operation: Operation, done: CopyDone) -> None:
        for fetch in self._fetches.values():
            if done.ticket in fetch.unpacking:
                fetch.unpacking.remove(done.ticket)
                if done.error:
                    self._give_up(fetch)
                else:
                    fetch.taken += operation.tokens
                return

    def _give_up(self, fetch: Fetch) -> None:
        fetch.blobs = []
        self._stop(fetch)

    def _stop(self, fetch: Fetch) -> None:
        """Ask for no more; what has been read is still used."""
        if not fetch.final:
            fetch.final = True
            self.io.cancel(fetch.ticket)
        self._by_ticket.pop(fetch.ticket, None)

    def _close_fetch(self, fetch: Fetch) -> None:
        del self._fetches[fetch.request.rid]
        missed = fetch.found * self.io.info.storage_page - fetch.taken
        if fetch.found * self.io.info.storage_page >= self.threshold and missed > 0:
            self.counters.prefetch_unfulfilled_tokens += missed

    # ── the storage itself ───────────────────────────────────────────────────

    def detach(self) -> None:
        """Forget everything that concerns the storage."""
        for fetch in list(self._fetches.values()):
            self._give_up(fetch)
        self.io.detach()
        self._stores.clear()
        self._to_store.clear()
        self.unmark()
        for ticket in list(self._expected):
            self._answer(ticket, "the storage was detached meanwhile")

    def expect(self, ticket: int, seconds: float, heard: Callable[[StorageDone], None]) -> None:
        """Call ``heard`` with the last news of a job, or with an error when none comes in time."""
        self._expected[ticket] = (self.clock() + seconds, heard)

    def _expire(self, now: float) -> None:
        for ticket in [ticket for ticket, (until, _) in self._expected.items() if now >= until]:
            self.io.cancel(ticket)
            self._answer(ticket, "the storage does not answer")

    def _answer(self, ticket: int, error: str) -> None:
        self._expected.pop(ticket)[1](StorageDone(ticket, final=True, error=error))

    def set_knobs(self, knobs: Mapping[str, float]) -> None:
        """Of prefetching, by their names in the extra configuration; what is missing goes back to the default."""
        config = self.config
        self.threshold = int(knobs.get("prefetch_threshold", config.prefetch_threshold))
        self.timeout = (
            knobs.get("prefetch_timeout_base", config.prefetch_timeout_base),
            knobs.get("prefetch_timeout_per_ki_token", config.prefetch_timeout_per_ki_token),
        )

    def look(self, key: CacheKey, known: int, limit: int, heard: Callable[[int], None]) -> bool:
        """Ask the storage how many tokens of ``key`` it has beyond the first ``known``; False: there is none to ask."""
        page = self.io.info.storage_page
        first, pages = known // page, limit // page
        if self.io.storage().state != "ok" or pages <= first:
            return False
        ticket = self.io.fetch(key.namespace, key.tokens[: pages * page], first, 2**31)

        def done(news: StorageDone) -> None:
            heard(max(0, (first + (news.found or 0)) * page - known))

        self.expect(ticket, LOOK_SECONDS, done)
        return True

    def unmark(self) -> None:
        """No node is in the storage any more, as far as anybody knows."""
        for node in self.cache.nodes():
            if isinstance(node, TierNode) and node.stored:
                node.stored = False
                node.mark()

    def offer_all(self) -> None:
        """Everything on the host goes to the storage: it is new, or empty."""
        nodes = [node for node in self.cache.nodes() if isinstance(node, TierNode) and node.hosted and not node.stored]
        nodes.sort(key=lambda node: -node.last_access)
        self._to_store.extend((node, 0) for node in nodes[:MAX_TO_STORE])

    def stats(self) -> dict[str, float]:
        cache, counters = self.cache, self.counters
        return {
            "hicache_host_total_tokens": float(cache.host.total),
            "hicache_host_used_tokens": float(cache.host_used),
            "hicache_backup_dropped_tokens": float(cache.backup_dropped_tokens),
            "hicache_dropped_tokens": float(cache.host_dropped_tokens),
            **counters.as_dict(),
        }
