"""HAZARDS 31: regexes from users run in a linear-time engine, and one that grows without bound ends its own choice."""

from __future__ import annotations

import time

import pytest

from ceiba.core.errors import BadRequest
from ceiba.core.limits import MAX_STOP_EXPRESSIONS
from ceiba.core.messages import DetokOpen, TokenBatch, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.text.detokenizer import Detokenizer
from ceiba.text.stop import StopCompiler, StopMatcher
from support import text_vocab


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+b", "(a|a)*b", "([a-z]+)*1", "(.*a){8}b"])
def test_catastrophic_patterns_take_linear_time(pattern: str) -> None:
    stops = StopCompiler().compile((), (pattern,))
    assert stops is not None
    matcher, began = StopMatcher(stops), time.monotonic()
    for _ in range(1000):
        _text, matched = matcher.feed("aaaa")
        assert matched is None
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("[^z]{{{},}}z", "a" * 4000), ("a{{{}}}z", ("a" * 320 + "b") * 12), ("(a|b)*a(a|b){{12}}c{}", "abaab" * 800)],
    ids=["always alive", "dies late", "many states"],
)
def test_looking_for_where_a_match_may_begin_is_bounded(pattern: str, text: str) -> None:
    """Windows that are always full, and starts that all die at their last byte: 4 to 10 s before there was a bound."""
    stops = StopCompiler().compile((), tuple(pattern.format(300 + i) for i in range(MAX_STOP_EXPRESSIONS)))
    assert stops is not None
    matcher, began, said = StopMatcher(stops), time.monotonic(), ""
    for i in range(0, len(text), 4):
        out, matched = matcher.feed(text[i : i + 4])
        said += out
        assert matched is None
    assert time.monotonic() - began < 4
    assert said + matcher.flush() == text, "nothing is lost"


def test_a_match_is_found_when_its_start_can_no_longer_be_looked_for() -> None:
    stops = StopCompiler().compile((), tuple(f"a{{{300 + i}}}z" for i in range(4)))
    assert stops is not None
    matcher, text = StopMatcher(stops), ("a" * 299 + "b") * 40 + "a" * 310 + "z"
    said, found = "", None
    for i in range(0, len(text), 4):
        out, found = matcher.feed(text[i : i + 4])
        said += out
        if found:
            break
    assert found is not None
    assert text.startswith(said)
    assert len(said) >= 40 * 300, "what stands before the match was said"


def test_expressions_are_counted() -> None:
    with pytest.raises(BadRequest, match=str(MAX_STOP_EXPRESSIONS)):
        StopCompiler().compile((), tuple(f"a{i}" for i in range(MAX_STOP_EXPRESSIONS + 1)))


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)b", "(?<!a)b"])
def test_what_a_linear_engine_cannot_do_is_refused(pattern: str) -> None:
    with pytest.raises(BadRequest, match="cannot be used") as caught:
        StopCompiler().compile((), (pattern,))
    assert caught.value.param == "stop_regex"


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "a{1000000}b", "[ab]*a[ab]{18}x"])
def test_patterns_with_too_many_states_end_only_their_choice(pattern: str) -> None:
    tokenizer = text_vocab.byte_level()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("abba" * 8, add_special=False).tolist()
    opened = [
        DetokOpen(rid="bad", stream=True, sampling=SamplingParams(stop_regex=(pattern,))),
        DetokOpen(rid="good", stream=True, sampling=SamplingParams()),
    ]
    began, good, ended = time.monotonic(), "", 0
    for turn in range(40):
        rids = ["bad", "good"]
        report, _ = detokenizer.process(
            TokenBatch(
                rids=rids,
                counts=ids_to_bytes([len(ids)] * 2),
                tokens=ids_to_bytes(ids * 2),
                opened=opened if turn == 0 else [],
            )
        )
        assert report is not None
        good += "".join(t for r, t in zip(report.rids, report.texts, strict=True) if r == "good")
        ended += len(report.finishes)
    assert good == "abba" * 8 * 40
    assert ended <= 1
    assert time.monotonic() - began < 10
