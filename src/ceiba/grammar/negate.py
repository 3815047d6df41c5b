"""The schema of all values that a schema rejects, for those keywords where a schema can say it.

Owns De Morgan and one rule for each keyword. A keyword applies to one type only, so its opposite is "of that type, and
outside". Raises Refusal, with the path, for keywords whose opposite needs what JSON Schema cannot say in other words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ceiba.grammar.base import Refusal
from ceiba.grammar.regex import escape
from ceiba.grammar.schema import FORMATS, TYPES, Schema, pointer, resolve

if TYPE_CHECKING:
    from ceiba.grammar.rewrite import Rewriter

_HARD = frozenset(
    {"items", "prefixItems", "additionalItems", "additionalProperties", "patternProperties", "propertyNames",
     "contains", "multipleOf", "pattern", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"}
)  # fmt: skip
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""keyword -> (its type, the keyword of the opposite, what to add to the bound)"""
MAX_DEPTH = 32


class Negation:
    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._rules: dict[str, Callable[[Any, dict[str, Any], str, int], list[Schema]]] = {
            "type": self._type,
            "enum": lambda value, schema, path, depth: [self._not_values(value, path, depth)],
            "const": lambda value, schema, path, depth: [self._not_values([value], path, depth)],
            "required": self._required,
            "properties": self._properties,
            "not": lambda value, schema, path, depth: [value],
            "allOf": lambda value, schema, path, depth: self._of_all(value, pointer(path, "allOf"), depth),
            "anyOf": lambda value, schema, path, depth: [_all(self._of_all(value, pointer(path, "anyOf"), depth))],
            "oneOf": lambda value, schema, path, depth: self._not_one_of(value, pointer(path, "oneOf"), depth),
            "$ref": self._reference,
            "if": lambda value, schema, path, depth: self._not_if(schema, path, depth),
            "dependencies": self._depends,
            "dependentRequired": self._depends,
            "dependentSchemas": self._depends,
            "format": self._format,
        }

    def of(self, schema: Schema, path: str, depth: int = 0) -> Schema:
        """All values outside of ``schema``."""
        self._rewriter.count(path)
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH:
            raise Refusal("it is negated over a recursion, which is not available", path=path)
        parts: list[Schema] = []
        for keyword, value in schema.items():
            parts += self._keyword(keyword, value, schema, path, depth)
        parts = [part for part in parts if part is not False]
        if any(part is True for part in parts):
            return True
        return False if not parts else parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _keyword(self, keyword: str, value: Any, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        if keyword in _BOUNDS:
            return self._bound(keyword, value, schema)
        if keyword in _HARD:
            if value is True or value == {} or (keyword == "uniqueItems" and not value):
                return []
            raise Refusal("cannot be negated", path=path, keyword=keyword)
        rule = self._rules.get(keyword)
        return [] if rule is None else rule(value, schema, path, depth)  # without a rule: an annotation

    def _of_all(self, schemas: list[Schema], path: str, depth: int) -> list[Schema]:
        return [self.of(schema, pointer(path, i), depth + 1) for i, schema in enumerate(schemas)]

    def _type(self, value: Any, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        return [self._not_types(value if isinstance(value, list) else [value], path)]

    def _required(self, value: Any, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        return [{"type": "object", "properties": {name: False}} for name in value]

    def _properties(self, value: Any, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        where = pointer(path, "properties")
        return [
            {"type": "object", "required": [n], "properties": {n: self.of(s, pointer(where, n), depth + 1)}}
            for n, s in value.items()
            if s is not True and s != {}
        ]

    def _reference(self, value: Any, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        target = resolve(self._rewriter.root, value)
        if target is None:
            raise Refusal(f"{value!r} cannot be followed to negate it", path=path, keyword="$ref")
        return [self.of(target, path, depth + 1)]

    def _format(self, value: Any, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        if value in FORMATS:
            raise Refusal("cannot be negated", path=path, keyword="format")
        return []

    def _depends(self, value: Any, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        return [self._not_dependency(n, s, pointer(path, n), depth) for n, s in value.items()]

    def _bound(self, keyword: str, value: Any, schema: dict[str, Any]) -> list[Schema]:
        kind, opposite, shift = _BOUNDS[keyword]
        if isinstance(value, bool):  # draft 4: a flag of the bound beside it, which has its own turn
            return []
        if keyword in {"minimum", "maximum"} and schema.get("exclusive" + keyword.capitalize()) is True:
            opposite = {"minimum": "maximum", "maximum": "minimum"}[keyword]
        if shift < 0 and value <= 0:
            return []
        return [{"type": kind, opposite: value + shift}]

    def _not_types(self, kinds: list[str], path: str) -> Schema:
        if "integer" in kinds and "number" not in kinds:
            raise Refusal("integer cannot be negated: numbers with a fraction alone are not available", path=path,
                          keyword="type")  # fmt: skip
        rest = [t for t in TYPES if t not in kinds and t != "integer"]
        return {"type": rest} if rest else False

    def _not_values(self, values: list[Any], path: str, depth: int) -> Schema:
        from ceiba.grammar.rewrite import type_of

        found: dict[str, list[Any]] = {}
        for value in values:
            kind = type_of(value)
            found.setdefault("number" if kind == "integer" else kind, []).append(value)
        branches: list[Schema] = []
        rest = [t for t in TYPES if t not in found and t != "integer"]
        if rest:
            branches.append({"type": rest})
        for kind, listed in found.items():
            match kind:
                case "boolean":
                    left = [b for b in (False, True) if b not in listed]
                    branches += [{"enum": left}] if left else []
                case "string":
                    branches.append({"type": "string", "pattern": f"^({string_outside(listed)})$"})
                case "number":
                    branches += _between(sorted(set(listed)))
                case "array" | "object":
                    outside = [self.of(_exactly(v), path, depth + 1) for v in listed]
                    branches.append(_all([{"type": kind}, *outside]))
        return {"anyOf": branches} if branches else False

    def _not_one_of(self, options: list[Schema], path: str, depth: int) -> list[Schema]:
        """None of them, or two of them."""
        none = _all(self._of_all(options, path, depth))
        pairs: list[Schema] = [
            {"allOf": [a, b]} for i, a in enumerate(options) for b in options[i + 1 :]
        ]  # fmt: skip
        return [none, *pairs]

    def _not_if(self, schema: dict[str, Any], path: str, depth: int) -> list[Schema]:
        parts: list[Schema] = []
        when = schema["if"]
        if "then" in schema:
            parts.append(_all([when, self.of(schema["then"], pointer(path, "then"), depth + 1)]))
        if "else" in schema:
            otherwise = self.of(schema["else"], pointer(path, "else"), depth + 1)
            parts.append(_all([self.of(when, pointer(path, "if"), depth + 1), otherwise]))
        return parts

    def _not_dependency(self, name: str, needs: Any, path: str, depth: int) -> Schema:
        then: Schema = {"required": needs} if isinstance(needs, list) else needs
        return _all([{"type": "object", "required": [name]}, self.of(then, path, depth + 1)])


def _all(parts: list[Schema]) -> Schema:
    if any(part is False for part in parts):
        return False
    kept = [part for part in parts if part is not True]
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def _between(numbers: list[Any]) -> list[Schema]:
    """The numbers outside of a finite set: intervals."""
    edges = [None, *numbers, None]
    spans: list[Schema] = []
    for low, high in itertools.pairwise(edges):
        span: dict[str, Any] = {"type": "number"}
        if low is not None:
            span["exclusiveMinimum"] = low
        if high is not None:
            span["exclusiveMaximum"] = high
        spans.append(span)
    return spans


def _exactly(value: Any) -> Schema:
    """An array or object said by its parts, so that it can be negated."""
    if isinstance(value, list):
        if value:
            raise Refusal("values that are arrays with items cannot be negated", keyword="enum")
        return {"type": "array", "minItems": 0, "maxItems": 0}
    if isinstance(value, dict):
        return {
            "type": "object",
            "required": list(value),
            "properties": {n: {"const": v} for n, v in value.items()},
            "maxProperties": len(value),
        }
    return {"const": value}


def string_outside(words: list[str]) -> str:
    """An expression for every text but ``words``: at each prefix of one of them, a character that leaves all of them or
    an end that is none of them. Linear in the words' characters; ``[^]``-free, for any syntax."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _outside(root)


def _outside(node: dict[str, Any]) -> str:
    nexts = {char: child for char, child in node.items() if char}
    anything = r"[\s\S]*"
    leave = f"[^{''.join(_in_class(c) for c in nexts)}]{anything}" if nexts else rf"[\s\S]{anything}"
    parts = [leave, *(escape(char) + _outside(child) for char, child in nexts.items())]
    body = f"({'|'.join(parts)})"
    return body if "" in node else body + "?"


def _in_class(char: str) -> str:
    names = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return names.get(char) or ("\\" + char if char in "\\]^-[&~" else char)
