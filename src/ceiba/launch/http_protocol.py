"""The HTTP server's connections with an end to patience: one that never finishes its headers is closed.

Owns that timer and nothing else; parsing is uvicorn's and httptools'. Without it a stranger could hold any number of
connections, and so all file descriptors, without ever sending a request.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ceiba.core import limits


class PunctualProtocol(HttpToolsProtocol):
    """One connection. ``HEADER_SECONDS`` run from connecting and from the first byte of every further request."""

    header_seconds = limits.HEADER_SECONDS
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self._header_timer is None:
            self._wait_for_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._headers_came()
        super().on_headers_complete()

    def _wait_for_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.header_seconds, self._late)

    def _headers_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _late(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()
