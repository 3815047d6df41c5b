"""HAZARDS 1: stop ``DEFGHIJ`` and a text about the alphabet. Only a suffix that may become the stop is held back, the
match is found across token borders, and what is held when the answer ends otherwise is given out."""

from __future__ import annotations

import pytest

from ceiba.text.stop import StopCompiler, StopMatcher

STOP = "DEFGHIJ"


def feed(parts: list[str]) -> tuple[list[str], str | None, StopMatcher]:
    stops = StopCompiler().compile((STOP,))
    assert stops is not None
    matcher, out = StopMatcher(stops), []
    for part in parts:
        text, matched = matcher.feed(part)
        out.append(text)
        if matched:
            return out, matched, matcher
    return out, None, matcher


@pytest.mark.parametrize("size", range(1, 9))
def test_the_stop_is_found_at_every_split(size: int) -> None:
    text = "The alphabet: ABCDEFGHIJKLMNOP"
    out, matched, _ = feed([text[i : i + size] for i in range(0, len(text), size)])
    assert matched == STOP
    assert "".join(out) == "The alphabet: ABC"


def test_near_misses_are_not_held() -> None:
    out, matched, matcher = feed(["ABC", "DEFGH", "X", "DEDE", "F", "GHI"])
    assert matched is None
    assert out == ["ABC", "", "DEFGHX", "DE", "", ""]
    assert matcher.flush() == "DEFGHI"
