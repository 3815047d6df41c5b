"""Arguments of tool calls that are not written as JSON: from a schema and a family's notation to a tree of tags.

Owns four notations (elements, trees of elements, Python's keywords, Gemma's braces). A tree never lets through what the
family's parser would read as a value outside of the schema; a schema for which that cannot be said raises Refusal with
its path. Values that hold no bare text are plain JSON where the notation reads JSON, so every keyword works there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ceiba.core import limits
from ceiba.grammar import tags
from ceiba.grammar.base import Refusal
from ceiba.grammar.regex import check_regex, containing
from ceiba.grammar.rewrite import type_of
from ceiba.grammar.schema import Schema, pointer, resolve
from ceiba.grammar.tags import Node, Text

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly",
     "strict", "name", "$defs", "definitions"}
)  # fmt: skip
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_STRING = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "format"})
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
MAX_DEPTH = 12
"""Nested objects and lists that are written out; a schema that contains itself has no end."""
_FREE_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_FREE_KEYS = 64
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,4}D(T[0-9]{1,4}H)?|T[0-9]{1,4}[HMS]|[0-9]{1,4}[YMW])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uri": r"[a-z][a-z0-9+.-]{0,15}:[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]{1,2000}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Of each format that is held to, a part of its texts: valid ones, in the form that models write."""


class Notation:
    """``content``: a tag's content as ``text.parsers`` describes it. ``build`` gives the tree of its arguments."""

    def __init__(self, content: dict[str, Any]) -> None:
        schema = content.get("schema", True)
        self.root: Schema = schema if isinstance(schema, dict | bool) else True
        self.kind = str(content["type"])
        self.open, self.close = str(content.get("open", "")), str(content.get("close", ""))
        self.item = str(content.get("item", ""))
        self.mark = str(content.get("mark", ""))
        """What begins every tag, and ends every text."""
        self.avoid = tuple(str(mark) for mark in content.get("avoid", ()))
        """Marks that the parser would take for the end of a text, beside the text's own."""
        self._made = 0

    def build(self) -> Node:
        """Raises Refusal."""
        node, _ = self._object(self.root, "#", 0, top=True)
        return node

    # ── objects ──────────────────────────────────────────────────────────────

    def _object(self, schema: Schema, path: str, depth: int, *, top: bool = False) -> tuple[Node, bool]:
        """(the members, whether there may be none). ``top``: the arguments themselves."""
        self._count(path, depth)
        variants = self._variants(schema, path)
        if self.kind in {"elements", "tree"}:
            self._agree(variants, path)
        options = [self._members(part, path, depth, top) for part in variants]
        if len(options) == 1:
            return options[0]
        return tags.Either(tuple(node for node, _ in options)), any(empty for _, empty in options)

    @staticmethod
    def _agree(variants: list[Schema], path: str) -> None:
        """The parser knows of a bare text only the name it belongs to."""
        seen: dict[str, Schema] = {}
        for part in variants:
            for name, value in (part.get("properties") or {}).items() if isinstance(part, dict) else ():
                if seen.setdefault(name, value) != value:
                    raise Refusal("its branches give one name two meanings", path=pointer(path, "properties", name))

    def _members(self, schema: Schema, path: str, depth: int, top: bool) -> tuple[Node, bool]:
        part = {} if isinstance(schema, bool) else schema
        if schema is False or part.get("type", "object") != "object":
            raise Refusal("the arguments of a call are an object", path=path, keyword="type")
        self._only(part, _OBJECT, path)
        declared = part.get("properties") or {}
        required = [n for n in part.get("required") or [] if isinstance(n, str)]
        more = part.get("additionalProperties", True)
        members = [(n, s, n in required) for n, s in declared.items() if s is not False]
        if any(declared.get(n) is False for n in required):
            raise Refusal("a required property is forbidden", path=path, keyword="required")
        members += [(n, more, True) for n in dict.fromkeys(required) if n not in declared]
        nodes = [
            (self._member(name, value, pointer(path, "properties", name), depth, top), must)
            for name, value, must in members
        ]
        if not nodes and more is not False:
            return self._free(more, path, depth, top), True
        separator = self._separator(top)
        empty = not any(must for _, must in nodes)
        if not separator:
            return tags.Sequence(tuple(n if must else tags.Either((n, Text(""))) for n, must in nodes)), empty
        return _listed(nodes, separator), empty

    def _separator(self, top: bool) -> str:
        return {"pythonic": ", ", "gemma": ","}.get(self.kind, "")

    def _member(self, name: str, schema: Schema, path: str, depth: int, top: bool) -> Node:
        if not _KEYS[self.kind].fullmatch(name):
            raise Refusal(f"the name {name[:60]!r} cannot be written in this model's form of a call", path=path)
        return self._written(Text(name), schema, path, depth)

    def _free(self, schema: Schema, path: str, depth: int, top: bool) -> Node:
        """Members of any name."""
        key = tags.Regex(_FREE_KEY)
        one = self._written(key, schema, pointer(path, "additionalProperties"), depth)
        separator = self._separator(top)
        if not separator:
            return tags.Repeat(one, 0, _FREE_KEYS)
        rest = tags.Repeat(tags.Sequence((Text(separator), one)), 0, _FREE_KEYS)
        return tags.Either((Text(""), tags.Sequence((one, rest))))

    def _written(self, key: Text | tags.Regex, schema: Schema, path: str, depth: int) -> Node:
        """A key and its value."""
        if self.kind == "pythonic":
            return tags.Sequence((key, Text("="), self._python(schema, path)))
        if self.kind == "gemma":
            return tags.Sequence((key, Text(":"), self._gemma(schema, path, depth)))
        close = self._close(key, self.close)
        options = [
            tags.Sequence((*self._opening(key, kind), value))
            for kind, value in self._values(schema, path, depth, close)
        ]
        return options[0] if len(options) == 1 else tags.Either(tuple(options))

    def _opening(self, key: Text | tags.Regex, kind: str) -> list[Node]:
        said = {"integer": "number"}.get(kind, kind)
        text = self.open.replace("{type}", said).replace("{is_string}", json.dumps(kind == "string"))
        before, found, after = text.partition("{key}")
        if isinstance(key, Text):
            return [Text(before + key.value + after if found else text)]
        return [Text(before), key, Text(after)]

    def _close(self, key: Text | tags.Regex, close: str) -> str:
        if "{key}" not in close:
            return close
        if not isinstance(key, Text):
            raise Refusal("a schema without properties cannot be held to in this model's form of a call", path="#")
        return close.replace("{key}", key.value)

    # ── values that stand between two tags ───────────────────────────────────

    def _values(self, schema: Schema, path: str, depth: int, close: str) -> list[tuple[str, Node]]:
        """(JSON type, the value with what closes it), one for each way to write it."""
        kinds = self.kinds(schema, path)
        if "string" not in kinds:
            kind = next(iter(kinds)) if len(kinds) == 1 else "object"
            return [(k, n) for k, n in self._bare_json(schema, kinds, kind, path, depth, close)]
        stop = self.mark or close.strip()
        if kinds == frozenset(_TYPES):
            if not _trivial(schema):
                raise Refusal("says no type, so that its values cannot be told from text", path=path)
            return [("string", tags.Until((), (stop, *self.avoid), close))]
        said = "{type}" in self.open or "{is_string}" in self.open
        found: list[tuple[str, Node]] = []
        structured = not said and bool(kinds & {"object", "array"})
        for part in self._variants(schema, path):
            own = self.kinds(part, path)
            if "string" in own:
                strings = part if isinstance(part, dict) else {}
                found += [("string", n) for n in self._strings(strings, path, stop, close, structured)]
            elif said or own <= {"null"} or own <= {"object", "array"}:
                found += self._bare_json(part, own, next(iter(own)), path, depth, close)
            # A bare scalar beside text is text to the parser: it is among the strings already.
        return found

    def _bare_json(
        self, schema: Schema, kinds: frozenset[str], kind: str, path: str, depth: int, close: str
    ) -> list[tuple[str, Node]]:
        if self.kind == "tree" and kinds in (frozenset({"object"}), frozenset({"array"})) and depth < MAX_DEPTH:
            try:
                inner = self._tree(schema, kind, path, depth + 1)
                return [(kind, tags.Sequence((inner, Text(close))))]
            except Refusal:
                pass  # the parser reads JSON there too
        return [(kind, tags.Sequence((self._json(schema, path), Text(close))))]

    def _tree(self, schema: Schema, kind: str, path: str, depth: int) -> Node:
        if kind == "object":
            return self._object(schema, path, depth)[0]
        self._count(path, depth)
        part, *others = self._variants(schema, path)
        if others or not isinstance(part, dict):
            raise Refusal("lists of several kinds are not available in this model's form of a call", path=path)
        self._only(part, _ARRAY, path)
        begin, end = (text.replace("{key}", self.item) for text in (self.open, self.close))
        ways = self._values(part.get("items", True), pointer(path, "items"), depth, end)
        one = tags.Either(tuple(tags.Sequence((Text(begin), node)) for _, node in ways))
        return tags.Repeat(one, int(part.get("minItems", 0)), _most(part))

    def _strings(self, part: dict[str, Any], path: str, stop: str, close: str, structured: bool) -> list[Node]:
        """A bare text. ``structured``: one that looks like JSON would be read as JSON."""
        self._only(part, _STRING, path)
        listed = _listed_strings(part)
        if listed is not None:
            kept = [
                v
                for v in listed
                if not any(m in v for m in (stop, *self.avoid)) and not (structured and v.lstrip()[:1] in {"{", "["})
            ]
            if not kept:
                raise Refusal("none of its values can be written in this model's form of a call", path=path)
            return [Text(v + close) for v in kept]
        start = [r"(?s:[^\s{\[].*)?"] if structured else []
        return [tags.Until((*start, *self._patterns(part, path)), (stop, *self.avoid), close)]

    @staticmethod
    def _patterns(part: dict[str, Any], path: str) -> list[str]:
        """Expressions that the texts of a string schema fit, all of them."""
        wanted: list[str] = []
        low, high = part.get("minLength"), part.get("maxLength")
        if low or high is not None:
            wanted.append(f"(?s:.{{{int(low or 0)},{'' if high is None else int(high)}}})")
        if "pattern" in part:
            check_regex(part["pattern"], path)
            wanted.append(containing(part["pattern"], path))
        if part.get("format") in FORMATS:
            wanted.append(FORMATS[part["format"]])
        return wanted

    # ── Python and Gemma ─────────────────────────────────────────────────────

    def _python(self, schema: Schema, path: str) -> Node:
        """JSON, which the parser reads among Python's literals; the constants as Python spells them."""
        kinds = self.kinds(schema, path)
        if kinds == frozenset({"boolean"}) and not _keys(schema) & {"enum", "const"}:
            return tags.Either((Text("True"), Text("False")))
        if "null" in kinds and len(kinds) > 1 and kinds != frozenset(_TYPES):
            parts = self._variants(schema, path)
            rest = [part for part in parts if self.kinds(part, path) != frozenset({"null"})]
            if 0 < len(rest) < len(parts):
                return tags.Either((*(self._python(part, path) for part in rest), Text("None")))
        return self._json(schema, path)

    def _gemma(self, schema: Schema, path: str, depth: int) -> Node:
        self._count(path, depth)
        kinds = self.kinds(schema, path)
        mark = '<|"|>'
        if kinds == frozenset(_TYPES):
            if not _trivial(schema):
                raise Refusal("says no type, so that its values cannot be told apart", path=path)
            plain = self._json({"type": ["number", "boolean", "null"]}, path)
            return tags.Either((tags.Sequence((Text(mark), tags.Until((), (mark,), mark))), plain))
        if not kinds & {"string", "object", "array"}:
            return self._json(schema, path)
        options: list[Node] = []
        for part in self._variants(schema, path):
            own = self.kinds(part, path)
            if not own & {"string", "object", "array"}:
                options.append(self._json(part, path))
            elif own == frozenset({"string"}):
                strings = part if isinstance(part, dict) else {}
                options += [tags.Sequence((Text(mark), n)) for n in self._strings(strings, path, mark, mark, False)]
            elif own == frozenset({"object"}):
                inner, _ = self._object(part, path, depth + 1)
                options.append(tags.Sequence((Text("{"), inner, Text("}"))))
            elif own == frozenset({"array"}):
                options.append(self._gemma_list(part, path, depth))
            else:
                raise Refusal("values of several kinds are not available in this model's form of a call", path=path)
        return options[0] if len(options) == 1 else tags.Either(tuple(options))

    def _gemma_list(self, part: Schema, path: str, depth: int) -> Node:
        assert isinstance(part, dict)
        self._only(part, _ARRAY, path)
        low, high = int(part.get("minItems", 0)), _most(part)
        one = self._gemma(part.get("items", True), pointer(path, "items"), depth + 1)
        if high == 0:
            return Text("[]")
        more = tags.Repeat(tags.Sequence((Text(","), one)), max(low - 1, 0), None if high is None else high - 1)
        filled = tags.Sequence((one, more))
        inner: Node = filled if low else tags.Either((Text(""), filled))
        return tags.Sequence((Text("["), inner, Text("]")))

    # ── schemas ──────────────────────────────────────────────────────────────

    def kinds(self, schema: Schema, path: str, depth: int = 0) -> frozenset[str]:
        """The JSON types a schema allows, by the parser's own rule: it must come to the same conclusion."""
        if depth > MAX_DEPTH:
            return frozenset(_TYPES)
        schema = self._resolved(schema, path)
        if isinstance(schema, bool):
            return frozenset(_TYPES)
        said = schema.get("type")
        if isinstance(said, str):
            return frozenset({said})
        if isinstance(said, list):
            return frozenset(said) or frozenset(_TYPES)
        if "const" in schema:
            return frozenset({_kind(schema["const"])})
        if isinstance(schema.get("enum"), list):
            return frozenset(map(_kind, schema["enum"]))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                return frozenset().union(*(self.kinds(s, path, depth + 1) for s in schema[word]))
        if isinstance(schema.get("allOf"), list):
            made = frozenset(_TYPES)
            for part in schema["allOf"]:
                made &= self.kinds(part, path, depth + 1)
            return made or frozenset(_TYPES)
        if "properties" in schema or "additionalProperties" in schema:
            return frozenset({"object"})
        if "items" in schema or "prefixItems" in schema:
            return frozenset({"array"})
        return frozenset(_TYPES)

    def _variants(self, schema: Schema, path: str, depth: int = 0) -> list[Schema]:
        """Schemas without references, unions and lists of types, of which a value must fit one."""
        if depth > MAX_DEPTH:
            raise Refusal(f"unions are nested deeper than {MAX_DEPTH} levels", path=path)
        schema = self._resolved(schema, path)
        if isinstance(schema, bool):
            return [schema]
        base = {k: v for k, v in schema.items() if k not in ANNOTATIONS}
        if "allOf" in base:
            for part in base.pop("allOf"):
                base = _merged(base, self._resolved(part, path), path)
            return self._variants(base, path, depth + 1)
        for word in ("anyOf", "oneOf"):
            if word not in base:
                continue
            options = base.pop(word)
            if word == "oneOf" and not self._apart(options, path):
                raise Refusal("its branches cannot be told apart here; use anyOf", path=path, keyword="oneOf")
            found: list[Schema] = []
            for option in options:
                found += self._variants(_merged(base, self._resolved(option, path), path), path, depth + 1)
            return found
        kinds = base.get("type")
        if isinstance(kinds, list):
            return [{**base, "type": kind} for kind in kinds]
        if kinds is None and isinstance(base.get("enum"), list):
            by_kind: dict[str, list[Any]] = {}
            for value in base["enum"]:
                by_kind.setdefault(_kind(value), []).append(value)
            return [{**base, "enum": values, "type": kind} for kind, values in by_kind.items()]
        return [base]

    def _apart(self, options: Sequence[Schema], path: str) -> bool:
        kinds = [self.kinds(option, path) for option in options]
        return sum(map(len, kinds)) == len(frozenset().union(*kinds))

    def _resolved(self, schema: Schema, path: str) -> Schema:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            found = resolve(self.root, schema["$ref"])
            if not isinstance(found, dict | bool):
                raise Refusal(f"{schema['$ref'][:200]!r} leads nowhere", path=path, keyword="$ref")
            others = {k: v for k, v in schema.items() if k != "$ref" and k not in ANNOTATIONS}
            schema = _merged(others, found, path) if others else found
        raise Refusal("references lead in a circle", path=path, keyword="$ref")

    def _json(self, schema: Schema, path: str) -> Node:
        """A value in plain JSON, with the definitions that it may refer to."""
        root = self.root if isinstance(self.root, dict) else {}
        shared: dict[str, Any] = {k: root[k] for k in ("$defs", "definitions") if k in root}
        if not isinstance(schema, dict):
            return tags.Json(schema)
        for _, part in tags.schemas.walk(schema):
            ref = part.get("$ref", "#/$defs/")
            if not ref.startswith(("#/$defs/", "#/definitions/")):
                raise Refusal("references must lead to $defs", path=path, keyword="$ref")
        return tags.Json({**shared, **schema})

    @staticmethod
    def _only(part: dict[str, Any], known: frozenset[str], path: str) -> None:
        odd = [key for key in part if key not in known and key not in ANNOTATIONS]
        if odd:
            raise Refusal("is not available in this model's form of a call", path=path, keyword=odd[0])

    def _count(self, path: str, depth: int) -> None:
        self._made += 1
        if depth > MAX_DEPTH or self._made > limits.MAX_SCHEMA_NODES:
            raise Refusal(
                f"values are nested deeper than {MAX_DEPTH} levels, or without end, which this model's form of a call "
                "does not allow",
                path=path,
            )


_KEYS = {
    "elements": re.compile(r"[\w.\-:/$@]+"),
    "tree": re.compile(r"[\w.\-:$@]+"),
    "pythonic": re.compile(r"[A-Za-z_][\w.\-]*"),
    "gemma": re.compile(r"[\w.\-$@]+"),
}
"""Names that the families' parsers read back."""


def _kind(value: Any) -> str:
    """As the parser sees it: 1.0 is a number."""
    return "number" if isinstance(value, float) else type_of(value)


def _keys(schema: Schema) -> set[str]:
    return set(schema) if isinstance(schema, dict) else set()


def _trivial(schema: Schema) -> bool:
    """Whether everything is allowed."""
    return schema is True or (isinstance(schema, dict) and not _keys(schema) - ANNOTATIONS)


def _most(part: dict[str, Any]) -> int | None:
    return None if part.get("maxItems") is None else int(part["maxItems"])


def _listed_strings(part: dict[str, Any]) -> list[str] | None:
    if "const" in part:
        return [part["const"]] if isinstance(part["const"], str) else []
    if isinstance(part.get("enum"), list):
        return [v for v in part["enum"] if isinstance(v, str)]
    return None


def _merged(base: dict[str, Any], other: Schema, path: str) -> dict[str, Any]:
    """Both, where they do not speak of the same."""
    if isinstance(other, bool):
        if not other:
            raise Refusal("the schema false allows nothing", path=path)
        return base
    made = dict(base)
    for key, value in other.items():
        if key in ANNOTATIONS:
            continue
        if key not in made or made[key] == value:
            made[key] = value
        elif key == "required":
            made[key] = [*made[key], *(n for n in value if n not in made[key])]
        elif key == "properties" and not made[key].keys() & value.keys():
            made[key] = {**made[key], **value}
        elif key == "type":
            ours, theirs = ([t] if isinstance(t, str) else t for t in (made[key], value))
            both = [t for t in ours if t in theirs]
            if not both:
                raise Refusal("its parts contradict each other", path=path, keyword="type")
            made[key] = both
        else:
            raise Refusal("is said twice, in parts that cannot be joined here", path=path, keyword=key)
    return made


def _listed(nodes: list[tuple[Node, bool]], separator: str) -> Node:
    """Members with ``separator`` between them, optional ones left out or not, in their order."""
    tails: list[Node] = [Text("")]
    """What may follow the first i members once something was written, from the last member on."""
    for node, must in reversed(nodes):
        one = tags.Sequence((Text(separator), node))
        tails.append(tags.Sequence((one if must else tags.Either((one, Text(""))), tails[-1])))
    tails.reverse()
    options: list[Node] = []
    for i, (node, must) in enumerate(nodes):
        options.append(tags.Sequence((node, tails[i + 1])))
        if must:
            break
    else:
        options.append(Text(""))
    return options[0] if len(options) == 1 else tags.Either(tuple(options))


KINDS: tuple[str, ...] = ("elements", "tree", "pythonic", "gemma")


def read(value: dict[str, Any], path: str) -> Node:
    """A tag's content in one of the notations. ``loose``: where the schema cannot be held, any text is let through."""
    try:
        return Notation(value).build()
    except Refusal as refusal:
        if value.get("loose"):
            return tags.AnyText()
        name = f" (arguments of {value['tool']})" if "tool" in value else ""
        raise Refusal(refusal.why + name, path=refusal.path or path, keyword=refusal.keyword) from None
