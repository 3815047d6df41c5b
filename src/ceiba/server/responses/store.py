"""Responses that were kept: their input, their object, and the task of those that run in the background.

Owns memory only, bounded by count and bytes; the oldest that have ended leave first. Must never know HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ceiba.core import limits
from ceiba.core.errors import NotFound, Overloaded
from ceiba.server.responses.schemas import Item


@dataclass(slots=True)
class Stored:
    response: dict[str, Any]
    history: list[Item]
    """Everything before the response's own output: earlier turns and this input."""
    input: list[Item] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    size: int = 0

    @property
    def ended(self) -> bool:
        return self.response["status"] not in {"queued", "in_progress"}


class ResponseStore:
    """By id. All methods belong to the event loop."""

    def __init__(self, most: int = limits.MAX_STORED_RESPONSES, most_bytes: int = limits.MAX_STORED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def running(self) -> int:
        return sum(stored.task is not None and not stored.task.done() for stored in self._kept.values())

    def add(self, stored: Stored) -> None:
        """Keep it. Raises Overloaded when too many run in the background."""
        if stored.response["background"] and self.running >= limits.MAX_BACKGROUND:
            raise Overloaded(f"{self.running} responses run in the background; the limit is {limits.MAX_BACKGROUND}.")
        self._kept[stored.response["id"]] = stored
        self.resize(stored)

    def resize(self, stored: Stored) -> None:
        """Count its bytes again, and let go of the oldest where there are too many."""
        if self._kept.get(stored.response["id"]) is not stored:
            return
        self._bytes -= stored.size
        stored.size = len(msgspec.json.encode([stored.response, stored.history]))
        self._bytes += stored.size
        for key in [key for key, old in self._kept.items() if old.ended and old is not stored]:
            if len(self._kept) <= self._most and self._bytes <= self._most_bytes:
                break
            self._drop(key)

    def get(self, response_id: str) -> Stored:
        """Raises NotFound."""
        stored = self._kept.get(response_id)
        if stored is None:
            raise NotFound(
                f"response {response_id[: limits.MAX_ID_CHARS]!r} is not stored here: it was deleted, made way for "
                "newer ones, or never stored (store: true).",
                param="response_id",
                code="response_not_found",
            )
        return stored

    def delete(self, response_id: str) -> Stored:
        """Raises NotFound."""
        stored = self.get(response_id)
        self._drop(response_id)
        return stored

    def _drop(self, key: str) -> None:
        self._bytes -= self._kept.pop(key).size
