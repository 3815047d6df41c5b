"""The OpenAPI document: request and answer schemas come from the same structs that decode and describe them.

Owns how structs become components. Must never know a route by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ceiba.core import limits
from ceiba.server.answers import AnthropicErrorAnswer, ErrorAnswer, OllamaErrorAnswer
from ceiba.server.errors import ANTHROPIC_PATH, OLLAMA_PATH

_ASKING = ("Request", "Fields", "Options")
"""How the names of components that are sent to us end."""
_PENALTY: dict[str, float] = {"minimum": -limits.MAX_PENALTY, "maximum": limits.MAX_PENALTY}
_SEED: dict[str, float] = {"minimum": -(2**63), "maximum": 2**64 - 1}
_BOUNDS: dict[str, dict[str, float]] = {
    "n": {"minimum": 1, "maximum": limits.MAX_N},
    "best_of": {"minimum": 1, "maximum": limits.MAX_N},
    "temperature": {"minimum": 0, "maximum": limits.MAX_TEMPERATURE},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": {"minimum": limits.MIN_REPETITION_PENALTY, "maximum": limits.MAX_REPETITION_PENALTY},
    "seed": _SEED,
    "sampling_seed": _SEED,
    "min_tokens": {"minimum": 0},
    "min_new_tokens": {"minimum": 0},
    "max_tokens": {"minimum": 0},
    "max_new_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "top_logprobs": {"minimum": 0, "maximum": limits.MAX_TOP_LOGPROBS},
    "stream_interval": {"minimum": 1},
    "thinking_budget": {"minimum": 0},
    "queue_timeout": {"exclusiveMinimum": 0},
    "top_n": {"minimum": 1},
    "dimensions": {"minimum": 1},
}
"""What the checks of ``validate`` ask of these fields, whichever protocol has them, where it does not depend on the
model."""
_REF = "#/components/schemas/{name}"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route's documentation. ``body``, ``answer`` and ``event`` are types msgspec can describe, or None."""

    summary: str
    body: Any
    answer: Any
    event: Any = None
    """The data of one server-sent event, for routes that stream."""
    event_type: str = EVENTS
    done: bool = False
    """Whether a stream ends with `[DONE]`, and says an error in the form of an error's body before that."""

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
        types: list[Any] = [ErrorAnswer, AnthropicErrorAnswer, OllamaErrorAnswer]
        for _, _, operation in self._operations:
            types += [t for t in (operation.body, operation.answer, operation.event) if t is not None]
        shown, components = msgspec.json.schema_components(types, ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas.update(components)
        for name, component in components.items():
            _say_what_is_refused(component)
            if name.endswith(_ASKING):
                _say_the_bounds(component)
        by_type = {id(kind): schema for kind, schema in zip(types, shown, strict=True)}
        for path, methods, operation in self._operations:
            entry = document["paths"][_plain(path)]
            shape = by_type[id(_error_of(path))]
            for method in methods:
                self._describe(entry[method.lower()], operation, by_type, shape)
        return document

    @staticmethod
    def _describe(entry: dict[str, Any], operation: Operation, by_type: dict[int, Any], shape: dict[str, Any]) -> None:
        """``shape``: of an error's body."""
        if operation.body is not None:
            schema = by_type[id(operation.body)]
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        content: dict[str, Any] = {}
        if operation.answer is not None:
            content["application/json"] = {"schema": by_type[id(operation.answer)]}
        if operation.event is not None:
            event = by_type[id(operation.event)]
            if operation.event_type == EVENTS:
                event = _sent({"anyOf": [event, shape]}, ["[DONE]"]) if operation.done else _sent(event)
            content[operation.event_type] = {"schema": event}
        error = {"description": "Error", "content": {"application/json": {"schema": shape}}}
        entry["responses"] = {"200": {"description": "Answer"}, "default": error}
        if content:
            entry["responses"]["200"]["content"] = content


def _sent(data: dict[str, Any], words: Sequence[str] = ()) -> dict[str, Any]:
    """One server-sent event in the words of OpenAPI 3.2: its data is JSON of the form ``data``, or one of ``words``."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "description": "One event of the stream.",
        "properties": {
            "data": {"anyOf": [{"enum": list(words)}, text]} if words else text,
            "event": {"type": "string"},
        },
        "required": ["data"],
    }


def _say_what_is_refused(component: dict[str, Any]) -> None:
    """A field that is refused takes the values that change nothing, as ``translate.refuse`` has it."""
    for field in component.get("properties", {}).values():
        if field.get("description", "").startswith("Refused:") and not {"type", "anyOf", "enum"} & field.keys():
            field["enum"] = [None, False, "", [], {}]


def _say_the_bounds(component: dict[str, Any]) -> None:
    for name, field in component.get("properties", {}).items():
        kinds = [field.get("type"), *(option.get("type") for option in field.get("anyOf", ()))]
        if name in _BOUNDS and ("integer" in kinds or "number" in kinds):
            field.update(_BOUNDS[name])


def _error_of(path: str) -> Any:
    """The form of an error on this route, as ``errors.payload`` gives it."""
    if path.startswith(ANTHROPIC_PATH):
        return AnthropicErrorAnswer
    return OllamaErrorAnswer if path.startswith(OLLAMA_PATH) else ErrorAnswer


def _plain(path: str) -> str:
    """The path as the document spells it: ``{name:path}`` without its converter."""
    return path.replace(":path}", "}")
