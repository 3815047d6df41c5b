"""gpt-oss's Harmony: messages with a channel and a recipient in their header, one format for thinking, answer and call.

Owns the message machine. The ``analysis`` channel is thinking, ``final`` and a ``commentary`` without recipient are
answer, a message to ``functions.name`` is a call. A message to a tool that the request did not offer (the model's
built-in python and browser) is for neither, and is dropped. Must never know a protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ceiba.text.parsers.arguments import object_text
from ceiba.text.parsers.literals import JSON, Literals
from ceiba.text.parsers.reasoning.tags import ReasoningFormat
from ceiba.text.parsers.source import Malformed, Source, Wait, markers
from ceiba.text.parsers.tools.base import Calls, ToolFormat

_START, _END, _MESSAGE = "<|start|>", "<|end|>", "<|message|>"
_CHANNEL, _CONSTRAIN, _CALL, _RETURN = "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _CALL, _RETURN)

_HEADER_STOPS = markers(_MESSAGE, _END, _START, _CALL, _RETURN)
_BODY_STOPS = markers(_END, _RETURN, _START)
_RECIPIENT = re.compile(r"\bto=(\S+)")
_CHANNEL_WORD = re.compile(r"\s*(analysis|commentary|final)\b")

CHANNELS = ReasoningFormat(
    (("<|channel|>analysis<|message|>", "<|end|>"),),
    forced=True,
    trim=False,
    ends=("<|end|><|start|>assistant",),
    answers=("<|channel|>final<|message|>",),
)
"""Thinking by channel: what a grammar and a prompt need to know of it. Reading is `read`'s business."""


class HarmonyCalls(ToolFormat):
    """The calls' side of Harmony. `read` does the reading, for calls and thinking together."""

    openers = ("<|start|>assistant<|channel|>commentary to=functions.", "<|channel|>commentary to=functions.")
    inner = MARKERS
    single = True

    def frame(self, name: str) -> tuple[str, str]:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>"


def read(
    source: Source,
    content: Callable[[str], None],
    reasoning: Callable[[str], None],
    calls: Calls | None,
    cut: Callable[[str, str], None],
) -> Wait[None]:
    """All messages of an output whose prompt ended with ``<|start|>assistant``. ``calls`` None: calls are answer.
    ``cut`` gets tool and text of a call that the output ends in."""
    if not (yield from source.ahead((_CHANNEL, _MESSAGE, _START, "to="))):
        # No header at all: the model just answers.
        yield from _body(source, content)
    while True:
        parts: list[str] = []
        found = yield from source.until(_HEADER_STOPS, parts.append)
        header = "".join(parts)
        if found == _MESSAGE:
            yield from _message(source, header, content, reasoning, calls, cut)
            continue
        # A header that never came to its message: its words are lost to no one.
        channel, _, rest = _parse(header)
        if rest:
            (reasoning if channel == "analysis" else content)(rest)
        if found is None:
            return


def _message(
    source: Source,
    header: str,
    content: Callable[[str], None],
    reasoning: Callable[[str], None],
    calls: Calls | None,
    cut: Callable[[str, str], None],
) -> Wait[None]:
    channel, recipient, _ = _parse(header)
    if recipient and recipient.startswith("functions.") and calls is not None:
        yield from _call(source, recipient.removeprefix("functions."), content, calls, cut)
    elif recipient and recipient not in {"assistant", "user"} and calls is not None:
        yield from _body(source, lambda text: None)
    else:
        yield from _body(source, reasoning if channel == "analysis" else content)


def _body(source: Source, sink: Callable[[str], None]) -> Wait[None]:
    found = yield from source.until(_BODY_STOPS, sink)
    if found == _START:
        source.pos -= len(_START)


def _call(
    source: Source, name: str, content: Callable[[str], None], calls: Calls, cut: Callable[[str, str], None]
) -> Wait[None]:
    source.mark()
    try:
        yield from source.expect("{")
        pairs = yield from Literals(source, JSON).members()
        after = yield from source.ahead((_CALL, _END, _RETURN, _START))
        if (after is None and not source.cut_within((_CALL, _END, _RETURN, _START))) or not name:
            raise Malformed
        calls.add(name, object_text([(k or "", v) for k, v in pairs]))
        yield from source.space()
        yield from source.at((_CALL, _END, _RETURN))
        if after is None:
            source.rest()
    except Malformed:
        raw = source.since()
        if not source.ended:
            content(raw)
            yield from _body(source, content)
        else:
            cut(name, source.rest())
    source.release()


def _parse(header: str) -> tuple[str, str | None, str]:
    """(channel, recipient, words that are neither) of a header: the role part, then the last channel part."""
    role, *channels = header.split(_CHANNEL)
    last, *kind = (channels[-1] if channels else "").split(_CONSTRAIN)
    match = _CHANNEL_WORD.match(last)
    channel = match[1] if match else ""
    rest = last[match.end() :] if match else last
    recipient: str | None = None
    for found in (_RECIPIENT.search(role), _RECIPIENT.search(rest)):
        if found:
            recipient = found[1]
    rest = _RECIPIENT.sub("", rest).strip()
    if not channels:
        rest = _RECIPIENT.sub("", role).strip().removeprefix("assistant").strip()
    elif kind or rest == "json":
        rest = "" if rest in {"", "json"} else rest
    return channel, recipient, rest
