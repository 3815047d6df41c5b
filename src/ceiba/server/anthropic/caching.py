"""Marks for the cache (``cache_control``), and what of a prompt counts as written there because of them.

Here every prefix is kept without being asked and that costs nothing, so a mark changes no KV: it says up to where the
client means its prompt to be cached, and the account (``cache_creation_input_tokens``) answers to that. Owns the form
of a mark and where the last one stands. Must never know tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ceiba.core.errors import BadRequest
from ceiba.server.anthropic.schemas import CountRequest
from ceiba.server.scheduling import is_mark


def marked(body: CountRequest) -> int | None:
    """How many of the messages lie in front of the end of the last mark: 0 where only tools or the system prompt are
    marked, None without a mark. Raises BadRequest for what is no mark."""
    found: int | None = None
    for where, count, control in _marks(body):
        if control is None:
            continue
        if not is_mark(control):
            raise BadRequest(
                f'{where} must be {{"type": "ephemeral"}}, with "ttl": "5m" (the default) or "1h".', param=where
            )
        found = count
    return found


def _marks(body: CountRequest) -> Iterator[tuple[str, int, Any]]:
    """Every place that may hold a mark, in the order of the prompt: its name, the messages up to its end, the mark."""
    for i, tool in enumerate(body.tools or ()):
        yield f"tools[{i}].cache_control", 0, tool.get("cache_control")
    if isinstance(body.system, list):
        for i, block in enumerate(body.system):
            yield f"system[{i}].cache_control", 0, block.get("cache_control")
    for i, message in enumerate(body.messages):
        if isinstance(message.content, list):
            for j, block in enumerate(message.content):
                yield f"messages[{i}].content[{j}].cache_control", i + 1, block.get("cache_control")
    yield "cache_control", len(body.messages), body.cache_control
