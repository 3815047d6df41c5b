"""The three mailboxes of ``core.ports`` over ZeroMQ: a PULL socket each, bound by its owner; writers connect PUSH.

Owns socket names, encoding and wake-ups. Must never know what a message means. The sockets lie in a private directory
(mode 0700) with a random name per launch, so two servers of one user never meet and other users cannot connect. No
queue has a limit: admission control is the scheduler's, and a message lost here would be a request that never ends.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from ceiba.core.errors import ConfigError
from ceiba.core.messages import (
    Abort,
    Heartbeat,
    Pooled,
    Reply,
    TextBatch,
    ToDetokenizer,
    ToFront,
    TokenBatch,
    ToPooling,
    ToScheduler,
)
from ceiba.launch.starting import DETOKENIZER, SCHEDULER

M = TypeVar("M")

FRONT = "front"
_MAX_SOCKET_PATH = 100
"""sun_path holds 107 bytes; ZeroMQ adds none of its own, the rest is slack."""
_READABLE = int(zmq.POLLIN)
_LINGER_MS = 500
"""How long a closing process tries to hand over what it has sent."""


class Endpoints(msgspec.Struct, frozen=True):
    """Where the mailboxes of one launch are. ``front_inproc``: a second name of the front's, for threads beside it."""

    scheduler: str
    detokenizer: str
    front: str
    front_inproc: str


def make_endpoints() -> tuple[Endpoints, Path]:
    """A fresh private directory and the addresses in it. The caller removes it with ``remove_endpoints``."""
    directory = Path(tempfile.mkdtemp(prefix="ceiba-"))  # mkdtemp: 0700 and 8 random characters
    if len(str(directory)) + len(DETOKENIZER) + 1 > _MAX_SOCKET_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="ceiba-", dir="/tmp"))
    if len(str(directory)) + len(DETOKENIZER) + 1 > _MAX_SOCKET_PATH:
        raise ConfigError(f"temporary directory {directory}: too long for a socket name; set TMPDIR to a short path")
    scheduler, detokenizer, front = (f"ipc://{directory / name}" for name in (SCHEDULER, DETOKENIZER, FRONT))
    return Endpoints(scheduler, detokenizer, front, f"inproc://{directory.name}-front"), directory


def remove_endpoints(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _pull(context: zmq.Context[Any], *addresses: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    for address in addresses:
        socket.bind(address)
    return socket


def _push(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)  # the reader may bind after we connect; start-up should not wait for it
    socket.connect(address)
    return socket


class _Outbox:
    """One PUSH socket. ``send`` may come from several threads (the heartbeat has its own), hence the lock."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = _push(context, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        data = self._encoder.encode(message)
        with self._lock:
            if not self._socket.closed:
                self._socket.send(data, zmq.NOBLOCK, copy=len(data) < 65536)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class _Inbox(Generic[M]):
    """One PULL socket read by a thread that may sleep."""

    def __init__(self, context: zmq.Context[Any], address: str, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._socket = _pull(context, address)
        self._decoder = decoder

    def receive(self, timeout: float) -> list[M]:
        if timeout >= 0.001:
            if not self._socket.poll(int(timeout * 1000), zmq.POLLIN):
                return []
        elif timeout > 0:  # finer than the poll's milliseconds
            time.sleep(timeout)
        messages: list[M] = []
        # Asked before each: the scheduler finds nothing in most of its rounds, and an exception costs it more.
        while int(self._socket.get(zmq.EVENTS)) & _READABLE:
            messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def close(self) -> None:
        self._socket.close()


class ZmqSchedulerPort:
    """``core.ports.SchedulerPort``. ``to_front`` is safe from a heartbeat thread as well."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context = zmq.Context()
        self._inbox: _Inbox[ToScheduler] = _Inbox(
            self._context, endpoints.scheduler, msgspec.msgpack.Decoder(ToScheduler)
        )
        self._detokenizer = _Outbox(self._context, endpoints.detokenizer)
        self._front = _Outbox(self._context, endpoints.front)

    def receive(self, timeout: float) -> list[ToScheduler]:
        return self._inbox.receive(timeout)

    def to_detokenizer(self, batch: TokenBatch) -> None:
        self._detokenizer.send(batch)

    def to_front(self, message: Reply | Heartbeat) -> None:
        self._front.send(message)

    def close(self) -> None:
        for part in (self._inbox, self._detokenizer, self._front):
            part.close()
        self._context.term()


class ZmqPoolingPort:
    """``core.ports.PoolingPort``: the scheduler's mailbox, for a model that gives numbers. ``to_front`` is safe from a
    heartbeat thread as well."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context = zmq.Context()
        self._inbox: _Inbox[ToPooling] = _Inbox(self._context, endpoints.scheduler, msgspec.msgpack.Decoder(ToPooling))
        self._front = _Outbox(self._context, endpoints.front)

    def receive(self, timeout: float) -> list[ToPooling]:
        return self._inbox.receive(timeout)

    def to_front(self, message: Pooled | Reply | Heartbeat) -> None:
        self._front.send(message)

    def close(self) -> None:
        self._inbox.close()
        self._front.close()
        self._context.term()


class ZmqDetokenizerPort:
    """``core.ports.DetokenizerPort``; as a thread of the main process it shares ``context`` and stays off the kernel
    on its way to the front."""

    def __init__(self, endpoints: Endpoints, context: zmq.Context[Any] | None = None) -> None:
        self._owned = context is None
        self._context: zmq.Context[Any] = context or zmq.Context()
        self._inbox: _Inbox[ToDetokenizer] = _Inbox(
            self._context, endpoints.detokenizer, msgspec.msgpack.Decoder(ToDetokenizer)
        )
        self._front = _Outbox(self._context, endpoints.front if self._owned else endpoints.front_inproc)
        self._scheduler = _Outbox(self._context, endpoints.scheduler)

    def receive(self, timeout: float) -> list[ToDetokenizer]:
        return self._inbox.receive(timeout)

    def to_front(self, batch: TextBatch) -> None:
        self._front.send(batch)

    def to_scheduler(self, message: Abort) -> None:
        self._scheduler.send(message)

    def close(self) -> None:
        for part in (self._inbox, self._front, self._scheduler):
            part.close()
        if self._owned:
            self._context.term()


class ZmqFrontPort:
    """``core.ports.FrontPort`` on a running event loop, one reader.

    ZeroMQ's descriptor is edge-triggered: it becomes readable when the socket's state *may* have changed and says
    nothing while unread messages lie there. So each wake-up reads until EAGAIN, which is also the only state in which
    sleeping on the descriptor is safe.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._socket = _pull(self.context, endpoints.front, endpoints.front_inproc)
        self._scheduler = _Outbox(self.context, endpoints.scheduler)
        self._decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
        self._ready: deque[bytes] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    def to_scheduler(self, message: ToScheduler) -> None:
        self._scheduler.send(message)

    async def receive(self) -> ToFront:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.FD, self._drain)
        while not self._ready:
            self._drain()
            if self._ready:
                break
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._decoder.decode(self._ready.popleft())

    def _drain(self) -> None:
        receive, ready = self._socket.recv, self._ready
        try:
            while True:
                ready.append(receive(zmq.NOBLOCK))
        except zmq.Again:
            pass
        if ready and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Call on the loop's thread, after the reader has ended. Threads that share ``context`` close theirs first."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._scheduler.close()
        self.context.term()
