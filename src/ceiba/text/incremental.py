"""Token ids to text, a few at a time: the pieces joined are the text of the whole, at every split.

Owns what is undecided between two calls (the first bytes of a character, the space at the start). Must never know stop
strings, requests or messages. For byte-level and SentencePiece vocabularies a token is one list lookup; only a
character split over tokens goes through a decoder.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from ceiba.text.tokenizer import Tokenizer

_FORCE_AFTER = 32
"""Tokens after which a window of an ``other`` vocabulary is given out even if it ends in a replacement character."""


class TextStream:
    """The text of one choice. Not safe to share among threads.

    ``prompt_tail``: the last prompt ids. A SentencePiece space is kept when text comes before it, and taken off at the
    very start or behind a control token, where encoding would have put it. Bytes of a character that the prompt
    began are completed.
    """

    __slots__ = ("_data", "_first", "_pending", "_plain", "_slow", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        table = tokenizer.table(skip_special_tokens)
        self._plain = table.text
        self._data = table.data
        self._pending = b""
        self._first = False
        self._window: _Window | None = None
        if tokenizer.kind == "other":
            self._window = _Window(tokenizer, skip_special_tokens, spaces_between_special_tokens, prompt_tail)
        else:
            self._first = tokenizer.space_prefix and (not prompt_tail or tokenizer.is_control(int(prompt_tail[-1])))
            self._pending = _unfinished(b"".join(tokenizer.token_bytes(int(i)) for i in prompt_tail[-8:]))
        self._slow = self._first or bool(self._pending) or self._window is not None

    def push(self, token_id: int) -> str:
        """The text this token settles; empty while a character is unfinished. Ids outside the vocabulary are empty."""
        if not self._slow and token_id >= 0:
            try:
                text = self._plain[token_id]
            except IndexError:
                return ""
            if text is not None:
                return text
        return self._push_slow(token_id)

    def push_many(self, ids: Sequence[int]) -> str:
        """The same for several tokens at once."""
        return "".join([self.push(i) for i in ids])

    def _push_slow(self, token_id: int) -> str:
        if self._window is not None:
            return self._window.push(token_id)
        if not 0 <= token_id < len(self._data):
            return ""
        data = self._pending + self._data[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if self._first and text:
            self._first = False
            text = text.removeprefix(" ")
        self._slow = self._first or bool(self._pending)
        return text

    def flush(self) -> str:
        """What is left at the end. The first bytes of a character that never came whole are no text: nothing is
        given for them rather than U+FFFD."""
        self._pending = b""
        self._slow = self._first or self._window is not None
        return self._window.flush() if self._window is not None else ""


class _Window:
    """Vocabularies whose decoder looks at neighbours: decode a short window with and without the new tokens, and give
    out the difference once it ends in whole characters."""

    def __init__(self, tokenizer: Tokenizer, skip: bool, spaces: bool, tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._spaces = spaces
        self._ids = [int(i) for i in tail[-8:]]
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._settle(force=len(self._ids) - self._read >= _FORCE_AFTER)

    def flush(self) -> str:
        return self._settle(force=True).rstrip("\ufffd")

    def _settle(self, force: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._read], self._skip, self._spaces)
        after = self._tokenizer.decode(self._ids, self._skip, self._spaces)
        if not force and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._ids = self._ids[self._read :] or self._ids
        self._read = len(self._ids)
        return after[len(before) :]


def _unfinished(data: bytes) -> bytes:
    """The trailing bytes that begin a UTF-8 character without ending it."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[-back:] if length > back else b""
    return b""
