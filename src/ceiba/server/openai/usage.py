"""OpenAI's ``usage`` object, and when a stream shows it."""

from __future__ import annotations

from typing import Any

import msgspec

from ceiba.server.choices import Choice, Totals, totals
from ceiba.server.openai.schemas import StreamOptions
from ceiba.server.request import EngineRequest

_encode = msgspec.json.Encoder().encode


class Usage:
    def __init__(self, request: EngineRequest, options: StreamOptions | None, cache_report: bool) -> None:
        self._request = request
        self._cache_report = cache_report
        self.at_end = bool(options and options.include_usage)
        """Whether a stream ends with a chunk of usage and no choices."""
        self._always = bool(options and options.continuous_usage_stats)

    def total(self, choices: list[Choice]) -> dict[str, Any]:
        sums = totals(self._request, choices)
        return {
            "prompt_tokens": sums.prompt,
            "completion_tokens": sums.completion,
            "total_tokens": sums.prompt + sums.completion,
            "prompt_tokens_details": _details(sums) if self._cache_report else None,
            "completion_tokens_details": {"reasoning_tokens": sums.reasoning},
        }

    def in_chunk(self, choices: list[Choice]) -> bytes:
        """What a chunk with choices says of usage, as the end of its JSON object."""
        if self._always:
            return b',"usage":' + _encode(self.total(choices))
        return b',"usage":null' if self.at_end else b""


def _details(sums: Totals) -> dict[str, Any]:
    details: dict[str, Any] = {"cached_tokens": sums.cached, "cached_tokens_by_tier": sums.cached_by_tier}
    return details | {"pinned_tokens": sums.pinned} if sums.pinned else details
