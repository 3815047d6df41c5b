"""Any JSON at all, on any route: an answer or a 4xx that has OpenAI's shape, never a 5xx, and nothing left behind."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ceiba.core import limits
from ceiba.server import answers, native_schemas
from ceiba.server.openai import schemas
from support.fake_engine import make_config
from support.front_world import make_world

NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**63, -(2**70)]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["user", "text", "a" * 300]))
ANY = st.recursive(
    LEAVES,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=6) | st.sampled_from(["role", "content"]), x),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": st.text(max_size=5) | ANY},
        optional={"tool_calls": ANY, "name": ANY},
    ),
    max_size=3,
)
IDS, TEXTS = st.lists(st.integers(-2, 300), max_size=5), st.lists(st.text(max_size=3), max_size=3)
PROMPT = st.text(min_size=1, max_size=6) | IDS | TEXTS | ANY


BOOLS, TEXT = st.booleans(), st.text(min_size=1, max_size=6)
PLAUSIBLE = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(1, 300),
    "min_p": st.floats(0, 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY),
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 4),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "sampling_seed": st.integers(-(2**63), 2**64 - 1),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 256), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 256).map(str), st.floats(-100, 100), max_size=3),
    "min_tokens": st.integers(0, 2),
    "min_new_tokens": st.integers(0, 2),
    "max_new_tokens": st.integers(0, 6),
    "top_logprobs": st.integers(0, 5),
    "top_logprobs_num": st.integers(0, 5),
    "logprob_start_len": st.integers(-1, 3),
    "rid": TEXT,
    "cache_salt": TEXT,
    "extra_key": TEXT,
    "model": TEXT,
    "user": TEXT,
    "stream_options": st.fixed_dictionaries({"include_usage": BOOLS}),
    "response_format": st.just({"type": "text"}),
    "prompt": TEXT,
    "messages": MESSAGES,
    "tokens": st.lists(st.integers(0, 256), max_size=5),
    **dict.fromkeys(["stream", "echo", "ignore_eos", "no_stop_trim", "return_logprob", "skip_special_tokens"], BOOLS),
}


def body(struct, **usual):
    def value(name):
        good = PLAUSIBLE.get(name)
        return ANY if good is None else st.one_of(good, good, good, ANY)

    optional = {name: value(name) for name in struct.__struct_fields__ if name not in usual}
    likely = [name for name in optional if name in PLAUSIBLE]
    names = st.lists(st.sampled_from(sorted(likely)), max_size=5, unique=True)
    rare = st.lists(st.sampled_from(sorted(optional)), max_size=1) | st.just([])
    return st.tuples(names, rare).flatmap(
        lambda picked: st.fixed_dictionaries({**usual, **{n: optional[n] for n in [*picked[0], *picked[1]]}})
    )


SMALL = st.integers(1, 5)
REQUESTS = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), body(schemas.ChatRequest, messages=MESSAGES, max_tokens=SMALL)),
    st.tuples(st.just("/v1/completions"), body(schemas.CompletionRequest, prompt=PROMPT, max_tokens=SMALL)),
    st.tuples(st.just("/generate"), body(native_schemas.GenerateRequest, text=PROMPT)),
    st.tuples(
        st.just("/generate"),
        st.fixed_dictionaries({"input_ids": PROMPT, "sampling_params": body(native_schemas.SamplingFields) | ANY}),
    ),
    st.tuples(st.just("/tokenize"), body(native_schemas.TokenizeRequest)),
    st.tuples(st.just("/detokenize"), body(native_schemas.DetokenizeRequest)),
    st.tuples(st.just("/abort_request"), body(native_schemas.AbortRequest)),
    st.tuples(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"]), ANY),
)


SEQUENCES = st.lists(REQUESTS, min_size=1, max_size=12)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=30, **QUIET)
@given(SEQUENCES)
def test_no_body_breaks_the_server(requests):
    asyncio.run(try_all(requests))


@pytest.mark.slow
@settings(max_examples=600, **QUIET)
@given(SEQUENCES)
def test_no_body_breaks_the_server_at_length(requests):
    asyncio.run(try_all(requests))


async def try_all(requests):
    async with make_world(make_config(context=64)) as world:
        for path, value in requests:
            reply = await world.client.post(path, content=msgspec.json.encode(value))
            event(f"{path} {reply.status_code}")
            assert reply.status_code < 500, (path, value, reply.text)
            if reply.status_code != 200:
                error = msgspec.json.decode(reply.content, type=answers.ErrorAnswer).error
                assert error.message
        await world.idle()
        good = await world.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert good.status_code == 200


SURROGATES = [b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00x"}', b'{"prompt": "x", "stop": "\\ud83d"}']


async def test_lone_surrogates_are_bad_requests():
    async with make_world() as world:
        for content in SURROGATES:
            reply = await world.client.post("/v1/completions", content=content)
            assert reply.status_code == 400, content
