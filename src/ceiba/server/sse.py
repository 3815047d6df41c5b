"""Carries one request's answer to its client: events as they come, or one body at the end. A raw ASGI response.

Owns the order of things (status only once the first token or error is known, so a full queue is a real 503), watching
for the client to leave, and putting many events into one write. What an answer looks like is the protocol's ``Shape``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ceiba.core.errors import CeibaError
from ceiba.server import errors, scheduling
from ceiba.server.choices import Choice, Delta, choices_of
from ceiba.server.front import Front
from ceiba.server.generation import Generation, failed
from ceiba.server.request import EngineRequest

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """One protocol's form of one request's answer. Called in order, from one task. Inherit for the defaults."""

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    """Of a streamed answer."""

    def opened(self, choices: list[Choice]) -> None:
        """The prompts are tokenized; ``choices`` are empty still."""

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        """Append the server-sent events for one chunk."""

    def closing(self, out: list[bytes]) -> None:
        """Append what follows the last chunk."""

    def whole(self) -> bytes:
        """The JSON body, when every choice has ended."""

    def left(self, error: CeibaError | None) -> None:
        """The answer will not come to its end: ``error``, or the client has gone."""
        return

    def failure(self, error: CeibaError) -> bytes:
        """What ends a stream that fails on its way."""
        return b"data: " + errors.body(error) + b"\n\n" + DONE


class Answer(Response):
    """Runs ``request`` when the framework calls it. Leaving the connection aborts the request in any state."""

    def __init__(
        self, front: Front, request: EngineRequest, shape: Shape, extra_headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self._front = front
        self._request = request
        self._shape = shape
        self._extra = [(b"x-request-id", request.rid.encode("utf-8", "replace"))]
        self._extra += [(k.encode(), v.encode("utf-8", "replace")) for k, v in (extra_headers or {}).items()]
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher: asyncio.Task[None] | None = None
        self._request.tenant = self._request.tenant or scheduling.tenant(scope, self._front)
        path = errors.path_of(scope)
        try:
            async with self._front.open(self._request) as generation:
                watcher = asyncio.create_task(_watch(receive, generation))
                await self._front.begin(generation)
                if generation.left:
                    self._shape.left(None)
                    return
                choices = choices_of(self._request, generation.prompts, generation.texts)
                self._shape.opened(choices)
                if self._request.stream:
                    await self._stream(generation, choices, send)
                else:
                    await self._whole(generation, choices, send)
        except Exception as error:
            await self._fail(errors.explain(error), send, path)
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _stream(self, generation: Generation, choices: list[Choice], send: Send) -> None:
        shape = self._shape
        out: list[bytes] = []
        while chunks := await generation.next():
            for chunk in chunks:
                choice = choices[chunk.index]
                delta = choice.feed(chunk)
                if delta.finish is None or not failed(delta.finish):
                    shape.event(choice, delta, out)
            if generation.error is not None and not self._started and not out:
                continue  # the error is next, and still in time to be a status
            await self._start(send)
            await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
            out.clear()
        if generation.left:
            shape.left(None)
            return
        shape.closing(out)
        await self._start(send)
        await send({"type": "http.response.body", "body": b"".join(out), "more_body": False})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", self._shape.media_type.encode()),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *self._extra,
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _whole(self, generation: Generation, choices: list[Choice], send: Send) -> None:
        while chunks := await generation.next():
            for chunk in chunks:
                choices[chunk.index].feed(chunk)
        if generation.left:
            self._shape.left(None)
            return
        body = self._shape.whole()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._extra,
        ]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, error: CeibaError, send: Send, path: str) -> None:
        self._shape.left(error)
        if not self._started:
            await errors.send_error(send, error, path)
        elif self._request.stream:
            event = self._shape.failure(error)
            await send({"type": "http.response.body", "body": event, "more_body": False})


async def collect(front: Front, request: EngineRequest, shape: Shape) -> bytes:
    """The whole answer without a connection: for batches and requests that run in the background."""
    async with await front.submit(request) as generation:
        choices = choices_of(request, generation.prompts, generation.texts)
        shape.opened(choices)
        async for chunk in generation:
            choices[chunk.index].feed(chunk)
    return shape.whole()


async def until_gone(request: Request, work: Coroutine[Any, Any, Any], answer: Callable[[Any], Response]) -> Response:
    """``answer`` of what ``work`` returns. A client that leaves cancels ``work``, in whatever state it is."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)  # nobody reads it
        return answer(task.result())
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _watch(receive: Receive, generation: Generation) -> None:
    """Wait for the client to leave, then abort."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abort()
