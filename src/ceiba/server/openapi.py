"""The OpenAPI document: request and answer schemas come from the same structs that decode and describe them.

Owns how structs become components. Must never know a route by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ceiba.server.answers import ErrorAnswer

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route's documentation. ``body``, ``answer`` and ``event`` are types msgspec can describe, or None."""

    summary: str
    body: Any
    answer: Any
    event: Any = None
    """The data of one server-sent event, for routes that stream."""
    event_type: str = "text/event-stream"

    def streaming(self, media_type: str) -> Operation:
        return replace(self, event_type=media_type)


class Document:
    def __init__(self) -> None:
        self._operations: list[tuple[str, tuple[str, ...], Operation]] = []

    def add(self, path: str, methods: tuple[str, ...], operation: Operation) -> None:
        self._operations.append((path, methods, operation))

    def of(self, app: FastAPI) -> Callable[[], dict[str, Any]]:
        """A replacement for ``app.openapi``; the document is built on first use."""

        def build() -> dict[str, Any]:
            if app.openapi_schema is None:
                app.openapi_schema = self._build(app)
            return app.openapi_schema

        return build

    def _build(self, app: FastAPI) -> dict[str, Any]:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        types = [ErrorAnswer]
        for _, _, operation in self._operations:
            types += [t for t in (operation.body, operation.answer, operation.event) if t is not None]
        shown, components = msgspec.json.schema_components(types, ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas.update(components)
        by_type = {id(kind): schema for kind, schema in zip(types, shown, strict=True)}
        error = {"description": "Error", "content": {"application/json": {"schema": by_type[id(ErrorAnswer)]}}}
        for path, methods, operation in self._operations:
            entry = document["paths"][_plain(path)]
            for method in methods:
                self._describe(entry[method.lower()], operation, by_type, error)
        return document

    @staticmethod
    def _describe(entry: dict[str, Any], operation: Operation, by_type: dict[int, Any], error: dict[str, Any]) -> None:
        if operation.body is not None:
            schema = by_type[id(operation.body)]
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        content: dict[str, Any] = {}
        if operation.answer is not None:
            content["application/json"] = {"schema": by_type[id(operation.answer)]}
        if operation.event is not None:
            content[operation.event_type] = {"schema": by_type[id(operation.event)]}
        entry["responses"] = {"200": {"description": "Answer"}, "default": error}
        if content:
            entry["responses"]["200"]["content"] = content


def _plain(path: str) -> str:
    """The path as the document spells it: ``{name:path}`` without its converter."""
    return path.replace(":path}", "}")
