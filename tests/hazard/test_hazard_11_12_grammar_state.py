"""HAZARDS 11 and 12 at the scheduler: a batch that spans the end of thinking, grammars under retraction and overlap, an
empty mask that fails one request, ends before masks, and rollback."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ceiba.cache.ledger import assert_ledger
from ceiba.config.records import GrammarConfig
from ceiba.grammar.base import Vocabulary
from ceiba.grammar.provider import Provider
from support.grammar_world import allowed, begin, walk
from support.scheduler_world import EOS, VOCAB, make_world, prompt

THINK_END = 7
LETTERS = {token: bytes([97 + token - 10]) for token in range(10, 36)}
"""The fake model's tokens 10..35 are the letters a to z."""


def letters() -> Vocabulary:
    tokens = [LETTERS.get(token, b"") for token in range(VOCAB)]
    return Vocabulary(tokens, EOS, {"</think>": THINK_END, "<eos>": EOS[0]}, None)


@pytest.fixture(scope="module")
def provider():
    made = Provider(GrammarConfig(backend="llguidance"), letters)
    yield made
    made.close()


def text_of(tokens: list[int]) -> str:
    return b"".join(LETTERS.get(token, b"?") for token in tokens).decode()


def settle(world) -> None:
    """Real compiles take real time, in which the scheduler only looks at its mailbox."""
    for _ in range(20_000):
        world.step()
        if world.scheduler.idle:
            return
        if len(world.scheduler.compiling):
            time.sleep(0.002)
    raise AssertionError(world.scheduler.admission.describe())


@pytest.mark.parametrize("overlap", [True, False])
def test_one_batch_spans_the_end_of_thinking(provider, overlap):
    world = make_world(grammar=provider, overlap=overlap, rows=8)
    for i in range(4):
        world.ask(f"think{i}", prompt(i, 10), max_new_tokens=100, regex="(abc|xyz){2}", think_end_ids=(THINK_END,))
        world.ask(f"plain{i}", prompt(50 + i, 10), max_new_tokens=100, regex="(abc|xyz){2}")
    world.ask("free", prompt(99, 10), max_new_tokens=40)
    settle(world)
    ended = 0
    for i in range(4):
        plain = world.answer(f"plain{i}")
        assert plain.finish.kind == "stop"
        assert re.fullmatch("(abc|xyz){2}", text_of([t for t in plain.tokens if t not in EOS]))
        tokens = world.answer(f"think{i}").tokens
        if THINK_END in tokens:
            answer = tokens[tokens.index(THINK_END) + 1 :]
            ended += 1
            whole = text_of([t for t in answer if t not in EOS])
            kind = world.answer(f"think{i}").finish.kind
            assert kind == "length" or re.fullmatch("(abc|xyz){2}", whole)
        else:
            assert world.answer(f"think{i}").finish.kind == "length"
            assert not set(tokens) & set(EOS), "no end before the answer has begun"
    assert ended, "at least one request thought to an end"
    world.check("free")
    assert_ledger(world.scheduler.leases, idle=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_keeps_the_grammar_in_step(provider, overlap):
    world = make_world(grammar=provider, overlap=overlap, pool=120, rows=6, conservativeness=0.05)
    for i in range(6):
        world.ask(f"g{i}", prompt(i, 12), max_new_tokens=40, regex="(ab|cd|ef){12}", ignore_eos=True)
    settle(world)
    assert world.scheduler.counters.retractions > 0, "the pool was meant to run short"
    for i in range(6):
        answer = world.answer(f"g{i}")
        assert answer.finish.kind == "stop", answer.finish
        assert re.fullmatch("(ab|cd|ef){12}", text_of(answer.tokens))
    assert_ledger(world.scheduler.leases, idle=True)


class Dead:
    """Nothing is allowed after the first token."""

    terminated = False

    def __init__(self, problem=""):
        self.accepted = 0
        self.problem = problem

    def fill(self, bits):
        bits[:] = -1 if not self.accepted else 0
        return not self.accepted

    def accept(self, token):
        self.accepted += 1
        return True

    def rollback(self, count):
        self.accepted -= count

    def forced_tokens(self):
        return []


class DeadTicket:
    def __init__(self, problem=""):
        self.problem = problem

    def ready(self):
        return True

    def state(self):
        return Dead(self.problem)

    def cancel(self):
        pass


def test_an_empty_mask_fails_one_request_only(provider):
    class Mixed:
        def create(self, sampling):
            known = {"dead": DeadTicket(), "large": DeadTicket("too many items")}
            return known.get(sampling.regex) or provider.create(sampling)

        def fill(self, states, bits):
            return provider.fill(states, bits)

    world = make_world(grammar=Mixed())
    world.ask("dead", prompt(1, 10), max_new_tokens=20, ignore_eos=True, regex="dead")
    world.ask("large", prompt(1, 10), max_new_tokens=20, ignore_eos=True, regex="large")
    world.ask("good", prompt(2, 10), max_new_tokens=20, regex="(ab){3}")
    world.ask("free", prompt(3, 10), max_new_tokens=20)
    settle(world)
    assert world.answer("dead").finish.kind == "error"
    assert "no next token" in world.answer("dead").finish.message
    assert world.answer("dead").finish.status == 500
    grown = world.answer("large").finish
    assert (grown.status, grown.code) == (400, "grammar_too_complex"), "a limit that a schema reaches is its own fault"
    assert "too many items" in grown.message
    assert len(world.answer("dead").tokens) == 1
    assert text_of([t for t in world.answer("good").tokens if t not in EOS]) == "ababab"
    world.check("free")
    assert_ledger(world.scheduler.leases, idle=True)


def test_a_complete_grammar_ends_before_another_mask_is_asked_for(provider):
    """With min_new_tokens the ends are held back: a mask of ends alone would leave the sampler nothing."""
    world = make_world(grammar=provider)
    world.ask("g", prompt(1, 10), max_new_tokens=30, min_new_tokens=20, regex="abc")
    settle(world)
    assert text_of(world.answer("g").tokens) == "abc"
    assert world.answer("g").finish.kind == "stop"


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "outlines"])
def test_drafts_rolled_back_leave_no_trace(backend, data):
    """Any accepted run of drafts, rolled back in any steps, leaves the masks of a walk without drafts."""
    if backend != "llguidance":
        pytest.importorskip({"xgrammar": "xgrammar", "outlines": "outlines_core"}[backend])
    state, plain = (begin(backend, "regex", "((ab|cd)[0-9]{2}){3}x?") for _ in range(2))
    for byte in b"ab12cd34ab56":
        for draft in data.draw(st.lists(st.sampled_from(list(b"abcd0x")), max_size=4)):
            if not state.accept(draft):
                continue
            state.rollback(1)
        ahead = data.draw(st.integers(0, 3))
        taken = 0
        for _ in range(ahead):
            mask = [token for token in allowed(state) if token < 256]
            if not mask:
                break
            assert state.accept(data.draw(st.sampled_from(mask)))
            taken += 1
        state.rollback(taken)
        assert allowed(state) == allowed(plain)
        assert state.terminated == plain.terminated
        assert walk(state, bytes([byte]))
        assert walk(plain, bytes([byte]))
    assert np.array_equal(allowed(state), allowed(plain))
