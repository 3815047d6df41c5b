"""Requests that are right in form and out of all proportion: refused or answered at once, never a 5xx, and no header,
thread or memory grows with them (HAZARDS 7)."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from support.fake_engine import ThinkingTemplate
from support.front_world import make_world

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def test_hints_do_not_fill_the_headers():
    async with make_world(template=ThinkingTemplate()) as world:
        names = {f"variable_number_{i}": i for i in range(20_000)}
        reply = await world.client.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": names})
        assert reply.status_code == 200
        header = reply.headers["x-ceiba-hints"]
        assert header.startswith("chat_template_kwargs.variable_number_0,")
        assert header.endswith(",...")
        assert len(header) <= limits.MAX_HINTS_CHARS + 4


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/tokenize", "prompt", {}),
        ("/v1/tokenize", "prompt", {}),
        ("/parse_function_call", "text", {"tool_call_parser": "qwen25"}),
        ("/separate_reasoning", "text", {"reasoning_parser": "qwen3"}),
    ],
)
async def test_texts_that_are_only_looked_at_have_a_limit(path, field, more):
    async with make_world() as world:
        reply = await world.client.post(path, json={field: "z" * (limits.MAX_TOOL_TEXT_CHARS + 1), **more})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
        assert str(limits.MAX_TOOL_TEXT_CHARS) in reply.json()["error"]["message"]


async def test_many_tokens_are_counted_and_listed():
    async with make_world() as world:
        texts = ["ab" * 100] * 1000
        answer = (await world.client.post("/tokenize", json={"prompt": texts})).json()
        assert answer["count"] == [200] * 1000
        assert answer["tokens"][-1] == list(b"ab" * 100)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"query": "q" * 1_000_000, "items": ["i"] * 4096, "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": [1] * 500_000, "items": [[2]] * 4096, "label_token_ids": [1]}, "items"),
        (
            "/v1/decisions",
            {"input": "x" * 1_000_000, "questions": [{"type": "predicate", "instructions": "is it?"}] * 400},
            "input",
        ),
    ],
)
async def test_what_stands_in_every_prompt_is_counted_in_every_prompt(path, body, param):
    async with make_world() as world:
        tracemalloc.start()
        try:
            reply = await world.client.post(path, json=body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert str(limits.MAX_JOINED) in reply.json()["error"]["message"]
        assert peak < 200 << 20


async def test_many_ids_become_texts_and_one_wrong_id_is_found_among_them():
    async with make_world() as world:
        tokens = [list(b"ab" * 100)] * 1000
        answer = (await world.client.post("/detokenize", json={"tokens": tokens})).json()
        assert answer["text"] == ["ab" * 100] * 1000
        for wrong in ([True], [[1]], [10**6], [-1]):
            reply = await world.client.post("/detokenize", json={"tokens": [*tokens, wrong]})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize("value", [2**64, -(2**70), {"deep": [10**40]}])
async def test_numbers_in_free_form_json_may_have_any_size(value):
    async with make_world() as world:
        deliver = world.engine.to_scheduler

        def encoded(message):
            msgspec.msgpack.encode(message)
            deliver(message)

        world.engine.to_scheduler = encoded
        with pytest.raises(BadRequest, match="64 bits"):
            await world.front.control("attach", {"config": value})
        assert not world.front._controls


@pytest.mark.parametrize("value", [2**63, 2**64, 2**200, -(2**63), -(2**70)])
@pytest.mark.parametrize("name", ["depth", "width"])
async def test_numbers_in_a_query_may_have_any_size(name, value):
    async with make_world() as world:
        deliver = world.engine.to_scheduler

        def encoded(message):
            msgspec.msgpack.encode(message)  # as the real port does
            deliver(message)

        world.engine.to_scheduler = encoded
        reply = await world.client.get(f"/cache/tree?{name}={value}")
        assert reply.status_code < 500, reply.text
