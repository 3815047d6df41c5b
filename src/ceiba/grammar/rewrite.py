"""A JSON schema said with fewer keywords: what grammar libraries lack, in terms of what they have.

Owns the rewriting of not, if, dependencies, propertyNames, contains, uniqueItems and the like. Each rule keeps the set
of values, or (where a rule says so) a part of it: then every answer is still valid, and only some valid answers cannot
be given. What no rule covers raises Refusal with its path. Pure functions; the parts of the input are never changed.
"""

from __future__ import annotations

import itertools
from typing import Any

from ceiba.core import limits
from ceiba.grammar.base import Refusal
from ceiba.grammar.negate import Negation, string_outside
from ceiba.grammar.schema import FORMATS, LISTS, MAPS, SINGLES, TYPES, Schema, pointer, resolve

INT_BOUND = 2**63 - 1024
"""The largest 64-bit integer that a double holds exactly: bounds are doubles to llguidance."""
FLOAT_BOUND = 1e15
"""Bounds of numbers beyond these are replaced by them (a part of the set): automata count digits, and no model means
such numbers."""
MAX_UNIQUE_VALUES = 4
"""``uniqueItems`` is written out as all orders of this many values, at most."""
CONTAINS_WITHIN = 8
"""Where ``contains`` finds its match in an array without ``maxItems``: one of the first so many (a part of the set)."""
PATTERNS = {"uri-template": r"^([^\x00-\x20\"'<>\\^`{|}]|\{[^\x00-\x20{}]+\})*$"}
"""Formats said by an expression (RFC 6570), where the schema has none of its own."""
MAX_SUBSETS = 256
"""Branches that ``minProperties`` and ``maxProperties`` are written out to."""


class Rewriter:
    """``exact_one_of``: write oneOf out as anyOf of branches that exclude each other, instead of leaving it."""

    def __init__(self, root: Schema, *, exact_one_of: bool = False) -> None:
        self.root = root
        self.exact_one_of = exact_one_of
        self._made = 0
        self._negation = Negation(self)

    def whole(self) -> Schema:
        return self.rewrite(self.root, "#")

    def count(self, path: str) -> None:
        """One schema more: rules that write things out stay within the limit on schemas."""
        self._made += 1
        if self._made > limits.MAX_SCHEMA_NODES:
            raise Refusal(
                f"it grows to more than {limits.MAX_SCHEMA_NODES} schemas when not and oneOf are written out: use a "
                "smaller one",
                path=path,
            )

    def rewrite(self, schema: Schema, path: str) -> Schema:
        self.count(path)
        if isinstance(schema, bool):
            return schema
        out = {key: value for key, value in schema.items() if key not in _GONE}
        self._children(out, path)
        _numbers(out)
        if "format" in out and out["format"] not in FORMATS:
            pattern = PATTERNS.get(out.pop("format"))
            if pattern is not None and "pattern" not in out:
                out["pattern"] = pattern
        more: list[Schema] = []
        more += self._conditions(schema, path)
        more += self._dependencies(schema, path)
        more += self._arrays(schema, out, path)
        more += self._objects(schema, out, path)
        if "not" in schema:
            more.append(self.rewrite(self._negation.of(schema["not"], pointer(path, "not")), pointer(path, "not")))
        if self.exact_one_of and "oneOf" in out:
            branches = self._one_of(schema["oneOf"], pointer(path, "oneOf"))
            if branches is not None:
                del out["oneOf"]
                more.append({"anyOf": branches})
        more = [part for part in more if part is not True]
        if not more:
            return out
        if any(part is False for part in more):
            return False
        return _and(out, more)

    def _children(self, out: dict[str, Any], path: str) -> None:
        for keyword in MAPS:
            value = out.get(keyword)
            if isinstance(value, dict):
                out[keyword] = {n: self.rewrite(s, pointer(path, keyword, n)) for n, s in value.items()}
        for keyword in LISTS:
            value = out.get(keyword)
            if isinstance(value, list):
                out[keyword] = [self.rewrite(s, pointer(path, keyword, i)) for i, s in enumerate(value)]
        for keyword in SINGLES:
            if isinstance(out.get(keyword), dict | bool):
                out[keyword] = self.rewrite(out[keyword], pointer(path, keyword))

    # ── if, dependencies ─────────────────────────────────────────────────────

    def _conditions(self, schema: dict[str, Any], path: str) -> list[Schema]:
        if "if" not in schema or not ("then" in schema or "else" in schema):
            return []
        when, where = schema["if"], pointer(path, "if")
        yes = self.rewrite(_and_all([when, schema.get("then", True)]), where)
        no = self.rewrite(_and_all([self._negation.of(when, where), schema.get("else", True)]), where)
        return [{"anyOf": [yes, no]}]

    def _dependencies(self, schema: dict[str, Any], path: str) -> list[Schema]:
        more: list[Schema] = []
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            table = schema.get(keyword)
            if table is None:
                continue
            where = pointer(path, keyword)
            if not isinstance(table, dict):
                raise Refusal("must be an object", path=path, keyword=keyword)
            for name, needs in table.items():
                if isinstance(needs, str):
                    needs = [needs]
                then: Schema = {"required": needs} if isinstance(needs, list) else needs
                more.append({"anyOf": [{"properties": {name: False}}, self.rewrite(then, pointer(where, name))]})
        return more

    # ── arrays ───────────────────────────────────────────────────────────────

    def _arrays(self, schema: dict[str, Any], out: dict[str, Any], path: str) -> list[Schema]:
        more = self._contains(schema, path) + self._unique(schema, path)
        if "unevaluatedItems" in schema:
            if schema["unevaluatedItems"] is False and not _applicators(schema) and "items" not in schema:
                out["items"] = False
            elif schema["unevaluatedItems"] is not True:
                raise Refusal("is available only where the same schema holds all items", path=path,
                              keyword="unevaluatedItems")  # fmt: skip
        return more

    def _contains(self, schema: dict[str, Any], path: str) -> list[Schema]:
        if "contains" not in schema:
            return []
        least = schema.get("minContains", 1)
        if schema.get("maxContains") is not None or least > 1:
            raise Refusal("minContains above 1 and maxContains are not available", path=path, keyword="contains")
        if least == 0:
            return []
        part = self.rewrite(schema["contains"], pointer(path, "contains"))
        ends = min(int(schema.get("maxItems", CONTAINS_WITHIN)), CONTAINS_WITHIN)
        branches: list[Schema] = [{"type": [t for t in TYPES if t not in {"array", "integer"}]}]
        branches += [
            {"type": "array", "minItems": i + 1, "prefixItems": [*[True] * i, part]} for i in range(ends)
        ]  # fmt: skip
        return [{"anyOf": branches}]

    def _unique(self, schema: dict[str, Any], path: str) -> list[Schema]:
        if not schema.get("uniqueItems") or schema.get("maxItems", 2) <= 1:
            return []
        values = self.values(schema.get("items", True))
        if values is None or len(values) > MAX_UNIQUE_VALUES:
            raise Refusal(
                f"is available only for items of at most {MAX_UNIQUE_VALUES} possible values, or with maxItems 1",
                path=path,
                keyword="uniqueItems",
            )
        low = int(schema.get("minItems", 0))
        high = int(min(schema.get("maxItems", len(values)), len(values)))
        orders = [list(p) for n in range(low, high + 1) for p in itertools.permutations(values, n)]
        others = [t for t in TYPES if t not in {"array", "integer"}]
        if not orders:
            return [{"type": others}]
        return [{"anyOf": [{"type": others}, {"enum": orders}]}]

    def values(self, schema: Schema) -> list[Any] | None:
        """All values of a schema that is a plain list of them; None for any other."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and len(schema) == 1:
            schema = resolve(self.root, schema["$ref"])
        if not isinstance(schema, dict) or set(schema) - {"enum", "const", "type", "title", "description"}:
            return None
        kind = schema.get("type")
        if "const" in schema and "enum" not in schema:
            listed = [schema["const"]]
        elif "enum" in schema:
            listed = list(schema["enum"])
        elif kind in {"boolean", "null"}:
            return [False, True] if kind == "boolean" else [None]
        else:
            return None
        kinds = TYPES if kind is None else kind if isinstance(kind, list) else [kind]
        return [
            value for value in listed if type_of(value) in kinds or (type_of(value) == "integer" and "number" in kinds)
        ]

    # ── objects ──────────────────────────────────────────────────────────────

    def _objects(self, schema: dict[str, Any], out: dict[str, Any], path: str) -> list[Schema]:
        if "unevaluatedProperties" in schema and schema["unevaluatedProperties"] is not True:
            if _applicators(schema) or "additionalProperties" in schema:
                raise Refusal("is available only where the same schema lists all properties", path=path,
                              keyword="unevaluatedProperties")  # fmt: skip
            out["additionalProperties"] = self.rewrite(schema["unevaluatedProperties"], path)
        if "propertyNames" in schema:
            self._names(schema["propertyNames"], out, path)
        return self._counted(out, path)

    def _names(self, names: Schema, out: dict[str, Any], path: str) -> None:
        """Names of additional properties held to an expression; declared ones that do not fit are forbidden."""
        while isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = resolve(self.root, names["$ref"])
        if names is True:
            return
        if (
            isinstance(names, dict)
            and not set(names) - {"type", *_ANNOTATIONS}
            and names.get("type") in {None, "string"}
        ):
            return
        pattern = self._name_pattern(names, path)
        if out.get("patternProperties"):
            raise Refusal("is not available beside patternProperties", path=path, keyword="propertyNames")
        from ceiba.grammar.finder import finder

        fits = finder(pattern, path, "propertyNames")
        declared = out.get("properties", {})
        out["properties"] = {n: s if fits(n) else False for n, s in declared.items()}
        rest = out.get("additionalProperties", True)
        if rest is not False:
            out["patternProperties"] = {pattern: rest}
        out["additionalProperties"] = False

    def _name_pattern(self, names: Schema, path: str) -> str:
        if isinstance(names, dict):
            keys = set(names) - {"type", *_ANNOTATIONS}
            if keys == {"pattern"}:
                from ceiba.grammar.regex import check_regex

                check_regex(str(names["pattern"]), path, "propertyNames")
                return str(names["pattern"])
            if keys in ({"enum"}, {"const"}):
                from ceiba.grammar.regex import escape

                listed = names["enum"] if "enum" in names else [names["const"]]
                return "^(" + "|".join(escape(v) for v in listed if isinstance(v, str)) + ")$"
            if keys and keys <= {"minLength", "maxLength"}:
                high = names.get("maxLength")
                return f"^[^\\n]{{{int(names.get('minLength', 0))},{'' if high is None else int(high)}}}$"
            if keys == {"not"} and isinstance(names["not"], dict) and set(names["not"]) <= {"enum", "const", "type"}:
                inner = names["not"]
                listed = inner["enum"] if "enum" in inner else [inner.get("const")]
                return f"^({string_outside([v for v in listed if isinstance(v, str)])})$"
        raise Refusal("is available with pattern, enum, const, minLength and maxLength", path=path,
                      keyword="propertyNames")  # fmt: skip

    def _counted(self, out: dict[str, Any], path: str) -> list[Schema]:
        """min/maxProperties over optional properties, written out as the sets of properties that may be there."""
        low, high = out.get("minProperties", 0), out.get("maxProperties")
        names = list(out.get("properties", {}))
        required = [n for n in out.get("required", []) if isinstance(n, str)]
        optional = [n for n in names if n not in required]
        closed = out.get("additionalProperties") is False and not out.get("patternProperties")
        if (low == 0 and high is None) or not optional:
            return []
        if low <= len(required) and high is None:
            out.pop("minProperties", None)
            return []
        least = max(0, int(low) - len(required))
        most = len(optional) if high is None else min(len(optional), int(high) - len(required))
        sets = [c for n in range(least, most + 1) for c in itertools.islice(itertools.combinations(optional, n), 999)]
        if not closed or len(sets) > MAX_SUBSETS:
            raise Refusal(
                f"is available where all properties are required, or with additionalProperties false and at most "
                f"{MAX_SUBSETS} combinations of properties",
                path=path,
                keyword="minProperties" if low else "maxProperties",
            )
        for keyword in ("minProperties", "maxProperties"):
            out.pop(keyword, None)
        others = [t for t in TYPES if t not in {"object", "integer"}]
        branches: list[Schema] = [{"type": others}]
        branches += [
            {"type": "object", "required": list(c), "properties": {n: False for n in optional if n not in c}}
            for c in sets
        ]
        return [{"anyOf": branches}]

    # ── oneOf ────────────────────────────────────────────────────────────────

    def _one_of(self, options: list[Schema], path: str) -> list[Schema] | None:
        """Branches of which each excludes the others; None where one of them cannot be negated."""
        if len(options) == 1:
            return [self.rewrite(options[0], pointer(path, 0))]
        branches: list[Schema] = []
        try:
            for i, option in enumerate(options):
                others = [self._negation.of(o, pointer(path, j)) for j, o in enumerate(options) if j != i]
                branches.append(self.rewrite(_and_all([option, *others]), pointer(path, i)))
        except Refusal:
            return None
        return branches


_GONE = frozenset(
    {"not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames", "contains",
     "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"}
)  # fmt: skip
_ANNOTATIONS = ("title", "description", "$comment", "examples", "default")


def type_of(value: Any) -> str:
    """JSON type of a decoded value; a whole number is an integer, however it is written."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _applicators(schema: dict[str, Any]) -> bool:
    return any(k in schema for k in ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "not"))


def _and(out: dict[str, Any], more: list[Schema]) -> dict[str, Any]:
    """``out`` and all of ``more``. What names and holds definitions stays on top."""
    top: dict[str, Any] = {}
    for key in ("$defs", "definitions", "$id", "id", "$schema", "$anchor"):
        if key in out:
            top[key] = out.pop(key)
    inner = out.pop("allOf", [])
    # The schema's own part comes first: it says in which order the properties are written.
    return {**top, "allOf": [out, *inner, *more]}


def _and_all(parts: list[Schema]) -> Schema:
    if any(part is False for part in parts):
        return False
    kept = [part for part in parts if part is not True]
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def _numbers(out: dict[str, Any]) -> None:
    """Draft 4's exclusive flags, and bounds that are too large to count."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = out.get(exclusive)
        if isinstance(flag, bool):
            del out[exclusive]
            if flag and bound in out:
                out[exclusive] = out.pop(bound)
    most = INT_BOUND if out.get("type") == "integer" else FLOAT_BOUND
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = out.get(keyword)
        if value is None or abs(value) <= most:
            continue
        lower = keyword in {"minimum", "exclusiveMinimum"}
        if (value < 0) == lower:
            out[keyword] = -most if lower else most
