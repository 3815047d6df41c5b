"""The three mailboxes of ``core.ports`` as queues of one process: for components that run as threads, and for tests.

Owns hand-over between threads and an event loop. Messages pass by reference, so a sender must not touch one again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Generic, TypeVar

from ceiba.core.messages import Abort, Heartbeat, Reply, TextBatch, ToDetokenizer, ToFront, TokenBatch, ToScheduler

M = TypeVar("M")


class _Mailbox(Generic[M]):
    def __init__(self) -> None:
        self._items: deque[M] = deque()
        self._changed = threading.Condition()

    def put(self, message: M) -> None:
        with self._changed:
            self._items.append(message)
            self._changed.notify()

    def receive(self, timeout: float) -> list[M]:
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._items:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            messages = list(self._items)
            self._items.clear()
            return messages


class _LoopMailbox(Generic[M]):
    """Many writers on any thread, one reader on an event loop; one wake-up however many messages arrive meanwhile."""

    def __init__(self) -> None:
        self._items: deque[M] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: M) -> None:
        with self._lock:
            self._items.append(message)
            waiter, self._waiter = self._waiter, None
            loop = self._loop
        if waiter is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_wake, waiter)

    async def receive(self) -> M:
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                self._loop = asyncio.get_running_loop()
                self._waiter = waiter = self._loop.create_future()
            await waiter


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class LocalHub:
    """All three mailboxes; each ``*_port`` method gives one component its ends."""

    def __init__(self) -> None:
        self._scheduler: _Mailbox[ToScheduler] = _Mailbox()
        self._detokenizer: _Mailbox[ToDetokenizer] = _Mailbox()
        self._front: _LoopMailbox[ToFront] = _LoopMailbox()

    def scheduler_port(self) -> LocalSchedulerPort:
        return LocalSchedulerPort(self)

    def detokenizer_port(self) -> LocalDetokenizerPort:
        return LocalDetokenizerPort(self)

    def front_port(self) -> LocalFrontPort:
        return LocalFrontPort(self)


class LocalSchedulerPort:
    def __init__(self, hub: LocalHub) -> None:
        self.receive = hub._scheduler.receive
        self._hub = hub

    def to_detokenizer(self, batch: TokenBatch) -> None:
        self._hub._detokenizer.put(batch)

    def to_front(self, message: Reply | Heartbeat) -> None:
        self._hub._front.put(message)

    def close(self) -> None:
        """Nothing to release."""


class LocalDetokenizerPort:
    def __init__(self, hub: LocalHub) -> None:
        self.receive = hub._detokenizer.receive
        self._hub = hub

    def to_front(self, batch: TextBatch) -> None:
        self._hub._front.put(batch)

    def to_scheduler(self, message: Abort) -> None:
        self._hub._scheduler.put(message)

    def close(self) -> None:
        """Nothing to release."""


class LocalFrontPort:
    def __init__(self, hub: LocalHub) -> None:
        self.receive = hub._front.receive
        self._hub = hub

    def to_scheduler(self, message: ToScheduler) -> None:
        self._hub._scheduler.put(message)

    def close(self) -> None:
        """Nothing to release."""
