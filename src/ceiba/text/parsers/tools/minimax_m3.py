"""MiniMax-M3's calls: markup in which objects and lists are elements themselves, every tag behind a namespace token.

Owns the tree and its conversion: the schema, else the shape, tells a list from an object and a number from a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ceiba.text.parsers.arguments import Schema, begun_object, coerce, object_text, part, types
from ceiba.text.parsers.literals import MAX_DEPTH, begun_string, ended, quote, run, without_begun
from ceiba.text.parsers.source import Cut, Malformed, Source, Wait, markers
from ceiba.text.parsers.tools.base import Calls, ToolFormat

_NS = "]<]minimax[>["
_INVOKE = re.compile(r'invoke\s+name="([^"]+)"')

Node = list["tuple[str, Node] | str"]
"""What stands in an element: text and (tag, node) children."""


class MiniMaxM3(ToolFormat):
    openers = (_NS + "<tool_call>",)
    inner = (_NS,)
    trim = True
    section = (_NS + "<tool_call>\n", _NS + "</tool_call>")

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        while True:
            yield from source.expect(_NS)
            tag = yield from self._tag(source)
            if tag == "/tool_call":
                return
            match = _INVOKE.fullmatch(tag)
            if not match:
                raise Malformed
            node = yield from self._node(source, "invoke", 0)
            calls.add(match[1], self._arguments(match[1], node))

    def _tag(self, source: Source) -> Wait[str]:
        yield from source.expect("<")
        parts: list[str] = []
        if (yield from source.until(markers(">"), parts.append)) is None:
            raise Cut
        return "".join(parts)

    def _node(self, source: Source, name: str, depth: int) -> Wait[Node]:
        if depth > MAX_DEPTH:
            raise Malformed
        node: Node = []
        while True:
            parts: list[str] = []
            if (yield from source.until(markers(_NS), parts.append)) is None:
                raise Cut
            if parts:
                node.append("".join(parts))
            tag = yield from self._tag(source)
            if tag == "/" + name:
                return node
            if tag.startswith("/"):
                raise Malformed
            node.append((tag, (yield from self._node(source, tag, depth + 1))))

    def _arguments(self, name: str, node: Node) -> str:
        root = self.tools.schema(name)
        pairs: list[tuple[str, str]] = []
        for child in node:
            if isinstance(child, tuple):
                schema = self.tools.parameter(name, child[0])
                pairs.append((child[0], _json(child[1], schema, root)))
        return object_text(pairs)

    def frame(self, name: str) -> tuple[str, str]:
        return f'{_NS}<invoke name="{name}">', f"{_NS}</invoke>\n"

    def begun(self, name: str, body: str) -> tuple[str, int | None]:
        """Of an element that is cut, its name alone, or the beginning of its text where it can be nothing else."""
        source, pairs, root = ended(body), list[tuple[str, str]](), self.tools.schema(name)
        tag, start = "", 0
        try:
            while True:
                tag, start = "", source.pos
                run(source.expect(_NS))
                tag = run(self._tag(source))
                if tag.startswith("/"):
                    return object_text(pairs), start
                start = source.pos
                node = run(self._node(source, tag, 1))
                pairs.append((tag, _json(node, self.tools.parameter(name, tag), root)))
        except Cut:
            if not tag:
                return begun_object(pairs), None
        text, schema = body[start:], self.tools.parameter(name, tag)
        is_text = _NS not in text and (schema is None or types(schema, root) == {"string"})
        value = begun_string(without_begun(text, _NS)) if is_text else ""
        return begun_object(pairs, f"{quote(tag)}: {value}"), None

    def body(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "type": "tree",
            "schema": schema,
            "open": _NS + "<{key}>",
            "close": _NS + "</{key}>",
            "item": "item",
            "mark": _NS,
        }


def _json(node: Node, schema: Schema | None, root: Schema) -> str:
    children = [c for c in node if isinstance(c, tuple)]
    if not children:
        text = "".join(c for c in node if isinstance(c, str))
        if schema is None:
            return quote(text)
        wanted = types(schema, root)
        if not text.strip() and "string" not in wanted:
            if wanted == {"array"}:
                return "[]"
            if wanted == {"object"}:
                return "{}"
        return coerce(text, schema, root)
    wanted = types(schema, root) if schema is not None else frozenset({"array", "object"})
    items = all(tag == "item" for tag, _ in children)
    if items and ("array" in wanted or "object" not in wanted):
        inner = part(schema, root, "items")
        return "[" + ", ".join(_json(n, inner, root) for _, n in children) + "]"
    return object_text([(tag, _json(n, part(schema, root, "properties", tag), root)) for tag, n in children])
