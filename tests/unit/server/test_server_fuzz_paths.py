"""Every value of a full request of every protocol, replaced in turn by what it is not: an answer or 4xx, never 5xx."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from support.fake_engine import ThinkingTemplate, make_config
from support.front_world import make_world

WRONG = [[], [[]], {}, {"type": []}, [{"type": {}}], 0, -1, 0.5, 1e300, True, None, "", "auto", ["x"]]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": ["string", "null"], "enum": ["x", None]}, "b": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"anyOf": [{"type": "integer", "minimum": 1}, {"const": 0}]}},
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
SHORT = {"temperature": 0.5, "top_p": 0.9, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "m",
        "prompt": [[5, 6], [7]],
        "max_tokens": 2,
        "stop": ["s"],
        "logit_bias": {"5": 1.0},
        "n": 1,
        "logprobs": 1,
        "echo": True,
        "seed": 3,
        "user": "u",
        "stream_options": None,
        **SHORT,
    },
    "/v1/chat/completions": {
        "model": "m",
        "max_tokens": 3,
        "tools": [{"type": "function", "function": FUNCTION}],
        "stop": ["s"],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "logprobs": True,
        "top_logprobs": 2,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c1", "content": "t"},
            {"role": "user", "content": "go"},
        ],
        "response_format": None,
        "chat_template_kwargs": {"k": 1},
        "reasoning_effort": "low",
        "metadata": {"a": "b"},
        "cache_control": {"type": "ephemeral", "ttl": "5m"},
        "logit_bias": {"5": 1},
        "parallel_tool_calls": False,
        **SHORT,
    },
    "/v1/chat/completions#schema": {
        "model": "m",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "go"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    },
    "/v1/chat/completions#image": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}],
            }
        ],
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 1030,
        "stop_sequences": ["s"],
        "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "is_error": False,
                        "content": [{"type": "text", "text": "r"}],
                    },
                    {"type": "text", "text": "q"},
                ],
            },
        ],
    },
    "/v1/messages#image": {
        "model": "m",
        "max_tokens": 3,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}],
            }
        ],
    },
    "/v1/messages/count_tokens": {
        "model": "m",
        "system": "s",
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "title": "t",
                        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                        "citations": {"enabled": False},
                    }
                ],
            }
        ],
    },
    "/v1/responses": {
        "model": "m",
        "max_output_tokens": 3,
        "instructions": "i",
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "metadata": {"a": "b"},
        "top_logprobs": 1,
        "previous_response_id": None,
        "store": False,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r"}]},
        ],
    },
    "/v1/responses#schema": {
        "model": "m",
        "max_output_tokens": 3,
        "input": "q",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
    },
    "/api/chat": {
        "model": "m",
        "messages": [
            {"role": "user", "content": "q", "images": []},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x"}}}]},
            {"role": "tool", "tool_name": "f", "content": "r"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "format": None,
        "think": "low",
        "stream": False,
        "keep_alive": "5m",
        "options": {"num_predict": 3, "temperature": 0.5, "stop": ["s"], "seed": 1, "top_k": 3},
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/api/generate": {
        "model": "m",
        "prompt": "p",
        "suffix": None,
        "system": "s",
        "raw": False,
        "format": SCHEMA,
        "context": None,
        "stream": False,
        "options": {"num_predict": 3},
    },
    "/generate": {
        "input_ids": [[5, 6], [7]],
        "sampling_params": [{"max_new_tokens": 2, "stop": ["s"], "temperature": 0}, {"max_new_tokens": 1}],
        "return_logprob": [True, True],
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "token_ids_logprob": [[5], [6]],
        "rid": ["a", "b"],
        "stream": False,
        "session_params": None,
        "priority": None,
    },
    "/v1/score": {
        "query": "q",
        "items": ["a", "b"],
        "label_token_ids": [1, 2],
        "apply_softmax": True,
        "item_first": False,
    },
    "/v1/decisions": {
        "input": "q",
        "questions": [
            {"type": "choice", "instructions": "i", "choices": [{"value": "a"}, {"value": "b"}]},
            {"type": "score", "instructions": "i", "levels": [{"label": "a"}, {"label": "b"}]},
        ],
    },
    "/parse_function_call": {
        "text": "x",
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_call_parser": "qwen25",
    },
    "/tokenize": {"prompt": ["a", "b"], "add_special_tokens": True},
    "/detokenize": {"tokens": [[5, 6]], "skip_special_tokens": True},
}
POOLING: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/embeddings": (
        "embed",
        {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2, "user": "u"},
    ),
    "/encode": ("embed", {"input_ids": [[5, 6], [7]], "model": "m"}),
    "/api/embed": (
        "embed",
        {"model": "m", "input": ["a"], "truncate": True, "dimensions": 2, "options": {"k": 1}, "keep_alive": "5m"},
    ),
    "/api/embeddings": ("embed", {"model": "m", "prompt": "p", "options": {"k": 1}}),
    "/v1/classify": ("classify", {"model": "m", "input": [[5, 6], [7]], "user": "u"}),
    "/v1/rerank": (
        "rerank",
        {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    ),
}
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/generate")
SAID = '<think>hm</think>x <tool_call>{"name": "f", "arguments": {"a": "x", "b": "1"}}</tool_call>'


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*at, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body


@pytest.mark.parametrize("route", BODIES)
def test_no_wrong_value_anywhere_breaks_a_protocol(route: str) -> None:
    asyncio.run(try_all(route, BODIES[route]))


@pytest.mark.parametrize("route", STREAMS)
def test_no_wrong_value_anywhere_breaks_a_stream(route: str) -> None:
    asyncio.run(try_all(route, BODIES[route] | {"stream": True}))


@pytest.mark.parametrize("route", POOLING)
def test_no_wrong_value_anywhere_breaks_a_route_that_gives_numbers(route: str) -> None:
    task, body = POOLING[route]
    asyncio.run(try_all(route, body, task=task))


async def try_all(route: str, body: dict[str, Any], **options: Any) -> None:
    options |= {"reasoning_parser": "auto", "tool_call_parser": "qwen25", "enable_response_store": True}
    config, broken = make_config(context=2048, **options), []
    scheduler = msgspec.structs.replace(config.scheduler, cache_pin_budget=1000)
    config = msgspec.structs.replace(config, scheduler=scheduler)
    async with make_world(config, template=ThinkingTemplate()) as world:
        world.engine.speak = SAID
        world.engine.width = 3 if config.model.task == "rerank" else 4
        reply = await world.client.post(route.partition("#")[0], content=msgspec.json.encode(body))
        assert reply.status_code == (400 if route.endswith("#image") else 200), reply.text
        for path in paths(body):
            for value in WRONG:
                given = changed(body, path, value)
                reply = await world.client.post(route.partition("#")[0], content=msgspec.json.encode(given))
                if reply.status_code >= 500 or "internal_error" in reply.text:
                    broken.append((path, value, reply.text[:200]))
        await world.idle()
    assert not broken
