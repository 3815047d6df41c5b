"""What can go wrong for a client. A server's error becomes the class of ``core.errors`` that the server raised.

Owns the way from a status and a body to an exception. ``ceiba.Engine`` raises the same classes in process, so code
that catches ``BadRequest`` or ``Overloaded`` works with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from ceiba.core.errors import (
    BadRequest,
    CeibaError,
    DeadlineExceeded,
    EngineFault,
    Forbidden,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthorized,
    Unavailable,
)


class ServerError(CeibaError):
    """An answer with an error status that has no class of its own; ``status`` says which."""

    kind = "server_error"


class ConnectionFailed(CeibaError):
    """No connection to the server, or it broke before the answer was complete."""

    kind = "connection_error"


class RequestTimeout(CeibaError):
    """The server sent nothing for ``timeout`` seconds. The request may still run: use ``rid`` and ``abort``."""

    kind = "timeout_error"


class InvalidOutput(CeibaError):
    """The answer is not what the schema asks for; ``text`` is the answer as it came."""

    kind = "invalid_output"

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message, code="invalid_output")
        self.text = text


_BY_STATUS: dict[int, type[CeibaError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    413: TooLarge,
    422: BadRequest,
    429: Overloaded,
    500: EngineFault,
    503: Unavailable,
    504: DeadlineExceeded,
}


def from_answer(status: int, headers: Mapping[str, str], body: bytes) -> CeibaError:
    """The exception for an error answer, with the server's own message, ``param`` and ``code`` where it sent them."""
    detail = _detail(body)
    shown = body[:500].decode("utf-8", "replace").strip()
    message = detail.get("message") or shown or f"status {status} and no message"
    return _made(status, str(message), detail, headers)


def from_event(error: Mapping[str, Any]) -> CeibaError:
    """The exception for an error in the middle of a stream."""
    status = error.get("status") or next(
        (known for known, kind in _BY_STATUS.items() if kind.kind == error.get("type")), EngineFault.status
    )
    return _made(int(status), str(error.get("message") or "the stream ended with an error"), error, {})


def _made(status: int, message: str, detail: Mapping[str, Any], headers: Mapping[str, str]) -> CeibaError:
    kind = _BY_STATUS.get(status, ServerError)
    code, param = detail.get("code"), detail.get("param")
    wait = retry_after(headers)
    if status == 429 or (status == 503 and detail.get("type") == Overloaded.kind):
        found: CeibaError = Overloaded(message, retry_after=max(1, round(wait or 1)), code=code)
        found.param = param
    else:
        found = kind(message, param=param, code=code)
    found.status = status
    return found


def _detail(body: bytes) -> dict[str, Any]:
    """OpenAI's error object, wherever the answer has it."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    if isinstance(value, dict):
        error = value.get("error", value)
        if isinstance(error, dict):
            return error
        if isinstance(error, str):
            return {"message": error}
        if isinstance(value.get("detail"), str):
            return {"message": value["detail"]}
    return {}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that ``Retry-After`` asks for (RFC 9110: a number or a date); None where there is none to read."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
