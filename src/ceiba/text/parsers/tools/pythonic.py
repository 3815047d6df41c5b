"""Calls as code: a list of Python calls (Llama 4, LFM2), and Gemma 4's ``call:name{key:value}``.

Owns both machines. Nothing is ever evaluated: values are read as literals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ceiba.text.parsers.arguments import begun_members, object_text
from ceiba.text.parsers.literals import GEMMA, PYTHON, Literals
from ceiba.text.parsers.source import Cut, Malformed, Source, Wait
from ceiba.text.parsers.tools.base import Calls, ToolFormat
from ceiba.text.parsers.tools.json_calls import JsonCalls

_NAME = re.compile(r"[\w.\-:/]*")
_HEAD = re.compile(r"\s*\[\s*([A-Za-z_][\w.\-]*)\s*\(")
_MAYBE_HEAD = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.\-]*\s*\(?)?)?")


def _name(source: Source) -> Wait[str]:
    yield from source.space()
    name = yield from source.run(_NAME)
    if not name:
        raise Cut if source.ended and source.pos == len(source.data) else Malformed
    return name


class Pythonic(ToolFormat):
    """``[name(key="value"), …]`` at the start of the answer, or between the markers."""

    openers = ("<|python_start|>",)
    noise: tuple[str, ...] = ("<|python_end|>",)
    closer = ""
    section = ("[", "]")
    separator = ", "
    opened = ("<|python_start|>[", "]<|python_end|>")
    bare_end = "]"

    @property
    def bare_start(self) -> str:  # type: ignore[override]
        return rf"\s*\[\s*({'|'.join(map(re.escape, self.tools.names))})\s*\("

    def bare_frames(self, name: str) -> list[tuple[str, str, str]]:
        head = rf"[ \n]{{0,9}}{re.escape(name)}[ ]?\([ \n]{{0,9}}"
        return [(rf"\s{{0,9}}\[{head}", f"[ ]?,{head}", r"[ \n]{0,9}\)")]

    def bare(self, source: Source) -> Wait[bool]:
        """Looks for the bracket and the name of an offered tool; a list in an answer begins otherwise."""
        while True:
            rest = source.data[source.pos : source.pos + 512]
            match = _HEAD.match(rest)
            if match:
                return match[1] in self.tools
            if source.ended or len(rest) == 512 or not _MAYBE_HEAD.fullmatch(rest):
                return False
            yield

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        yield from source.expect("[")
        found: list[tuple[str, str]] = []
        while True:
            yield from source.space()
            head = yield from source.peek()
            if head == "]":
                source.pos += 1
                break
            if found:
                yield from source.expect(",")
            name = yield from _name(source)
            yield from source.expect("(")
            pairs = yield from Literals(source, PYTHON).members(")", "=")
            found.append((name, self._arguments(name, pairs)))
        if self.closer and opener:
            yield from source.expect(self.closer)
        if not found:
            raise Malformed
        for name, arguments in found:
            calls.add(name, arguments)

    def _arguments(self, name: str, pairs: list[tuple[str | None, str]]) -> str:
        """Positional arguments take the tool's parameters in their order."""
        order = [k for k in self.tools.properties(name) if k not in {k for k, _ in pairs}]
        named: list[tuple[str, str]] = []
        for key, value in pairs:
            if key is None:
                if not order:
                    raise Malformed
                key = order.pop(0)
            named.append((key, value))
        return object_text(named)

    def frame(self, name: str) -> tuple[str, str]:
        return f"{name}(", ")"

    def begun(self, name: str, body: str) -> tuple[str, int | None]:
        return begun_members(body, PYTHON, ")", "=")

    def body(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "pythonic", "schema": schema}


class Lfm2(Pythonic):
    openers = ("<|tool_call_start|>",)
    noise = ()
    closer = "<|tool_call_end|>"
    inner = ("<|tool_call_end|>",)
    section = ("<|tool_call_start|>[", "]<|tool_call_end|>")
    opened = section
    trim = True

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        if (yield from source.ahead(("[{", "{"))):
            found = JsonCalls(self.tools)
            found.closers = (self.closer,)
            yield from found.region(source, opener, calls)
        else:
            yield from super().region(source, opener, calls)


class Gemma4(ToolFormat):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``; strings are not escaped."""

    openers = ("<|tool_call>",)
    inner = ("<tool_call|>", '<|"|>')

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        yield from source.expect("call:")
        name = yield from _name(source)
        yield from source.expect("{")
        pairs = yield from Literals(source, GEMMA).members()
        yield from source.expect("<tool_call|>")
        calls.add(name, object_text([(k or "", v) for k, v in pairs]))

    def frame(self, name: str) -> tuple[str, str]:
        return f"<|tool_call>call:{name}{{", "}<tool_call|>"

    def begun(self, name: str, body: str) -> tuple[str, int | None]:
        return begun_members(body, GEMMA, "}")

    def body(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "gemma", "schema": schema}
