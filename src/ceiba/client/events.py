"""Server-sent events of the streaming routes: bytes in, deltas and the finished text out.

Owns the reading of streams, without any I/O. Lines end at newlines only: JSON may hold other line separators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ceiba.client import errors
from ceiba.client.answers import Text, native_text, usage_of
from ceiba.core.errors import CeibaError


class EventReader:
    """Splits bytes into the data of events. ``done`` once the server has said so."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The events that are complete now. Raises the typed error that the server put into the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
                return
            event = msgspec.json.decode(payload)
            if isinstance(event, dict) and event.get("error"):
                error = event["error"]
                raise errors.from_event(error if isinstance(error, dict) else {"message": str(error)})
            yield event

    def end(self, url: str) -> CeibaError | None:
        """The error of a stream that ended now, if it ended too early."""
        if self.done:
            return None
        return errors.ConnectionFailed(f"{url} closed the stream before its end.")


class NativeDeltas:
    """``/generate``: each event holds the whole text so far."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self._length = 0

    def add(self, event: dict[str, Any]) -> str:
        """The text that this event adds."""
        self._last = event
        delta = event["text"][self._length :]
        self._length += len(delta)
        return delta

    def text(self) -> Text:
        return native_text(self._last) if self._last is not None else Text()


class ChatDeltas:
    """``/v1/chat/completions``: each event holds what it adds; calls come in pieces by index."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._id = ""
        self._usage: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> str:
        self._id = event.get("id", self._id)
        self._usage = event.get("usage") or self._usage
        added = ""
        for choice in event.get("choices", []):
            delta = choice.get("delta") or {}
            added += delta.get("content") or ""
            self._reasoning.append(delta.get("reasoning_content") or "")
            self._finish = choice.get("finish_reason") or self._finish
            for call in delta.get("tool_calls") or []:
                self._add_call(call)
        self._parts.append(added)
        return added

    def _add_call(self, piece: dict[str, Any]) -> None:
        call = self._calls.setdefault(piece.get("index", 0), {"id": "", "type": "function", "function": {}})
        call["id"] = piece.get("id") or call["id"]
        for name, value in (piece.get("function") or {}).items():
            call["function"][name] = call["function"].get(name, "") + (value or "")

    def text(self) -> Text:
        return Text(
            "".join(self._parts),
            id=self._id,
            usage=usage_of(self._usage),
            finish_reason=self._finish,
            tool_calls=[self._calls[index] for index in sorted(self._calls)],
            reasoning="".join(self._reasoning),
        )


Deltas = NativeDeltas | ChatDeltas
