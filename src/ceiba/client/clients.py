"""The two clients: the same calls, performed with asyncio or at once.

Owns connections and the driving of ``exchange``'s steps; what is sent and what it means is said elsewhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from ceiba.client.answers import Reader, Text
from ceiba.client.api import Api
from ceiba.client.events import Deltas, EventReader
from ceiba.client.exchange import Call, Send, broken, exchange

_LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)


class Client(Api):
    """Asynchronous client. One belongs to one event loop; ``async with`` or ``await aclose()`` ends it."""

    _http: httpx.AsyncClient | None = None

    async def _perform(self, call: Call) -> Any:
        steps = exchange(call, self._policy, self.url)
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                return end.value
            if isinstance(step, Send):
                outcome = await self._send(call)
            else:
                await asyncio.sleep(step.seconds)
                outcome = None

    async def _send(self, call: Call) -> httpx.Response | Exception:
        if self._http is None:
            self._http = httpx.AsyncClient(**_options(self))
        try:
            response = await self._http.send(_request(self, self._http, call), stream=True)
            if not (call.stream and response.is_success):
                await response.aread()
            return response
        except httpx.TransportError as error:
            return error

    def _open(self, call: Call, deltas: Deltas, read: Reader | None) -> AsyncStream:
        return AsyncStream(self, call, deltas, read)

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class SyncClient(Api):
    """Blocking client; safe to use from several threads. ``with`` or ``close()`` ends it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._http = httpx.Client(**_options(self))

    def _perform(self, call: Call) -> Any:
        steps = exchange(call, self._policy, self.url)
        outcome: Any = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                return end.value
            if isinstance(step, Send):
                outcome = self._send(call)
            else:
                time.sleep(step.seconds)
                outcome = None

    def _send(self, call: Call) -> httpx.Response | Exception:
        try:
            response = self._http.send(_request(self, self._http, call), stream=True)
            if not (call.stream and response.is_success):
                response.read()
            return response
        except httpx.TransportError as error:
            return error

    def _open(self, call: Call, deltas: Deltas, read: Reader | None) -> Stream:
        return Stream(self, call, deltas, read)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _StreamState:
    """What is known of a stream so far. The request is sent when the first piece is asked for."""

    def __init__(self, call: Call, deltas: Deltas, read: Reader | None) -> None:
        self._call = call
        self._deltas = deltas
        self._read = read
        self._events = EventReader()
        self._response: httpx.Response | None = None

    @property
    def text(self) -> Text:
        """Everything so far; after the end with usage, finish reason and calls."""
        return self._deltas.text()

    def _value(self) -> Any:
        return self.text if self._read is None else self._read(self.text)

    def _pieces(self, data: bytes) -> Iterator[str]:
        for event in self._events.feed(data):
            delta = self._deltas.add(event)
            if delta:
                yield delta


class AsyncStream(_StreamState):
    """Pieces of text as they come: ``async for piece in client.generate(…, stream=True)`` (awaiting it first is fine).

    Leaving the loop early, or ``aclose``, closes the connection, which aborts the request.
    """

    def __init__(self, client: Client, call: Call, deltas: Deltas, read: Reader | None) -> None:
        super().__init__(call, deltas, read)
        self._client = client
        self._iterator = self._iterate()

    def __await__(self) -> Generator[Any, None, AsyncStream]:
        return self._self().__await__()

    async def _self(self) -> AsyncStream:
        return self

    def __aiter__(self) -> AsyncIterator[str]:
        return self._iterator

    async def _iterate(self) -> AsyncIterator[str]:
        self._response = await self._client._perform(self._call)
        try:
            async for data in self._response.aiter_bytes():
                for piece in self._pieces(data):
                    yield piece
                if self._events.done:
                    return
            error = self._events.end(self._client.url)
            if error is not None:
                raise error
        except httpx.TransportError as failure:
            raise broken(failure, self._client.url) from failure
        finally:
            await self._response.aclose()

    async def result(self) -> Any:
        """Read the rest; what the call gives without ``stream``."""
        async for _ in self._iterator:
            pass
        return self._value()

    async def aclose(self) -> None:
        close = getattr(self._iterator, "aclose", None)
        if close is not None:
            await close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Stream(_StreamState):
    """``AsyncStream`` for plain code."""

    def __init__(self, client: SyncClient, call: Call, deltas: Deltas, read: Reader | None) -> None:
        super().__init__(call, deltas, read)
        self._client = client
        self._iterator = self._iterate()

    def __iter__(self) -> Iterator[str]:
        return self._iterator

    def _iterate(self) -> Generator[str, None, None]:
        self._response = self._client._perform(self._call)
        try:
            for data in self._response.iter_bytes():
                yield from self._pieces(data)
                if self._events.done:
                    return
            error = self._events.end(self._client.url)
            if error is not None:
                raise error
        except httpx.TransportError as failure:
            raise broken(failure, self._client.url) from failure
        finally:
            self._response.close()

    def result(self) -> Any:
        """Read the rest; what the call gives without ``stream``."""
        for _ in self._iterator:
            pass
        return self._value()

    def close(self) -> None:
        self._iterator.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _options(api: Api) -> dict[str, Any]:
    timeout, connect = api._timeouts
    return {
        "timeout": httpx.Timeout(timeout, connect=connect),
        "limits": _LIMITS,
        "headers": api._headers,
        "trust_env": not _is_loopback(api.url),  # a proxy of the environment does not know our loopback
    }


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _request(api: Api, http: Any, call: Call) -> httpx.Request:
    key = api._admin_key if call.admin else api._key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return http.build_request(call.method, api.url + call.path, json=call.body, headers=headers)
