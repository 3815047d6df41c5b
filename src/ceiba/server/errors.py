"""How an error looks on the wire: OpenAI's shape, and the shapes of Anthropic's and Ollama's clients on their routes.

Owns the mapping from exceptions to status, headers and body. Must never show an internal traceback to a client.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope, Send

from ceiba.core.errors import BadRequest, CeibaError, EngineFault, NotFound, Overloaded, Unauthorized

log = logging.getLogger(__name__)


class NotImplementedHere(CeibaError):
    """A known route whose feature this version does not have (501)."""

    status = 501
    kind = "not_available_error"


class MethodNotAllowed(CeibaError):
    status = 405
    kind = "invalid_request_error"


ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def payload(error: CeibaError, path: str = "") -> dict[str, object]:
    """The body as an object; ``path``, without the mount prefix, says whose protocol it is."""
    if path.startswith(ANTHROPIC_PATH):
        kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}
    if path.startswith(OLLAMA_PATH):
        return {"error": error.message}
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def body(error: CeibaError, path: str = "") -> bytes:
    return msgspec.json.encode(payload(error, path))


def headers(error: CeibaError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


def response(error: CeibaError, path: str = "") -> Response:
    return Response(body(error, path), error.status, headers(error), "application/json")


async def send_error(send: Send, error: CeibaError, path: str = "") -> None:
    """A whole response from below the framework, where there is no request object."""
    content = body(error, path)
    raw = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    raw += [(name.encode(), value.encode()) for name, value in headers(error).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


def explain(error: Exception) -> CeibaError:
    """Whatever was raised, as an error of ours; unexpected ones are logged with their traceback."""
    if isinstance(error, CeibaError):
        return error
    log.error("unexpected error while serving a request", exc_info=error)
    return EngineFault("internal error: the server's log has the details.", code="internal_error")


def path_of(scope: Scope) -> str:
    """The path below the mount prefix, as the router sees it."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in {"", "/"}:
        return path[len(root) :] or "/"
    return path


def install(app: FastAPI) -> None:
    """Every way a request can fail inside ``app`` ends in its protocol's shape."""

    async def ours(request: Request, error: Exception) -> Response:
        return response(explain(error), path_of(request.scope))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = path_of(request.scope)
        if error.status_code == 404:
            return response(NotFound(f"no such route: {request.method} {request.url.path}", code="unknown_route"), path)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            wrong = MethodNotAllowed(f"{request.url.path} does not take {request.method}", code="method_not_allowed")
            answer = response(wrong, path)
            if allowed:
                answer.headers["allow"] = allowed
            return answer
        text = error.detail or HTTPStatus(error.status_code).phrase
        ours = BadRequest(text) if error.status_code < 500 else EngineFault(text)
        answer = response(ours, path)
        answer.status_code = error.status_code
        return answer

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first: dict[str, Any] = next(iter(error.errors()), {})
        where = [str(part) for part in first.get("loc", ()) if part not in {"body", "query", "path", "header"}]
        return response(
            BadRequest(first.get("msg", "invalid request"), param=".".join(where) or None), path_of(request.scope)
        )

    app.add_exception_handler(CeibaError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, ours)
