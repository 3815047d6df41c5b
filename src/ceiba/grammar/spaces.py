"""A limit on the space between the parts of JSON, for libraries in whose own automata such a limit costs seconds.

Owns the bookkeeping of one answer: whether it stands in a string, and how much space came last.
"""

from __future__ import annotations

import numpy as np

from ceiba.core.step import Int32
from ceiba.grammar.base import Vocabulary
from ceiba.grammar.masks import packed

_SPACE = b" \t\n\r"


class SpaceTable:
    """What a vocabulary's tokens do to space; shared by all answers with the same limit."""

    def __init__(self, vocabulary: Vocabulary, limit: int) -> None:
        self.limit = limit
        self.tokens = vocabulary.tokens
        self._words = vocabulary.words
        leads = (len(text) - len(text.lstrip(_SPACE)) for text in vocabulary.tokens)
        self._lead = np.fromiter(leads, np.int32, len(vocabulary.tokens))
        self._masks: dict[int, Int32] = {}

    def mask(self, left: int) -> Int32:
        """Tokens that begin with no more than ``left`` characters of space, packed."""
        made = self._masks.get(left)
        if made is None:
            made = self._masks[left] = packed(np.flatnonzero(self._lead <= left).tolist(), self._words)
        return made

    def lead(self, token: int) -> int:
        return int(self._lead[token])


class Spaces:
    """Where one JSON answer stands."""

    def __init__(self, table: SpaceTable) -> None:
        self._table = table
        self._now = (False, False, 0)
        """Whether inside a string, whether behind a backslash there, and the run of space that came last."""
        self._before: list[tuple[bool, bool, int]] = []

    def fits(self, token: int) -> bool:
        inside, _, run = self._now
        return inside or self._table.lead(token) <= self._table.limit - run

    def limit(self, bits: Int32) -> None:
        """Take the tokens out of ``bits`` that would bring too much space."""
        inside, _, run = self._now
        if not inside:
            bits &= self._table.mask(self._table.limit - run)

    def accept(self, token: int) -> None:
        self._before.append(self._now)
        inside, escaped, run = self._now
        for byte in self._table.tokens[token]:
            if inside:
                if escaped:
                    escaped = False
                elif byte == 0x5C:
                    escaped = True
                elif byte == 0x22:
                    inside, run = False, 0
            elif byte == 0x22:
                inside = True
            else:
                run = min(run + 1, self._table.limit) if byte in _SPACE else 0
        self._now = (inside, escaped, run)

    def rollback(self, count: int) -> None:
        if count:
            self._now = self._before[-count]
            del self._before[-count:]
