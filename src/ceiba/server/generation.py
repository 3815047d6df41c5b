"""One request in flight: the chunks that have arrived for its choices, and whoever waits for them.

Owns the hand-over from the front's single receive task to the task that answers a client: any number of chunks, one
wake-up per step. Must never know HTTP or sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import numpy as np

from ceiba.core.errors import BadRequest, CeibaError, DeadlineExceeded, EngineFault, Overloaded, Unavailable
from ceiba.core.messages import Finish
from ceiba.server.request import Chunk, EngineRequest

LeaveFn = Callable[["Generation"], None]


def failed(finish: Finish) -> bool:
    """Whether this end is an error of the whole request, not the end of an answer."""
    return finish.status != 0 or finish.kind == "error"


def fault(finish: Finish, name: Callable[[str], str] = str) -> CeibaError:
    """The error that a failed choice means for its client; ``name``: what its protocol calls a native field."""
    message = finish.message or "the engine ended this request without saying why."
    param, code = name(finish.param) if finish.param else None, finish.code or None
    if finish.status == 503:
        return Overloaded(message)
    kinds: dict[int, type[CeibaError]] = {504: DeadlineExceeded, 400: BadRequest}
    return kinds.get(finish.status, EngineFault)(message, param=param, code=code)


class Generation:
    """Made by ``Front.open``. Use as ``async with``, so that leaving early aborts what still runs.

    ``prompts`` are the token ids of each input and ``texts`` its words, known once ``Front.begin`` has returned. All
    methods belong to the event loop of the front.
    """

    def __init__(self, request: EngineRequest, leave: LeaveFn) -> None:
        self.request = request
        self.prompts: list[np.ndarray] = []
        self.texts: list[str] = []
        """Each prompt as text, "" for prompts given as ids."""
        self.arrival = time.monotonic()
        self.rids: tuple[str, ...] = ()
        self.wire_ids: list[str] = []
        """Per choice, once sent to the scheduler."""
        self.open: set[int] = set()
        """Choices that have not ended."""
        self.error: CeibaError | None = None
        self.left = False
        self.drops: frozenset[int] = frozenset()
        """Choices with ``max_new_tokens`` 0: one token is computed for them and thrown away here."""
        self.last_at: list[float] = []
        """Per choice, when its last token came; 0 before the first."""
        self.said: list[list[str]] | None = None
        """Per choice its text so far, kept only when the request log shows it."""
        self._leave = leave
        self._chunks: list[Chunk] = []
        self._waiter: asyncio.Future[None] | None = None

    # ── the front's side ──────────────────────────────────────────────────────

    def push(self, chunk: Chunk) -> None:
        """Deliver; at most one wake-up until the reader has come."""
        self._chunks.append(chunk)
        finish = chunk.finish
        if finish is not None:
            self.open.discard(chunk.index)
            if failed(finish):
                self.fail(fault(finish, self.request.name))
        self._wake()

    def fail(self, error: CeibaError) -> None:
        """End everything with ``error``, after the chunks that have already come."""
        if self.error is None:
            self.error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ── the reader's side ─────────────────────────────────────────────────────

    async def next(self) -> list[Chunk]:
        """All chunks that lie ready, waiting for at least one; an empty list when every choice has ended.

        Raises the request's error once, after its last good chunk.
        """
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.left or not self.open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunks, self._chunks = self._chunks, []
        return chunks

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while chunks := await self.next():
            for chunk in chunks:
                yield chunk

    def abort(self) -> None:
        """The reader has gone: end what still runs, in whatever state. Safe to call at any time, more than once."""
        if not self.left:
            self.left = True
            self._leave(self)
            self._wake()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.abort()


def stopped(reason: str) -> Unavailable:
    return Unavailable(f"the engine is not running: {reason}", code="engine_unavailable")
