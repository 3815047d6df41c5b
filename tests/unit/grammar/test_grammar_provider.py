"""Grammars compiled aside: the real compiler process, killed by its budget, by its memory, and when nobody waits."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError
from ceiba.grammar.compiler import Answer
from ceiba.grammar.masks import members
from ceiba.grammar.process import CompilerProcess
from support.grammar_world import EOS, SIZE, THINK, TOOL, ask, make_provider, ready, walk

EXPLODES = "[ab]*a[ab]{22}"
"""2**22 states once an automaton is built ahead, as outlines does."""
WORDS = -(-SIZE // 32)


@pytest.fixture
def provider():
    made = make_provider()
    yield made
    made.close()
    assert made.pids == []


@pytest.fixture
def eager():
    """Outlines with half a second to compile."""
    pytest.importorskip("outlines_core")
    made = make_provider("outlines", seconds=0.5)
    yield made
    made.close()


def test_one_compile_serves_all_who_ask(provider):
    tickets = [ask(provider, regex="ab+") for _ in range(5)]
    states = [ready(ticket).state() for ticket in tickets]
    assert len(provider.pids) == 1
    assert states[0].accept(ord("a"))
    bits = np.zeros((5, WORDS), np.int32)
    assert provider.fill(states, bits).all()
    assert [members(row).tolist() for row in bits[1:]] == [members(bits[1]).tolist()] * 4
    assert members(bits[0]).tolist() == [ord("b")]
    assert ask(provider, regex="ab+").ready(), "known grammars are ready at once"


def test_a_refusal_is_the_requests_error_and_is_kept(provider):
    with pytest.raises(BadRequest, match=r"json_schema: #/items: uniqueItems: ") as error:
        ready(ask(provider, json_schema='{"items": {"uniqueItems": true}}')).state()
    assert error.value.param == "json_schema"
    again = ask(provider, json_schema='{"items": {"uniqueItems": true}}')
    assert again.ready()
    with pytest.raises(BadRequest):
        again.state()


def test_two_constraints_are_refused_at_sight(provider):
    with pytest.raises(BadRequest, match="exclude each other"):
        ask(provider, regex="a", ebnf='root ::= "a"')
    assert provider.pids == []


def test_the_budget_kills_the_compiler_and_the_next_grammar_compiles(eager):
    ready(ask(eager, regex="a")).state()
    pid = eager.pids[0]
    started = time.monotonic()
    ticket = ready(ask(eager, regex=EXPLODES))
    assert time.monotonic() - started < 20.0
    with pytest.raises(BadRequest, match=r"0\.5 s") as error:
        ticket.state()
    assert error.value.code == "grammar_too_complex"
    assert not psutil.pid_exists(pid), "the CPU is given back"
    assert walk(ready(ask(eager, regex="ab")).state(), b"ab")
    assert ask(eager, regex=EXPLODES).ready(), "it is not tried again at once"


def test_a_client_that_leaves_kills_the_compile():
    pytest.importorskip("outlines_core")
    provider = make_provider("outlines", workers=1)
    ready(ask(provider, regex="a")).state()
    pid = provider.pids[0]
    first, second = ask(provider, regex=EXPLODES), ask(provider, regex=EXPLODES)
    first.cancel()
    first.cancel()
    time.sleep(0.3)
    assert psutil.pid_exists(pid), "somebody still waits"
    second.cancel()
    deadline = time.monotonic() + 20.0
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
    assert walk(ready(ask(provider, regex="ab")).state(), b"ab")
    provider.close()


def test_a_slow_grammar_holds_up_no_other():
    pytest.importorskip("outlines_core")
    provider = make_provider("outlines", seconds=30.0, workers=2)
    ready(ask(provider, regex="a")).state()
    slow = ask(provider, regex=EXPLODES)
    assert walk(ready(ask(provider, regex="cd")).state(), b"cd")
    assert not slow.ready()
    slow.cancel()
    provider.close()


def test_a_compiler_that_dies_fails_one_grammar(provider):
    ready(ask(provider, regex="a")).state()
    psutil.Process(provider.pids[0]).kill()
    time.sleep(0.1)
    with pytest.raises(CeibaError, match="memory"):
        ready(ask(provider, regex="b")).state()
    assert walk(ready(ask(provider, regex="c")).state(), b"c")


def test_memory_is_bounded():
    pytest.importorskip("outlines_core")
    provider = make_provider("outlines", seconds=60.0)
    ready(ask(provider, regex="a")).state()
    process = psutil.Process(provider.pids[0])
    soft, _ = process.rlimit(psutil.RLIMIT_AS)
    assert 0 < soft - process.memory_info().vms <= limits.GRAMMAR_MEMORY_BYTES
    provider.close()


def test_the_cache_forgets_the_oldest(provider, monkeypatch):
    monkeypatch.setattr(limits, "GRAMMAR_CACHE", 3)
    for word in ("aa", "bb", "cc", "dd"):
        ready(ask(provider, regex=word)).state()
    child = psutil.Process(provider.pids[0])
    child.suspend()  # so that what is ready was not compiled just now
    try:
        assert ask(provider, regex="dd").ready()
        assert not ask(provider, regex="aa").ready()
    finally:
        child.resume()


def test_thinking_is_free_and_then_the_grammar_rules(provider):
    state = ready(ask(provider, regex="ab", think_end_ids=(THINK,))).state()
    plain = ready(ask(provider, regex="ab")).state()
    bits = np.zeros((2, WORDS), np.int32)
    assert provider.fill([state, plain], bits).all()
    free = set(members(bits[0]).tolist())
    assert {ord("z"), THINK, TOOL} <= free
    assert EOS not in free, "an end would leave an answer without its shape"
    assert members(bits[1]).tolist() == [ord("a")]
    for token in (ord("z"), ord("a"), THINK):
        assert not state.terminated
        assert state.accept(token)
    bits[:] = 0
    assert provider.fill([state, plain], bits).all()
    assert members(bits[0]).tolist() == members(bits[1]).tolist() == [ord("a")]
    assert not state.accept(ord("z"))
    assert state.accept(ord("a"))
    state.rollback(2)  # over the end of the thinking
    assert state.thinking
    assert state.accept(ord("q"))
    assert state.accept(THINK)
    assert walk(state, b"ab")
    assert state.terminated


def test_an_end_of_thinking_of_several_tokens(provider):
    state = ready(ask(provider, regex="ab", think_end_ids=(1, 2))).state()
    for token in (1, 1, 3, 2, 1):
        assert state.accept(token)
        assert state.thinking
    assert state.accept(2)
    assert not state.thinking


def test_masks_of_different_libraries_in_one_batch():
    pytest.importorskip("xgrammar")
    provider = make_provider("xgrammar")
    mixed = [{"regex": "ab"}, {"json_schema": json.dumps({"type": "integer", "minimum": 3})}, {"regex": "cd"},
             {"json_schema": json.dumps({"type": "integer", "maximum": -3})}]  # fmt: skip
    states = [ready(ask(provider, **fields)).state() for fields in mixed]
    bits = np.zeros((4, WORDS), np.int32)
    assert provider.fill(states, bits).all()
    rows = [members(row).tolist() for row in bits]
    assert rows[0] == [ord("a")]
    assert rows[2] == [ord("c")]
    assert ord("3") in rows[1]
    assert ord("-") not in rows[1]
    assert rows[3] == [ord("-")]
    provider.close()


def test_nothing_is_loaded_before_the_first_constraint():
    from ceiba.config.records import GrammarConfig
    from ceiba.grammar.provider import Provider

    def never():
        raise AssertionError("the vocabulary was loaded")

    provider = Provider(GrammarConfig(), never)
    assert provider.pids == []
    provider.close()


@pytest.fixture
def prepared_ahead():
    pytest.importorskip("xgrammar")
    made = make_provider("xgrammar", workers=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"regex": r"\p{Lu}[0-9]"}, "Z7", "z"),
        ({"ebnf": 'start: "x" | NUM\nNUM: /[0-9]{2}/'}, "42", "y"),
    ],
    ids=["character class", "lark"],
)
def test_what_xgrammar_does_not_know_goes_to_llguidance(prepared_ahead, constraint, right, wrong):
    assert walk(ready(ask(prepared_ahead, **constraint)).state(), right.encode())
    assert not walk(ready(ask(prepared_ahead, **constraint)).state(), wrong.encode())


def test_what_neither_knows_is_refused_once(prepared_ahead):
    with pytest.raises(BadRequest, match="regex"):
        ready(ask(prepared_ahead, regex=r"(a)\1")).state()
    assert len(prepared_ahead.pids) == 1


def test_a_compiler_that_grew_is_replaced(provider, monkeypatch):
    ready(ask(provider, regex="a")).state()
    pid = provider.pids[0]
    ready(ask(provider, regex="b")).state()
    assert provider.pids == [pid], "a small grammar leaves it alone"
    monkeypatch.setattr(limits, "GRAMMAR_RETAINED_BYTES", -(1 << 20))
    assert walk(ready(ask(provider, regex="c")).state(), b"c")
    assert not psutil.pid_exists(pid)
    monkeypatch.undo()
    assert walk(ready(ask(provider, regex="d")).state(), b"d")
    assert provider.pids != [pid]


def test_what_takes_xgrammar_too_long_goes_to_llguidance(prepared_ahead, monkeypatch):
    """Objects of any further properties, one or the other: a dozen seconds ahead on a real vocabulary."""
    state = ready(ask(prepared_ahead, regex="ab")).state()
    assert type(state).__name__ == "XGrammarState"
    pid = prepared_ahead.pids[0]
    monkeypatch.setattr(limits, "GRAMMAR_AHEAD_SECONDS", 0.0)
    parts = [{"type": "object", "properties": {f"q{i}": {"type": "integer"}}} for i in range(200)]
    state = ready(ask(prepared_ahead, json_schema=json.dumps({"anyOf": parts}))).state()
    assert type(state).__name__ == "GuidanceState"
    assert walk(state, b'{"q7": 12, "z": null}')
    assert not psutil.pid_exists(pid), "the CPU is given back"
    monkeypatch.undo()
    assert walk(ready(ask(prepared_ahead, regex="cd")).state(), b"cd")


def test_the_budget_is_cpu_time_so_a_busy_machine_refuses_nothing_more():
    """A child that gets no CPU for longer than its seconds, and then answers."""
    code = "import sys, time; time.sleep(2.2); sys.stdout.buffer.write(bytes([4, 0, 0, 0, 0x93, 0xC0, 0xA0, 0xA0]))"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process = CompilerProcess(lambda: pytest.fail("it has a child"))
    try:
        assert process._receive(child, 2.0, lambda: False, of_cpu=True) == Answer()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_compiler_that_neither_computes_nor_answers_is_given_up():
    pytest.importorskip("outlines_core")
    provider = make_provider("outlines", seconds=1.0)
    ready(ask(provider, regex="a")).state()
    child = psutil.Process(provider.pids[0])
    before = sum(child.cpu_times()[:2])
    ticket = ask(provider, regex=EXPLODES)
    deadline = time.monotonic() + 60
    while sum(child.cpu_times()[:2]) < before + 0.05:  # it has begun, and has most of its seconds left
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.suspend()
    with pytest.raises(BadRequest, match="given up"):
        ready(ticket).state()
    assert not psutil.pid_exists(child.pid)
    provider.close()
