"""outlines: the masks that are kept are those of the library's own token lists, within their memory."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from ceiba.core import limits
from ceiba.core.errors import Overloaded
from ceiba.grammar.base import Constraint
from ceiba.grammar.masks import members
from support.grammar_world import EOS, EOS2, SIZE, ask, compilers, make_provider, ready, walk

pytest.importorskip("outlines_core")
from outlines_core import Guide

PATTERNS = ["[a-z]+", "((ab|cd)[0-9]{2}){3}x?", '"[^"]{0,40}"', "(yes|no|nothing at all)", "abc", "a?(true|false)*é{2}"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_the_token_lists_on_random_walks(pattern):
    """Against a guide of the library walked beside: its list of tokens, and whether it is done."""
    compiler, engine = compilers("outlines")
    prepared = engine.prepare(compiler.compile(Constraint("regex", pattern)))
    draw = random.Random(pattern)
    for _ in range(4):
        state, guide, way = prepared.state(), Guide(prepared.index, 64), []
        for _ in range(40):
            listed = set(guide.get_tokens()) - {EOS}
            expected = listed | ({EOS, EOS2} if guide.is_finished() else set())
            bits = np.full(-(-SIZE // 32), -1, np.int32)
            assert state.fill(bits) is bool(expected)
            assert set(members(bits).tolist()) == expected
            assert state.terminated is (guide.is_finished() and not listed)
            one_way = len(listed) == 1 and not guide.is_finished()
            assert state.forced_tokens()[:1] == (sorted(listed) if one_way else [])
            if way and draw.random() < 0.3:
                count = draw.randint(1, min(3, len(way)))
                state.rollback(count)
                guide.rollback_state(count)
                del way[-count:]
            elif listed:
                way.append(draw.choice(sorted(listed)))
                assert state.accept(way[-1])
                guide.advance(way[-1], return_tokens=False)


def test_forced_tokens_end_where_a_choice_begins_and_late_in_an_answer_too():
    compiler, engine = compilers("outlines")
    state = engine.prepare(compiler.compile(Constraint("regex", "(x{100}(yes|no)){4}"))).state()
    for _ in range(4):
        left = 100
        while left:
            forced = state.forced_tokens()
            assert forced == [ord("x")] * min(left, 64)
            assert walk(state, bytes(forced))
            left -= len(forced)
        assert state.forced_tokens() == []
        assert walk(state, b"n")
        assert state.forced_tokens()[0] == ord("o")
        assert walk(state, b"o")
    assert state.terminated


def test_masks_stay_within_their_memory(monkeypatch):
    monkeypatch.setattr("ceiba.grammar.backends.outlines.MASK_BYTES", 64 * 4 * -(-SIZE // 32))
    compiler, engine = compilers("outlines")
    state = engine.prepare(compiler.compile(Constraint("regex", "[a-z]{200}"))).state()
    for _ in range(200):
        assert walk(state, b"q")
        assert len(engine.places) <= 64
    state.rollback(150)
    bits = np.zeros(-(-SIZE // 32), np.int32)
    assert state.fill(bits)
    assert set(b"abcxyz") <= set(members(bits).tolist())


def test_two_grammars_never_share_a_mask():
    """Their states have the same numbers."""
    compiler, engine = compilers("outlines")
    states = [engine.prepare(compiler.compile(Constraint("regex", text))).state() for text in ("ab", "cd")]
    assert [state.forced_tokens() for state in states] == [[ord("a"), ord("b")], [ord("c"), ord("d")]]


def test_grammars_in_use_are_bounded_and_make_room_when_they_end(monkeypatch):
    provider = make_provider("outlines")
    try:
        first = ready(ask(provider, regex="[a-z]{200}")).state()
        size = provider._bytes.held
        assert size > 10_000
        monkeypatch.setattr(limits, "GRAMMAR_CACHE_BYTES", int(size * 1.5))
        with pytest.raises(Overloaded, match="try again") as error:
            ready(ask(provider, regex="[b-z]{200}")).state()
        assert error.value.status == 503
        assert walk(first, b"abc"), "what runs goes on"
        del first
        gc.collect()
        second = ready(ask(provider, regex="[b-z]{200}")).state()
        assert walk(second, b"bcd")
        assert provider._bytes.held <= limits.GRAMMAR_CACHE_BYTES
    finally:
        provider.close()
