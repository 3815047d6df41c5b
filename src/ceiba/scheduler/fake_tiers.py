"""Lower tiers without memory or files: copies the fake runner's shadow KV, as slowly and as badly as it is told to.

Owns a shadow host pool and a shadow storage. Copies are carried out in the order of the calls, but only when ``tick``
says so, so that a test decides how far they have come; a restore that finds other KV than its host slots held when it
was asked for shows in the fake runner as a wrong prefix. Tests and ``ceiba simulate`` drive the real index with it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ceiba.core.tiers import CopyDone, Int32, StorageDone, StorageStatus, TierInfo


@dataclass(slots=True)
class _Copy:
    ticket: int
    kind: str
    run: Callable[[], list[Any]]
    size: int


@dataclass(slots=True)
class _Job:
    ticket: int
    keys: list[str]
    first: int
    threshold: int
    blobs: list[Any] | None
    """Of a store; None for a fetch."""
    done: int = 0


@dataclass
class FakeTiers:
    """``device``: the runner's shadow KV, one number per slot."""

    device: np.ndarray
    info: TierInfo
    eager: bool = True
    """Carry out every copy and job as soon as somebody looks; otherwise only in ``tick``."""
    fail: Callable[[str], bool] = lambda kind: False
    """Whether the next copy or job of a kind (backup, restore, pack, unpack, fetch, store) fails."""
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    """The storage; give the same to two engines to share it."""
    corrupt: set[str] = field(default_factory=set)
    """Keys whose pages do not verify."""
    fenced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = np.zeros(self.info.host_tokens, np.uint64)
        self._copies: deque[_Copy] = deque()
        self._done: list[CopyDone] = []
        self._jobs: deque[_Job] = deque()
        self._news: list[StorageDone] = []
        self._ticket = 0
        self._backend: str | None = None
        self.counts: dict[str, int] = {}
        """Tokens (pages for the storage) moved, by kind."""

    # ── copies ───────────────────────────────────────────────────────────────

    def backup(self, device: Int32, host: Int32) -> int:
        return self._copy("backup", lambda: self._move(self.device, device, self.host, host), len(host))

    def restore(self, host: Int32, device: Int32) -> int:
        return self._copy("restore", lambda: self._move(self.host, host, self.device, device), len(host))

    def pack(self, pages: list[Int32]) -> int:
        return self._copy("pack", lambda: [self.host[page].copy() for page in pages], sum(map(len, pages)))

    def unpack(self, blobs: list[Any], host: list[Int32], skip: list[int]) -> int:
        def run() -> list[Any]:
            for blob, slots, left_out in zip(blobs, host, skip, strict=True):
                self.host[slots] = blob[left_out : left_out + len(slots)]
            return []

        return self._copy("unpack", run, sum(map(len, host)))

    def fence(self, ticket: int) -> None:
        self.fenced.append(ticket)
        while self._copies and self._copies[0].ticket <= ticket:
            self._run()

    def poll(self) -> list[CopyDone]:
        if self.eager:
            self.tick(len(self._copies), 0)
        done, self._done = self._done, []
        return done

    def drain(self) -> list[CopyDone]:
        self.tick(len(self._copies), 0)
        done, self._done = self._done, []
        return done

    def tick(self, copies: int = 1, pages: int = 1) -> None:
        """Carry out that many copies, and that many pages of storage work."""
        for _ in range(min(copies, len(self._copies))):
            self._run()
        for _ in range(pages):
            if self._jobs:
                self._work()

    # ── storage ──────────────────────────────────────────────────────────────

    def fetch(self, namespace: str, tokens: Int32, first: int, threshold: int) -> int:
        return self._job(namespace, tokens, first, threshold, None)

    def store(self, namespace: str, tokens: Int32, first: int, blobs: list[Any]) -> int:
        return self._job(namespace, tokens, first, 0, blobs)

    def cancel(self, ticket: int) -> None:
        self._jobs = deque(job for job in self._jobs if job.ticket != ticket)
        self._news = [news for news in self._news if news.ticket != ticket]

    def poll_storage(self) -> list[StorageDone]:
        if self.eager:
            while self._jobs:
                self._work()
        news, self._news = self._news, []
        return news

    def attach(self, backend: str, options: Mapping[str, Any]) -> int:
        self._backend = backend
        self._ticket += 1
        self._news.append(StorageDone(self._ticket, final=True))
        return self._ticket

    def detach(self) -> None:
        self._backend = None
        self._jobs.clear()
        self._news.clear()

    def clear(self) -> int:
        self._ticket += 1
        self._news.append(StorageDone(self._ticket, final=True, stored=len(self.stored)))
        self.stored.clear()
        return self._ticket

    def storage(self) -> StorageStatus:
        return StorageStatus(self._backend, "ok" if self._backend else "detached")

    def close(self) -> None:
        self.detach()

    # ── inside ───────────────────────────────────────────────────────────────

    def _copy(self, kind: str, run: Callable[[], list[Any]], size: int) -> int:
        self._ticket += 1
        self._copies.append(_Copy(self._ticket, kind, run, size))
        return self._ticket

    @staticmethod
    def _move(source: np.ndarray, at: Int32, target: np.ndarray, to: Int32) -> list[Any]:
        target[to] = source[at]
        return []

    def _run(self) -> None:
        copy = self._copies.popleft()
        if self.fail(copy.kind):
            self._done.append(CopyDone(copy.ticket, error="told to fail"))
            return
        blobs = copy.run()
        self.counts[copy.kind] = self.counts.get(copy.kind, 0) + copy.size
        size = copy.size * self.info.bytes_per_token
        self._done.append(CopyDone(copy.ticket, seconds=1e-6 * copy.size, size=size, blobs=blobs))

    def _job(self, namespace: str, tokens: Int32, first: int, threshold: int, blobs: list[Any] | None) -> int:
        self._ticket += 1
        page, keys, chain = self.info.storage_page, [], namespace.encode()
        for i in range(len(tokens) // page):
            chain = hashlib.sha256(chain + tokens[i * page : (i + 1) * page].tobytes()).digest()
            keys.append(chain.hex())
        self._jobs.append(_Job(self._ticket, keys, first, threshold, blobs))
        return self._ticket

    def _work(self) -> None:
        """One page of the first job."""
        job = self._jobs[0]
        if job.blobs is None:
            self._read(job)
        else:
            self._write(job, job.blobs)

    def _end(self, news: StorageDone) -> None:
        self._jobs.popleft()
        self._news.append(news)

    def _read(self, job: _Job) -> None:
        wanted = job.keys[job.first :]
        found = next((i for i, key in enumerate(wanted) if key not in self.stored), len(wanted))
        if self.fail("fetch"):
            self._end(StorageDone(job.ticket, final=True, error="told to fail"))
            return
        if job.done == 0:
            self._news.append(StorageDone(job.ticket, final=False, found=found))
        if found < job.threshold or job.done >= found or wanted[job.done] in self.corrupt:
            self._end(StorageDone(job.ticket, final=True))
            return
        blob = self.stored[wanted[job.done]].copy()
        self.counts["fetch"] = self.counts.get("fetch", 0) + 1
        job.done += 1
        news = StorageDone(job.ticket, final=job.done == found, first=job.done - 1, blobs=[blob])
        if news.final:
            self._end(news)
        else:
            self._news.append(news)

    def _write(self, job: _Job, blobs: list[Any]) -> None:
        if self.fail("store"):
            self._end(StorageDone(job.ticket, final=True, stored=job.done, error="told to fail"))
            return
        self.stored.setdefault(job.keys[job.first + job.done], blobs[job.done])
        self.counts["store"] = self.counts.get("store", 0) + 1
        job.done += 1
        if job.done == len(blobs):
            self._end(StorageDone(job.ticket, final=True, stored=job.done))
