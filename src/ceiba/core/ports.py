"""The three mailboxes as protocols. ``launch`` implements them over ZeroMQ; components never see a socket.

A port belongs to one thread or event loop; sending never blocks for long and never raises because a peer is gone
(supervision notices that instead).
"""

from __future__ import annotations

from typing import Protocol

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


class SchedulerPort(Protocol):
    def receive(self, timeout: float) -> list[ToScheduler]:
        """Wait up to ``timeout`` seconds (0: not at all) for a first message; return all that lie ready, in order."""

    def to_detokenizer(self, batch: TokenBatch) -> None: ...

    def to_front(self, message: Reply | Heartbeat) -> None: ...


class PoolingPort(Protocol):
    """The scheduler's mailbox and its way to the front, for a model that gives numbers."""

    def receive(self, timeout: float) -> list[ToPooling]:
        """As ``SchedulerPort.receive``."""

    def to_front(self, message: Pooled | Reply | Heartbeat) -> None: ...


class DetokenizerPort(Protocol):
    def receive(self, timeout: float) -> list[ToDetokenizer]: ...

    def to_front(self, batch: TextBatch) -> None: ...

    def to_scheduler(self, message: Abort) -> None: ...


class FrontPort(Protocol):
    def to_scheduler(self, message: ToScheduler) -> None: ...

    async def receive(self) -> ToFront: ...
