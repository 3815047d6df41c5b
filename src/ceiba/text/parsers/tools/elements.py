"""Calls as markup: a call element with one element for each argument, whose text is the bare value.

Owns the machine and the declarations of qwen3-coder, minimax-m2, step3, DeepSeek's DSML, Kimi-K3's XTML, GLM, Hunyuan
3 and MiniCPM 5. Values are not escaped, so an end tag inside a value is told from the real one by what follows it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from ceiba.text.parsers.arguments import ANY, STRUCTURED, begun_object, object_text, types
from ceiba.text.parsers.literals import begun, begun_string, parse, quote, without_begun
from ceiba.text.parsers.source import Cut, Malformed, Source, Wait, markers
from ceiba.text.parsers.tools.base import Calls, ToolFormat
from ceiba.text.parsers.tools.json_calls import MiniMaxM1

_ATTRIBUTE = re.compile(r'([\w-]+)\s*=\s*"([^"]*)"')
_NAME = re.compile(r"[\w.\-:/]+")
_NAME_RUN = re.compile(r"[\w.\-:/]*")


class Elements(ToolFormat):
    """``call`` and ``parameter`` are (begin, end of the begin tag, end tag)."""

    wrap: tuple[str, str] = ("", "")
    """Begin and end tag around one or all calls."""
    glue: tuple[str, ...] = ()
    """What may stand between calls inside the wrap."""
    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    value: str = ""
    """A begin tag of the value, where the key is an element of its own."""
    lines: bool = False
    """Whether values stand on lines of their own: one newline on each side is markup."""
    trim = True

    # Where the parts say it, the head of a tag gives name, key and whether the value is a string.

    def call_name(self, head: str) -> str:
        return dict(_ATTRIBUTE.findall(head)).get("name", "")

    def key(self, head: str) -> tuple[str, bool | None]:
        """(key, whether the value is a string; None if only the schema knows)."""
        return dict(_ATTRIBUTE.findall(head)).get("name", ""), None

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        wrapped = bool(self.wrap[0]) and opener == self.wrap[0]
        begin, closing = self.call[0], self.wrap[1]
        if not wrapped:
            yield from self._call(source, calls)
            if closing and closing not in self.openers and (yield from source.ahead((closing,))) == closing:
                yield from source.expect(closing)
            return
        while True:
            found = yield from source.expect(begin, closing, *self.glue)
            if found == begin:
                yield from self._call(source, calls)
            elif found == closing:
                return

    def _call(self, source: Source, calls: Calls) -> Wait[None]:
        head, empty = yield from self._head(source, self.call[1])
        name = self.call_name(head)
        if not _NAME.fullmatch(name):
            raise Malformed
        pairs: list[tuple[str, str]] = []
        if not empty:
            yield from self._pairs(source, name, pairs)
        calls.add(name, object_text(pairs))

    def _pairs(self, source: Source, name: str, pairs: list[tuple[str, str]]) -> Wait[None]:
        """The arguments, up to the end tag of the call."""
        begin, _, end = self.parameter
        found = end
        while True:
            if found == end:
                found = yield from source.expect(begin, self.call[2])
            if found == self.call[2]:
                return
            head, _ = yield from self._head(source, self.parameter[1])
            key, is_string = self.key(head)
            if self.value:
                yield from source.expect(self.value)
            text, found = yield from self._text(source, name, {k for k, _ in pairs})
            pairs.append((key, self._json(name, key, text, is_string)))

    def _head(self, source: Source, close: str) -> Wait[tuple[str, bool]]:
        """(what stands in a begin tag, whether the tag closes itself)."""
        parts: list[str] = []
        while True:
            if (yield from source.until(markers(close), parts.append)) is None:
                raise Cut
            if sum(p.count('"') for p in parts) % 2 == 0:
                break
            parts.append(close)
        head = "".join(parts)
        return (head[:-1], True) if head.endswith("/") else (head, False)

    def _text(self, source: Source, name: str, seen: set[str]) -> Wait[tuple[str, str]]:
        """A value, up to the first end tag that something of the format follows, and the tag that ended it (its own,
        or one in whose place its own is missing: the call's end or the next argument's begin)."""
        begin, _, end = self.parameter
        closing = self.call[2]
        over = self.wrap[1] or self.call[0]
        parts: list[str] = []
        stop = markers(end, closing, *((begin,) if self.lines else ()))
        while True:
            found = yield from source.until(stop, parts.append)
            if found is None:
                raise Cut
            if found == end:
                if (yield from source.ahead((begin, closing))):
                    break
            elif found == closing:
                after = yield from source.ahead((over, self.call[0]))
                if after or (after == "" and not self.wrap[1]):
                    break
            elif (yield from self._next_begins(source, name, seen, parts)):
                break
            parts.append(found)
        text = "".join(parts)
        if self.lines:
            text = text[1:] if text.startswith("\n") else text
            text = text[:-1] if text.endswith("\n") else text
        return text, found

    def _next_begins(self, source: Source, name: str, seen: set[str], parts: list[str]) -> Wait[bool]:
        """Whether a begin tag inside a value, just read, is the next argument: it stands alone on a line and names a
        parameter of the tool that has not come yet."""
        if not parts or not parts[-1].endswith("\n"):
            return False
        options = [k + self.parameter[1] + "\n" for k in self.tools.properties(name) if k not in seen]
        longest = max(map(len, options), default=0)
        while True:
            rest = source.data[source.pos : source.pos + longest]
            if any(rest.startswith(o) for o in options):
                return True
            if source.ended or not any(o.startswith(rest) for o in options):
                return False
            yield

    def _json(self, name: str, key: str, text: str, is_string: bool | None) -> str:
        if is_string is None:
            return self.tools.json_text(name, key, text)
        return quote(text) if is_string else parse(text) or quote(text)

    def frame(self, name: str) -> tuple[str, str]:
        raise NotImplementedError

    def begun(self, name: str, body: str) -> tuple[str, int | None]:
        """Of a value that is cut, its key alone, or the beginning of a text, object or list where it can be nothing
        else."""
        opened, closed = self.argument()
        begin = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.*?)", re.escape(opened)))
        pairs: list[tuple[str, str]] = []
        at = 0
        while found := begin.match(body, at):
            key, start = found["key"], found.end()
            is_string = self._is_string(found.groupdict())
            cut, skipped = self._value(name, key, body[start:], is_string)
            end = body.find(closed, start + skipped)
            if end < 0:
                return begun_object(pairs, f"{quote(key)}: {cut}"), None
            pairs.append((key, self._json(name, key, body[start:end], is_string)))
            at = end + len(closed)
        rest, close = body[at:], self.frame(name)[1].strip()
        if rest.startswith(close) or (close.startswith(rest) and not opened.startswith(rest)):
            return object_text(pairs), at
        return begun_object(pairs), None

    def _value(self, name: str, key: str, text: str, is_string: bool | None) -> tuple[str, int]:
        """Of a value that ``text`` begins with: what can be said of it if it is cut, and how much of ``text`` holds no
        end of it: a list or an object may have the family's marks inside."""
        schema = self.tools.parameter(name, key)
        kinds = types(schema, self.tools.schema(name)) if schema is not None else frozenset({"string"})
        if is_string or (is_string is None and kinds == {"string"}):
            return begun_string(without_begun(text, self.argument()[1])), 0
        listed = is_string is False or (bool(kinds & STRUCTURED) and kinds != ANY)
        if listed and text.lstrip()[:1] in {"{", "["}:
            said, end = begun(text)
            return said, len(text) if end is None else end
        return "", 0

    def _is_string(self, said: Mapping[str, str]) -> bool | None:
        """Whether a value is a string, where the begin of its element says it (``said``: what that begin holds)."""
        if "is_string" in said:
            return said["is_string"] == "true"
        return said["type"] == "string" if "type" in said else None

    def body(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """``{key}`` in ``open`` is the argument's name; strings stand bare, other values are JSON."""
        opened, closed = self.argument()
        # What `_text` takes for the end of a value although its own tag is missing.
        avoid = [self.call[2], *([self.parameter[0]] if self.lines else [])]
        return {"type": "elements", "schema": schema, "open": opened, "close": closed, "avoid": avoid}

    def argument(self) -> tuple[str, str]:
        raise NotImplementedError


class Qwen3Coder(Elements):
    """``<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>``; the
    outer tag is sometimes left out."""

    wrap = ("<tool_call>", "</tool_call>")
    openers = ("<tool_call>", "<function=")
    call = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    lines = True
    separator = "\n"

    def call_name(self, head: str) -> str:
        return head.strip().strip('"')

    def key(self, head: str) -> tuple[str, bool | None]:
        return head.strip().strip('"'), None

    def frame(self, name: str) -> tuple[str, str]:
        return f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"

    def argument(self) -> tuple[str, str]:
        return "<parameter={key}>\n", "\n</parameter>\n"


class MiniMaxM2(Elements):
    wrap = ("<minimax:tool_call>", "</minimax:tool_call>")
    openers = ("<minimax:tool_call>",)
    call = ("<invoke", ">", "</invoke>")
    parameter = ("<parameter", ">", "</parameter>")
    section = ("<minimax:tool_call>\n", "</minimax:tool_call>")

    def frame(self, name: str) -> tuple[str, str]:
        return f'<invoke name="{name}">\n', "</invoke>\n"

    def argument(self) -> tuple[str, str]:
        return '<parameter name="{key}">', "</parameter>\n"


class MiniCPM5(Elements):
    """``<function name="name"><param name="key">value</param></function>``; a value may be a CDATA section."""

    openers = ("<function ",)
    call = ("<function ", ">", "</function>")
    parameter = ("<param ", ">", "</param>")
    separator = "\n"

    def _json(self, name: str, key: str, text: str, is_string: bool | None) -> str:
        if text.startswith("<![CDATA[") and text.endswith("]]>"):
            text = text[9:-3]
        return super()._json(name, key, text, is_string)

    def frame(self, name: str) -> tuple[str, str]:
        return f'<function name="{name}">', "</function>"

    def argument(self) -> tuple[str, str]:
        return '<param name="{key}">', "</param>"


class Step3(Elements):
    wrap = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
    openers = ("<｜tool_calls_begin｜>",)
    glue = ("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    inner = ("<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    call = ("<steptml:invoke", ">", "</steptml:invoke>")
    parameter = ("<steptml:parameter", ">", "</steptml:parameter>")
    section = ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>")

    def frame(self, name: str) -> tuple[str, str]:
        opened = f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
        return opened, "</steptml:invoke><｜tool_call_end｜>\n"

    def argument(self) -> tuple[str, str]:
        return '<steptml:parameter name="{key}">', "</steptml:parameter>\n"


class Dsml(Elements):
    """DeepSeek's markup, which says of each value whether it is a string. V3.2, V4 and V4.1 differ in two words."""

    word = "function_calls"
    gap = ""

    def __init_subclass__(cls) -> None:
        tag = "｜DSML｜" + cls.gap
        cls.wrap = (f"<{tag}{cls.word}>", f"</{tag}{cls.word}>")
        cls.openers = (cls.wrap[0],)
        cls.call = (f"<{tag}invoke", ">", f"</{tag}invoke>")
        cls.parameter = (f"<{tag}parameter", ">", f"</{tag}parameter>")
        cls.section = (cls.wrap[0] + "\n", cls.wrap[1])
        cls.inner = ("｜DSML｜",)

    def key(self, head: str) -> tuple[str, bool | None]:
        attributes = dict(_ATTRIBUTE.findall(head))
        return attributes.get("name", ""), {"true": True, "false": False}.get(attributes.get("string", ""))

    def frame(self, name: str) -> tuple[str, str]:
        return f'{self.call[0]} name="{name}">\n', f"{self.call[2]}\n"

    def argument(self) -> tuple[str, str]:
        return f'{self.parameter[0]} name="{{key}}" string="{{is_string}}">', f"{self.parameter[2]}\n"


class DeepSeekV32(Dsml):
    pass


class DeepSeekV4(Dsml):
    word = "tool_calls"


class DeepSeekV41(Dsml):
    word = "calls"
    gap = " "


class KimiK3(Elements):
    """XTML: ``<|open|>call tool="name" index="1"<|sep|>`` … ``<|close|>call<|sep|>``, values with their type."""

    wrap = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
    openers = ("<|open|>tools<|sep|>",)
    call = ("<|open|>call", "<|sep|>", "<|close|>call<|sep|>")
    parameter = ("<|open|>argument", "<|sep|>", "<|close|>argument<|sep|>")
    noise = (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|close|>think<|sep|>",
        "<|end_of_msg|>",
    )
    inner = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    trim = False
    section = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")

    def call_name(self, head: str) -> str:
        return html.unescape(dict(_ATTRIBUTE.findall(head)).get("tool", ""))

    def key(self, head: str) -> tuple[str, bool | None]:
        attributes = dict(_ATTRIBUTE.findall(head))
        return html.unescape(attributes.get("key", "")), attributes.get("type", "string") == "string"

    def frame(self, name: str) -> tuple[str, str]:
        return f'<|open|>call tool="{name}" index="{{index}}"<|sep|>', "<|close|>call<|sep|>"

    def argument(self) -> tuple[str, str]:
        return '<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"


class Glm(Elements):
    """``<tool_call>name`` and ``<arg_key>`` / ``<arg_value>`` pairs, with newlines between them (4.5) or without."""

    openers = ("<tool_call>",)
    call = ("<tool_call>", "", "</tool_call>")
    parameter = ("<arg_key>", "</arg_key>", "</arg_value>")
    value = "<arg_value>"
    break_after = ""
    separator = ""

    def key(self, head: str) -> tuple[str, bool | None]:
        return head.strip(), None

    def _call(self, source: Source, calls: Calls) -> Wait[None]:
        yield from source.space()
        name = yield from source.run(_NAME_RUN)
        if not name:
            raise Cut if source.ended and source.pos == len(source.data) else Malformed
        if self.call[1]:
            yield from source.expect(self.call[1])
        pairs: list[tuple[str, str]] = []
        yield from self._pairs(source, name, pairs)
        calls.add(name, object_text(pairs))

    def frame(self, name: str) -> tuple[str, str]:
        return f"{self.call[0]}{name}{self.call[1]}{self.break_after}", self.call[2]

    def argument(self) -> tuple[str, str]:
        key, value = self.parameter[:2], self.value
        return f"{key[0]}{{key}}{key[1]}{self.break_after}{value}", f"{self.parameter[2]}{self.break_after}"


class Glm45(Glm):
    break_after = "\n"
    separator = "\n"


class Hunyuan(Glm):
    """Hunyuan 3; its open weights write every tag with ``:opensource``. A JSON list is Hunyuan-A13B's."""

    mark = ""

    def __init_subclass__(cls) -> None:
        mark = cls.mark
        cls.wrap = (f"<tool_calls{mark}>", f"</tool_calls{mark}>")
        cls.openers = (cls.wrap[0],)
        cls.call = (f"<tool_call{mark}>", f"<tool_sep{mark}>", f"</tool_call{mark}>")
        cls.parameter = (f"<arg_key{mark}>", f"</arg_key{mark}>", f"</arg_value{mark}>")
        cls.value = f"<arg_value{mark}>"
        cls.section = (cls.wrap[0] + "\n", cls.wrap[1])
        cls.noise = ("<answer>", "</answer>")

    break_after = "\n"
    separator = "\n"


class HunyuanOpen(Hunyuan):
    mark = ":opensource"


class HunyuanPlain(Hunyuan):
    pass


class HunyuanAny(ToolFormat):
    """All three Hunyuan forms, told apart by what they begin with; a grammar forces Hunyuan 3's open one."""

    openers = ("<tool_calls>", "<tool_calls:opensource>")
    noise = ("<answer>", "</answer>")
    trim = True
    separator = HunyuanOpen.separator
    section = HunyuanOpen.section

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        form: ToolFormat = HunyuanOpen(self.tools)
        if opener == "<tool_calls>":
            listed = yield from source.ahead(("[", "{"))
            form = MiniMaxM1(self.tools) if listed else HunyuanPlain(self.tools)
        yield from form.region(source, opener, calls)

    def frame(self, name: str) -> tuple[str, str]:
        return HunyuanOpen(self.tools).frame(name)

    def begun(self, name: str, body: str) -> tuple[str, int | None]:
        return HunyuanOpen(self.tools).begun(name, body)

    def body(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return HunyuanOpen(self.tools).body(schema)
