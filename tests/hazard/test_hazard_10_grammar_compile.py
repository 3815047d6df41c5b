"""HAZARD 10: schemas that have hung or broken engines give valid JSON or a quick 400 that names the path; a compile can
be killed and gives the CPU back, also when the client leaves (``tests/unit/grammar/test_grammar_provider.py``)."""

from __future__ import annotations

import json
import time

import jsonschema
import psutil
import pytest

from ceiba.core.errors import BadRequest
from ceiba.core.sampling import SamplingParams
from support.grammar_world import EOS, allowed, ask, make_provider, ready, walk

SECONDS = 5.0
"""A quick answer, on a machine that does much else."""

RECURSIVE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


def nested_one_of(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for i in range(depth):
        schema = {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": i}, "v": schema},
                    "required": ["k", "v"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    return schema


def nested_overlap(depth: int) -> dict:
    """Branches that overlap: telling them apart means negating each, level by level."""
    schema: dict = {"required": ["leaf"]}
    for i in range(depth):
        schema = {"oneOf": [schema, {"required": [f"n{i}"]}, {"properties": {f"p{i}": schema}}]}
    return {"type": "object", **schema}


CASES = {
    "recursive $ref with pattern": (RECURSIVE, '{"name": "ab", "children": [{"name": "c"}]}', '{"name": "AB"}'),
    "oneOf at depth 16": (nested_one_of(16), '{"k": 15, "v": {"k": 14, "v": null}}', '{"k": 14}'),
    "huge maximum": ({"type": "integer", "minimum": 0, "maximum": 10**40}, "12345678901234567", "-1"),
    "huge bounds of a number": ({"type": "number", "minimum": -1e308, "maximum": 1e308}, "-12.5", "x"),
    "64-bit bounds": ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, "9223372036854774783", "1.5"),
    "a dot in a name": (
        {"type": "object", "properties": {"a.b": {"type": "null"}}, "required": ["a.b"], "additionalProperties": False},
        '{"a.b": null}',
        '{"a": null}',
    ),
    "a name beyond ASCII": (
        {
            "type": "object",
            "properties": {"größe": {"type": "null"}, "日本": {"type": "null"}},
            "required": ["größe", "日本"],
        },
        '{"größe": null, "日本": null}',
        '{"grosse": null}',
    ),
    "empty schema": ({}, '{"any": [1, "x", null]}', "nope"),
    "true": (True, "[1]", "]"),
}


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def provider(request):
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    made = make_provider(request.param)
    ready(ask(made, regex="warm"))
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_hard_schemas_are_served(provider, name):
    schema, good, bad = CASES[name]
    started = time.monotonic()
    text = json.dumps(schema)
    first = ready(ask(provider, json_schema=text)).state()
    assert time.monotonic() - started < SECONDS
    assert walk(first, good.encode()), good
    assert first.terminated or EOS in allowed(first)
    jsonschema.validate(json.loads(good), schema)
    assert not walk(ask(provider, json_schema=text).state(), bad.encode())


def test_an_automaton_with_a_wide_window(provider):
    started = time.monotonic()
    state = ready(ask(provider, regex="[ab]*a[ab]{13}")).state()
    assert walk(state, b"bbbab" + b"b" * 12)
    assert time.monotonic() - started < 2 * SECONDS


@pytest.mark.parametrize("depth", [3, 8, 16])
def test_overlapping_one_of_is_served_or_refused_quickly(provider, depth):
    started = time.monotonic()
    ticket = ready(ask(provider, json_schema=json.dumps(nested_overlap(depth))), 30.0)
    assert time.monotonic() - started < 15.0, "the budget and some for starting again"
    try:
        state = ticket.state()
    except BadRequest as refusal:
        assert "json_schema" in refusal.message  # noqa: PT017 - either outcome is right, and both are looked at
    else:
        assert walk(state, b"{")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "array", "items": {"uniqueItems": True}}}}, "#/properties/a/items"),
        ({"properties": {"x.y": {"pattern": "(?=a)"}}}, "#/properties/x.y"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#"),
        ({"properties": {"n": {"minLength": 10**12}}}, "#/properties/n"),
        ({"properties": {"p": {"pattern": "((a{1,1000}){1,1000}){1,1000}"}}}, "#/properties/p"),
    ],
)
def test_what_is_refused_names_its_path(provider, schema, path):
    started = time.monotonic()
    with pytest.raises(BadRequest) as error:
        ready(ask(provider, json_schema=json.dumps(schema))).state()
    assert time.monotonic() - started < SECONDS
    assert error.value.status == 400
    assert f"json_schema: {path}: " in error.value.message


def test_the_compiler_idles_afterwards(provider):
    """Whatever was asked above, nobody computes any more."""

    def spent() -> list[float]:
        return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in provider.pids]

    deadline = time.monotonic() + 30
    while True:  # a compiler that was started anew may still be loading its libraries
        before = spent()
        time.sleep(0.5)
        if all(b - a < 0.1 for a, b in zip(before, spent(), strict=True)):
            break
        assert time.monotonic() < deadline, "somebody still computes"
    state = ready(provider.create(SamplingParams(regex="ok"))).state()
    assert walk(state, b"ok")
