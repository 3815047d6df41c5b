"""A rewritten schema accepts the same values, a negated one the others: jsonschema is the judge."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ceiba.grammar.base import Refusal
from ceiba.grammar.rewrite import Rewriter

GONE = {"not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames",
        "contains", "uniqueItems", "unevaluatedProperties"}  # fmt: skip
NAMES = ["a", "b", "c"]
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 6),
        st.sampled_from([0.5, -1.5, 2.0]),
        st.sampled_from(["", "a", "ab", "abc"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)),
    max_leaves=5,
)


def leaves() -> st.SearchStrategy:
    return st.one_of(
        st.booleans(),
        st.just({}),
        st.builds(lambda t: {"type": t}, st.sampled_from(["string", "number", "boolean", "null", "array", "object"])),
        st.builds(
            lambda v: {"enum": v}, st.lists(st.sampled_from([0, 1, "a", "ab", True, None, {}]), min_size=1, max_size=3)
        ),
        st.builds(lambda k, n: {k: n}, st.sampled_from(["minimum", "maximum", "exclusiveMinimum"]), st.integers(-2, 4)),
        st.builds(
            lambda k, n: {k: n}, st.sampled_from(["minLength", "maxLength", "minItems", "maxItems"]), st.integers(0, 3)
        ),
        st.builds(lambda r: {"required": r}, st.lists(st.sampled_from(NAMES), max_size=2, unique=True)),
    )


def composed(inner: st.SearchStrategy) -> st.SearchStrategy:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda k, s: {k: s}, st.sampled_from(["allOf", "anyOf", "oneOf"]), some),
        st.builds(lambda s: {"not": s}, inner),
        st.builds(lambda p: {"properties": p}, st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)),
        st.builds(lambda i, t, e: {"if": i, "then": t, "else": e}, inner, inner, inner),
        st.builds(lambda n, s: {"dependentSchemas": {n: s}}, st.sampled_from(NAMES), inner),
        st.builds(lambda n, r: {"dependentRequired": {n: [r]}}, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    )


SCHEMAS = st.recursive(leaves(), composed, max_leaves=6)


def valid(schema: object, value: object) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def rewritten(schema: object, *, exact: bool = True) -> object:
    try:
        return Rewriter(schema, exact_one_of=exact).whole()
    except Refusal:
        assume(False)


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=6))
def test_rewriting_keeps_the_set_of_values(schema, values):
    out = rewritten(schema)
    for value in values:
        assert valid(out, value) == valid(schema, value), (out, value)


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=6))
def test_a_negated_schema_takes_exactly_the_other_values(schema, values):
    out = rewritten({"not": schema})
    for value in values:
        assert valid(out, value) != valid(schema, value), (out, value)


@settings(max_examples=200, deadline=None)
@given(SCHEMAS)
def test_nothing_is_left_that_libraries_lack(schema):
    text = json.dumps(rewritten(schema, exact=False))
    assert not [word for word in GONE if f'"{word}":' in text]


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "array", "contains": {"const": 1}}, [[1], [0, 1]], [[], [0]]),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [[], [2, 1]], [[1, 1], [3]]),
        ({"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 1}, [[1]], [[], [1, 1]]),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x1": 1}, {}], [{"y": 1}]),
        ({"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}, [{"a": 1}], [{"b": 1}]),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "b|c$"}, "properties": {"xbx": {}, "cx": {}, "xc": {}}},
         [{"xbx": 1}, {"xc": 1}, {}], [{"cx": 1}]),
        ({"properties": {"a": {}, "b": {}}, "additionalProperties": False, "maxProperties": 1, "type": "object"},
         [{}, {"a": 1}], [{"a": 1, "b": 1}]),
        ({"properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 1, "type": "object"},
         [{"b": 1}], [{}]),
        ({"dependencies": {"a": ["b"], "b": {"required": ["c"]}}}, [{}, {"c": 1}, {"a": 1, "b": 1, "c": 1}],
         [{"a": 1}, {"b": 1}]),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"not": {"enum": ["a", 1, True, None, {"a": 1}]}}, ["b", 2, False, {"a": 2}, {}, {"a": 1, "b": 1}, []],
         ["a", 1, True, None, {"a": 1}]),
        ({"type": "integer", "maximum": 10**40}, [5, 2**62], []),
    ],
)  # fmt: skip
def test_rules_with_examples(schema, inside, outside):
    out = Rewriter(schema, exact_one_of=True).whole()
    for value in inside:
        assert valid(out, value), (out, value)
    for value in outside:
        assert not valid(out, value), (out, value)


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        ({"properties": {"s": {"type": "array", "uniqueItems": True}}}, "#/properties/s", "uniqueItems"),
        ({"anyOf": [{}, {"not": {"pattern": "a"}}]}, "#/anyOf/1/not", "pattern"),
        ({"items": {"contains": {}, "minContains": 2}}, "#/items", "contains"),
        ({"properties": {"a/b": {"not": {"multipleOf": 2}}}}, "#/properties/a~1b/not", "multipleOf"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "#", "unevaluatedProperties"),
        ({"properties": {"a": {}}, "maxProperties": 0}, "#", "maxProperties"),
        ({"propertyNames": {"pattern": "^(?=a)"}, "properties": {"a": {}}}, "#", "propertyNames"),
        ({"propertyNames": {"pattern": "[b-a]"}, "properties": {"a": {}}}, "#", "propertyNames"),
    ],
)
def test_refusals_name_the_path_and_the_keyword(schema, path, keyword):
    with pytest.raises(Refusal) as refusal:
        Rewriter(schema).whole()
    assert (refusal.value.path, refusal.value.keyword) == (path, keyword)


def test_the_input_is_never_changed():
    schema = {"not": {"type": "string"}, "allOf": [{"minimum": 10**30}], "if": True, "then": {"maximum": 3}}
    before = json.dumps(schema)
    Rewriter(schema, exact_one_of=True).whole()
    assert json.dumps(schema) == before


def test_writing_out_is_bounded():
    schema: dict = {"required": ["a"]}
    for i in range(18):
        schema = {"oneOf": [schema, {"required": [f"n{i}"]}, {"properties": {f"p{i}": schema}}]}
    with pytest.raises(Refusal, match="more than"):
        Rewriter({"not": schema}, exact_one_of=False).whole()


def test_names_are_tried_in_linear_time():
    """An engine that backtracks would need 2**5000 steps."""
    bad, good = "a" * 5000 + "b", "a" * 5000
    schema = {"type": "object", "propertyNames": {"pattern": "^(a+)+$"}, "properties": {bad: {}, good: {}}}
    assert Rewriter(schema).whole()["properties"] == {bad: False, good: {}}
