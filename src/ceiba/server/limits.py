"""Limits of a request kept before anything is parsed: bytes of one and of all bodies, and how slowly one may come.
Pure ASGI, outside the framework.

Owns header and body size, and the sum of the bodies in memory. A body without a length is counted as it comes.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError, Overloaded, TooLarge, TooSlow
from ceiba.server.errors import path_of, send_error


class BodyBudget:
    """Bytes of request bodies in memory. ``take`` as they come, ``give`` back when the request has been answered."""

    def __init__(self, most: int = limits.MAX_BODIES_BYTES) -> None:
        self.most = most
        self.held = 0

    def take(self, count: int) -> None:
        """Raises Overloaded where there is no room for ``count`` more."""
        if count > 0 and self.held + count > self.most:
            raise Overloaded(
                f"the bodies of requests in flight fill {self.most >> 20} MiB, the server's limit: send it again.",
                code="bodies_full",
            )
        self.held += count

    def give(self, count: int) -> None:
        self.held -= count


class LimitMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        max_body: int = limits.MAX_BODY_BYTES,
        max_header: int = limits.MAX_HEADER_BYTES,
        uploads: frozenset[str] = frozenset({"/v1/files"}),
        stall: float = limits.BODY_STALL_SECONDS,
        rate: int = limits.BODY_BYTES_PER_SECOND,
        budget: BodyBudget | None = None,
    ) -> None:
        """``uploads``: paths whose bodies may be as long as a file, with a little around it, and go to the disk.
        ``rate``: bytes a second that a body must come at on average, once ``stall`` seconds are over."""
        self._app = app
        self._max_body = max_body
        self._max_header = max_header
        self._uploads = uploads
        self.stall = stall
        self.rate = rate
        self.budget = budget or BodyBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = path_of(scope) in self._uploads
        most = limits.MAX_FILE_BYTES + (1 << 20) if upload else self._max_body
        size, length = 0, 0
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            if name == b"content-length" and value.isdigit():
                length = int(value[:20])
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if size > self._max_header:
            await send_error(
                send,
                BadRequest(f"headers of {size} bytes; the limit is {self._max_header}.", param="headers"),
                path_of(scope),
            )
            return
        if length > most:
            await send_error(send, self.too_large(length, most), path_of(scope))
            return
        body = _Body(receive, self, most, counted=not upload)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()

    @staticmethod
    def too_large(size: int, most: int) -> CeibaError:
        return TooLarge(f"the body has {size} bytes or more; the limit is {most}.", param="body", code="body_too_large")


class _Body:
    """One request's body on its way in."""

    def __init__(self, receive: Receive, limit: LimitMiddleware, most: int, counted: bool) -> None:
        self._receive = receive
        self._limit = limit
        self._most = most
        self._counted = counted
        self._got = 0
        self._taken = 0
        self._complete = False
        self._began = time.monotonic()

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        limit = self._limit
        try:
            async with asyncio.timeout(limit.stall):
                message = await self._receive()
        except TimeoutError:
            raise self._slow(f"no byte of the body came for {limit.stall:g} s after the first {self._got}") from None
        self._complete = not message.get("more_body", False)
        if message["type"] == "http.request":
            self._got += len(message.get("body", b""))
            if self._got > self._most:
                raise limit.too_large(self._got, self._most)
            self._take()
        seconds = time.monotonic() - self._began
        if not self._complete and seconds > limit.stall + self._got / limit.rate:
            raise self._slow(f"{self._got} bytes of the body in {seconds:.0f} s are under {limit.rate} bytes a second")
        return message

    def _take(self) -> None:
        more = self._got - limits.SMALL_BODY_BYTES - self._taken
        if self._counted and more > 0:
            self._limit.budget.take(more)
            self._taken += more

    def close(self) -> None:
        self._limit.budget.give(self._taken)
        self._taken = 0

    @staticmethod
    def _slow(what: str) -> TooSlow:
        return TooSlow(f"{what}: send it again.", param="body", code="body_stalled")
