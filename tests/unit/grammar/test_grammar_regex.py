"""Reading expressions: their size, what needs backtracking, escaping and anchors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.grammar.base import Refusal
from ceiba.grammar.negate import string_outside
from ceiba.grammar.regex import check_regex, escape, expanded_size, trim_anchors


@pytest.mark.parametrize(
    ("pattern", "size"),
    [("abc", 3), ("a{3}", 3), ("a{2,5}", 5), ("(ab){3}", 6), ("((a{10}){10}){10}", 1000), (r"\d{4}-\d{2}", 7),
     ("[a-z]]{2}", 3), ("[]a]{3}", 3), ("[^]{2}]{2}", 2), (r"\{3\}", 3), ("a{x}", 4), ("a*b+", 4), ("a{0}", 1)],
)  # fmt: skip
def test_size_after_writing_repetitions_out(pattern, size):
    assert expanded_size(pattern, Refusal) == size


@pytest.mark.parametrize(
    ("pattern", "word"),
    [("(?=a)b", "lookahead"), ("a(?!b)", "lookahead"), ("(?<=a)b", "lookbehind"), ("(?<!a)b", "lookbehind"),
     (r"(a)\1", "backreference"), ("(a", "not closed"), ("a)", "closes nothing"), ("((a{999}){999}){9}", "limit"),
     ("x" * 20_000, "limit")],
)  # fmt: skip
def test_what_no_automaton_has_is_refused_by_name(pattern, word):
    with pytest.raises(Refusal, match=word):
        check_regex(pattern)


def test_a_named_group_is_no_lookbehind():
    check_regex(r"(?P<year>\d{4})(?:x)")


@given(st.text(max_size=8))
def test_escaped_text_matches_itself_and_nothing_else(text):
    pattern = escape(text)
    assert re.fullmatch(pattern, text)
    assert not re.fullmatch(pattern, text + "x")


@given(
    st.lists(st.text(st.sampled_from("ab]^-\\\n"), max_size=4), max_size=4),
    st.text(st.sampled_from("ab]^-\\\n"), max_size=5),
)
def test_everything_but_some_words(words, text):
    assert bool(re.fullmatch(string_outside(words), text)) == (text not in words)


@pytest.mark.parametrize(
    ("pattern", "trimmed"), [("^a$", "a"), ("a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("^", ""), ("a", "a")]
)
def test_anchors_at_the_ends_say_nothing(pattern, trimmed):
    assert trim_anchors(pattern) == trimmed
