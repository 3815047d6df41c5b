"""How a route is added: with its access level and its documentation, or not at all.

Owns the three kinds of route (working, page, refusal) and the plain forms of answers. Must never know a route by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from ceiba.core.errors import BadRequest
from ceiba.server.auth import Access, AccessTable
from ceiba.server.hints import hint_header, hints_of
from ceiba.server.openapi import Document, Operation

Handler = Callable[..., Awaitable[Response]]


class Routes:
    """Adds routes with their access level and documentation; a working route cannot be added without both."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.table = AccessTable()
        self.document = Document()

    def add(self, path: str, methods: tuple[str, ...], level: Access, operation: Operation, handler: Handler) -> None:
        self.table.declare(path, level)
        self.document.add(path, methods, operation)
        name = path.strip("/").replace("/", "_").replace("{", "").replace(":path}", "")
        for method in methods:
            self._app.add_api_route(
                path,
                handler,
                methods=[method],
                response_model=None,
                summary=operation.summary,
                operation_id=f"{method.lower()}_{name}",
            )

    def add_page(self, path: str, handler: Handler) -> None:
        """Something for browsers: public, GET and HEAD, and no part of the document."""
        self.table.declare(path, Access.OPEN)
        self._app.add_route(path, handler, methods=["GET"], include_in_schema=False)

    def add_refusal(self, path: str, methods: tuple[str, ...], level: Access, handler: Handler) -> None:
        """A known route that does not work here; it is closed like the others, and no part of the document."""
        self.table.declare(path, level)
        self._app.add_route(path, handler, methods=list(methods), include_in_schema=False)


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def hinting(body: msgspec.Struct) -> Callable[[object], Response]:
    """``json_answer`` for ``body``'s answer, which names the hints that it gave."""
    return lambda value: json_answer(value, headers=hint_header(hints_of(body)))


def page(found: Sequence[Any], after: str | None, limit: int, most: int) -> dict[str, Any]:
    """A list as OpenAI shows it in pages. Entries have an ``id``, as attribute or key. Raises BadRequest."""
    if not 1 <= limit <= most:
        raise BadRequest(f"limit is {limit}; it must lie in 1..{most}.", param="limit")
    ids = [str(entry["id"] if isinstance(entry, dict) else entry.id) for entry in found]
    start = 0
    if after is not None:
        if after not in ids:
            raise BadRequest("after names nothing that is here.", param="after")
        start = ids.index(after) + 1
    end = min(start + limit, len(ids))
    return {
        "object": "list",
        "data": found[start:end],
        "first_id": ids[start] if start < end else None,
        "last_id": ids[end - 1] if start < end else None,
        "has_more": end < len(ids),
    }
