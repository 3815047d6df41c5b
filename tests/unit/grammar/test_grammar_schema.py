"""What is refused by reading alone, with its path and keyword, and what must pass."""

from __future__ import annotations

import json

import pytest

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import SamplingParams
from ceiba.grammar import fields, schema, tags
from ceiba.grammar.base import Constraint, Refusal
from support.grammar_world import real_schemas


@pytest.mark.parametrize(
    ("given", "path", "keyword"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "#/properties/a", "type"),
        ({"items": {"$dynamicRef": "#x"}}, "#/items", "$dynamicRef"),
        ({"$ref": "https://example.com/schema.json"}, "#", "$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/a", "$ref"),
        ({"properties": {"a": 3}}, "#/properties/a", ""),
        ({"anyOf": []}, "#", "anyOf"),
        ({"enum": []}, "#", "enum"),
        ({"properties": {"a.b": {"pattern": "(?=x)"}}}, "#/properties/a.b", "pattern"),
        ({"patternProperties": {"(?!x)": True}}, "#/patternProperties/(?!x)", ""),
        ({"properties": {"ünï": {"minLength": -1}}}, "#/properties/ünï", "minLength"),
        ({"minItems": 10**9}, "#", "minItems"),
        ({"minimum": "3"}, "#", "minimum"),
        ({"multipleOf": 0}, "#", "multipleOf"),
        ({"required": [1]}, "#", "required"),
        ({"properties": {"a/b~c": {"pattern": 3}}}, "#/properties/a~1b~0c", "pattern"),
    ],
)
def test_refusals_name_path_and_keyword(given, path, keyword):
    with pytest.raises(Refusal) as refusal:
        schema.check(given)
    assert (refusal.value.path, refusal.value.keyword) == (path, keyword)
    assert path in str(refusal.value)


@pytest.mark.parametrize("text", ["", "nope", "3", '"x"', "[]", "null", '{"a":'])
def test_what_is_no_schema(text):
    with pytest.raises(Refusal):
        schema.parse(text)


def test_depth_and_size_are_bounded():
    deep: dict = {}
    for _ in range(limits.MAX_SCHEMA_DEPTH + 1):
        deep = {"items": deep}
    with pytest.raises(Refusal, match="nested deeper"):
        schema.check(deep)
    with pytest.raises(Refusal, match="more than"):
        schema.check({"anyOf": [{}] * (limits.MAX_SCHEMA_NODES + 1)})


def test_a_keyword_inside_data_is_data():
    schema.check({"properties": {"type": {"const": {"type": "nonsense"}}, "$ref": True}, "default": {"$ref": 3}})
    schema.check({"enum": [{"pattern": "(?=x)"}], "examples": [{"type": 1}]})


def test_recursion_through_a_property_is_fine():
    schema.check({"properties": {"next": {"$ref": "#"}}})


def test_every_real_schema_is_read():
    """A real schema is refused at sight only where one of the libraries would fail, too."""
    refused = []
    for entry in real_schemas():
        try:
            schema.check(schema.parse(json.dumps(entry["schema"])))
        except Refusal as refusal:
            refused.append((entry["id"], str(refusal)))
    assert not refused


def test_one_constraint_for_each_request():
    assert fields.constraint_of(SamplingParams()) is None
    assert fields.constraint_of(SamplingParams(regex="a")) == Constraint("regex", "a")
    with pytest.raises(BadRequest, match="regex and ebnf exclude each other"):
        fields.constraint_of(SamplingParams(regex="a", ebnf="b"))


def test_errors_carry_the_callers_field():
    with pytest.raises(BadRequest) as error:
        fields.check(
            Constraint("json_schema", '{"properties": {"a": {"type": 1}}}'), "response_format.json_schema.schema"
        )
    assert error.value.param == "response_format.json_schema.schema"
    assert "#/properties/a: type" in error.value.message
    with pytest.raises(BadRequest, match="limit"):
        fields.check(Constraint("ebnf", "x" * (limits.MAX_GRAMMAR_CHARS + 1)), "ebnf")
    with pytest.raises(BadRequest, match="empty"):
        fields.check(Constraint("ebnf", " "), "ebnf")


@pytest.mark.parametrize("choices", [[], "ab", [1], [""], None, ["x"] * (limits.MAX_CHOICES + 1), ["x" * 20_000]])
def test_choices_that_are_none(choices):
    with pytest.raises(BadRequest, match="choice"):
        fields.choice_regex(choices)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, ""),
        ({"format": {"type": "nope"}}, "#/format"),
        ({"format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "(?=a)"}, "end": ""}},
         "#/format/content"),
        ({"structures": [{"begin": "<a>", "schema": {"type": "x"}, "end": ""}], "triggers": ["<a"]},
         "#/structures/0/schema"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}, "#"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}]}, "#"),
        ({"format": {"type": "sequence", "elements": [{"type": "const_string"}]}}, "#/format/elements/0"),
    ],
)  # fmt: skip
def test_structural_tags_that_cannot_be_read(given, path):
    with pytest.raises(Refusal) as refusal:
        tags.parse(json.dumps(given))
    assert refusal.value.path == path


def test_formats_nest_to_a_bound():
    node: dict = {"type": "any_text"}
    for _ in range(40):
        node = {"type": "sequence", "elements": [node]}
    with pytest.raises(Refusal, match="nested deeper"):
        tags.parse(json.dumps({"format": node}))
