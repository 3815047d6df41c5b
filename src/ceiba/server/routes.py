"""How a route is added: with its access level and its documentation, or not at all.

Owns the three kinds of route (working, page, refusal). Must never know a route by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Response

from ceiba.server.auth import Access, AccessTable
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


def json_answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
