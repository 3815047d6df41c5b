from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ceiba.core.errors import BadRequest
from ceiba.core.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS
from ceiba.text.stop import StopCompiler, StopMatcher

COMPILER = StopCompiler()
LETTERS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 30), max_size=8)


def pieces(text: str, cuts: list[int]) -> list[str]:
    points = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    return [text[a:b] for a, b in pairwise(points)]


def drive(matcher: StopMatcher, parts: list[str]) -> tuple[str, str | None]:
    out = ""
    for part in parts:
        text, matched = matcher.feed(part)
        out += text
        if matched is not None:
            return out, matched
    return out + matcher.flush(), None


def offline(text: str, stops: list[str], trim: bool) -> tuple[str, str | None]:
    """The first position at which any stop is complete; the longest that ends there."""
    for end in range(len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            best = max(ended, key=len)
            return text[: end - len(best)] if trim else text[:end], best
    return text, None


@given(LETTERS, STOPS, CUTS, st.booleans())
@settings(deadline=None, max_examples=500)
def test_strings_equal_the_search_in_the_whole_text(text: str, stops: list[str], cuts: list[int], trim: bool) -> None:
    matcher = StopMatcher(COMPILER.compile(tuple(stops)), trim=trim)
    assert drive(matcher, pieces(text, cuts)) == offline(text, stops, trim)


@given(LETTERS, STOPS, CUTS)
@settings(deadline=None, max_examples=300)
def test_only_a_true_prefix_of_a_stop_is_held(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(COMPILER.compile(tuple(stops)))
    fed = out = ""
    for part in pieces(text, cuts):
        given_out, matched = matcher.feed(part)
        if matched is not None:
            return
        fed, out = fed + part, out + given_out
        longest = max(k for k in range(len(fed) + 1) if k == 0 or any(s.startswith(fed[-k:]) for s in stops))
        assert out == fed[: len(fed) - longest]


@given(
    st.text(alphabet="ab1é ", max_size=30),
    CUTS,
    st.sampled_from(["a+b", r"\d\d", "é(a|b)+1", "[ab]1[^1]"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_expressions_equal_the_search_in_the_whole_text(text: str, cuts: list[int], pattern: str, trim: bool) -> None:
    matcher = StopMatcher(COMPILER.compile((), (pattern,)), trim=trim)
    expected: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        starts = [s for s in range(end) if re.fullmatch(pattern, text[s:end])]
        if starts:
            expected = (text[: min(starts)] if trim else text[:end], pattern)
            break
    assert drive(matcher, pieces(text, cuts)) == expected


def test_strings_and_expressions_together_take_what_ends_first() -> None:
    for parts in (["abXcd"], list("abXcd")):
        assert drive(StopMatcher(COMPILER.compile(("cd",), ("b.",))), parts) == ("a", "b.")
        assert drive(StopMatcher(COMPILER.compile(("ab",), ("b.",))), parts) == ("", "ab")


def test_compiled_sets_are_shared_and_bounded() -> None:
    compiler = StopCompiler(keep=2)
    first = compiler.compile(("a",))
    assert compiler.compile(("a",)) is first
    compiler.compile(("b",))
    compiler.compile(("c",))
    assert compiler.compile(("a",)) is not first
    assert compiler.compile(()) is None
    assert compiler.compile(("",)) is None


@pytest.mark.parametrize(
    ("stops", "expressions", "words"),
    [
        (("x" * (MAX_STOP_CHARS + 1),), (), str(MAX_STOP_CHARS)),
        (tuple(map(str, range(MAX_STOP_STRINGS + 1))), (), str(MAX_STOP_STRINGS)),
        ((), ("(",), "cannot be used"),
        ((), ("a*",), "matches the empty text"),
        ((), ("(?=a)b",), "cannot be used"),
    ],
)
def test_what_cannot_be_searched_is_refused(stops: tuple[str, ...], expressions: tuple[str, ...], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        COMPILER.compile(stops, expressions)
