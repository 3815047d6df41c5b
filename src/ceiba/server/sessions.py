"""Sessions of /generate: each turn sends only what is new, and the conversation's KV stays pinned between turns.

Owns the turns of every open session as token ids, their ages and limits. What a turn continues is joined here, before
the request goes its usual way; the scheduler only hears a pin's name. Must never hold more than the limits below.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError, NotFound, Overloaded
from ceiba.server.choices import Choice, Delta
from ceiba.server.front import Front
from ceiba.server.request import EngineRequest, TextPrompt
from ceiba.server.sse import Answer, Shape

MAX_SESSIONS = 4096
MAX_TURNS = 1024
MAX_BYTES = 256 << 20
"""Token ids of all turns of all sessions."""
DEFAULT_TIMEOUT = 3600.0
"""Seconds without a turn after which a session is closed."""


class OpenSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /open_session."""

    capacity_of_str_len: Annotated[
        int | None, Meta(description="The most tokens that one turn's conversation may have. Default: the context.")
    ] = None
    session_id: Annotated[str | None, Meta(description="Your own id; made up if missing.")] = None
    timeout: Annotated[float | None, Meta(description="Seconds without a turn until it closes. Default 3600.")] = None


class CloseSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /close_session."""

    session_id: Annotated[str, Meta(description="The session.")]


class SessionParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``session_params`` of /generate."""

    id: Annotated[str, Meta(description="The session.")]
    rid: Annotated[
        str | None, Meta(description="The turn to continue, by its request id; missing: begin a conversation.")
    ] = None
    offset: Annotated[
        int | None, Meta(description="Where in that turn's tokens the new ones go; what follows is left out.")
    ] = None
    replace: Annotated[
        bool, Meta(description="Forget the turns that followed that one (without rid: all turns) first.")
    ] = False
    drop_previous_output: Annotated[bool, Meta(description="Continue that turn's prompt, without its answer.")] = False


@dataclass(slots=True)
class _Turn:
    prompt: np.ndarray
    answer: np.ndarray
    parent: str | None

    @property
    def size(self) -> int:
        return self.prompt.nbytes + self.answer.nbytes


@dataclass(slots=True)
class _Session:
    capacity: int
    timeout: float
    used: float
    turns: dict[str, _Turn] = field(default_factory=dict)
    busy: bool = False
    held: int = 0
    """Bytes of the turns."""


class Sessions:
    """All sessions of one front. Methods belong to its event loop; ``clock`` gives seconds."""

    def __init__(self, front: Front, clock: Callable[[], float] = time.monotonic) -> None:
        self._front = front
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    def open(self, body: OpenSession) -> str:
        """Raises BadRequest for an id in use or a limit that means nothing, Overloaded when there are too many."""
        self._expire()
        front = self._front
        if front.config.scheduler.disable_radix_cache:
            raise BadRequest("sessions need the prefix cache: start the server without --disable-radix-cache.")
        capacity = front.capacity if body.capacity_of_str_len is None else body.capacity_of_str_len
        if capacity < 1:
            raise BadRequest("capacity_of_str_len must be at least 1.", param="capacity_of_str_len")
        timeout = DEFAULT_TIMEOUT if body.timeout is None else body.timeout
        if not 0 < timeout <= 7 * 86400:
            raise BadRequest("timeout must be above 0 and at most a week, in seconds.", param="timeout")
        name = uuid.uuid4().hex if body.session_id is None else body.session_id
        if not name or len(name) > limits.MAX_ID_CHARS or not name.isprintable():
            raise BadRequest(
                f"session_id must be printable text of 1 to {limits.MAX_ID_CHARS} characters.", param="session_id"
            )
        if name in self._sessions:
            raise BadRequest(f"session {name!r} is open already: close it first.", param="session_id")
        if len(self._sessions) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} sessions are open: close one.", code="too_many_sessions")
        self._sessions[name] = _Session(capacity, timeout, self._clock())
        return name

    async def close(self, name: str) -> None:
        """Forget the session; its KV loses its pin and stays cached as long as there is room. A turn that runs ends
        normally and is not remembered. Raises NotFound."""
        if self._sessions.pop(name, None) is None:
            raise _unknown(name)
        await self._front.control("cache_unpin", {"name": _pin(name)})

    async def continued(self, params: SessionParams, request: EngineRequest) -> Turn:
        """Put the conversation before the prompt of ``request``. Raises what is wrong; one turn at a time."""
        self._expire()
        session = self._sessions.get(params.id)
        if session is None:
            raise _unknown(params.id)
        if request.num_choices != 1:
            raise BadRequest("session_params goes with one prompt and n = 1.", param="session_params")
        if session.busy:
            raise BadRequest(
                f"session {params.id!r} is answering another turn: wait for it.", param="session_params", code="busy"
            )
        before = _history(session, params)
        if request.rid in session.turns:
            raise BadRequest(f"rid {request.rid!r} names an earlier turn of this session.", param="rid")
        gone = _behind(session, params.rid) if params.replace else set()
        if len(session.turns) - len(gone) >= MAX_TURNS:
            raise BadRequest(
                f"the session has {MAX_TURNS} turns: send replace: true, or open another.", param="session_params"
            )
        held = sum(other.held for other in self._sessions.values())
        held -= sum(session.turns[name].size for name in gone)
        if held >= MAX_BYTES:
            raise Overloaded(
                f"the turns of all sessions hold {held >> 20} MiB, the server's limit: close sessions, or send "
                "replace: true.",
                code="sessions_full",
            )
        entry = request.inputs[0]
        session.busy = True
        try:
            prompt = entry.prompt
            if isinstance(prompt, TextPrompt):
                special = prompt.add_special_tokens and not len(before)
                prompt = (await self._front.encode_texts([prompt.text], special))[0]
            assert isinstance(prompt, np.ndarray)
            whole = np.concatenate([before, prompt]).astype(np.int32)
            if len(whole) > session.capacity:
                raise BadRequest(
                    f"the conversation has {len(whole)} tokens; this session holds {session.capacity}.",
                    param="session_params",
                    code="session_full",
                )
        except BaseException:
            session.busy = False
            raise
        entry.prompt = whole
        request.pin, request.pin_output, request.pin_seconds = _pin(params.id), True, session.timeout
        return Turn(self, params, request.rid)

    def ended(self, turn: Turn, choice: Choice | None) -> None:
        """A turn is over; ``choice`` is None when it did not come to its end."""
        session = self._sessions.get(turn.params.id)
        if session is None:
            return
        session.busy = False
        session.used = self._clock()
        if choice is None:
            return
        if turn.params.replace:
            _forget_after(session, turn.params.rid)
        answer = np.asarray(choice.token_ids, np.int32)
        made = session.turns[turn.rid] = _Turn(choice.prompt, answer, turn.params.rid)
        session.held += made.size

    def _expire(self) -> None:
        now = self._clock()
        for name in [n for n, s in self._sessions.items() if not s.busy and s.used + s.timeout < now]:
            del self._sessions[name]  # its pin has the same age limit in the scheduler


def _pin(name: str) -> str:
    return f"session:{name}"


def _unknown(name: str) -> CeibaError:
    return NotFound(f"no session {name[:64]!r} is open: it was closed, has timed out, or never was.", code="no_session")


def _history(session: _Session, params: SessionParams) -> np.ndarray:
    if params.rid is None:
        if params.offset or params.drop_previous_output:
            raise BadRequest("offset and drop_previous_output need rid, the turn to continue.", param="session_params")
        return np.empty(0, np.int32)
    turn = session.turns.get(params.rid)
    if turn is None:
        raise BadRequest(f"the session has no finished turn {params.rid!r}.", param="session_params", code="no_turn")
    tokens = turn.prompt if params.drop_previous_output else np.concatenate([turn.prompt, turn.answer])
    if params.offset is None or params.offset == -1:
        return tokens
    if not 0 <= params.offset <= len(tokens):
        raise BadRequest(f"offset must lie in 0..{len(tokens)}, or be -1 for the end.", param="session_params")
    return tokens[: params.offset]


def _behind(session: _Session, rid: str | None) -> set[str]:
    """Every turn that follows ``rid``."""
    gone: set[str | None] = {rid}
    changed = True
    while changed:
        late = {name for name, turn in session.turns.items() if turn.parent in gone} - gone
        changed = bool(late)
        gone |= late
    return {name for name in gone - {rid} if name is not None}


def _forget_after(session: _Session, rid: str | None) -> None:
    for name in _behind(session, rid):
        session.held -= session.turns.pop(name).size


class Turn:
    """A turn that runs. ``over`` must be called once it has ended in any way."""

    def __init__(self, sessions: Sessions, params: SessionParams, rid: str) -> None:
        self.params = params
        self.rid = rid
        self._sessions = sessions
        self._open = True

    def over(self, choice: Choice | None = None) -> None:
        if self._open:
            self._open = False
            self._sessions.ended(self, choice)


class SessionShape(Shape):
    """The native shape, which also tells the session when its turn has come to an end."""

    def __init__(self, inner: Shape, turn: Turn) -> None:
        self._inner = inner
        self._turn = turn
        self._choice: Choice | None = None

    def opened(self, choices: list[Choice]) -> None:
        self._choice = choices[0]
        self._inner.opened(choices)

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        self._inner.event(choice, delta, out)

    def closing(self, out: list[bytes]) -> None:
        self._remember()
        self._inner.closing(out)

    def whole(self) -> bytes:
        self._remember()
        return self._inner.whole()

    def failure(self, error: CeibaError) -> bytes:
        return self._inner.failure(error)

    def _remember(self) -> None:
        choice = self._choice
        if choice is not None and choice.finish is not None and choice.finish.kind in {"stop", "length"}:
            self._turn.over(choice)


class SessionAnswer(Answer):
    """An answer that lets go of its session however it ends, also when the client leaves."""

    def __init__(
        self, front: Front, request: EngineRequest, shape: Shape, turn: Turn, headers: Mapping[str, str]
    ) -> None:
        super().__init__(front, request, SessionShape(shape, turn), headers)
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.over()


def described(params: Any) -> SessionParams:
    """``session_params`` as decoded. Raises BadRequest."""
    try:
        return msgspec.convert(params, SessionParams)
    except msgspec.ValidationError as error:
        raise BadRequest(f"session_params: {error}", param="session_params") from None
