"""/v1/chat/completions over the fake engine: whole answers, streams, and that both say the same."""

from __future__ import annotations

import json

import msgspec
import pytest

from ceiba.server import answers
from support.fake_engine import EOS, PlainTemplate, logprob_of, text_for
from support.front_world import events

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = list(b"<user>hello\n<assistant>")
URL = "/v1/chat/completions"


async def chat(world, **fields):
    reply = await world.client.post(URL, json={"model": "m", "messages": MESSAGES, **fields})
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=answers.ChatCompletion)


async def stream(world, **fields):
    reply = await world.client.post(URL, json={"model": "m", "messages": MESSAGES, "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    data = events(reply.text)
    assert data[-1] == "[DONE]"
    return [msgspec.json.decode(d, type=answers.ChatCompletionChunk) for d in data[:-1]]


async def test_a_whole_answer_has_text_usage_and_reason(world):
    answer = await chat(world, max_tokens=10)
    (choice,) = answer.choices
    assert choice.message.content == text_for(PROMPT, None)[:10]
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == len(PROMPT) + 10
    assert answer.model == "m"
    assert answer.id.startswith("chatcmpl-")


async def test_without_max_tokens_the_answer_may_take_all_the_context(world):
    answer = await chat(world)
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("fields", [{}, {"n": 3, "seed": 5}, {"stop": "k"}, {"logprobs": True, "top_logprobs": 2}])
async def test_a_stream_adds_up_to_the_whole_answer(world, fields):
    whole = await chat(world, max_tokens=20, **fields)
    chunks = await stream(world, max_tokens=20, **fields)
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert mine[0].delta.role == "assistant"
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].finish_reason == choice.finish_reason
        entries = [e for c in mine if c.logprobs for e in c.logprobs.content]
        assert entries == (choice.logprobs.content if choice.logprobs else [])


async def test_a_stream_has_one_event_per_token(world):
    chunks = await stream(world, max_tokens=12)
    assert sum(bool(c.choices[0].delta.content) for c in chunks) == 12
    assert len({c.id for c in chunks}) == 1


async def test_the_choices_of_a_seeded_request_differ_and_repeat(world):
    first = await chat(world, max_tokens=8, n=3, seed=41)
    again = await chat(world, max_tokens=8, n=3, seed=41)
    texts = [c.message.content for c in first.choices]
    assert len(set(texts)) == 3
    assert texts == [c.message.content for c in again.choices]
    alone = await chat(world, max_tokens=8, seed=41)
    assert alone.choices[0].message.content == texts[0]


async def test_logprobs_carry_bytes_and_alternatives(world):
    answer = await chat(world, max_tokens=3, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    text = text_for(PROMPT, None)[:3]
    assert [e.token for e in entries] == list(text)
    assert [bytes(e.bytes) for e in entries] == [c.encode() for c in text]
    assert [e.logprob for e in entries] == [logprob_of(ord(c)) for c in text]
    assert [[t.logprob for t in e.top_logprobs] for e in entries] == [
        [logprob_of(ord(c)), logprob_of(ord(c)) - 1] for c in text
    ]


async def test_the_second_identical_request_reports_its_cached_tokens(world):
    first = await chat(world, max_tokens=2)
    second = await chat(world, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == len(PROMPT) - 1


async def test_another_salt_shares_nothing(world):
    await chat(world, max_tokens=2, cache_salt="tenant-a")
    other = await chat(world, max_tokens=2, cache_salt="tenant-b")
    same = await chat(world, max_tokens=2, cache_salt="tenant-b")
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert same.usage.prompt_tokens_details.cached_tokens == len(PROMPT) - 1


async def test_salt_and_key_cannot_be_confused(world):
    await chat(world, max_tokens=2, cache_salt="a", extra_key="b")
    other = await chat(world, max_tokens=2, cache_salt="b", extra_key="a")
    only = await chat(world, max_tokens=2, cache_salt="ab")
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert only.usage.prompt_tokens_details.cached_tokens == 0


async def test_an_end_token_ends_with_reason_stop(world):
    world.engine.speak = "ok"
    answer = await chat(world)
    assert answer.choices[0].message.content == "ok"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].matched_stop == EOS
    assert answer.usage.completion_tokens == 3


async def test_several_tokens_in_one_step_are_one_event(world):
    world.engine.burst = 4
    chunks = await stream(world, max_tokens=8)
    assert [len(c.choices[0].delta.content) for c in chunks if c.choices[0].delta.content] == [4, 4]


async def test_content_parts_are_joined_and_developer_speaks_as_system(world):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(
        world, messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}], max_tokens=1
    )
    sent = bytes(np_bytes(world.engine.received[-1].input_ids))
    assert sent == b"<system>x\n<user>a\nb\n<assistant>"


def np_bytes(ids: bytes) -> list[int]:
    return memoryview(ids).cast("i").tolist()


async def test_the_last_message_can_be_continued(world):
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    await chat(world, messages=messages, continue_final_message=True, max_tokens=1)
    assert bytes(np_bytes(world.engine.received[-1].input_ids)) == b"<user>hello\n<assistant>Once upon"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"lora_path": "x"}, "lora_path"),
        ({"regex": "(a"}, "regex"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"refuse": True}}, "messages"),
        ({"priority": 3}, "priority"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": "hello"}, "messages"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(world, fields, param):
    reply = await world.client.post(URL, json={"model": "m", "messages": MESSAGES, **fields})
    assert reply.status_code == 400, reply.text
    error = msgspec.json.decode(reply.content, type=answers.ErrorAnswer).error
    assert error.param == param
    assert error.message
    assert not [m for m in world.engine.received if type(m).__name__ == "Generate"]


async def test_harmless_values_and_hints_are_taken_and_named(world):
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"},
        "separate_reasoning": True,
        "reasoning_effort": "low",
    }
    reply = await world.client.post(URL, json={"model": "m", "messages": MESSAGES, "max_tokens": 1, **fields})
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-ceiba-hints"].split(",")) == {"user", "metadata", "prediction"}


async def test_a_model_without_template_says_so(worlds):
    world = await worlds(template=None)
    reply = await world.client.post(URL, json={"model": "m", "messages": MESSAGES})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "no_chat_template"


async def test_tool_calls_and_variables_reach_the_template(worlds):
    seen = []

    class Template(PlainTemplate):
        def source(self):
            return "{{ messages }}{{ enable_thinking }}"

        def render(self, messages, *args, **kwargs):
            seen.append((messages, kwargs))
            return super().render(messages, *args)

    world = await worlds(template=Template())
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    body = {"messages": messages, "max_tokens": 1, "reasoning_effort": "low"}
    body["chat_template_kwargs"] = {"enable_thinking": False, "unknown": 1}
    reply = await world.client.post(URL, json=body)
    assert reply.status_code == 200, reply.text
    ((shown, kwargs),) = seen
    assert shown == messages
    assert kwargs.items() >= {"enable_thinking": False, "unknown": 1, "reasoning_effort": "low"}.items()
    assert reply.headers["x-ceiba-hints"] == "chat_template_kwargs.unknown,reasoning_effort"


async def test_operator_defaults_lie_under_the_requests_fields(worlds):
    from support.fake_engine import make_config

    config = make_config(preferred_sampling_params={"temperature": 0.25, "top_p": 0.5})
    world = await worlds(config, sampling_defaults={"top_k": 20, "top_p": 0.9})
    await chat(world, max_tokens=1, temperature=0.75)
    sampling = world.engine.received[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.75, 0.5, 20)


async def test_ids_and_routing_keys_are_passed_on(world):
    reply = await world.client.post(
        URL,
        json={"messages": MESSAGES, "max_tokens": 1, "rid": "my-own"},
        headers={"x-smg-routing-key": "tenant"},
    )
    assert json.loads(reply.content)["id"] == "my-own"
    assert reply.headers["x-request-id"] == "my-own"
    message = world.engine.received[-1]
    assert (message.rid, message.routing_key) == ("my-own#0", "tenant")
