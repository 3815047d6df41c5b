"""A JSON schema read before anything is compiled: is it one, is it of a size we serve, and where is what we cannot.

Owns the map of keywords that hold schemas, JSON pointers and the quick refusals; builds no grammar. Draft 2020-12 with
the older drafts' spellings; a keyword it does not know is an annotation, as the standard says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ceiba.core import limits
from ceiba.grammar.base import Refusal
from ceiba.grammar.regex import check_regex

Schema = dict[str, Any] | bool

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose values are objects of schemas."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLES = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that are held to; others are annotations, as JSON Schema allows."""

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains")
_NUMBERS = ("minimum", "maximum", "multipleOf")
_NEVER = {
    "$dynamicRef": "dynamic references are not available; use $ref",
    "$recursiveRef": "recursive references of draft 2019-09 are not available; use $ref",
}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "properties": (lambda value: isinstance(value, dict), "an object of schemas"),
    "patternProperties": (lambda value: isinstance(value, dict), "an object of schemas"),
    "$defs": (lambda value: isinstance(value, dict), "an object of schemas"),
    "definitions": (lambda value: isinstance(value, dict), "an object of schemas"),
    "allOf": (_is_list, "a list of at least one schema"),
    "anyOf": (_is_list, "a list of at least one schema"),
    "oneOf": (_is_list, "a list of at least one schema"),
    "enum": (_is_list, "a list of at least one value"),
    "pattern": (lambda value: isinstance(value, str), "a text"),
    "$ref": (lambda value: isinstance(value, str), "a text"),
    "required": (
        lambda value: not isinstance(value, list) or all(isinstance(n, str) for n in value),
        "a list of names",
    ),
}
"""keyword -> (whether a value has its form, what the form is)"""


def parse(text: str) -> Schema:
    """The schema behind ``text``. Raises Refusal when it is no JSON object and no boolean."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"not valid JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise Refusal(f"a schema is an object or a boolean, not {type(value).__name__}")
    return value


def pointer(path: str, *keys: str | int) -> str:
    """``path`` with further steps, as a URI fragment (RFC 6901)."""
    return path + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) wherever a schema should stand directly inside this one."""
    for keyword in MAPS:
        value = schema.get(keyword)
        if isinstance(value, dict):
            for name, child in value.items():
                if keyword == "dependencies" and isinstance(child, list):
                    continue
                yield pointer(path, keyword, name), child
    for keyword in LISTS:
        value = schema.get(keyword)
        if isinstance(value, list):
            for i, child in enumerate(value):
                yield pointer(path, keyword, i), child
    for keyword in SINGLES:
        if keyword in schema and not (keyword == "items" and isinstance(schema[keyword], list)):
            yield pointer(path, keyword), schema[keyword]


def walk(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object schema with its path, outermost first. Raises Refusal beyond the limits or for a value that is no
    schema."""
    stack: list[tuple[str, Any, int]] = [("#", schema, 1)]
    seen = 0
    while stack:
        path, value, depth = stack.pop()
        seen += 1
        if seen > limits.MAX_SCHEMA_NODES:
            raise Refusal(f"the schema holds more than {limits.MAX_SCHEMA_NODES} schemas; use a smaller one")
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            raise Refusal(f"a schema must stand here, not {_named(value)}", path=path)
        if depth > limits.MAX_SCHEMA_DEPTH:
            raise Refusal(f"schemas are nested deeper than {limits.MAX_SCHEMA_DEPTH} levels", path=path)
        yield path, value
        stack += [(where, child, depth + 1) for where, child in reversed(list(children(value, path)))]


def check(schema: Schema) -> None:
    """Raise Refusal for the first place that no backend can serve."""
    if schema is False:
        raise Refusal("the schema false allows nothing", path="#")
    ids = set()
    for _, part in walk(schema):
        ids |= {part[k] for k in ("$id", "id") if isinstance(part.get(k), str)}
    for path, part in walk(schema):
        _check_part(part, path, ids)
    if isinstance(schema, dict):
        _check_loops(schema)


def _check_part(part: dict[str, Any], path: str, ids: set[str]) -> None:
    for keyword, why in _NEVER.items():
        if keyword in part:
            raise Refusal(why, path=path, keyword=keyword)
    for keyword, (fits, what) in _SHAPES.items():
        if keyword in part and not fits(part[keyword]):
            raise Refusal(f"must be {what}", path=path, keyword=keyword)
    _check_type(part, path)
    _check_values(part, path)
    if "pattern" in part:
        check_regex(part["pattern"], path)
    for pattern in part.get("patternProperties", {}):
        check_regex(pattern, pointer(path, "patternProperties", pattern), "")
    if "$ref" in part:
        _check_reference(part["$ref"], path, ids)


def _check_reference(ref: str, path: str, ids: set[str]) -> None:
    base = ref.partition("#")[0]
    if base and base not in ids and not any(i.endswith(base) or base.endswith(i) for i in ids):
        raise Refusal(
            f"{ref[:200]!r} lies outside of this schema, and nothing is fetched; put it under $defs",
            path=path,
            keyword="$ref",
        )


def _check_type(part: dict[str, Any], path: str) -> None:
    kinds = part.get("type")
    if kinds is None:
        return
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            raise Refusal(f"{str(kind)[:60]!r} is no type; types are {', '.join(TYPES)}", path=path, keyword="type")


def _check_values(part: dict[str, Any], path: str) -> None:
    for keyword in _COUNTS:
        value = part.get(keyword)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise Refusal(f"must be a whole number from 0, not {_named(value)}", path=path, keyword=keyword)
        if keyword.startswith("min") and value > limits.MAX_SCHEMA_ITEMS:
            raise Refusal(
                f"{value} is more than can be generated; the limit is {limits.MAX_SCHEMA_ITEMS}",
                path=path,
                keyword=keyword,
            )
    for keyword in _NUMBERS:
        value = part.get(keyword)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise Refusal(f"must be a number, not {_named(value)}", path=path, keyword=keyword)
    if part.get("multipleOf", 1) <= 0:
        raise Refusal("must be more than 0", path=path, keyword="multipleOf")


def _check_loops(schema: dict[str, Any]) -> None:
    """A reference that leads to itself without anything in between describes nothing."""
    for path, part in walk(schema):
        seen: set[str] = set()
        at: Any = part
        while isinstance(at, dict) and isinstance(at.get("$ref"), str):
            if at["$ref"] in seen:
                raise Refusal(f"{at['$ref'][:200]!r} leads back to itself", path=path, keyword="$ref")
            seen.add(at["$ref"])
            at = resolve(schema, at["$ref"])


def resolve(root: Schema, ref: str) -> Any:
    """What a local reference points at; None where it points nowhere we can follow."""
    if ref in ("#", ""):
        return root
    if not ref.startswith("#/"):
        return None
    at: Any = root
    for step in ref[2:].split("/"):
        step = _unquote(step)
        if isinstance(at, list) and step.isdigit() and int(step) < len(at):
            at = at[int(step)]
        elif isinstance(at, dict) and step in at:
            at = at[step]
        else:
            return None
    return at


def _unquote(step: str) -> str:
    if "%" in step:
        from urllib.parse import unquote

        step = unquote(step)
    return step.replace("~1", "/").replace("~0", "~")


def find(schema: Schema, keyword: str) -> str | None:
    """Path of the first schema that has ``keyword``."""
    return next((path for path, part in walk(schema) if keyword in part), None)


def _named(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), repr(value)[:40])
