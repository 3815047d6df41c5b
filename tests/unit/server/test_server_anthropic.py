"""Anthropic's protocol: the real SDK against uvicorn on loopback, and what is refused."""

from __future__ import annotations

import json

import anthropic
import httpx
import pytest

from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, ThinkingTemplate, make_config, text_for
from support.front_world import RawCall, make_world
from support.http_server import serving

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = list(b"<user>hello\n<assistant>")
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"


@pytest.fixture(scope="module")
def server():
    def make():
        engine = FakeEngine(0.0002)
        config = make_config(context=4096, api_key="key", reasoning_parser="auto")
        return Front(config, ByteTokenizer(), ThinkingTemplate(), engine), engine

    with serving(make) as made:
        yield made


@pytest.fixture
def engine(server):
    yield server[1]
    server[1].speak = None
    server[1].burst = 1


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server[0], api_key="key", max_retries=0) as client:
        yield client


def test_a_message(client):
    answer = client.messages.create(model="any", max_tokens=10, messages=MESSAGES)
    assert answer.content[0].text == text_for(PROMPT, None)[:10]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "any")
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(PROMPT)
    assert answer.usage.output_tokens == 10
    assert answer.id.startswith("msg_")
    assert answer._request_id == answer.id


def test_system_blocks_and_stop_sequences(client, engine):
    engine.speak = "one two three"
    answer = client.messages.create(
        model="m",
        max_tokens=50,
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "count"}]}],
        stop_sequences=["three"],
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    )
    assert answer.content[0].text == "one two "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "three")
    sent = engine.received[-1]
    assert bytes(sent.input_ids[::4]) == b"<system>Be short.\n<user>count\n<assistant>"
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.top_p) == (0.5, 5, 0.9)


@pytest.mark.parametrize("burst", [1, 4, 1000])
def test_a_stream_is_what_the_sdk_expects_and_adds_up_to_the_whole(client, engine, burst):
    engine.burst, engine.speak = burst, SAID
    fields = {"model": "m", "max_tokens": 500, "messages": MESSAGES, "tools": [WEATHER]}
    with client.messages.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_message()
    whole = client.messages.create(**fields)

    def blocks(message):
        return [{**b.model_dump(), "id": None} for b in message.content]

    assert blocks(final) == blocks(whole)
    assert [b.type for b in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == "hm"
    assert final.content[1].text == "Let me see."
    assert final.content[2].input == {"city": "Bern"}
    assert final.stop_reason == whole.stop_reason == "tool_use"
    kinds = [e.type for e in events]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("message_delta") == 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call_that_max_tokens_cuts(client, engine, choice):
    """The stream brings the arguments as far as they go; a whole message has no half object to give."""
    engine.speak = f"hm</think>{CALL}"
    limit = engine.speak.index("rn")
    fields = {"model": "m", "max_tokens": limit, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice}
    _, block = client.messages.create(**fields).content
    assert (block.type, block.name, block.input) == ("tool_use", "weather", {})
    with client.messages.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_message()
    deltas = [e.delta for e in events if e.type == "content_block_delta"]
    assert "".join(d.partial_json for d in deltas if d.type == "input_json_delta") == '{"city": "Be'
    assert final.stop_reason == "max_tokens"
    assert [b.type for b in final.content] == ["thinking", "tool_use"]


def test_both_ends_of_a_stream_carry_input_counters(client):
    """HAZARD 4."""
    list(client.messages.create(model="m", max_tokens=3, messages=MESSAGES, stream=True))
    events = list(client.messages.create(model="m", max_tokens=3, messages=MESSAGES, stream=True))
    start = next(e for e in events if e.type == "message_start").message.usage
    delta = next(e for e in events if e.type == "message_delta").usage
    for usage in (start, delta):
        assert usage.input_tokens == 1
        assert usage.cache_read_input_tokens == len(PROMPT) - 1
        assert usage.cache_creation_input_tokens == 0
    assert delta.output_tokens == 3


def test_an_answer_that_is_aborted_does_not_look_finished(client, server, engine):
    engine.speak, engine.step_seconds = "word " * 200, 0.02
    try:
        with client.messages.stream(model="m", max_tokens=1000, messages=MESSAGES) as stream:
            for event in stream:
                if event.type == "message_start":
                    key = {"authorization": "Bearer key"}
                    ended = httpx.post(f"{server[0]}/abort_request", json={"rid": event.message.id}, headers=key)
                    assert ended.json() == {"aborted": 1}
            final = stream.get_final_message()
    finally:
        engine.step_seconds = 0.0002
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens < 200


MARK = {"cache_control": {"type": "ephemeral"}}


def text_block(text, **more):
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize(
    ("name", "fields", "upto"),
    [
        ("none", {}, ""),
        ("top", MARK, "<system>rules\n<user>one\n<assistant>two\n<user>three\n<assistant>"),
        ("last", {"last": MARK}, "<system>rules\n<user>one\n<assistant>two\n<user>three\n<assistant>"),
        ("first", {"first": MARK}, "<system>rules\n<user>one\n"),
        ("system", {"system": MARK}, "<system>rules\n"),
    ],
)
def test_marks_for_the_cache_are_accounted_for(client, name, fields, upto):
    """New tokens up to the last mark were written, cached ones read; the three counters are the whole prompt. The
    second, equal request has written nothing."""
    rules = f"{name} rules"  # a prompt of its own: nothing is cached of it
    upto = upto.replace("rules", rules)
    body = {
        "model": "m",
        "max_tokens": 3,
        "system": [text_block(rules, **fields.get("system", {}))],
        "messages": [
            {"role": "user", "content": [text_block("one", **fields.get("first", {}))]},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": [text_block("three", **fields.get("last", {}))]},
        ],
        "extra_body": {k: v for k, v in fields.items() if k == "cache_control"},
    }
    whole = len(f"<system>{rules}\n<user>one\n<assistant>two\n<user>three\n<assistant>")
    first = client.messages.create(**body).usage
    assert first.cache_creation_input_tokens == max(0, len(upto) - first.cache_read_input_tokens)
    assert first.input_tokens + first.cache_creation_input_tokens + first.cache_read_input_tokens == whole
    assert first.cache_read_input_tokens <= len("<system>")
    with client.messages.stream(**body) as stream:
        events = list(stream)
    start = next(e for e in events if e.type == "message_start").message.usage
    delta = next(e for e in events if e.type == "message_delta").usage
    for usage in (start, delta):
        assert usage.cache_read_input_tokens == whole - 1
        assert usage.cache_creation_input_tokens == (1 if len(upto) == whole else 0)
        assert usage.input_tokens == whole - 1 - usage.cache_read_input_tokens + (0 if len(upto) == whole else 1)


def test_what_is_no_mark_is_refused_with_its_place(client):
    messages = [{"role": "user", "content": [text_block("x"), text_block("y", cache_control={"type": "forever"})]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]\.cache_control"):
        client.messages.create(model="m", max_tokens=3, messages=messages)
    with pytest.raises(anthropic.BadRequestError, match="cache_control"):
        client.messages.count_tokens(model="m", messages=MESSAGES, extra_body={"cache_control": {"ttl": "9h"}})


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"thinking": {"type": "disabled", "zzz": 1}}, "thinking.zzz"),
        ({"output_config": {"zzz": 1}}, "output_config.zzz"),
        ({"tool_choice": {"type": "auto", "zzz": 1}}, "tool_choice.zzz"),
        ({"messages": [{"role": "user", "content": "x", "zzz": 1}]}, "messages[0].zzz"),
        ({"messages": [{"role": "user", "content": [text_block("x", zzz=1)]}]}, "messages[0].content[0].zzz"),
        ({"system": [text_block("x", zzz=1)]}, "system[0].zzz"),
        ({"tools": [{**WEATHER, "zzz": 1}]}, "tools[0].zzz"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "zzz": 1}]}]},
            "messages[0].content[0].zzz",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {"type": "text", "data": "x"},
                                "citations": {"enabled": True},
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].citations",
        ),
    ],
)
def test_nothing_inside_is_ignored_in_silence(client, fields, place):
    body = {"messages": MESSAGES, **fields}
    extra = {k: v for k, v in body.items() if k != "messages"}
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(model="m", max_tokens=3, messages=body["messages"], extra_body=extra)
    assert place in error.value.body["error"]["message"]


def test_what_usual_clients_send_along_is_taken(client, engine):
    """Fields of the SDK that ask for what happens here in any case, or tell of an earlier answer."""
    tool = {**WEATHER, "eager_input_streaming": True, "allowed_callers": ["direct"], "defer_loading": False}
    cited = {"type": "char_location", "cited_text": "a", "document_index": 0, "start_char_index": 0}
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}, "caller": {"type": "direct"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [text_block("a", citations=[cited]), use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5 degrees"}]},
    ]
    client.messages.create(model="m", max_tokens=3, messages=messages, tools=[tool])
    assert b"5 degrees" in bytes(engine.received[-1].input_ids[::4])


def test_a_document_is_read_with_its_title(client, engine):
    document = {"type": "document", "source": {"type": "text", "data": "body"}, "title": "T", "context": "C"}
    client.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": [document]}])
    assert bytes(engine.received[-1].input_ids[::4]) == b"<user>T\nC\nbody\n<assistant>"


def test_a_tool_conversation(client, engine):
    engine.speak = "It is sunny."
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    answer = client.messages.create(model="m", max_tokens=50, messages=messages, tools=[WEATHER])
    assert answer.content[0].text == "It is sunny."
    assert answer.stop_reason == "end_turn"


def test_thinking_can_be_switched_off_and_bounded(client, engine):
    engine.speak = "x" * 300
    client.messages.create(
        model="m", max_tokens=200, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 100}
    )
    assert engine.received[-2].sampling.max_new_tokens == 100
    with pytest.raises(anthropic.BadRequestError, match="less than max_tokens"):
        client.messages.create(
            model="m", max_tokens=100, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 100}
        )
    client.messages.create(model="m", max_tokens=20, messages=MESSAGES, thinking={"type": "disabled"})


def test_a_prefilled_answer_is_continued(client, engine):
    client.messages.create(model="m", max_tokens=2, messages=[*MESSAGES, {"role": "assistant", "content": "The"}])
    assert bytes(engine.received[-1].input_ids[::4]) == b"<user>hello\n<assistant>The"


def test_count_tokens(client):
    counted = client.messages.count_tokens(model="m", messages=MESSAGES, system="s", tools=[WEATHER])
    assert counted.input_tokens == len(b"<system>s\n") + len(PROMPT)


def test_models(client):
    page = client.models.list()
    assert [m.id for m in page.data] == ["fake-model"]
    assert client.models.retrieve("fake-model").display_name == "fake-model"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "strange"}]}]}, "strange"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}, "redacted"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nope"}}, "nope"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"container": "c"}, "container"),
        ({"output_config": {"effort": "gigantic"}}, "effort"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
    ],
)
def test_what_cannot_be_is_refused_in_anthropics_shape(client, fields, match):
    with pytest.raises(anthropic.BadRequestError, match=match) as error:
        client.messages.create(**{"model": "m", "max_tokens": 5, "messages": MESSAGES, **fields})
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"


def test_a_wrong_key_and_a_full_queue_have_anthropics_kinds(server, client, engine):
    with (
        anthropic.Anthropic(base_url=server[0], api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as error,
    ):
        stranger.messages.create(model="m", max_tokens=5, messages=MESSAGES)
    assert error.value.body["error"]["type"] == "authentication_error"
    engine.max_waiting = 0
    try:
        with pytest.raises(anthropic.InternalServerError) as full:
            client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
    finally:
        engine.max_waiting = None
    assert full.value.status_code == 503
    assert full.value.body["error"]["type"] == "overloaded_error"


async def test_an_error_in_the_middle_of_a_stream_is_an_event():
    async with make_world(step_seconds=0.002) as world:
        body = {"model": "m", "max_tokens": 400, "messages": MESSAGES, "stream": True}
        call = RawCall(world.app, "/v1/messages", json.dumps(body).encode())
        await call.first_event()
        world.front.fail("gone")
        await call.task
        text = b"".join(m.get("body", b"") for m in call.sent).decode()
        last = text.rstrip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.partition("data: ")[2])["error"]["type"] == "overloaded_error"
