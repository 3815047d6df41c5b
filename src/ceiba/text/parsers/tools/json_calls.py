"""Calls as JSON objects (``{"name", "arguments"}``) behind a marker, between two, or bare at the start of the answer.

Owns the machine and the declarations of hermes, qwen, hunyuan-a13b, internlm, cohere, gigachat, granite, nemotron,
llama and mistral.
"""

from __future__ import annotations

import re
from typing import ClassVar

from ceiba.text.parsers.arguments import as_object, compact, object_text
from ceiba.text.parsers.literals import JSON, Literals, load
from ceiba.text.parsers.source import Cut, Malformed, Source, Wait, markers
from ceiba.text.parsers.tools.base import Calls, ToolFormat

_GAP = r"[ \t\n\r]{0,20}"
_NAME = re.compile(r"[\w.\-:/]*")


def _key_pattern(name: str, arguments: str) -> str:
    """An expression for the beginning of a call's object, up to the arguments."""
    return rf'\{{{_GAP}"name"{_GAP}:{_GAP}"{re.escape(name)}"{_GAP},{_GAP}"{arguments}"{_GAP}:{_GAP}'


class JsonCalls(ToolFormat):
    """Objects, or one list of objects, up to one of ``closers``; without closers, up to the end of the last one."""

    closers: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """What follows the opener before the JSON begins."""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    between: str = ""
    """What may stand between two objects that nothing closes."""
    known_only: bool = False
    """Whether an object whose name is no offered tool is an answer in JSON instead of a call."""

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        for text in self.after:
            yield from source.expect(text)
        found: list[tuple[str, str]] = []
        while (yield from self._item(source, found)):
            if not self.closers:
                self._add(found, calls)
                if not (yield from self._goes_on(source)):
                    return
        if not found:
            raise Malformed if (yield from source.peek()) else Cut
        yield from source.expect(*self.closers)
        self._add(found, calls)

    def _item(self, source: Source, found: list[tuple[str, str]]) -> Wait[bool]:
        """Reads an object or a list of them; False if there is none."""
        yield from source.space()
        head = yield from source.peek()
        if head == "{":
            source.pos += 1
            found.append((yield from self._object(source)))
        elif head == "[":
            source.pos += 1
            yield from self._list(source, found)
        else:
            return False
        return True

    def _goes_on(self, source: Source) -> Wait[bool]:
        """Whether another object follows, behind one of ``between``."""
        if not self.between:
            return False
        if (yield from source.ahead((self.between,))) == self.between:
            yield from source.expect(self.between)
        return (yield from source.ahead(("{",))) == "{"

    def _add(self, found: list[tuple[str, str]], calls: Calls) -> None:
        if self.known_only and any(name not in self.tools for name, _ in found):
            raise Malformed
        for name, arguments in found:
            calls.add(name, arguments)
        found.clear()

    def _list(self, source: Source, found: list[tuple[str, str]]) -> Wait[None]:
        while True:
            yield from source.space()
            head = yield from source.peek()
            if head == "]":
                source.pos += 1
                return
            if head == "," and found:
                source.pos += 1
                yield from source.space()
                head = yield from source.peek()
            if head != "{":
                raise Malformed if head else Cut
            source.pos += 1
            found.append((yield from self._object(source)))

    def _object(self, source: Source) -> Wait[tuple[str, str]]:
        """(name, arguments) of one object whose "{" is read."""
        members = dict((yield from Literals(source, JSON).members()))
        if members.get("type") == '"function"' and "function" in members:
            inner = load(members["function"])
            if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                return inner["name"], as_object(compact(inner.get("arguments", inner.get("parameters"))))
        name = next((members[k] for k in self.name_keys if k in members), "")
        value = load(name) if name.startswith('"') else None
        if not isinstance(value, str) or not value:
            raise Malformed
        arguments = next((members[k] for k in self.argument_keys if k in members), None)
        if arguments is None and self.known_only and len(members) > 1:
            raise Malformed
        return value, as_object(arguments if arguments is not None else "{}")

    def frame(self, name: str) -> tuple[str, str]:
        begin = self.openers[0] + "".join(self.after)
        return f'{begin}{{"{self.name_keys[0]}": "{name}", "{self.argument_keys[0]}": ', "}" + "".join(self.closers[:1])


class Hermes(JsonCalls):
    """``<tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>``, one object a tag."""

    openers = ("<tool_call>",)
    closers = ("</tool_call>",)
    trim = True
    separator = "\n"

    def frame(self, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"


class Qwen25(Hermes):
    """Hermes; the small Qwen 2.5 models often write the object in a code fence, or bare, instead of in the tag.

    That counts at the start of the answer only, and only as an object of name and arguments, the name an offered
    tool's.
    """

    bare_start = rf"{_GAP}(```(json)?{_GAP})?\{{{_GAP}\"(name|arguments)\""

    def bare_frames(self, name: str) -> list[tuple[str, str, str]]:
        key, over = _key_pattern(name, "arguments"), rf"{_GAP}\}}"
        fenced = f"```json{_GAP}{key}"
        return [(_GAP + key, _GAP + key, over), (_GAP + fenced, _GAP + fenced, f"{over}{_GAP}```")]

    def bare(self, source: Source) -> Wait[bool]:
        return bool((yield from source.ahead(("{", "```json", "```\n"))))

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        if opener:
            yield from super().region(source, opener, calls)
            return
        more: str | None = "{"
        while more:
            yield from source.space()
            fence = yield from source.at(("```json", "```"))
            yield from source.expect("{")
            if not (yield from source.ahead(('"name"', '"arguments"'))):
                raise Malformed
            members = dict((yield from Literals(source, JSON).members()))
            name = load(members.get("name", "null"))
            if set(members) != {"name", "arguments"} or not isinstance(name, str) or name not in self.tools:
                raise Malformed
            arguments = as_object(members["arguments"])
            if fence:
                yield from source.expect("```")
            calls.add(name, arguments)
            more = yield from source.ahead(("{", "```json"))


class Trinity(Hermes):
    """Hermes, with calls that also stand inside the thinking."""

    in_reasoning = True
    noise = ("<think>", "</think>")


class MiniMaxM1(JsonCalls):
    """``<tool_calls>`` with an object a line, or a list (Hunyuan-A13B)."""

    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)
    trim = True
    section = ("<tool_calls>\n", "\n</tool_calls>")
    separator = "\n"

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "arguments": ', "}"


class InternLM(JsonCalls):
    openers = ("<|action_start|>",)
    after = ("<|plugin|>",)
    closers = ("<|action_end|>",)
    argument_keys = ("parameters", "arguments")
    trim = True
    inner = ("<|plugin|>", "<|action_end|>")

    def frame(self, name: str) -> tuple[str, str]:
        return f'<|action_start|><|plugin|>\n{{"name": "{name}", "parameters": ', "}<|action_end|>"


class Cohere(JsonCalls):
    openers = ("<|START_ACTION|>",)
    closers = ("<|END_ACTION|>",)
    name_keys = ("tool_name", "name")
    argument_keys = ("parameters", "arguments")
    trim = True
    noise = ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>")
    inner = ("<|END_ACTION|>",)
    section = ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>")
    separator = ",\n    "

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": ', "}"


class GigaChat(JsonCalls):
    """A message of the role ``function call``, or ``<|function_call|>`` behind the text; nothing closes it."""

    openers = ("<|function_call|>", "function call<|role_sep|>\n")
    noise = ("<|message_sep|>",)
    trim = True
    single = True


class Granite(JsonCalls):
    """``<|tool_call|>`` (3.x) and a list; 4.x writes hermes."""

    openers = ("<|tool_call|>",)
    trim = True
    section = ("<|tool_call|>[", "]")
    separator = ", "

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "arguments": ', "}"


class NemotronList(JsonCalls):
    """``<TOOLCALL>[…]</TOOLCALL>`` (Nemotron Nano 2)."""

    openers = ("<TOOLCALL>",)
    closers = ("</TOOLCALL>",)
    trim = True
    section = ("<TOOLCALL>[", "]</TOOLCALL>")
    separator = ", "

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "arguments": ', "}"


class Llama3(JsonCalls):
    """An object at the start of the answer, or behind ``<|python_tag|>``; several are parted by ``;``."""

    openers = ("<|python_tag|>",)
    argument_keys = ("parameters", "arguments")
    between = ";"
    known_only = True
    separator = "; "
    opened = ("<|python_tag|>", "")
    bare_start = rf"{_GAP}\{{{_GAP}\"(name|type|function|parameters|arguments)\""

    def bare_frames(self, name: str) -> list[tuple[str, str, str]]:
        key = _key_pattern(name, "parameters")
        return [(_GAP + key, f"{_GAP};{_GAP}{key}", rf"{_GAP}\}}")]

    def bare(self, source: Source) -> Wait[bool]:
        return (yield from source.ahead(("{",))) == "{"

    def frame(self, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "parameters": ', "}"


class Mistral(ToolFormat):
    """``[TOOL_CALLS]`` and a list of objects (up to v7), or ``[TOOL_CALLS]name[ARGS]{…}`` a call (from v11)."""

    openers = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    short_ids: ClassVar[bool] = True

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        yield from source.space()
        if (yield from source.peek()) in {"[", "{"}:
            found = JsonCalls(self.tools)
            yield from found.region(source, opener, calls)
            return
        name = yield from source.run(_NAME)
        if not name:
            raise Cut if source.ended and source.pos == len(source.data) else Malformed
        call_id: str | None = None
        mark = yield from source.expect("[ARGS]", "[CALL_ID]", "{")
        if mark == "[CALL_ID]":
            parts: list[str] = []
            if (yield from source.until(markers("[ARGS]"), parts.append)) is None:
                raise Cut
            call_id = "".join(parts).strip() or None
            mark = "[ARGS]"
        if mark == "[ARGS]":
            yield from source.expect("{")
        pairs = yield from Literals(source, JSON).members()
        calls.add(name, object_text([(k or "", v) for k, v in pairs]), call_id)

    def frame(self, name: str) -> tuple[str, str]:
        return f"[TOOL_CALLS]{name}[ARGS]", ""
