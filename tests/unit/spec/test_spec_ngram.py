"""The index of a text against a search through all of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ceiba.spec.ngram import LEAST, PLACES, NgramDrafter

LONGEST = 6


def naive(text: list[int], most: int) -> list[int]:
    """What followed the place with the longest common past, the latest of several, among the latest PLACES."""
    end = len(text)
    places = [p for p in range(LEAST, end) if text[p - LEAST : p] == text[end - LEAST :]]

    def common(place: int) -> int:
        found = 0
        while found < min(LONGEST, place) and text[place - 1 - found] == text[end - 1 - found]:
            found += 1
        return found

    if end <= LEAST or not places:
        return []
    best = max(reversed(places[-PLACES:]), key=common)
    tail, out = list(text[best:]), []
    for i in range(most):
        out.append(tail[i % len(tail)])
    return out


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 9), max_size=12), st.data())
def test_proposals_are_those_of_a_search(start: list[int], grow: list[int], data: st.DataObject) -> None:
    guesser = NgramDrafter(LONGEST).begin()
    text = list(start)
    for amount in [0, *grow]:
        text += data.draw(st.lists(st.integers(0, 2), min_size=amount, max_size=amount))
        most = data.draw(st.integers(0, 9))
        got = guesser.propose(np.array(text, np.int32), most)
        assert got.dtype == np.int32
        assert got.tolist() == naive(text, most)


def test_a_text_that_repeats_itself_goes_on() -> None:
    guesser = NgramDrafter(18).begin()
    assert guesser.propose(np.array([9, 1, 2, 3, 1, 2, 3], np.int32), 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_largest_ids_are_told_apart() -> None:
    top = (1 << 21) - 1
    text = np.array([top, 0, top, 7, top, 0, top], np.int32)
    assert NgramDrafter(18).begin().propose(text, 1).tolist() == [7]
    text[0] = top - 1
    assert not len(NgramDrafter(18).begin().propose(text, 1))
