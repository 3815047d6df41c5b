"""What a grammar is told: frames that the family's own parser reads back, and when there is one at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ceiba.core.errors import BadRequest
from ceiba.text.parsers.registry import tool_names, tool_parser
from support.call_writers import NS, bare, dumped, gemma, python
from support.parsing import parser, result

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
STRICT = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}, TOOLS[1]]
ARGUMENTS = {"city": "Zürich <b>", "days": 3}


def generated(content: dict[str, Any], arguments: dict[str, Any]) -> str:
    """What a grammar of ``content`` lets through for these arguments."""
    match content["type"]:
        case "json":
            return dumped(arguments)
        case "elements":
            return "".join(
                content["open"]
                .replace("{key}", k)
                .replace("{type}", "string" if isinstance(v, str) else "number")
                .replace("{is_string}", dumped(isinstance(v, str)))
                + bare(v)
                + content["close"]
                for k, v in arguments.items()
            )
        case "pythonic":
            return ", ".join(f"{k}={python(v)}" for k, v in arguments.items())
        case "gemma":
            return gemma(arguments)[1:-1]
        case "tree":
            return "".join(f"{NS}<{k}>{bare(v)}{NS}</{k}>" for k, v in arguments.items())
    raise AssertionError(content["type"])


def written(constraint: dict[str, Any], picks: list[tuple[int, dict[str, Any]]]) -> str:
    calls = []
    for index, (tag, arguments) in enumerate(picks):
        part = constraint["tags"][tag]
        begin = part["begin"].replace("{index}", str(index + 1)).replace("{index0}", str(index))
        calls.append(begin + generated(part["content"], arguments) + part["end"])
    return constraint["begin"] + constraint["separator"].join(calls) + constraint["end"]


@pytest.mark.parametrize("name", tool_names())
def test_what_a_grammar_forces_is_what_the_parser_reads(name: str) -> None:
    constraint = tool_parser(name, TOOLS).constraint("required")
    assert constraint is not None
    picks = [(0, ARGUMENTS), (1, {}), (0, {"city": "Oslo"})]
    if not constraint["parallel"]:
        picks = picks[:1]
    text = written(constraint, picks)
    content, _, calls = result(parser(name, tools=TOOLS), [text])
    assert [(n, json.loads(a)) for n, a in calls] == [(("weather", "clock")[i], a) for i, a in picks], text
    assert content == ""
    assert any(text.startswith(t) for t in constraint["triggers"])


@pytest.mark.parametrize("name", tool_names())
def test_the_schema_is_the_tools(name: str) -> None:
    constraint = tool_parser(name, TOOLS).constraint({"type": "function", "function": {"name": "weather"}})
    assert constraint is not None
    assert constraint["required"]
    assert not constraint["parallel"]
    (tag,) = constraint["tags"]
    assert tag["name"] == "weather"
    assert tag["content"]["schema"] == SCHEMA
    json.dumps(constraint)


def test_when_there_is_a_constraint() -> None:
    form = tool_parser("hermes", TOOLS)
    assert form.constraint("auto") is None
    assert form.constraint("none") is None
    assert tool_parser("hermes").constraint("required") is None
    strict = tool_parser("hermes", STRICT).constraint("auto")
    assert strict is not None
    assert not strict["required"]
    assert [t["content"]["schema"] for t in strict["tags"]] == [SCHEMA, {"type": "object"}]
    every = form.constraint("auto", strict=True)
    assert every is not None
    assert every["triggers"] == ["<tool_call>"]
    one = form.constraint("required", parallel=False)
    assert one is not None
    assert not one["parallel"]


def test_a_tool_that_is_not_offered() -> None:
    with pytest.raises(BadRequest, match="'sing', which is not among the tools") as caught:
        tool_parser("hermes", TOOLS).constraint({"type": "function", "function": {"name": "sing"}})
    assert caught.value.param == "tool_choice"
    with pytest.raises(BadRequest):
        tool_parser("hermes", TOOLS).constraint({"type": "function"})
