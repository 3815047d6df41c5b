"""Structural tags: free text in which marked parts have a shape. From the three forms that clients send to one tree.

Owns the tree and its reading: xgrammar's ``{"type": "structural_tag", "format": …}``, SGLang's older ``structures`` and
``triggers``, and what our own tool-call formats ask for (``{"type": "tags", …}``). Backends turn the tree into their
own language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ceiba.core import limits
from ceiba.grammar import schema as schemas
from ceiba.grammar.base import Refusal
from ceiba.grammar.regex import check_regex
from ceiba.grammar.schema import Schema, pointer

MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this."""

    value: str


@dataclass(frozen=True, slots=True)
class Json:
    schema: Schema


@dataclass(frozen=True, slots=True)
class Regex:
    pattern: str


@dataclass(frozen=True, slots=True)
class Ebnf:
    grammar: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Whatever comes, up to what follows."""


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Tag:
    begin: str
    content: Node
    end: str


@dataclass(frozen=True, slots=True)
class Triggered:
    """Free text; where one of ``triggers`` has been written, one of the tags that begin with it must follow."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    never: str = ""
    """An expression for what the text may not begin with."""


@dataclass(frozen=True, slots=True)
class TagList:
    """Tags and nothing else, with ``separator`` between them."""

    tags: tuple[Tag, ...]
    separator: str = ""
    at_least_one: bool = False
    stop_after_first: bool = False


@dataclass(frozen=True, slots=True)
class Until:
    """A text that fits all of ``patterns`` and holds none of ``stops``, then ``end``, which holds the first of them."""

    patterns: tuple[str, ...]
    stops: tuple[str, ...]
    end: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """``part`` from ``least`` to ``most`` times (None: any number)."""

    part: Node
    least: int
    most: int | None


Node = Text | Json | Regex | Ebnf | AnyText | Sequence | Either | Tag | Triggered | TagList | Until | Repeat


def parse(text: str) -> Node:
    """The tree. Raises Refusal with the path of what cannot be read."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal("a structural tag is an object")
    if value.get("type") == "tags":
        return _ours(value)
    if "structures" in value:
        return _older(value)
    if "format" in value:
        return _node(value["format"], "#/format", 0)
    raise Refusal("a structural tag has a format, or structures and triggers")


def texts(node: Node) -> Iterator[str]:
    """Every literal in the tree."""
    for part in nodes(node):
        if isinstance(part, Text):
            yield part.value
        elif isinstance(part, Tag):
            yield part.begin
            yield part.end
        elif isinstance(part, TagList):
            yield part.separator


def nodes(node: Node) -> Iterator[Node]:
    """Every part of a tree once, however often it is used."""
    stack, seen = [node], {id(node)}
    while stack:
        part = stack.pop()
        yield part
        inner: tuple[Node, ...] = ()
        if isinstance(part, Sequence | Either):
            inner = part.parts
        elif isinstance(part, Tag):
            inner = (part.content,)
        elif isinstance(part, Triggered | TagList):
            inner = part.tags
        elif isinstance(part, Repeat):
            inner = (part.part,)
        fresh = [one for one in reversed(inner) if id(one) not in seen]
        seen |= {id(one) for one in fresh}
        stack += fresh


# ── reading ──────────────────────────────────────────────────────────────────


def _ours(value: dict[str, Any]) -> Node:
    tags = tuple(_tag(tag, pointer("#/tags", i), 1) for i, tag in enumerate(_list(value, "tags", "#")))
    once = not value.get("parallel", True)
    begin, end = _text(value, "begin", "#", ""), _text(value, "end", "#", "")
    separator = _text(value, "separator", "#", "")
    numbered = any("{index" in tag.begin for tag in tags)
    calls = _numbered(tags, separator, once) if numbered else TagList(tags, separator, True, once)
    if value.get("required"):
        return Sequence((Text(begin), calls, Text(end)))
    if begin:
        free = Triggered((begin,), (Tag(begin, calls, end),), stop_after_first=once)
    else:
        free = _triggered(tuple(value.get("triggers", ())), tags, "#", stop_after_first=once)
    bare = value.get("bare")
    if not isinstance(bare, dict):
        return free
    start = _text(bare, "start", "#/bare")
    check_regex(start, "#/bare")
    firsts, others = [], []
    for i, tag in enumerate(_list(bare, "tags", "#/bare")):
        path = pointer("#/bare/tags", i)
        content = _node(tag.get("content"), pointer(path, "content"), 1)
        # The beginning is one expression, so that it and the free text part at the same character.
        head, more, close = (Regex(_text(tag, key, path)) for key in ("begin", "more", "end"))
        firsts.append(Sequence((head, content, close)))
        others.append(Sequence((more, content, close)))
    parts: list[Node] = [Either(tuple(firsts))]
    if not once:
        parts.append(Repeat(Either(tuple(others)), 0, None))
    called = Sequence((*parts, Text(_text(bare, "end", "#/bare", ""))))
    return Either((called, replace(free, never=start)))


def _numbered(tags: tuple[Tag, ...], separator: str, once: bool) -> Node:
    """Calls that say which they are, from 1 (``{index}``) or 0 (``{index0}``) on."""

    def call(i: int) -> Node:
        begins = [tag.begin.replace("{index}", str(i + 1)).replace("{index0}", str(i)) for tag in tags]
        return Either(tuple(Tag(b, tag.content, tag.end) for b, tag in zip(begins, tags, strict=True)))

    last = 0 if once else limits.MAX_NUMBERED_CALLS - 1
    calls = call(last)
    for i in reversed(range(last)):
        calls = Sequence((call(i), Either((Text(""), Sequence((Text(separator), calls))))))
    return calls


def _older(value: dict[str, Any]) -> Node:
    tags = []
    for i, entry in enumerate(_list(value, "structures", "#")):
        path = pointer("#/structures", i)
        if not isinstance(entry, dict):
            raise Refusal("must be an object with begin, schema and end", path=path)
        content = Json(_schema(entry.get("schema", True), pointer(path, "schema")))
        tags.append(Tag(_text(entry, "begin", path), content, _text(entry, "end", path)))
    return _triggered(tuple(_list(value, "triggers", "#")), tuple(tags), "#")


def _node(value: Any, path: str, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise Refusal(f"formats are nested deeper than {MAX_DEPTH} levels", path=path)
    if not isinstance(value, dict):
        raise Refusal("a format is an object with a type", path=path)
    kind = value.get("type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise Refusal(f"type {str(kind)[:60]!r} is not available; types are {', '.join(_READERS)}", path=path)
    return reader(value, path, depth)


def _read_tag(value: dict[str, Any], path: str, depth: int) -> Tag:
    return _tag(value, path, depth)


def _tag(value: Any, path: str, depth: int) -> Tag:
    if not isinstance(value, dict):
        raise Refusal("a tag is an object with begin, content and end", path=path)
    end = value.get("end", "")
    if isinstance(end, list) and len(end) == 1:
        end = end[0]
    if not isinstance(end, str):
        raise Refusal("end must be one text", path=path)
    return Tag(_text(value, "begin", path), _node(value.get("content"), pointer(path, "content"), depth + 1), end)


def _read_triggered(value: dict[str, Any], path: str, depth: int) -> Node:
    tags = tuple(_tag(tag, pointer(path, "tags", i), depth + 1) for i, tag in enumerate(_list(value, "tags", path)))
    return _triggered(
        tuple(_list(value, "triggers", path)),
        tags,
        path,
        at_least_one=bool(value.get("at_least_one")),
        stop_after_first=bool(value.get("stop_after_first")),
    )


def _triggered(
    triggers: tuple[Any, ...], tags: tuple[Tag, ...], path: str, *, at_least_one: bool = False,
    stop_after_first: bool = False,
) -> Triggered:  # fmt: skip
    if not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise Refusal("triggers must be a list of texts that are not empty", path=path)
    for i, tag in enumerate(tags):
        if sum(tag.begin.startswith(trigger) for trigger in triggers) != 1:
            raise Refusal(f"tag {i} begins with {tag.begin[:60]!r}, which must start with exactly one trigger",
                          path=path)  # fmt: skip
    return Triggered(triggers, tags, at_least_one, stop_after_first)


def _read_list(value: dict[str, Any], path: str, depth: int) -> Node:
    tags = tuple(_tag(tag, pointer(path, "tags", i), depth + 1) for i, tag in enumerate(_list(value, "tags", path)))
    return TagList(
        tags, _text(value, "separator", path, ""), bool(value.get("at_least_one")), bool(value.get("stop_after_first"))
    )


def _parts(value: dict[str, Any], path: str, depth: int) -> tuple[Node, ...]:
    entries = _list(value, "elements", path)
    return tuple(_node(entry, pointer(path, "elements", i), depth + 1) for i, entry in enumerate(entries))


def _read_json(value: dict[str, Any], path: str, depth: int) -> Node:
    name = "json_schema" if "json_schema" in value else "schema"
    return Json(_schema(value.get(name), pointer(path, name)))


def _read_regex(value: dict[str, Any], path: str, depth: int) -> Node:
    pattern = _text(value, "pattern", path)
    check_regex(pattern, path)
    return Regex(pattern)


_READERS: dict[str, Callable[[dict[str, Any], str, int], Node]] = {
    "const_string": lambda value, path, depth: Text(_text(value, "value", path)),
    "json_schema": _read_json,
    "json": _read_json,
    "regex": _read_regex,
    "grammar": lambda value, path, depth: Ebnf(_text(value, "grammar", path)),
    "any_text": lambda value, path, depth: AnyText(),
    "sequence": lambda value, path, depth: Sequence(_parts(value, path, depth)),
    "or": lambda value, path, depth: Either(_parts(value, path, depth)),
    "tag": _read_tag,
    "triggered_tags": _read_triggered,
    "tags_with_separator": _read_list,
    "tags": lambda value, path, depth: _ours(value),
    **dict.fromkeys(("elements", "tree", "pythonic", "gemma"), lambda value, path, depth: _read_arguments(value, path)),
}


def _read_arguments(value: dict[str, Any], path: str) -> Node:
    from ceiba.grammar import notations  # it is made of these nodes

    return notations.read({**value, "schema": _schema(value.get("schema", True), pointer(path, "schema"))}, path)


def _schema(value: Any, path: str) -> Schema:
    schema = schemas.parse(value) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise Refusal("a schema must stand here", path=path)
    try:
        schemas.check(schema)
    except Refusal as refusal:
        raise Refusal(refusal.why, path=path + refusal.path.removeprefix("#"), keyword=refusal.keyword) from None
    return schema


def _list(value: dict[str, Any], name: str, path: str) -> list[Any]:
    entries = value.get(name)
    if not isinstance(entries, list) or not entries:
        raise Refusal("must be a list that is not empty", path=path, keyword=name)
    if len(entries) > limits.MAX_STRUCTURAL_TAGS:
        raise Refusal(f"has {len(entries)} entries; the limit is {limits.MAX_STRUCTURAL_TAGS}", path=path, keyword=name)
    return entries


def _text(value: dict[str, Any], name: str, path: str, default: str | None = None) -> str:
    found = value.get(name, default)
    if not isinstance(found, str):
        raise Refusal("must be a text", path=path, keyword=name)
    return found
