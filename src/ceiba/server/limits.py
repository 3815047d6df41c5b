"""Byte limits of a request, kept before anything is parsed. Pure ASGI, outside the framework.

Owns header and body size. A body without a length is counted as it comes.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError, TooLarge
from ceiba.server.errors import path_of, send_error


class LimitMiddleware:
    def __init__(
        self, app: ASGIApp, max_body: int = limits.MAX_BODY_BYTES, max_header: int = limits.MAX_HEADER_BYTES
    ) -> None:
        self._app = app
        self._max_body = max_body
        self._max_header = max_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
        if length > self._max_body:
            await send_error(send, self._too_large(length), path_of(scope))
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            if message["type"] == "http.request":
                got += len(message.get("body", b""))
                if got > self._max_body:
                    raise self._too_large(got)
            return message

        return counted

    def _too_large(self, size: int) -> CeibaError:
        return TooLarge(
            f"the body has {size} bytes or more; the limit is {self._max_body}.", param="body", code="body_too_large"
        )
