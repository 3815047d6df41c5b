"""How each protocol's words for the shape of an answer reach the engine."""

from __future__ import annotations

import json

import msgspec
import pytest

from support.fake_engine import make_config

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGES = [{"role": "user", "content": "hello"}]


def sent(world):
    return next(m for m in reversed(world.engine.received) if type(m).__name__ == "Generate").sampling


async def chat(world, **fields):
    return await world.client.post(
        "/v1/chat/completions", json={"model": "m", "messages": MESSAGES, "max_tokens": 2, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema",
         SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"choice": ["a.b", "c"]}, "regex", r"(a\.b|c)"),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag", {"format": {"type": "any_text"}}),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "structural_tag",
         {"type": "structural_tag", "format": {"type": "any_text"}}),
    ],
)  # fmt: skip
async def test_chat_fields(world, fields, kind, text):
    reply = await chat(world, **fields)
    assert reply.status_code == 200, reply.text
    sampling = sent(world)
    value = getattr(sampling, kind)
    assert (value if isinstance(text, str) else json.loads(value)) == text
    assert [k for k in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(sampling, k) is not None] == [kind]


async def test_text_is_no_constraint(world):
    reply = await chat(world, response_format={"type": "text"})
    assert reply.status_code == 200
    assert not sent(world).constrained


async def test_the_other_routes_take_them_too(world):
    body = {"model": "m", "prompt": "x", "max_tokens": 2, "regex": "ab"}
    assert (await world.client.post("/v1/completions", json=body)).status_code == 200
    assert sent(world).regex == "ab"
    native = {"text": "x", "sampling_params": {"max_new_tokens": 2, "json_schema": SCHEMA}}
    assert (await world.client.post("/generate", json=native)).status_code == 200
    assert json.loads(sent(world).json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "choice": ["a"]}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}}},
         "response_format.json_schema.schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"regex": r"(a)\1"}, "regex"),
        ({"choice": []}, "choice"),
        ({"structural_tag": {}}, "structural_tag"),
    ],
)  # fmt: skip
async def test_refusals_name_the_callers_field(world, fields, param):
    reply = await chat(world, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not [m for m in world.engine.received if type(m).__name__ == "Generate"]


@pytest.mark.parametrize(("backend", "fields"), [("none", {"regex": "a"}), ("outlines", {"ebnf": 'root ::= "a"'})])
async def test_a_server_without_a_fitting_backend_says_so(worlds, backend, fields):
    config = make_config()
    config = msgspec.structs.replace(config, grammar=msgspec.structs.replace(config.grammar, backend=backend))
    world = await worlds(config=config)
    reply = await chat(world, **fields)
    assert reply.status_code == 400
    assert f"--grammar-backend {backend}" in reply.json()["error"]["message"]
