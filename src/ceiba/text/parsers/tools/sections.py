"""Calls between control tokens: a section, in it one pair of tokens a call, a third between its name and its JSON.

Owns the machine and the declarations of DeepSeek V3, R1 and V3.1 and of Kimi K2.
"""

from __future__ import annotations

import re

from ceiba.text.parsers.arguments import object_text
from ceiba.text.parsers.literals import JSON, Literals
from ceiba.text.parsers.source import Cut, Malformed, Source, Wait, markers
from ceiba.text.parsers.tools.base import Calls, ToolFormat

_NAME = re.compile(r"[\w.\-:/]+")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.\-/]+?)(?::\d+)?")


class Sections(ToolFormat):
    begin: str
    """Begin of a call."""
    middle: str
    end: str
    close: str
    """End of the section."""
    fence: bool = False
    """Whether the JSON stands in a fenced code block, behind the name."""

    def name(self, head: str) -> tuple[str, str | None]:
        """(tool, id) of what stands between begin and middle."""
        return head.strip(), None

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        count = 0
        while True:
            noise: list[str] = []
            found = yield from source.until(markers(self.begin, self.close), noise.append)
            if found is None:
                raise Cut
            if found == self.close:
                if not count and "".join(noise).strip():
                    raise Malformed  # nothing in the section was a call: it is all answer
                return
            yield from self._call(source, calls)
            count += 1

    def _call(self, source: Source, calls: Calls) -> Wait[None]:
        parts: list[str] = []
        found = yield from source.until(markers(self.middle, self.end, self.close), parts.append)
        if found != self.middle:
            raise Malformed if found else Cut
        name, call_id = self.name("".join(parts))
        if self.fence:
            name = ""
            line: list[str] = []
            if (yield from source.until(markers("\n"), line.append)) is None:
                raise Cut
            name = "".join(line).strip()
            yield from source.expect("```json")
        if not _NAME.fullmatch(name):
            raise Malformed
        yield from source.expect("{")
        pairs = yield from Literals(source, JSON).members()
        if self.fence:
            yield from source.expect("```")
        yield from source.expect(self.end)
        calls.add(name, object_text([(k or "", v) for k, v in pairs]), call_id)

    def frame(self, name: str) -> tuple[str, str]:
        return f"{self.begin}{name}{self.middle}", self.end


class DeepSeekV31(Sections):
    openers = ("<｜tool▁calls▁begin｜>",)
    begin = "<｜tool▁call▁begin｜>"
    middle = "<｜tool▁sep｜>"
    end = "<｜tool▁call▁end｜>"
    close = "<｜tool▁calls▁end｜>"
    inner = (begin, middle, end, close)
    section = (openers[0], close)
    trim = True


class DeepSeekV3(DeepSeekV31):
    """Also DeepSeek-R1's: ``function``, the separator, the name, and the JSON in a fence."""

    fence = True
    separator = "\n"

    def frame(self, name: str) -> tuple[str, str]:
        return f"{self.begin}function{self.middle}{name}\n```json\n", f"\n```{self.end}"


class KimiK2(Sections):
    """The name stands in the id, ``functions.name:index``, which the model wants to see again in its history."""

    openers = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    begin = "<|tool_call_begin|>"
    middle = "<|tool_call_argument_begin|>"
    end = "<|tool_call_end|>"
    close = "<|tool_calls_section_end|>"
    inner = (begin, middle, end, close)
    section = (openers[0], close)

    def name(self, head: str) -> tuple[str, str | None]:
        match = _KIMI_ID.fullmatch(head.strip())
        return (match[1], head.strip()) if match else ("", None)

    def own_id(self, begin: str) -> str | None:
        return begin.removeprefix(self.begin).removesuffix(self.middle)

    def frame(self, name: str) -> tuple[str, str]:
        return f"{self.begin}functions.{name}:{{index0}}{self.middle}", self.end
