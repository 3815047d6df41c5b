"""Tells a marker that is a control token from the same characters written as ordinary tokens.

Owns where in the text of a choice its control tokens stand. A marker that the model spelled out (a value that explains
the format, a prompt injection) gets an invisible break, so that no format takes it for the real one; the emitter takes
the break out again. Must never know a format.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from ceiba.text.parsers.source import markers

BREAK = "\ufdd0"
"""A Unicode noncharacter, which no text may contain; the parser replaces one that a model makes up by U+FFFD."""

_SLACK = 4
"""Bytes by which a token may stand before its computed place: a SentencePiece space taken off at the start."""


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    def token_to_id(self, token: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class SpelledOut:
    """Breaks spelled-out markers. ``wanted`` that are no single tokens of the vocabulary are left alone."""

    __slots__ = ("_at", "_bytes", "_held", "_ids", "_markers", "_real", "_search", "_vocabulary")

    def __init__(self, wanted: Iterable[str], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids = {i: text for text in wanted if (i := vocabulary.token_to_id(text)) is not None}
        self._markers = markers(*sorted(self._ids.values()))
        self._search = re.compile("|".join(map(re.escape, self._ids.values())) or r"(?!)")
        self._real: deque[tuple[int, str]] = deque()
        """(first byte at the earliest, text) of control tokens whose text has not come yet."""
        self._bytes = 0
        self._at = 0
        """Bytes of the tokens, and of the text given out."""
        self._held = ""

    @property
    def useful(self) -> bool:
        return bool(self._ids)

    def feed(self, text: str, ids: Iterable[int]) -> str:
        """The text with breaks; an end that may be the start of a marker is held back until it is known."""
        for token in map(int, ids):
            known = self._ids.get(token)
            if known is not None:
                self._real.append((self._bytes - _SLACK, known))
            self._bytes += len(self._vocabulary.token_bytes(token))
        text = self._held + text
        cut = self._markers.undecided(text, 0)
        self._held = text[cut:]
        return self._broken(text[:cut])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return self._broken(held)

    def _broken(self, text: str) -> str:
        out: list[str] = []
        start = 0
        for match in self._search.finditer(text):
            piece = text[start : match.start()]
            out.append(piece)
            self._at += len(piece.encode(errors="replace"))
            found = match.group()
            if self._is_real(found):
                out.append(found)
            else:
                out.append(found[0] + BREAK + found[1:])
            self._at += len(found.encode(errors="replace"))
            start = match.end()
        out.append(text[start:])
        self._at += len(text[start:].encode(errors="replace"))
        return "".join(out)

    def _is_real(self, found: str) -> bool:
        """Whether the next control token is ``found`` and may stand here. Text only ever grows over its tokens
        (U+FFFD is longer than the bytes it stands for), so the byte count of the tokens is a lower bound."""
        while self._real:
            earliest, text = self._real[0]
            if earliest > self._at:
                return False
            if text == found:
                self._real.popleft()
                return True
            if self._at < earliest + _SLACK + len(text.encode()):
                return False
            self._real.popleft()  # its text never came (a stop token, trimmed)
        return False
