"""What every backend must do, on a vocabulary of bytes: masks, ends, rollback, padding, refusals with their path."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ceiba.core import limits
from ceiba.grammar.backends import xgrammar
from ceiba.grammar.base import Constraint, Refusal, Spacing
from support.grammar_world import (
    EOS,
    EOS2,
    SIZE,
    THINK,
    TOOL,
    allowed,
    begin,
    compilers,
    complete,
    matches,
    pair,
    vocabulary,
    walk,
)

ALL = ["llguidance", "xgrammar", "outlines"]
FULL = ["llguidance", "xgrammar"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ann", "tags": ["x", 1]}', True),
        ('{"name":"é","tags":[null]}', True),
        ('{"name": "toolong", "tags": [1]}', False),
        ('{"name": "Ann", "tags": []}', False),
        ('{"name": "Ann", "tags": [1, 1, 1]}', False),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "tags": [2]}', False),
        ('{"name": "Ann", "tags": [1], "z": 1}', False),
        ('{"name": 1', False),
    ],
)
def test_json_schema(backend, text, fits):
    assert matches(begin(backend, "json_schema", PERSON), text) is fits


@pytest.mark.parametrize("backend", ALL)
def test_the_empty_schema_is_any_value(backend):
    number = "1" if backend == "outlines" else "1.5"  # its automata lose what goes on after a possible end
    for text in ('{"a": [1, null]}', number, '"x"', "true", "null", "[]"):
        assert matches(begin(backend, "json_schema", {}), text), text
    for text in ("nope", "{", "[1,]", ""):
        assert not matches(begin(backend, "json_schema", {}), text), text


@pytest.mark.parametrize("backend", ALL)
def test_regex(backend):
    assert matches(begin(backend, "regex", "^(yes|no)+[0-9]{2}$"), "yesno42")
    assert not matches(begin(backend, "regex", "(yes|no)+[0-9]{2}"), "yes4")
    assert not matches(begin(backend, "regex", "a/b"), "ab")
    assert matches(begin(backend, "regex", "a/b"), "a/b")
    assert matches(begin(backend, "regex", "é{2}"), "éé")


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)b", "(a"])
def test_expressions_beyond_automata_are_refused(backend, pattern):
    with pytest.raises(Refusal):
        begin(backend, "regex", pattern)


@pytest.mark.parametrize("backend", FULL)
def test_ebnf(backend):
    grammar = 'root ::= "x" pair\npair ::= "(" pair? ")" | [0-9]+'
    assert matches(begin(backend, "ebnf", grammar), "x(())")
    assert matches(begin(backend, "ebnf", grammar), "x42")
    assert not matches(begin(backend, "ebnf", grammar), "x(()")
    with pytest.raises(Refusal):
        begin(backend, "ebnf", 'root ::= "x" missing')


def test_outlines_has_no_ebnf_and_says_so():
    for kind in ("ebnf", "structural_tag"):
        with pytest.raises(Refusal, match="outlines"):
            begin("outlines", kind, 'root ::= "x"')


@pytest.mark.parametrize("backend", ALL)
def test_ends_are_allowed_only_where_the_answer_may_end(backend):
    state = begin(backend, "regex", "ab+")
    assert not {EOS, EOS2} & set(allowed(state))
    assert not state.accept(EOS)
    assert walk(state, b"ab")
    assert {EOS, EOS2, ord("b")} == set(allowed(state))
    assert not state.terminated
    assert state.accept(EOS2)
    assert state.terminated


@pytest.mark.parametrize("backend", ALL)
def test_a_finished_grammar_terminates_without_an_end(backend):
    state = begin(backend, "regex", "ab")
    assert walk(state, b"ab")
    assert state.terminated
    assert set(allowed(state)) == {EOS, EOS2}
    assert not state.accept(ord("b"))


@pytest.mark.parametrize("backend", ALL)
def test_padding_and_control_tokens_are_never_text(backend):
    state = begin(backend, "json_schema", {"type": "string"})
    assert walk(state, b'"a')
    mask = allowed(state)
    words = vocabulary()
    assert not {TOOL, THINK} & set(mask)
    assert all(words.tokens[token] for token in mask)
    assert max(mask) < SIZE
    assert not walk(state, b"\n")


@pytest.mark.parametrize("backend", ALL)
def test_merged_tokens_are_allowed_where_all_their_bytes_are(backend):
    words = vocabulary()
    state = begin(backend, "regex", "(true|é)")
    expected = {
        i for i, data in enumerate(words.tokens) if data and (b"true".startswith(data) or "é".encode().startswith(data))
    }
    assert set(allowed(state)) == expected


@pytest.mark.parametrize("backend", ALL)
def test_refused_tokens_change_nothing(backend):
    state = begin(backend, "regex", "abc")
    assert state.accept(ord("a"))
    before = allowed(state)
    assert not state.accept(ord("x"))
    assert allowed(state) == before
    assert walk(state, b"bc")


@pytest.mark.parametrize("backend", ALL)
def test_rollback_restores_every_earlier_mask(backend):
    state = begin(backend, "json_schema", PERSON)
    text = b'{"name": "Ann", "tags": [1]}'
    masks = []
    for byte in text:
        masks.append(allowed(state))
        assert state.accept(byte)
    back = 0
    for count in (1, 3, 7, 2):
        state.rollback(count)
        back += count
        assert allowed(state) == masks[len(text) - back]
    state.rollback(0)
    assert walk(state, text[len(text) - back :])
    assert complete(state)


@pytest.mark.parametrize("backend", ALL)
def test_rollback_over_an_end(backend):
    state = begin(backend, "regex", "ab*")
    assert walk(state, b"ab")
    assert state.accept(EOS)
    state.rollback(1)
    assert not state.terminated
    assert walk(state, b"b")
    state.rollback(3)
    assert ord("a") in allowed(state)


@pytest.mark.parametrize("backend", ALL)
def test_many_masks_at_once_are_the_masks_one_by_one(backend):
    engine = pair(backend)[1]
    texts = [b"", b"{", b'{"name', b'{"name": "A', b'{"name": "A", "tags": [1]}']
    states = [begin(backend, "json_schema", PERSON) for _ in texts]
    for state, text in zip(states, texts, strict=True):
        assert walk(state, text)
    bits = np.zeros((len(states), -(-SIZE // 32)), np.int32)
    assert engine.fill(states, bits).all()
    for state, row in zip(states, bits, strict=True):
        one = np.zeros_like(row)
        state.fill(one)
        assert np.array_equal(row, one)


@pytest.mark.parametrize("backend", ALL)
def test_forced_tokens_are_the_only_way(backend):
    state = begin(backend, "regex", "a(bcde|bcdf)")
    state.accept(ord("a"))
    forced = state.forced_tokens()
    assert bytes(forced) == b"bcd"[: len(forced)]
    for token in forced:
        assert len(allowed(state)) == 1
        assert state.accept(token)


@pytest.mark.parametrize("backend", FULL)
def test_compact_and_bounded_space(backend):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                         "additionalProperties": False})  # fmt: skip
    for spacing, good, bad in (
        (Spacing(allowed=False), '{"a":1}', '{"a": 1}'),
        (Spacing(most=2), '{ "a":  1}', '{"a":   1}'),
        (Spacing(), '{\n\t"a"  :   1 }', '{"a" 1}'),
    ):
        compiler, engine = compilers(backend, spacing)
        compiled = compiler.compile(Constraint("json_schema", schema))
        assert matches(engine.prepare(compiled).state(), good), (spacing, good)
        assert not matches(engine.prepare(compiled).state(), bad), (spacing, bad)


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_a_pattern_for_space(backend):
    compiler, engine = compilers(backend, Spacing(pattern="[ ]"))
    compiled = compiler.compile(Constraint("json_schema", json.dumps({"type": "array", "items": {"type": "null"}})))
    assert matches(engine.prepare(compiled).state(), "[ null, null]")
    assert not matches(engine.prepare(compiled).state(), "[\nnull]")


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        (
            {"properties": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/no"}}}}},
            "#/properties/a/properties/x",
            "$ref",
        ),
        ({"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}, "#/anyOf/1", "uniqueItems"),
        ({"properties": {"p": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}}, "#/properties/p", "oneOf"),
    ],
)
def test_llguidance_refusals_name_path_and_keyword(schema, path, keyword):
    with pytest.raises(Refusal) as refusal:
        begin("llguidance", "json_schema", schema)
    assert (refusal.value.path, refusal.value.keyword) == (path, keyword)


def test_outlines_refuses_what_it_would_drop():
    with pytest.raises(Refusal) as refusal:
        begin("outlines", "json_schema", {"properties": {"a": {"type": "integer", "minimum": 3}}})
    assert (refusal.value.path, refusal.value.keyword) == ("#/properties/a", "minimum")


def test_xgrammar_takes_only_what_it_keeps():
    def takes(schema):
        return xgrammar.takes(Constraint("json_schema", json.dumps(schema)), Spacing(), vocabulary())

    assert takes(PERSON)
    assert takes({})
    assert not takes({"type": "integer", "minimum": 3})
    assert not takes({"allOf": [{"type": "object"}]})
    assert not takes({"not": {"type": "null"}})


TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"},
            {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</f>"},
        ],
    },
}


@pytest.mark.parametrize("backend", FULL)
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("no tags at all", True),
        ('Hi <f=a>{"name":"A","tags":[1]}</f> and <f=b>12</f> done', True),
        ("<f=b>12</f>", True),
        ("x <f=c>", False),
        ("x <f=b>1a", False),
        ("x <f=b>12", False),
    ],
)
def test_triggered_tags(backend, text, fits):
    assert matches(begin(backend, "structural_tag", TAGS), text) is fits


def test_control_tokens_in_tags_are_tokens():
    tags = {"type": "structural_tag", "triggers": ["<tool>"],
            "structures": [{"begin": "<tool>", "schema": {"type": "integer"}, "end": "<stop>"}]}  # fmt: skip
    state = begin("llguidance", "structural_tag", tags)
    assert walk(state, b"hi ")
    assert TOOL in allowed(state)
    assert state.accept(TOOL)
    assert walk(state, b"42")
    assert EOS2 in allowed(state)
    assert not xgrammar.takes(Constraint("structural_tag", json.dumps(tags)), Spacing(), vocabulary())


def test_required_calls_have_no_free_text():
    call = {"name": "f", "begin": "f(", "content": {"type": "json", "schema": {"type": "integer"}}, "end": ")"}
    tags = {"type": "tags", "required": True, "parallel": True, "separator": ", ", "begin": "[", "end": "]",
            "triggers": ["["], "tags": [call]}  # fmt: skip
    for backend in FULL:
        assert matches(begin(backend, "structural_tag", tags), "[f(1), f(22)]"), backend
        assert not matches(begin(backend, "structural_tag", tags), "[]"), backend
        assert not matches(begin(backend, "structural_tag", tags), "hi [f(1)]"), backend
        once = {**tags, "parallel": False}
        assert matches(begin(backend, "structural_tag", once), "[f(1)]"), backend
        assert not matches(begin(backend, "structural_tag", once), "[f(1), f(2)]"), backend


def test_masks_stop_growing_at_the_state_limit(monkeypatch):
    monkeypatch.setattr(limits, "GRAMMAR_LEXER_STATES", 40)
    state = begin("llguidance", "regex", "[ab]*a[ab]{13}")
    for byte in b"abbaabababbbabaababaababbbababab":
        if not state.accept(byte):
            break
    bits = np.zeros(-(-SIZE // 32), np.int32)
    assert state.fill(bits) is False


def test_a_limit_reached_on_the_way_says_so(monkeypatch):
    """llguidance's automata grow while they are used."""
    parts = [{"type": "object", "properties": {f"q{i}": {"type": "integer"}}} for i in range(40)]
    schema = json.dumps({"anyOf": parts})
    wide = begin("llguidance", "json_schema", schema)
    assert walk(wide, b'{"q7": 1')
    assert wide.problem == ""
    compiler, engine = compilers("llguidance")
    compiled = compiler.compile(Constraint("json_schema", schema))
    monkeypatch.setattr(limits, "GRAMMAR_STEP_ITEMS", 200)
    state = engine.prepare(compiled).state()
    assert not state.accept(ord("{"))
    assert "items" in state.problem


def test_hundreds_of_alternatives_are_no_limit():
    parts = [{"type": "object", "properties": {f"q{i}": {"type": "integer"}}} for i in range(300)]
    assert matches(begin("llguidance", "json_schema", {"anyOf": parts}), '{"q7": 1, "z": null}')
