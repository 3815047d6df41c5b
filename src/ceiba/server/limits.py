"""Limits of a request kept before anything is parsed: bytes, and how long its body may stall. Pure ASGI, outside the
framework.

Owns header and body size. A body without a length is counted as it comes.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError, TooLarge, TooSlow
from ceiba.server.errors import path_of, send_error


class LimitMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        max_body: int = limits.MAX_BODY_BYTES,
        max_header: int = limits.MAX_HEADER_BYTES,
        uploads: frozenset[str] = frozenset({"/v1/files"}),
        stall: float = limits.BODY_STALL_SECONDS,
    ) -> None:
        """``uploads``: paths whose bodies may be as long as a file, with a little around it."""
        self._app = app
        self._max_body = max_body
        self._max_header = max_header
        self._uploads = uploads
        self._stall = stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = limits.MAX_FILE_BYTES + (1 << 20) if path_of(scope) in self._uploads else self._max_body
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
            await send_error(send, self._too_large(length, most), path_of(scope))
            return
        await self._app(scope, self._counted(receive, most), send)

    def _counted(self, receive: Receive, most: int) -> Receive:
        got = 0
        complete = False

        async def counted() -> Message:
            nonlocal got, complete
            try:
                async with asyncio.timeout(None if complete else self._stall):
                    message = await receive()
            except TimeoutError:
                raise TooSlow(
                    f"no byte of the body came for {self._stall:g} s after the first {got}: send it again.",
                    param="body",
                    code="body_stalled",
                ) from None
            complete = not message.get("more_body", False)
            if message["type"] == "http.request":
                got += len(message.get("body", b""))
                if got > most:
                    raise self._too_large(got, most)
            return message

        return counted

    @staticmethod
    def _too_large(size: int, most: int) -> CeibaError:
        return TooLarge(f"the body has {size} bytes or more; the limit is {most}.", param="body", code="body_too_large")
