"""The HTTP server's connections with an end to patience, to headers, and to what may wait behind a running request.

Owns three rules and nothing else; parsing is uvicorn's and httptools'. Headers that never end close their connection,
or a stranger could hold any number of file descriptors; so do headers without bound, which the parser would keep in
memory; and a client that leaves is noticed although it has sent further requests behind the one that runs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ceiba.core import limits


class PunctualProtocol(HttpToolsProtocol):
    """One connection. ``HEADER_SECONDS`` run from connecting and from the first byte of every further request.

    While further (pipelined) requests wait, the base class stops reading and so never learns that its client has gone,
    nor tells the request that runs. Here reading goes on: what comes is kept unparsed until the running answer is
    complete, up to ``MAX_PIPELINED_BYTES``; a client that sends more closes its own connection.
    """

    header_seconds = limits.HEADER_SECONDS
    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    """Received since the current request began, while its headers have not ended."""
    _trailer_bytes = 0
    _in_body = False
    _running: Any = None
    """The cycle whose answer is being made; ``cycle`` is the one whose body is being read."""
    _held = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._held = b""

    def data_received(self, data: bytes) -> None:
        if self._held or self.pipeline:
            self._hold(data)
            return
        if self._header_timer is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_timer is not None and self._header_bytes > limits.MAX_HEADER_BYTES:
            self._refuse_headers()
        if self.pipeline:
            self.flow.resume_reading()

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > limits.MAX_PIPELINED_BYTES:
            self._held = b""
            self.transport.abort()

    def on_message_begin(self) -> None:
        if self._header_timer is None:
            self._wait_for_headers()
        self._in_body = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # trailers of a chunked body: nobody reads them
            self._trailer_bytes += len(name) + len(value)
            if self._trailer_bytes > limits.MAX_HEADER_BYTES:
                self._refuse_headers()
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_came()
        self._in_body, self._trailer_bytes = True, 0
        before = self.cycle
        super().on_headers_complete()
        if before is None or before.response_complete:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._running = following
        if self._held and not self.pipeline:
            self.loop.call_soon(self._release)

    def _release(self) -> None:
        """Parse what came while other requests waited."""
        if self.pipeline or self.parser is None or self.transport.is_closing():
            return
        data, self._held = self._held, b""
        if data:
            self.data_received(data)

    def _refuse_headers(self) -> None:
        if self.transport.is_closing():
            return
        if self._running is None or self._running.response_complete:
            text = b"headers are over the limit of %d bytes" % limits.MAX_HEADER_BYTES
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
            self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text))
        self.transport.close()

    def _wait_for_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(self.header_seconds, self._late)

    def _headers_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _late(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()
