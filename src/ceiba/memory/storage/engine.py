"""The threads between the scheduler and a store: one reads, one writes, neither is ever waited for. Either has helpers
where the store bears them, since checksums and copies take as long as the store itself.

Owns jobs, checks, back-pressure and the breaker: a store that fails, hangs or is full costs hits, nothing else. Pages
are checked here, so what leaves is what was stored; the first page that is missing or damaged ends a fetch, because KV
behind a gap is of no use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ceiba.core.tiers import StorageDone, StorageStatus
from ceiba.memory.storage.base import PageStore, StoreFull
from ceiba.memory.storage.crew import Crew
from ceiba.memory.storage.pages import CorruptPage, frame, identity_digest, page_keys, unframe

log = logging.getLogger("ceiba.hicache")

FAILURES = 3
"""One after the other: then the store is left alone for a while."""
FIRST_PAUSE = 1.0
MAX_PAUSE = 60.0
FULL_PAUSE = 10.0
"""Seconds without writing after the store said that it is full."""
HUNG = 15.0
"""Seconds that one operation may take before nothing more is asked of the store."""
UNREAD_BYTES = 256 << 20
"""Pages read and not yet taken; the reader waits at this."""
GROUP = 8
"""Pages of one report."""


@dataclass(slots=True, eq=False)
class _Job:
    ticket: int
    run: Callable[[_Job], None]
    size: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class _Lane:
    """One thread's work, and the threads that help it with the pages of a job."""

    crew: Crew
    jobs: deque[_Job] = field(default_factory=deque)
    asked: dict[int, float] = field(default_factory=dict)
    """Thread -> when the store operation that it is in began."""


class StorageEngine:
    """``page``: tokens of a page."""

    def __init__(self, store: PageStore, identity: Mapping[str, Any], page: int, name: str = "") -> None:
        self._store = store
        self._name = name or type(store).__name__
        self._identity = identity_digest(identity)
        self._page = page
        self._changed = threading.Condition()
        threads = int(getattr(store, "threads", 1))
        self._lanes = {what: _Lane(Crew(threads, f"kv-storage-{what}")) for what in ("read", "write")}
        self._jobs: dict[int, _Job] = {}
        self._news: list[StorageDone] = []
        self._unread = 0
        self._backlog = 0
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._suspended_until = 0.0
        self._full_until = 0.0
        self._closed = False
        self._last_error = ""
        self.corrupt = 0
        for what, lane in self._lanes.items():
            threading.Thread(target=self._work, args=(lane,), name=f"kv-storage-{what}", daemon=True).start()

    def fetch(self, ticket: int, namespace: str, tokens: np.ndarray, first: int, threshold: int) -> None:
        """See ``core.tiers.TierIO.fetch``."""
        self._put("read", _Job(ticket, lambda job: self._fetch(job, namespace, tokens, first, threshold)))

    def store(self, ticket: int, namespace: str, tokens: np.ndarray, first: int, blobs: list[Any]) -> None:
        """See ``core.tiers.TierIO.store``."""
        size = sum(memoryview(blob).nbytes for blob in blobs)
        self._put("write", _Job(ticket, lambda job: self._write(job, namespace, tokens, first, blobs), size))

    def clear(self, ticket: int) -> None:
        """Delete every page of this model, behind what is being written."""

        def run(job: _Job) -> None:
            count = self._ask("write", self._store.clear)
            self._end(job, stored=count)

        self._put("write", _Job(ticket, run))

    def cancel(self, ticket: int) -> None:
        with self._changed:
            job = self._jobs.pop(ticket, None)
            if job is not None:
                job.cancelled = True
            gone = [news for news in self._news if news.ticket == ticket]
            self._news = [news for news in self._news if news.ticket != ticket]
            self._unread -= sum(map(_bytes, gone))
            self._changed.notify_all()

    def poll(self) -> list[StorageDone]:
        if not self._news:
            return []
        with self._changed:
            news, self._news = self._news, []
            self._unread = 0
            self._changed.notify_all()
        return news

    def status(self) -> StorageStatus:
        now = time.monotonic()
        state = "ok" if now >= self._suspended_until and not self._hung(now) else "suspended"
        return StorageStatus(
            backend=self._name,
            state=state,
            backlog=self._backlog,
            writable=now >= self._full_until,
            detail={"last_error": self._last_error, "corrupt_pages": self.corrupt, **self._stats()},
        )

    def close(self) -> None:
        """Forget all jobs. A thread that hangs in the store is left behind; the store is closed when it returns."""
        with self._changed:
            self._closed = True
            for job in self._jobs.values():
                job.cancelled = True
            self._jobs.clear()
            self._news.clear()
            for lane in self._lanes.values():
                lane.jobs.clear()
            self._changed.notify_all()

    # ── threads ──────────────────────────────────────────────────────────────

    def _work(self, lane: _Lane) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: lane.jobs or self._closed)
                if self._closed:
                    break
                job = lane.jobs.popleft()
            if not job.cancelled:
                self._run(job)
            with self._changed:
                self._backlog -= job.size
        lane.crew.close()
        with self._changed:
            self._lanes = {name: other for name, other in self._lanes.items() if other is not lane}
            last = not self._lanes
        if last:
            self._store.close()

    def _run(self, job: _Job) -> None:
        try:
            job.run(job)
        except StoreFull as error:
            self._full_until = time.monotonic() + FULL_PAUSE
            if self._last_error != str(error):
                log.warning("the KV storage is full, nothing is written for %.0f s: %s", FULL_PAUSE, error)
            self._last_error = str(error)
            self._end(job, error=str(error))
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            self._end(job, error=self._last_error)

    def _failed(self, text: str) -> None:
        self._last_error = text
        self._failures += 1
        if self._failures >= FAILURES:
            log.warning("the KV storage fails and is left alone for %.0f s: %s", self._pause, text)
            self._suspended_until = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self._failures = FAILURES - 1  # after the pause one more failure is enough

    def _ask(self, lane: str, call: Callable[..., Any], *args: Any) -> Any:
        """One operation of the store, timed; success closes the breaker."""
        asked, thread = self._lanes[lane].asked, threading.get_ident()
        asked[thread] = time.monotonic()
        try:
            value = call(*args)
        finally:
            del asked[thread]
        self._failures, self._pause = 0, FIRST_PAUSE
        return value

    def _hung(self, now: float) -> bool:
        return any(now - began > HUNG for lane in self._lanes.values() for began in list(lane.asked.values()))

    # ── jobs ─────────────────────────────────────────────────────────────────

    def _fetch(self, job: _Job, namespace: str, tokens: np.ndarray, first: int, threshold: int) -> None:
        keys = page_keys(self._identity, namespace, tokens, self._page)[first:]
        found = self._ask("read", self._store.exists, keys)
        enough = found >= threshold and found > 0
        self._tell(job, StorageDone(job.ticket, final=not enough, found=found))
        if not enough:
            return
        blobs: list[Any] = []
        at, started = 0, time.monotonic()
        with closing(self._lanes["read"].crew.results(self._read, keys[:found])) as pages:
            for i, page in enumerate(pages):
                if page is not None:
                    blobs.append(page)
                final = page is None or i == found - 1
                if final or len(blobs) == GROUP:
                    size = sum(blob.nbytes for blob in blobs)
                    seconds = time.monotonic() - started
                    news = StorageDone(job.ticket, final, first=at, blobs=blobs, seconds=seconds, size=size)
                    if not self._tell(job, news) or final:
                        return
                    at, blobs, started = i + 1, [], time.monotonic()

    def _read(self, key: str) -> memoryview | None:
        """A page that has been checked. A damaged one is deleted, so that it is written anew."""
        data = self._ask("read", self._store.get, key)
        if data is None:
            return None
        try:
            return unframe(key, data)
        except CorruptPage as error:
            with self._changed:
                self.corrupt += 1
            self._last_error = f"page {key[:12]}… is damaged: {error}"
            log.warning("the KV storage: %s; it is computed again", self._last_error)
        self._ask("read", self._store.delete, key)
        return None

    def _write(self, job: _Job, namespace: str, tokens: np.ndarray, first: int, blobs: list[Any]) -> None:
        keys = page_keys(self._identity, namespace, tokens, self._page)[first:]
        started, size = time.monotonic(), 0
        with closing(self._lanes["write"].crew.results(self._write_page, zip(keys, blobs, strict=True))) as written:
            for count in written:
                size += count
                if job.cancelled:
                    return
        self._end(job, stored=len(blobs), size=size, seconds=time.monotonic() - started)

    def _write_page(self, page: tuple[str, Any]) -> int:
        key, blob = page
        return int(self._ask("write", self._store.put, key, frame(key, blob)))

    # ── news ─────────────────────────────────────────────────────────────────

    def _put(self, lane: str, job: _Job) -> None:
        with self._changed:
            self._jobs[job.ticket] = job
            self._backlog += job.size
            self._lanes[lane].jobs.append(job)
            self._changed.notify_all()

    def _end(self, job: _Job, **fields: Any) -> None:
        self._tell(job, StorageDone(job.ticket, final=True, **fields))

    def _tell(self, job: _Job, news: StorageDone) -> bool:
        """Report, once there is room for what it carries. False: nobody is interested any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread < UNREAD_BYTES or job.cancelled or self._closed)
            if job.cancelled or self._closed:
                return False
            self._unread += _bytes(news)
            self._news.append(news)
            if news.final:
                self._jobs.pop(job.ticket, None)
            return True

    def _stats(self) -> dict[str, object]:
        stats: dict[str, object] = self._store.stats() if hasattr(self._store, "stats") else {}
        return stats


def _bytes(news: StorageDone) -> int:
    return sum(memoryview(blob).nbytes for blob in news.blobs)
