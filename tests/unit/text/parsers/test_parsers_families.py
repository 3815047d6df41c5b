"""Every family's calls, written by naive writers over arbitrary arguments, come back as they were, at any cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceiba.text.parsers.registry import tool_names
from ceiba.text.parsers.special import BREAK
from support.call_writers import OTHER_FORMS, WRITERS, Call
from support.parsing import bursts, parser, result

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "level": {"enum": ["low", "high"]},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "items": {"type": "array", "items": {"type": "string"}},
        "box": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/size"}, "b": {"type": "string"}, "c": {"type": "array"}},
        },
    },
    "$defs": {"size": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in ("act", "do_it", "get-x2")]

BARE_AT_START = {"llama3", "pythonic"}
NO_NULL = {"minimax-m3"}
"""MiniMax-M3's template leaves null arguments out."""
SINGLE = {"gigachat3"}

# Characters that formats use, but no whole marker: those are the fixtures' and test_parsers_rules' business. U+FDD0 is
# the parser's own (test_parsers_special).
texts = st.text(
    st.one_of(
        st.sampled_from("ab 1\n\t\"'\\{}[]<>/|:,;=()é日🦙&%"),
        st.characters(exclude_categories=["Cs"], exclude_characters=BREAK),
    ),
    max_size=24,
).filter(lambda s: not any(m in s for m in ('<|"|>', "</", "]]>", "<![CDATA[", "]<]")))
numbers = st.floats(allow_nan=False, allow_infinity=False).filter(lambda f: not f.is_integer())
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "count": st.integers(-(10**30), 10**30),
        "ratio": numbers,
        "flag": st.booleans(),
        "level": st.sampled_from(["low", "high"]),
        "maybe": st.none() | st.integers(-5, 5),
        "items": st.lists(texts.filter(bool), max_size=3),
        "box": st.fixed_dictionaries({}, optional={"a": st.integers(), "b": texts}),
    },
)
calls = st.lists(st.tuples(st.sampled_from(["act", "do_it", "get-x2"]), arguments), min_size=1, max_size=3)
said = st.text("abc éx日,.\n", max_size=20)

FORMS = [*WRITERS.items(), *OTHER_FORMS]


def test_every_parser_has_a_writer() -> None:
    assert set(WRITERS) == set(tool_names())


@pytest.mark.parametrize(("name", "write"), FORMS, ids=[n for n, _ in FORMS])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=calls, before=said, seed=st.integers(0, 99))
def test_calls_come_back(name: str, write: Any, calls: list[Call], before: str, seed: int) -> None:
    if name in NO_NULL:
        calls = [(n, {k: v for k, v in a.items() if v is not None}) for n, a in calls]
    if name in {"pythonic", "lfm2"}:
        calls = [(n.replace("-", "_"), a) for n, a in calls if n != "get-x2"] or [("act", {})]
    if name in SINGLE:
        calls = calls[:1]
    raw = write(calls)
    if name in BARE_AT_START and not raw.startswith("<|"):
        before = ""
    elif name == "gpt-oss":
        raw = f"<|channel|>final<|message|>{before}<|end|><|start|>assistant{raw}"
    else:
        raw = before + raw
    whole = result(parser(name, tools=TOOLS), [raw])
    assert [(n, json.loads(a)) for n, a in whole[2]] == calls, raw
    assert whole[0].strip() == before.strip()
    assert result(parser(name, tools=TOOLS), raw) == whole
    assert result(parser(name, tools=TOOLS), bursts(raw, seed)) == whole


@pytest.mark.parametrize(("name", "write"), FORMS, ids=[n for n, _ in FORMS])
def test_cut_short_is_never_a_call(name: str, write: Any) -> None:
    """Every prefix of a call's text: no call comes out of it, and a client sees nothing but the text."""
    raw = write([("act", {"text": "rm -rf /tmp/build", "count": 3})])
    done = next(i for i in range(len(raw) + 1) if result(parser(name, tools=TOOLS), [raw[:i]])[2])
    arguments = result(parser(name, tools=TOOLS), [raw])[2][0][1]
    for end in range(len(raw)):
        content, _, found = result(parser(name, tools=TOOLS), [raw[:end]])
        assert (found != []) == (end >= done)
        assert all(a == arguments for _, a in found)
        if not found and name != "gpt-oss":
            assert content.strip() in raw
