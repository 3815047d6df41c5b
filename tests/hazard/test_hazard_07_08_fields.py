"""HAZARDS 7 and 8: values that would hurt are refused by name before any fan-out; lengths around the context limit."""

from __future__ import annotations

import json

import pytest

from ceiba.core import limits
from support.fake_engine import VOCAB, make_config
from support.front_world import make_world

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
HUGE = 10**12


def chat(**fields):
    return CHAT, {"messages": MESSAGES, **fields}


def text(**fields):
    return TEXT, {"prompt": "hi", **fields}


def native(**fields):
    return NATIVE, {"text": "hi", "sampling_params": fields}


BAD = [
    *[(make(stop_token_ids=[v]), "stop_token_ids") for make in (chat, text, native) for v in (-1, VOCAB, HUGE, 10**30)],
    *[(make(logit_bias={v: 1}), "logit_bias") for make in (chat, text, native) for v in ("-1", str(VOCAB), str(HUGE))],
    *[(make(logit_bias={"1": v}), "logit_bias") for make in (chat, text, native) for v in (101, -101, 1e308)],
    (text(logit_bias={"x": 1}), "logit_bias"),
    (text(logit_bias={"9" * 30: 1}), "logit_bias"),
    (text(logit_bias={str(i): 1 for i in range(limits.MAX_LOGIT_BIAS + 1)}), "logit_bias"),
    *[(make(n=v), "n") for make in (chat, text, native) for v in (0, -1, limits.MAX_N + 1, HUGE)],
    *[(text(best_of=v), "best_of") for v in (0, -1, limits.MAX_N + 1, HUGE)],
    *[(text(logprobs=v), "logprobs") for v in (-1, limits.MAX_TOP_LOGPROBS + 1, HUGE)],
    *[(chat(logprobs=True, top_logprobs=v), "top_logprobs") for v in (-1, limits.MAX_TOP_LOGPROBS + 1, HUGE)],
    *[
        ((NATIVE, {"text": "hi", "return_logprob": True, "top_logprobs_num": v}), "top_logprobs_num")
        for v in (-1, HUGE)
    ],
    *[((NATIVE, {"text": "hi", "return_logprob": True, "logprob_start_len": v}), "logprob_start_len") for v in (-2, 9)],
    ((NATIVE, {"text": "hi", "return_logprob": True, "token_ids_logprob": [VOCAB]}), "token_ids_logprob"),
    *[(chat(max_tokens=v), "max_tokens") for v in (0, -1, 513, HUGE)],
    *[(chat(max_completion_tokens=v), "max_completion_tokens") for v in (0, -1, HUGE)],
    *[(text(max_tokens=v), "max_tokens") for v in (-1, 513, HUGE)],
    *[(native(max_new_tokens=v), "max_new_tokens") for v in (-1, 513, HUGE)],
    (text(max_tokens=4, min_tokens=5), "min_tokens"),
    (chat(max_tokens=4, min_tokens=5), "min_tokens"),
    (native(max_new_tokens=4, min_new_tokens=5), "min_new_tokens"),
    (text(min_tokens=-1), "min_tokens"),
    (text(min_tokens=HUGE), "min_tokens"),
    (text(min_tokens=100), "min_tokens"),
    ((TEXT, {"prompt": ""}), "prompt"),
    ((TEXT, {"prompt": []}), "prompt"),
    ((TEXT, {"prompt": [""]}), "prompt"),
    ((TEXT, {"prompt": [[]]}), "prompt"),
    ((TEXT, {"prompt": [-1]}), "prompt"),
    ((TEXT, {"prompt": [VOCAB]}), "prompt"),
    ((TEXT, {"prompt": [10**30]}), "prompt"),
    ((TEXT, {"prompt": ["x"] * (limits.MAX_BATCH + 1)}), "prompt"),
    ((TEXT, {"prompt": ["x"] * limits.MAX_BATCH, "n": 2}), "n"),
    ((NATIVE, {"text": ""}), "text"),
    ((NATIVE, {"input_ids": [[]]}), "input_ids"),
    ((CHAT, {"messages": []}), "messages"),
    ((CHAT, {"messages": MESSAGES * (limits.MAX_MESSAGES + 1)}), "messages"),
    *[(make(temperature=v), "temperature") for make in (chat, text, native) for v in (-0.1, 101, 1e300)],
    *[(make(top_p=v), "top_p") for make in (chat, text, native) for v in (0, -1, 1.01)],
    *[(make(min_p=v), "min_p") for make in (chat, text, native) for v in (-0.1, 1.1)],
    *[(make(top_k=v), "top_k") for make in (chat, text, native) for v in (0, -2, HUGE)],
    *[(make(frequency_penalty=v), "frequency_penalty") for make in (chat, text, native) for v in (-2.1, 2.1)],
    *[(make(presence_penalty=v), "presence_penalty") for make in (chat, text, native) for v in (-2.1, 2.1)],
    *[
        (make(repetition_penalty=v), "repetition_penalty")
        for make in (chat, text, native)
        for v in (0, -1, 1000, 2.4e-81, 0.009)  # what divides logits must leave them finite
    ],
    *[(text(seed=v), "seed") for v in (2**64, -(2**63) - 1, 10**40)],
    (text(stop=""), "stop"),
    (text(stop=["a"] * (limits.MAX_STOP_STRINGS + 1)), "stop"),
    (text(stop_regex=["a"] * (limits.MAX_STOP_EXPRESSIONS + 1)), "stop_regex"),
    (text(stop="a" * (limits.MAX_STOP_CHARS + 1)), "stop"),
    (text(stop_token_ids=[1] * (limits.MAX_STOP_TOKEN_IDS + 1)), "stop_token_ids"),
    (text(rid="x" * (limits.MAX_ID_CHARS + 1)), "rid"),
    (text(rid=""), "rid"),
    (text(cache_salt="x" * (limits.MAX_ID_CHARS + 1)), "cache_salt"),
    (text(temperature="hot"), "temperature"),
    (text(n="2"), "n"),
    (text(max_tokens=1.5), "max_tokens"),
]


@pytest.mark.parametrize("index", range(8))
async def test_bad_values_are_refused_by_name_before_any_fan_out(index):
    """An eighth of the list each, so that a failure says where; one server for all of its part."""
    async with make_world() as world:
        for (url, body), param in BAD[index::8]:
            reply = await world.client.post(url, json=body)
            shown = json.dumps(body)[:200]
            assert reply.status_code == 400, (url, shown, reply.text)
            error = reply.json()["error"]
            assert error["param"] == param, (url, shown, error)
            assert error["type"] == "invalid_request_error"
            assert world.engine.received == [], (url, shown)
            assert world.front.num_live == 0
        good = await world.client.post(TEXT, json={"prompt": "hi", "max_tokens": 1})
        assert good.status_code == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_json_does_not_have_are_refused(value):
    async with make_world() as world:
        body = f'{{"prompt": "hi", "temperature": {value}}}'.encode()
        reply = await world.client.post(TEXT, content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] in {"body", "temperature"}


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"messages": [{"role": "user", "content": "' + b"\\\\" * 3 + b'", "x": ' + b"[" * 70 + b"]" * 70 + b"}]}",
    ],
)
async def test_nesting_bombs_are_refused_before_parsing(body):
    async with make_world() as world:
        for url in (CHAT, TEXT, NATIVE):
            reply = await world.client.post(url, content=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "json_too_deep"


async def test_brackets_inside_strings_are_not_nesting():
    async with make_world() as world:
        prompt = '"[[{{' * 50 + "\\" * 7
        reply = await world.client.post(TEXT, json={"prompt": prompt, "max_tokens": 1})
        assert reply.status_code == 200, reply.text


async def test_ten_megabytes_of_headers_are_refused():
    async with make_world() as world:
        reply = await world.client.post(TEXT, json={"prompt": "x"}, headers={"x-big": "a" * (10 << 20)})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "headers"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused(announced):
    async def pieces():
        for _ in range(65):
            yield b" " * (1 << 20)

    async with make_world() as world:
        content = b" " * (65 << 20) if announced else pieces()
        reply = await world.client.post(TEXT, content=content)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"


CONTEXT = 64


@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize("max_tokens", [None, 1, 2])
async def test_prompts_around_the_context_limit(length, max_tokens):
    async with make_world(make_config(context=CONTEXT)) as world:
        body = {"prompt": [7] * length}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        reply = await world.client.post(TEXT, json=body)
        room = CONTEXT - length
        if room < 1 or (max_tokens or 0) > room:
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "context_length_exceeded"
            assert str(CONTEXT) in reply.json()["error"]["message"]
            assert world.engine.received == []
        else:
            assert reply.status_code == 200
            assert reply.json()["choices"][0]["finish_reason"] == "length"
            assert reply.json()["usage"]["total_tokens"] <= CONTEXT


@pytest.mark.parametrize("length", [CONTEXT, 3 * CONTEXT])
async def test_truncation_when_the_operator_allows_it(length):
    async with make_world(make_config(context=CONTEXT, allow_auto_truncate=True)) as world:
        reply = await world.client.post(TEXT, json={"prompt": [7] * length, "max_tokens": 9})
        assert reply.status_code == 200
        assert reply.json()["usage"]["total_tokens"] == CONTEXT


async def test_a_pool_smaller_than_the_context_is_the_limit():
    async with make_world(make_config(context=512, pool=32)) as world:
        reply = await world.client.post(TEXT, json={"prompt": [7] * 40, "max_tokens": 1})
        assert reply.status_code == 400
        assert "32" in reply.json()["error"]["message"]
