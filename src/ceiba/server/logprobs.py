"""Log-probabilities as the protocols show them. Owns the text and bytes of single tokens, and JSON-safe numbers."""

from __future__ import annotations

import codecs
import math
from typing import Any

from ceiba.server.choices import Positions
from ceiba.server.request import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
_MAX_CACHED = 1 << 16


def number(value: float) -> float | None:
    """A JSON-safe log-probability; None where there is none."""
    return None if math.isnan(value) else max(float(value), FLOOR)


class TokenTexts:
    """Text and bytes of token ids, remembered. Without a tokenizer every token is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """(text with U+FFFD where bytes are no whole character, bytes)"""
        found = self._cache.get(token_id)
        if found is None:
            raw = self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else b""
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            found = self._cache[token_id] = (raw.decode("utf-8", "replace"), raw)
        return found

    def key(self, token_id: int) -> str:
        """A text that is different for different bytes, as the legacy completions API writes it."""
        text, raw = self(token_id)
        if "\ufffd" in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text


def chat_entries(part: Positions, texts: TokenTexts) -> list[dict[str, Any]]:
    """``choices[].logprobs.content`` of the chat API."""
    entries = []
    for i, (token, value) in enumerate(zip(part.ids.tolist(), part.values.tolist(), strict=True)):
        entry = _chat_entry(token, value, texts)
        entry["top_logprobs"] = [
            _chat_entry(t, v, texts) for t, v in zip(part.top_ids[i].tolist(), part.top_values[i].tolist(), strict=True)
        ]
        entries.append(entry)
    return entries


def _chat_entry(token: int, value: float, texts: TokenTexts) -> dict[str, Any]:
    text, raw = texts(token)
    return {"token": text, "bytes": list(raw), "logprob": number(value)}


class LegacyLogprobs:
    """``choices[].logprobs`` of /v1/completions, piece by piece: text offsets go on from piece to piece."""

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, part: Positions) -> dict[str, Any]:
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float | None] | None] = []
        for i, (token, value) in enumerate(zip(part.ids.tolist(), part.values.tolist(), strict=True)):
            key = self._texts.key(token)
            tokens.append(key)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts(token)[1]))
            if math.isnan(value):
                tops.append(None)
                continue
            pairs = zip(part.top_ids[i, : self._top].tolist(), part.top_values[i, : self._top].tolist(), strict=True)
            top = {self._texts.key(t): number(v) for t, v in pairs}
            top.setdefault(key, number(value))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": [number(v) for v in part.values.tolist()],
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }


def native_pairs(part: Positions, texts: TokenTexts, with_text: bool) -> list[list[Any]]:
    """[log-probability, id, text or null] per token, as /generate shows it."""
    return [_triple(t, v, texts, with_text) for t, v in zip(part.ids.tolist(), part.values.tolist(), strict=True)]


def native_top(part: Positions, texts: TokenTexts, with_text: bool) -> list[list[list[Any]] | None]:
    """Per token its most likely alternatives, null where there are none."""
    rows: list[list[list[Any]] | None] = []
    for i, value in enumerate(part.values.tolist()):
        if math.isnan(value):
            rows.append(None)
            continue
        pairs = zip(part.top_ids[i].tolist(), part.top_values[i].tolist(), strict=True)
        rows.append([_triple(t, v, texts, with_text) for t, v in pairs])
    return rows


def native_fixed(
    part: Positions, ids: tuple[int, ...], texts: TokenTexts, with_text: bool
) -> list[list[list[Any]] | None]:
    """Per token the log-probabilities of the ids that the request named."""
    rows: list[list[list[Any]] | None] = []
    for i, value in enumerate(part.values.tolist()):
        if math.isnan(value):
            rows.append(None)
            continue
        rows.append([_triple(t, v, texts, with_text) for t, v in zip(ids, part.fixed_values[i].tolist(), strict=True)])
    return rows


def _triple(token: int, value: float, texts: TokenTexts, with_text: bool) -> list[Any]:
    return [number(value), token, texts(token)[0] if with_text else None]
