"""Running output parsers in tests: any cut of the stream, the canitoolcall fixtures, and what identical means."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ceiba.text.parsers.events import Answer, Arguments, CallEnd, CallStart, Event, join
from ceiba.text.parsers.output import OutputParser
from ceiba.text.parsers.registry import reasoning_parser, tool_parser

Outcome = tuple[str, str, list[tuple[str, str]]]
"""(content, reasoning, [(name, arguments)]): what must not depend on the cut."""

FAMILIES = [
    # (family, part of the model's name, tool parser, reasoning parser); the first that fits
    ("qwen3-hermes", "Instruct-2507", "hermes", None),
    ("qwen3-hermes", "", "qwen", "qwen3"),
    ("qwen3-xml", "Coder", "qwen3_coder", None),
    ("qwen3-xml", "", "qwen3_coder", "qwen3"),
    ("gpt-oss", "", "gpt-oss", "gpt-oss"),
    ("deepseek", "V4.1", "deepseekv41", "deepseek-v4"),
    ("deepseek", "V4", "deepseekv4", "deepseek-v4"),
    ("deepseek", "V3.2", "deepseekv32", "deepseek-v3"),
    ("deepseek", "V3.1", "deepseekv31", "deepseek-v3"),
    ("deepseek", "V3", "deepseekv3", None),
    ("kimi", "K3", "kimi_k3", "kimi_k3"),
    ("kimi", "Instruct", "kimi_k2", None),
    ("kimi", "", "kimi_k2", "kimi_k2"),
    ("glm", "4.5", "glm45", "glm45"),
    ("glm", "", "glm47", "glm45"),
    ("llama", "Llama-4", "pythonic", None),
    ("llama", "", "llama3", None),
    ("mistral", "", "mistral", "mistral"),
    ("gemma4", "", "gemma4", "gemma4"),
]


def parser(
    tool: str | None = None,
    reasoning: str | None = None,
    *,
    tools: Sequence[Any] = (),
    prompt: str = "",
    vocabulary: Any = None,
    forced: Sequence[str] = (),
) -> OutputParser:
    return OutputParser(
        reasoning_parser(reasoning) if reasoning else None,
        tool_parser(tool, tools) if tool else None,
        prompt=prompt,
        vocabulary=vocabulary,
        forced=forced,
    )


def events(parsing: OutputParser, pieces: Iterable[str]) -> list[Event]:
    found: list[Event] = []
    for piece in pieces:
        found += parsing.feed(piece)
    return found + parsing.finish()


def outcome(answer: Answer) -> Outcome:
    return answer.content, answer.reasoning, [(c.name, c.arguments) for c in answer.calls]


def result(parsing: OutputParser, pieces: Iterable[str]) -> Outcome:
    found = events(parsing, pieces)
    check_order(found)
    return outcome(join(found))


def check_order(found: Sequence[Event]) -> None:
    """A call's first event carries its id and name; indices count from 0; every call ends; nothing is empty."""
    opened: list[int] = []
    closed: list[int] = []
    for event in found:
        match event:
            case CallStart(index, call_id, name):
                assert index == len(opened)
                assert call_id
                assert name
                opened.append(index)
            case Arguments(index, text):
                assert index in opened
                assert index not in closed
                assert text
            case CallEnd(index):
                assert index in opened
                assert index not in closed
                closed.append(index)
            case _:
                assert event.text
    assert opened == closed


def bursts(text: str, seed: int, most: int = 8) -> Iterator[str]:
    """``text`` in pieces of 1 to ``most`` characters."""
    rng = random.Random(seed)
    at = 0
    while at < len(text):
        size = rng.randint(1, most)
        yield text[at : at + size]
        at += size


def by_bytes(text: str) -> Iterator[str]:
    """What an incremental decoder makes of one byte at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for byte in text.encode():
        yield decoder.decode(bytes([byte]))


def names_for(family: str, model: str) -> tuple[str, str | None]:
    return next((t, r) for f, part, t, r in FAMILIES if f == family and part in model)
