"""The five things a parser can say, in the order in which a client should hear them.

Owns the event types and their joining. Must never know a format or a protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; ``index`` counts the calls of the choice from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments; all pieces of a call joined are one JSON object, if it ends with a ``CallEnd``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is whole. A forced call that the length limit cut has no end."""

    index: int


Event = Content | Reasoning | CallStart | Arguments | CallEnd


@dataclass(slots=True)
class Call:
    """A tool call. ``arguments`` is the text of a JSON object, of a call that is not ``whole`` only its beginning."""

    id: str
    name: str
    arguments: str = ""
    whole: bool = False


@dataclass(slots=True)
class Answer:
    """All events of one choice, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def join(events: Iterable[Event]) -> Answer:
    """The answer that a client has when it heard these events."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, Call] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(index, call_id, name):
                calls[index] = Call(call_id, name)
                arguments[index] = []
            case Arguments(index, text):
                arguments[index].append(text)
            case CallEnd(index):
                calls[index].whole = True
    for index, call in calls.items():
        call.arguments = "".join(arguments[index])
    return Answer("".join(content), "".join(reasoning), [calls[i] for i in sorted(calls)])
