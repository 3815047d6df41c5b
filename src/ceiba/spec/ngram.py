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


class NgramGuesser:
    """``longest``: tokens by which places are compared."""

    def __init__(self, longest: int) -> None:
        self._longest = max(longest, LEAST)
        self._last: dict[int, int] = {}
        """The latest place behind each run of LEAST tokens."""
        self._earlier: list[int] = []
        """Place - LEAST -> the place before it behind the same run; -1 for none."""

    def propose(self, tokens: Int32, most: int) -> Int32:
        end = len(tokens)
        if end <= LEAST or most <= 0:
            return _NONE
        self._index(tokens)
        place = self._last.get(int(_runs(tokens[end - LEAST :])[0]), -1)
        best, length = -1, 0
        for _ in range(PLACES):
            if place < 0 or length == self._longest:
                break
            common = self._common(tokens, place)
            if common > length:
                best, length = place, common
            place = self._earlier[place - LEAST]
        if best < 0:
            return _NONE
        # A text that repeats itself is expected to go on: what follows the end is then what followed the place.
        return np.resize(tokens[best:], most)

    def _index(self, tokens: Int32) -> None:
        """Take in every place before the end of ``tokens``."""
        known = len(self._earlier)
        last, earlier = self._last, self._earlier
        for place, run in enumerate(_runs(tokens[known : len(tokens) - 1]).tolist(), known + LEAST):
            earlier.append(last.get(run, -1))
            last[run] = place

    def _common(self, tokens: Int32, place: int) -> int:
        """How many tokens before ``place`` are those before the end."""
        most = min(self._longest, place)
        differs = tokens[place - most : place] != tokens[len(tokens) - most :]
        found = int(differs[::-1].argmax())
        return most if not found and not differs[-1] else found


def _runs(tokens: Int32) -> np.ndarray:
    """int64 [N - LEAST + 1]: each run of LEAST tokens as one number; ids are below 2**21."""
    wide = tokens.astype(np.int64)
    return (wide[:-2] << 42) | (wide[1:-1] << 21) | wide[2:]


class NgramDrafter:
    """See ``spec.base.Drafter``."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def begin(self) -> NgramGuesser:
        return NgramGuesser(self._longest)
