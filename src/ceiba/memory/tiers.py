"""The engine behind ``core.tiers.TierIO``: a thread that copies in the order of the calls, and the storage beside it.

Owns the thread, the CUDA stream and the completion of each copy; which slots they concern is the index's business. On
a CPU the thread computes the copy while the model runs; on CUDA it puts it on a stream of its own and goes on, and an
event tells when it has ended. Every call returns at once, ``fence`` apart, which waits until the copy it names has at
least been launched (on a CPU: has ended).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ceiba.config.records import HiCacheConfig
from ceiba.core.errors import CeibaError
from ceiba.core.tiers import CopyDone, Int32, StorageDone, StorageStatus, TierInfo
from ceiba.memory.copies import Copier
from ceiba.memory.host_pool import HostPool
from ceiba.memory.pool import KVPool
from ceiba.memory.storage.engine import StorageEngine
from ceiba.memory.storage.registry import check, open_store


@dataclass(slots=True)
class _Task:
    ticket: int
    run: Callable[[], list[Any]]
    size: int
    after: Any = None
    """CUDA event that it must wait for."""
    reads_host: bool = False
    """Whether the host itself reads host memory: earlier copies must have arrived."""


@dataclass(slots=True)
class _Launched:
    done: CopyDone
    started: float
    event: Any = None
    """CUDA event behind it; None: it has ended."""


class TierEngine:
    """``identity`` names model, data types and everything else that makes stored KV unusable elsewhere."""

    def __init__(self, config: HiCacheConfig, pool: KVPool, identity: Mapping[str, Any]) -> None:
        self._device = pool.k[0].device
        self._cuda = self._device.type == "cuda"
        host = HostPool(pool.shape, config.host_tokens, pool.page_size, config.mem_layout, pin=self._cuda)
        self.info = TierInfo(host.tokens, pool.shape.bytes_per_token, config.storage_page)
        self._host = host
        self._copier = Copier(pool, host, config.io_backend)
        self._identity = dict(identity)
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None
        self._tickets = 0
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._launched: deque[_Launched] = deque()
        self._launched_ticket = 0
        self._pending = 0
        self._storage: StorageEngine | None = None
        self._attaching = 0
        """The ticket of the attach under way, else 0. Whoever gives it up closes what it may have connected."""
        self._attached: tuple[StorageDone, StorageEngine | None] | None = None
        """What that attach came to, until it is polled."""
        self._lock = threading.Lock()
        """Of the storage, the attach and the news."""
        self._news: list[StorageDone] = []
        if config.storage_backend is not None:
            check(config.storage_backend, config.storage_options)
            self._storage = self._connect(config.storage_backend, config.storage_options)
        self._thread = threading.Thread(target=self._work, name="kv-tiers", daemon=True)
        self._thread.start()

    # ── copies ───────────────────────────────────────────────────────────────

    def backup(self, device: Int32, host: Int32) -> int:
        def run() -> list[Any]:
            self._copier.backup(device, host)
            return []

        return self._submit(run, len(host))

    def restore(self, host: Int32, device: Int32) -> int:
        def run() -> list[Any]:
            self._copier.restore(host, device)
            return []

        return self._submit(run, len(host), after=self._now())

    def pack(self, pages: list[Int32]) -> int:
        return self._submit(lambda: [self._copier.pack(page) for page in pages], sum(map(len, pages)), reads_host=True)

    def unpack(self, blobs: list[Any], host: list[Int32], skip: list[int]) -> int:
        def run() -> list[Any]:
            for blob, slots, left_out in zip(blobs, host, skip, strict=True):
                self._copier.unpack(np.frombuffer(blob, np.uint8), slots, left_out)
            return []

        return self._submit(run, sum(map(len, host)))

    def fence(self, ticket: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._launched_ticket >= ticket)
            events = [entry.event for entry in self._launched if entry.done.ticket == ticket]
        if events and events[0] is not None:
            torch.cuda.current_stream(self._device).wait_event(events[0])

    def poll(self) -> list[CopyDone]:
        found: list[CopyDone] = []
        now = time.monotonic()
        with self._changed:
            while self._launched:
                entry = self._launched[0]
                if entry.event is not None:
                    if not entry.event.query():
                        break
                    entry.done.seconds = now - entry.started
                self._launched.popleft()
                self._pending -= 1
                found.append(entry.done)
        return found

    def drain(self) -> list[CopyDone]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._launched) == self._pending)
        if self._stream is not None:
            self._stream.synchronize()
        return self.poll()

    # ── storage ──────────────────────────────────────────────────────────────

    def fetch(self, namespace: str, tokens: Int32, first: int, threshold: int) -> int:
        ticket, storage = self._next(), self._storage
        if storage is None:
            self._tell(StorageDone(ticket, final=True, error="no storage is attached"))
        else:
            storage.fetch(ticket, namespace, tokens, first, threshold)
        return ticket

    def store(self, namespace: str, tokens: Int32, first: int, blobs: list[Any]) -> int:
        ticket, storage = self._next(), self._storage
        if storage is None:
            self._tell(StorageDone(ticket, final=True, error="no storage is attached"))
        else:
            storage.store(ticket, namespace, tokens, first, blobs)
        return ticket

    def cancel(self, ticket: int) -> None:
        if ticket == self._attaching:
            self._forget_attach()
        elif self._storage is not None:
            self._storage.cancel(ticket)

    def poll_storage(self) -> list[StorageDone]:
        with self._lock:
            news, self._news = self._news, []
            if self._attached is not None:
                done, self._storage = self._attached
                self._attaching, self._attached = 0, None
                news.append(done)
        return news + self._storage.poll() if self._storage is not None else news

    def attach(self, backend: str, options: Mapping[str, Any]) -> int:
        check(backend, options)
        ticket = self._attaching = self._next()

        def connect() -> None:
            done, storage = StorageDone(ticket, final=True), None
            try:
                storage = self._connect(backend, options)
            except CeibaError as error:
                done.error = error.message
            except Exception as error:
                done.error = f"{type(error).__name__}: {error}"
            with self._lock:
                wanted = self._attaching == ticket
                if wanted:
                    self._attached = done, storage
            if not wanted and storage is not None:
                storage.close()

        threading.Thread(target=connect, name="kv-storage-attach", daemon=True).start()
        return ticket

    def detach(self) -> None:
        self._forget_attach()
        with self._lock:
            storage, self._storage = self._storage, None
            self._news.clear()
        if storage is not None:
            storage.close()

    def clear(self) -> int:
        ticket, storage = self._next(), self._storage
        if storage is None:
            self._tell(StorageDone(ticket, final=True, error="no storage is attached"))
        else:
            storage.clear(ticket)
        return ticket

    def storage(self) -> StorageStatus:
        with self._lock:
            storage, attaching = self._storage, self._attaching != 0
        if storage is None:
            return StorageStatus(state="attaching" if attaching else "detached")
        return storage.status()

    def close(self) -> None:
        """End the threads. Copies under way are finished, storage jobs are forgotten."""
        self.detach()
        self._tasks.put(None)
        self._thread.join(timeout=5)
        if self._thread.is_alive():
            return  # it still copies: the memory stays pinned until the process ends, or the device would fault
        if self._stream is not None:
            self._stream.synchronize()
        self._host.close()

    # ── inside ───────────────────────────────────────────────────────────────

    def _connect(self, backend: str, options: Mapping[str, Any]) -> StorageEngine:
        store = open_store(backend, options, self._identity)
        return StorageEngine(store, self._identity, self.info.storage_page, backend)

    def _forget_attach(self) -> None:
        with self._lock:
            attached, self._attached, self._attaching = self._attached, None, 0
        if attached is not None and attached[1] is not None:
            attached[1].close()

    def _next(self) -> int:
        self._tickets += 1
        return self._tickets

    def _tell(self, news: StorageDone) -> None:
        with self._lock:
            self._news.append(news)

    def _now(self) -> Any:
        """An event behind everything that has been launched on the device so far."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _submit(self, run: Callable[[], list[Any]], tokens: int, *, after: Any = None, reads_host: bool = False) -> int:
        ticket = self._next()
        with self._changed:
            self._pending += 1
        self._tasks.put(_Task(ticket, run, tokens * self.info.bytes_per_token, after, reads_host))
        return ticket

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            entry = _Launched(CopyDone(task.ticket, size=task.size), time.monotonic())
            try:
                self._run(task, entry)
            except Exception as error:
                entry.done.error = f"{type(error).__name__}: {error}"
            entry.done.seconds = time.monotonic() - entry.started
            with self._changed:
                self._launched.append(entry)
                self._launched_ticket = task.ticket
                self._changed.notify_all()

    @torch.inference_mode()
    def _run(self, task: _Task, entry: _Launched) -> None:
        if self._stream is None:
            entry.done.blobs = task.run()
            return
        with torch.cuda.stream(self._stream):
            if task.after is not None:
                self._stream.wait_event(task.after)
            if task.reads_host:
                self._stream.synchronize()
            try:
                entry.done.blobs = task.run()
            finally:  # a copy that failed half way may still be running
                entry.event = torch.cuda.Event()
                entry.event.record(self._stream)
