"""Space in JSON is limited on every backend, and nothing else is."""

from __future__ import annotations

import json

import pytest

from ceiba.config.parse import parse_args
from ceiba.grammar.base import Constraint, Spacing, State
from support.grammar_world import allowed, compilers, complete, walk

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LIMIT = 5
PAIRS: dict[tuple[str, int], tuple] = {}


def start(backend: str, most: int = LIMIT, kind: str = "json_schema", text: object = SCHEMA) -> State:
    if (backend, most) not in PAIRS:
        PAIRS[backend, most] = compilers(backend, Spacing(most=most))
    compiler, engine = PAIRS[backend, most]
    return engine.prepare(compiler.compile(Constraint(kind, json.dumps(text)))).state()


BACKENDS = ["llguidance", "xgrammar", "outlines"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("space", [" ", "\n", "\t \n"])
def test_space_ends(backend: str, space: str) -> None:
    state = start(backend)
    assert walk(state, b'{"a":')
    count = 0
    while count < 50 and walk(state, space[count % len(space)].encode()):
        count += 1
    assert count == LIMIT
    assert set(allowed(state)).isdisjoint(b" \t\r\n")
    assert walk(state, b'"x"')


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_spaces_in_one_token_count_twice(backend: str) -> None:
    state = start(backend)
    double = next(t for t in allowed_after(state, b'{"a":') if t > 260)
    taken = 0
    while taken < 20 and double in allowed(state) and state.accept(double):
        taken += 1
    assert taken == LIMIT // 2
    assert 32 in allowed(state)
    assert double not in allowed(state)


def allowed_after(state: State, data: bytes) -> list[int]:
    from support.grammar_world import MERGED

    assert walk(state, data)
    double = 260 + MERGED.index(b"  ")
    assert double in allowed(state)
    return [double]


@pytest.mark.parametrize("backend", BACKENDS)
def test_indented_json_and_strings_of_spaces_fit(backend: str) -> None:
    text = json.dumps({"a": "x" + " " * 30 + '\\" ' + "y", "b": [1, 2]}, indent=2)
    state = start(backend)
    assert walk(state, text.encode())
    assert complete(state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_taken_back_counts_no_more(backend: str) -> None:
    state = start(backend)
    assert walk(state, b'{"a":   ')
    state.rollback(3)
    assert walk(state, b" " * LIMIT)
    assert not walk(state, b" ")
    state.rollback(LIMIT)
    assert walk(state, b'"   " ')
    state.rollback(3)
    assert walk(state, b" " * 20 + b'"')


def test_the_default_and_the_flags(tmp_path) -> None:
    from ceiba.launch.engine import _configured

    def grammar(*argv: str):
        return _configured(parse_args(["--grammar-backend", "llguidance", *argv])).grammar

    assert grammar().max_whitespace == 40
    assert grammar("--constrained-json-max-whitespace-cnt", "7").max_whitespace == 7
    assert grammar("--constrained-json-whitespace-pattern", " ?").max_whitespace is None
    assert not grammar("--constrained-json-disable-any-whitespace").any_whitespace
