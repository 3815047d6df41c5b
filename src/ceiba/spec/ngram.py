"""Drafts without a model: what followed the last time that the request's latest tokens stood in its own text.

Owns the index of a request's tokens and the choice among earlier places (prompt look-up, Saxena 2023). An index costs
one dictionary entry a token; a proposal looks at a handful of places, however long the text is.
"""

from __future__ import annotations

import numpy as np

from ceiba.core.step import Int32

LEAST = 3
"""Tokens that an earlier place must have in common with the end of the text. Two are no evidence."""
PLACES = 8
"""Earlier places that are compared, the latest ones first."""

_NONE = np.empty(0, np.int32)
_BITS = 21
"""Of a token id in a run: no vocabulary is larger."""
_MASK = (1 << LEAST * _BITS) - 1


class NgramGuesser:
    """``longest``: tokens by which places are compared."""

    def __init__(self, longest: int) -> None:
        self._longest = max(longest, LEAST)
        self._last: dict[int, int] = {}
        """The latest place behind each run of LEAST tokens, which stands here as one number."""
        self._earlier: list[int] = []
        """Place - LEAST -> the place before it behind the same run; -1 for none."""
        self._seen = 0
        """Tokens taken in."""
        self._run = 0
        """The run at their end."""

    def propose(self, tokens: Int32, most: int) -> Int32:
        self._take_in(tokens)
        if most <= 0 or self._seen < LEAST or (place := self._last.get(self._run, -1)) < 0:
            return _NONE
        best, length = place, 0
        for _ in range(PLACES):
            if place < 0 or length == self._longest:
                break
            common = self._common(tokens, place)
            if common > length:
                best, length = place, common
            place = self._earlier[place - LEAST]
        # A text that repeats itself is expected to go on: what follows the end is then what followed the place.
        return np.resize(tokens[best:], most)

    def _take_in(self, tokens: Int32) -> None:
        """Note every place before the end of ``tokens``."""
        last, earlier, place, run = self._last, self._earlier, self._seen, self._run
        for token in tokens[place:].tolist():
            if place >= LEAST:
                earlier.append(last.get(run, -1))
                last[run] = place
            run = (run << _BITS | token) & _MASK
            place += 1
        self._seen, self._run = place, run

    def _common(self, tokens: Int32, place: int) -> int:
        """How many tokens before ``place`` are those before the end."""
        most = min(self._longest, place)
        differs = tokens[place - most : place] != tokens[len(tokens) - most :]
        found = int(differs[::-1].argmax())
        return most if not found and not differs[-1] else found


class NgramDrafter:
    """See ``spec.base.Drafter``."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def begin(self) -> NgramGuesser:
        return NgramGuesser(self._longest)
