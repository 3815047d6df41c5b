"""Tool schemas, and the arguments of formats that write values as bare text.

Owns the rule which JSON type such a text has: the tool's schema decides, and a text that fits no wanted type stays a
string, so nothing is lost. Must never know where the text came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ceiba.text.parsers.literals import (
    JSON,
    MAX_DEPTH,
    PYTHON,
    Dialect,
    Literals,
    ended,
    load,
    number,
    parse,
    quote,
    run,
)
from ceiba.text.parsers.source import Cut, Malformed

Schema = Mapping[str, Any]

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
ANY: frozenset[str] = frozenset(_TYPES)
STRUCTURED = frozenset({"object", "array"})


class Tools:
    """The tools a request offers, by name. ``tools`` are OpenAI tool objects or bare function objects."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()) -> None:
        self._functions: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._functions[function["name"]] = function

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def strict(self, name: str) -> bool:
        return bool(self._functions[name].get("strict"))

    def schema(self, name: str) -> Schema:
        """The schema of a tool's arguments; of a tool without one, any object."""
        found = self._functions.get(name, {}).get("parameters")
        return found if isinstance(found, Mapping) else {"type": "object"}

    def properties(self, name: str) -> Mapping[str, Any]:
        found = _resolved(self.schema(name), self.schema(name)).get("properties")
        return found if isinstance(found, Mapping) else {}

    def parameter(self, name: str, key: str) -> Schema | None:
        """The schema of one argument, or None if the tool's schema does not speak of it."""
        found = part(self.schema(name), self.schema(name), "properties", key)
        if found is None:
            found = self.properties(name).get(key)
        if found is None:
            found = self.schema(name).get("additionalProperties")
            if not isinstance(found, Mapping):
                return None
        return _resolved(found, self.schema(name)) if isinstance(found, Mapping) else {}

    def json_text(self, name: str, key: str, text: str) -> str:
        """A bare argument as JSON text of the type its schema wants."""
        schema = self.parameter(name, key)
        if schema is None:
            return quote(text)
        return coerce(text, schema, self.schema(name))


def object_text(pairs: Sequence[tuple[str, str]]) -> str:
    """A JSON object of (key, JSON text) pairs; of equal keys the last one stays."""
    return "{" + ", ".join(f"{quote(k)}: {v}" for k, v in dict(pairs).items()) + "}"


def begun_object(pairs: Sequence[tuple[str, str]], more: str = "") -> str:
    """`object_text` of whole pairs and the beginning of a further one, not closed."""
    return object_text(pairs)[:-1] + (", " if pairs and more else "") + more


def begun_members(text: str, dialect: Dialect, close: str, assign: str = ":") -> tuple[str, int | None]:
    """`literals.begun` for members without the brackets around them: what ends them begins with ``close``."""
    source = ended(text)
    literals, pairs = Literals(source, dialect), list[tuple[str | None, str]]()
    try:
        run(literals.members(close, assign, pairs))
    except Cut:
        return begun_object([(k or "", v) for k, v in pairs], "".join(literals.member) + literals.tail), None
    return object_text([(k or "", v) for k, v in pairs]), source.pos - len(close)


def as_object(text: str) -> str:
    """Arguments given as JSON text, as the text of an object: unwraps a string that holds one, null is empty.

    Raises Malformed for anything else.
    """
    if text.startswith("{"):
        return text
    if text == "null":
        return "{}"
    if text.startswith('"'):
        inner = load(text)
        assert isinstance(inner, str)
        if not inner.strip():
            return "{}"
        made = parse(inner)
        if made is not None and made.startswith("{"):
            return made
    raise Malformed


def coerce(text: str, schema: Schema, root: Schema) -> str:
    """``text`` as JSON text of one of the types that ``schema`` allows; a string when it fits none of them.

    ``root`` resolves local references. Where both a string and something else are allowed, only an object, a list or
    null is taken as such: a scalar is a valid string too.
    """
    wanted = types(schema, root)
    bare = text.strip()
    if "null" in wanted and bare in {"null", "None"}:
        return "null"
    loose = "string" not in wanted or wanted == ANY
    if loose:
        made = _scalar(bare, wanted)
        if made is not None:
            return made
    if wanted & STRUCTURED and bare[:1] in {"{", "["}:
        made = parse(bare, JSON) or parse(bare, PYTHON)
        if made is not None and ("object" if made[0] == "{" else "array") in wanted:
            return made
    if loose and len(bare) > 1 and bare[0] == bare[-1] == '"' and "string" in wanted:
        made = parse(bare, JSON)
        if made is not None:
            return made
    return quote(text)


def _scalar(bare: str, wanted: frozenset[str]) -> str | None:
    if wanted & {"integer", "number"}:
        made = number(bare)
        if made is not None:
            if "number" in wanted or made.lstrip("-").isdigit():
                return made
            value = float(made)
            if value.is_integer() and abs(value) < 2**53:
                return str(int(value))
    if "boolean" in wanted and bare in {"true", "false", "True", "False", "TRUE", "FALSE"}:
        return bare.lower()
    return None


def types(schema: Schema, root: Schema, depth: int = 0) -> frozenset[str]:
    """The JSON types that ``schema`` allows, as far as its own words say; all of them if it says nothing."""
    schema = _resolved(schema, root)
    if depth > MAX_DEPTH:
        return ANY
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset({said}) if said in _TYPES else frozenset({_ALIASES.get(said, "string")})
    if isinstance(said, list):
        return frozenset(t for t in said if isinstance(t, str) and t in _TYPES) or ANY
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"])) or ANY
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [types(s, root, depth + 1) for s in schema[word] if isinstance(s, Mapping)]
            return frozenset().union(*parts) or ANY
    if isinstance(schema.get("allOf"), list):
        made = ANY
        for part in schema["allOf"]:
            if isinstance(part, Mapping):
                made &= types(part, root, depth + 1)
        return made or ANY
    if "properties" in schema or "additionalProperties" in schema:
        return frozenset({"object"})
    if "items" in schema or "prefixItems" in schema:
        return frozenset({"array"})
    return ANY


_ALIASES = {
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""Type words that are no JSON Schema but that tools in the wild use."""


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def part(schema: Schema | None, root: Schema, *way: str, depth: int = 0) -> Schema | None:
    """What ``schema`` says of a part of its values (``"properties", name`` or ``"items"``), also in the branches of a
    union; None where it says nothing."""
    if schema is None or depth > MAX_DEPTH:
        return None
    schema = _resolved(schema, root)
    found: Any = schema
    for step in way:
        found = found.get(step) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        return _resolved(found, root)
    for word in ("allOf", "anyOf", "oneOf"):
        for branch in schema.get(word) or ():
            inner = part(branch, root, *way, depth=depth + 1) if isinstance(branch, Mapping) else None
            if inner is not None:
                return inner
    return None


def _resolved(schema: Schema, root: Schema) -> Schema:
    """``schema`` behind its local ``$ref`` (as many as there are, not in circles)."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        found: Any = root
        for step in reference[1:].strip("/").split("/"):
            if step:
                found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return {}


def compact(value: object) -> str:
    """JSON text for prompts and grammars: no spaces, no escapes that are not needed."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
