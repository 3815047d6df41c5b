"""A conversation of three turns with tools, on a real model that knows tools, in OpenAI's and in Anthropic's form.

Runs where ``CEIBA_TEST_TOOL_MODEL`` names a GGUF file of Qwen2.5-Coder-0.5B-Instruct, which no registry serves under a
licence that a test could rely on. ``docs/tools.md`` shows its transcript (``-s`` prints it).
"""

from __future__ import annotations

import ast
import json
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from live_server import LiveServer

MODEL = os.environ.get("CEIBA_TEST_TOOL_MODEL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(MODEL).is_file(), reason="CEIBA_TEST_TOOL_MODEL names no GGUF file"),
]

SYSTEM = "You are a helpful assistant."
TURNS = [
    "What is the weather in Oslo?",
    "Convert that to Fahrenheit: calculate temperature * 9 / 5 + 32.",
    "Thank you. Summarize what you found out in one sentence.",
]
WEATHER = {"Oslo": {"temperature": 4, "unit": "celsius", "sky": "rain"}}
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "get_weather": (
        "Get the current weather of a city.",
        {"city": {"type": "string", "description": "Name of the city"}},
    ),
    "calculate": ("Evaluate an arithmetic expression.", {"expression": {"type": "string"}}),
}
_STEPS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def schema(name: str) -> dict[str, Any]:
    properties = SCHEMAS[name][1]
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def calculate(node: Any) -> float:
    if isinstance(node, ast.BinOp):
        return _STEPS[type(node.op)](calculate(node.left), calculate(node.right))
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int | float)
    return node.value


def call(name: str, arguments: dict[str, Any]) -> str:
    """What the tools of the conversation answer. Raises for arguments that are not the tool's."""
    if name == "get_weather":
        return json.dumps(WEATHER[arguments["city"]])
    return f"{calculate(ast.parse(arguments['expression'], mode='eval').body):g}"


@pytest.fixture(scope="module")
def qwen() -> Iterator[LiveServer]:
    with LiveServer("--model-path", MODEL, "--tool-call-parser", "auto", "--max-total-tokens", "8192") as server:
        yield server


def check(calls: list[tuple[str, dict[str, Any]]], answer: str) -> None:
    """The two tools were called as the turns ask, the second with what the first had answered, and the answer tells."""
    assert [name for name, _ in calls] == ["get_weather", "calculate"]
    assert calls[0][1] == {"city": "Oslo"}
    assert set(calls[1][1]) == {"expression"}
    assert call(*calls[1]) == "39.2"
    assert "Oslo" in answer
    assert "4 degrees" in answer
    assert "rain" in answer


@pytest.mark.parametrize("stream", [False, True])
def test_openai(qwen: LiveServer, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0, timeout=300)
    tools: list[Any] = [
        {"type": "function", "function": {"name": n, "description": text, "parameters": schema(n), "strict": True}}
        for n, (text, _) in SCHEMAS.items()
    ]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    called: list[tuple[str, dict[str, Any]]] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        asked: dict[str, Any] = {
            "model": "m",
            "messages": messages,
            "tools": tools,
            "temperature": 0,
            "max_tokens": 120,
        }
        if stream:
            with client.chat.completions.stream(**asked) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
        message = choice.message
        print(turn, "->", message.content, [(c.function.name, c.function.arguments) for c in message.tool_calls or []])
        said: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            said["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": c.function.arguments},
                }
                for c in message.tool_calls
            ]
        messages.append(said)
        for made in message.tool_calls or []:
            called.append((made.function.name, json.loads(made.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": call(*called[-1])})
    assert choice.finish_reason == "stop"
    check(called, message.content or "")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(qwen: LiveServer, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=qwen.url, api_key="none", max_retries=0, timeout=300)
    tools: list[Any] = [
        {"name": n, "description": text, "input_schema": schema(n), "strict": True} for n, (text, _) in SCHEMAS.items()
    ]
    messages: list[Any] = []
    called: list[tuple[str, dict[str, Any]]] = []
    results: list[Any] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": turn}]})
        asked: dict[str, Any] = {"model": "m", "system": SYSTEM, "messages": messages, "tools": tools,
                                 "max_tokens": 120, "extra_body": {"temperature": 0}}  # fmt: skip
        if stream:
            with client.messages.stream(**asked) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": reply.content})
        results = []
        for block in reply.content:
            if block.type == "tool_use":
                assert reply.stop_reason == "tool_use"
                called.append((block.name, dict(block.input)))  # type: ignore[call-overload]
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": call(*called[-1])})
    assert reply.stop_reason == "end_turn"
    check(called, "".join(block.text for block in reply.content if block.type == "text"))


def test_the_prompt_is_the_one_of_the_models_own_template(qwen: LiveServer) -> None:
    """Token by token, tool calls and results included, as transformers renders the template in the file."""
    from gguf import GGUFReader
    from transformers.utils.chat_template_utils import render_jinja_template

    calls = [("call_1", "get_weather", {"city": "Oslo"}), ("call_2", "calculate", {"expression": "4 * 9"})]
    tools = [
        {"type": "function", "function": {"name": n, "description": text, "parameters": schema(n)}}
        for n, (text, _) in SCHEMAS.items()
    ]
    ours: list[Any] = [{"role": "system", "content": SYSTEM}]
    theirs: list[Any] = [{"role": "system", "content": SYSTEM}]
    for (call_id, name, arguments), turn in zip(calls, TURNS, strict=False):
        made = {"name": name, "arguments": json.dumps(arguments)}
        ours += [
            {"role": "user", "content": turn},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": made}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": "4"},
        ]
        theirs += [
            {"role": "user", "content": turn},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
            {"role": "tool", "content": "4"},
        ]
    field = GGUFReader(MODEL).fields["tokenizer.chat_template"]
    template = bytes(field.parts[field.data[0]]).decode()
    rendered = render_jinja_template(
        conversations=[theirs], tools=tools, chat_template=template, add_generation_prompt=True
    )[0][0]
    body = {"model": "m", "messages": ours, "tools": tools, "max_tokens": 1}
    used = qwen.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    ids = qwen.post("/tokenize", json={"prompt": rendered, "add_special_tokens": False}).json()["tokens"]
    assert used == len(ids)
    again = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    cached = qwen.post("/generate", json=again).json()["meta_info"]["cached_tokens"]
    assert cached == len(ids) - 1, "the cache holds the very same tokens"
