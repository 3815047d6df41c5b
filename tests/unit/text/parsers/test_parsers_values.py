"""Bare values and schemas: which type a text becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.text.parsers.arguments import Tools, as_object, coerce
from ceiba.text.parsers.literals import JSON, PYTHON, number, parse
from ceiba.text.parsers.source import Malformed

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_json_is_read_as_json_reads_it(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        made = parse(text, JSON)
        assert made is not None
        assert json.loads(made) == value


@given(values)
def test_python_literals_are_read_as_python_reads_them(value: object) -> None:
    made = parse(repr(value), PYTHON)
    assert made is not None
    assert json.loads(made) == value


@given(st.text())
def test_whatever_comes_the_answer_is_json_or_none(text: str) -> None:
    for dialect in (JSON, PYTHON):
        made = parse(text, dialect)
        if made is not None:
            json.loads(made)


@pytest.mark.parametrize(
    ("text", "made"),
    [("5", "5"), ("-0.5", "-0.5"), ("1e-05", "1e-05"), ("+5", "5"), (".5", "0.5"), ("5.", "5"), ("-.5e3", "-0.5e3")],
)
def test_numbers(text: str, made: str) -> None:
    assert number(text) == made


@pytest.mark.parametrize("text", ["", "-", ".", "007", "1_000", "0x10", "NaN", "inf", "1e", "5 6", "１"])
def test_no_numbers(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "schema", "meant"),
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("123456789012345678901", {"type": "integer"}, 123456789012345678901),
        ("02139", {"type": "integer"}, "02139"),
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["integer", "null"]}, None),
        ("True", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ('{"a": 1}', {"anyOf": [{"type": "string"}, {"type": "object"}]}, {"a": 1}),
        ("[1", {"type": "array"}, "[1"),
        ("[1]", {"type": "object"}, "[1]"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5"),
        ("5", {"oneOf": [{"type": "number"}, {"type": "null"}]}, 5),
        ("3", {"enum": [1, 2, 3]}, 3),
        ("low", {"enum": ["low", "high"]}, "low"),
        ("4", {"const": 4}, 4),
        ("7", {"allOf": [{"type": "integer"}, {"minimum": 1}]}, 7),
        ("8", {"$ref": "#/$defs/n"}, 8),
        ("9", {"$ref": "#/$defs/loop"}, 9),
        ("10", {}, 10),
        ("ten", {}, "ten"),
        ('"ten"', {}, "ten"),
        ("[1, 2]", {"items": {}}, [1, 2]),
        ("11", {"type": "int"}, 11),
        (" padded ", {"type": "string"}, " padded "),
    ],
)
def test_the_schema_decides(text: str, schema: Any, meant: object) -> None:
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    made = json.loads(coerce(text, schema, root))
    assert made == meant
    assert type(made) is type(meant)


def test_tools() -> None:
    tools = Tools(
        [{"type": "function", "function": {"name": "a", "strict": True}}, {"name": "b", "parameters": {}}, {}]
    )
    assert tools.names == ("a", "b")
    assert tools.strict("a")
    assert not tools.strict("b")
    assert tools.json_text("a", "unknown", "5") == '"5"'
    assert tools.json_text("nobody", "x", "5") == '"5"'
    extra = Tools([{"name": "c", "parameters": {"additionalProperties": {"type": "integer"}}}])
    assert extra.json_text("c", "x", "5") == "5"


def test_only_objects_are_arguments() -> None:
    assert as_object("null") == as_object('""') == "{}"
    assert as_object('"{}"') == "{}"
    for text in ("[]", "5", '"x"', "true"):
        with pytest.raises(Malformed):
            as_object(text)
