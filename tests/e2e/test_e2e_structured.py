"""Structured output on the real server with the real model: every form of constraint, streamed and not, together."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from live_server import LiveServer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Describe a person as JSON."}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def person_format() -> dict:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_json_schema_through_chat(client, temperature):
    reply = client.chat.completions.create(
        model="m", messages=MESSAGES, response_format=person_format(), temperature=temperature, max_tokens=200, seed=1
    )
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(reply.choices[0].message.content), PERSON)


def test_a_stream_gives_the_same_object(client):
    chunks = client.chat.completions.create(
        model="m", messages=MESSAGES, response_format=person_format(), temperature=0, max_tokens=200, stream=True
    )
    parts, finish = [], None
    for chunk in chunks:
        parts.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    whole = client.chat.completions.create(
        model="m", messages=MESSAGES, response_format=person_format(), temperature=0, max_tokens=200
    )
    assert finish == "stop"
    assert "".join(parts) == whole.choices[0].message.content


def native(server: LiveServer, **sampling: object) -> dict:
    reply = server.post("/generate", json={"text": "Answer: ", "sampling_params": {"max_new_tokens": 64, **sampling}})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("constraint", "expression"),
    [
        ({"regex": r"(yes|no), [0-9]{3}"}, r"(yes|no), [0-9]{3}"),
        ({"ebnf": 'root ::= "v" digit "." digit\ndigit ::= [0-9]'}, r"v[0-9]\.[0-9]"),
        ({"choice": ["crimson", "teal", "no (none)"]}, r"crimson|teal|no \(none\)"),
        ({"json_schema": {"enum": ["left", "right"]}}, '"left"|"right"'),
    ],
)
def test_native_constraints_hold_at_temperature_one(server, constraint, expression):
    for seed in range(3):
        answer = native(server, temperature=1, seed=seed, **constraint)
        assert re.fullmatch(expression, answer["text"]), answer["text"]
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_constrained_and_free_requests_share_batches(server):
    """Greedy answers are the same alone and in company."""
    alone = native(server, temperature=0, json_schema=PERSON, max_new_tokens=120)["text"]
    free = native(server, temperature=0, max_new_tokens=24)["text"]
    jobs = [{"json_schema": PERSON, "max_new_tokens": 120}, {"max_new_tokens": 24}, {"regex": "[a-f]{20}"}] * 2
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: native(server, temperature=0, **job)["text"], jobs))
    for job, text in zip(jobs, answers, strict=True):
        if "regex" in job:
            assert re.fullmatch("[a-f]{20}", text)
        else:
            assert text == (alone if "json_schema" in job else free)
    jsonschema.validate(json.loads(alone), PERSON)


def test_json_object_and_the_empty_schema(client):
    reply = client.chat.completions.create(
        model="m", messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=120
    )
    text = reply.choices[0].message.content
    assert text.startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_structural_tags(server):
    tags = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "I call "},
                {
                    "type": "tag",
                    "begin": "<f>",
                    "content": {
                        "type": "json_schema",
                        "json_schema": {
                            "type": "object",
                            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                            "required": ["n"],
                            "additionalProperties": False,
                        },
                    },
                    "end": "</f>",
                },
            ],
        },
    }
    text = native(server, temperature=0, structural_tag=tags)["text"]
    found = re.fullmatch(r"I call <f>(.*)</f>", text, re.DOTALL)
    assert found, text
    assert json.loads(found[1])["n"] in range(10)


@pytest.mark.parametrize(
    ("fields", "param", "place"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"type": "x"}}}}},
         "response_format.json_schema.schema", "#/items"),
        ({"extra_body": {"regex": "(?=a)"}}, "regex", "lookahead"),
        ({"extra_body": {"regex": "a", "choice": ["b"]}}, "choice", "exclude"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_400_with_its_place(client, fields, param, place):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4, **fields)
    assert error.value.param == param
    assert place in error.value.message


def test_what_only_the_compiler_finds_is_a_400_too(server):
    body = {"text": "x", "sampling_params": {"json_schema": {"properties": {"a": {"uniqueItems": True}}}}}
    for stream in (False, True):
        reply = server.post("/generate", json={**body, "stream": stream})
        assert reply.status_code == 400, reply.text
        assert "#/properties/a: uniqueItems" in reply.json()["error"]["message"]


def test_the_ledger_balances_afterwards(server):
    state = server.info()["internal_states"][0]
    assert state["num_grammar_queue_reqs"] == 0
    assert state["running"] == 0
    assert state["tokens_locked"] == 0
