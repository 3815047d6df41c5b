"""The Responses API: the real openai SDK against uvicorn on loopback."""

from __future__ import annotations

import httpx
import openai
import pytest

from ceiba.core import limits
from ceiba.server.front import Front
from ceiba.server.responses.store import ResponseStore, Stored
from support.fake_engine import ByteTokenizer, FakeEngine, ThinkingTemplate, make_config, text_for
from support.front_world import RawCall, make_world
from support.http_server import serving, wait_until

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"


def serve(**config):
    def make():
        engine = FakeEngine(0.0002)
        made = make_config(context=4096, api_key="key", reasoning_parser="auto", **config)
        return Front(made, ByteTokenizer(), ThinkingTemplate(), engine), engine

    return serving(make)


@pytest.fixture(scope="module")
def server():
    with serve(enable_response_store=True) as made:
        yield made


@pytest.fixture(scope="module")
def plain():
    with serve() as made:
        yield made


@pytest.fixture
def engine(server):
    yield server[1]
    server[1].speak, server[1].burst, server[1].step_seconds = None, 1, 0.0002


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="key", max_retries=0) as client:
        yield client


def prompt(message):
    return bytes(message.input_ids[::4])


def test_a_response(client, engine):
    answer = client.responses.create(model="any", input="hello", instructions="Be short.", max_output_tokens=10)
    assert prompt(engine.received[-1]) == b"<system>Be short.\n<user>hello\n<assistant>"
    assert answer.output_text == text_for(list(prompt(engine.received[-1])), None)[:10]
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.model == "any"
    assert answer.usage.total_tokens == answer.usage.input_tokens + 10
    assert answer.id.startswith("resp_")


def test_a_forced_call_that_the_limit_cuts_is_incomplete(client, engine):
    engine.speak = f"hm</think>{CALL}"
    limit = engine.speak.index("rn")
    fields = {"model": "m", "input": "hello", "tools": [WEATHER], "tool_choice": "required"}
    answer = client.responses.create(**fields, max_output_tokens=limit)
    _, item = answer.output
    assert (item.type, item.name, item.arguments) == ("function_call", "weather", '{"city": "Be')
    assert (item.status, answer.status) == ("incomplete", "incomplete")
    events = list(client.responses.create(**fields, max_output_tokens=limit, stream=True))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item.arguments
    assert events[-1].response.output[1].arguments == item.arguments


@pytest.mark.parametrize("burst", [1, 5, 1000])
def test_a_stream_is_what_the_sdk_expects_and_adds_up_to_the_whole(client, engine, burst):
    engine.burst, engine.speak = burst, SAID
    fields = {"model": "m", "input": "hello", "tools": [WEATHER], "metadata": {"a": "b"}}
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = client.responses.create(**fields)

    def items(response):
        return [{**i.model_dump(), "id": None, "call_id": None, "parsed_arguments": None} for i in response.output]

    assert [i.type for i in final.output] == ["reasoning", "message", "function_call"]
    assert [i["type"] for i in items(final)] == [i["type"] for i in items(whole)]
    assert final.output_text == whole.output_text == "Let me see."
    assert final.output[0].content[0].text == whole.output[0].content[0].text == "hm"
    assert final.output[2].arguments == whole.output[2].arguments == '{"city": "Bern"}'
    assert final.output[2].name == "weather"
    assert final.status == whole.status == "completed"
    assert final.metadata == {"a": "b"}
    assert [e.sequence_number for e in events if hasattr(e, "sequence_number")] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert deltas == '{"city": "Bern"}'


def test_a_tool_conversation_from_the_answers_own_items(client, engine):
    engine.speak = SAID
    first = client.responses.create(model="m", input="hello", tools=[WEATHER])
    call = first.output[2]
    engine.speak = "It is sunny."
    items = [
        {"role": "user", "content": "hello"},
        *[i.model_dump(exclude_none=True) for i in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    second = client.responses.create(model="m", input=items, tools=[WEATHER])
    assert second.output_text == "It is sunny."
    assert prompt(engine.received[-1]) == b"<user>hello\n<assistant>Let me see.\n<tool>sunny\n<assistant>"


def test_a_conversation_goes_on_from_a_stored_response(client, engine):
    engine.speak = "first"
    first = client.responses.create(model="m", input="one", instructions="only here")
    engine.speak = "second"
    second = client.responses.create(model="m", input="two", previous_response_id=first.id)
    assert prompt(engine.received[-1]) == b"<user>one\n<assistant>first\n<user>two\n<assistant>"
    third = client.responses.create(model="m", input="three", previous_response_id=second.id, store=False)
    assert b"second\n<user>three" in prompt(engine.received[-1])
    assert client.responses.retrieve(second.id).output_text == "second"
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    assert [i.content for i in client.responses.input_items.list(second.id).data] == ["two"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.create(model="m", input="x", previous_response_id=first.id)


def test_background_runs_to_the_end(client, engine):
    engine.speak = "done"
    started = client.responses.create(model="m", input="hello", background=True)
    assert started.status == "queued"
    wait_until(lambda: client.responses.retrieve(started.id).status == "completed")
    assert client.responses.retrieve(started.id).output_text == "done"


def test_background_is_cancelled_in_the_middle(client, engine):
    engine.step_seconds = 0.02
    started = client.responses.create(model="m", input="hello", background=True)
    wait_until(lambda: client.responses.retrieve(started.id).status == "in_progress")
    cancelled = client.responses.cancel(started.id)
    assert cancelled.status == "cancelled"
    wait_until(lambda: engine.idle)
    stored = client.responses.create(model="m", input="hello", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(stored.id)


def test_a_stream_of_logprobs(client):
    fields = {
        "model": "m",
        "input": "hello",
        "max_output_tokens": 4,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**fields)
    assert len(whole.output[0].content[0].logprobs) == 4
    assert len(whole.output[0].content[0].logprobs[0].top_logprobs) == 2
    events = list(client.responses.create(stream=True, **fields))
    assert events[-1].response.output[0].content[0].logprobs == whole.output[0].content[0].logprobs


@pytest.mark.parametrize("field", [{"store": True}, {"previous_response_id": "resp_x"}, {"background": True}])
def test_nothing_is_stored_without_the_flag(plain, field):
    with (
        openai.OpenAI(base_url=f"{plain[0]}/v1", api_key="key", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="--enable-response-store"),
    ):
        client.responses.create(model="m", input="x", **field)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"input": []}, "empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "call_id"),
        ({"input": [{"role": "robot", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "gigantic"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "include"),
        ({"metadata": {str(i): "" for i in range(65)}}, "metadata"),
        ({"background": True, "stream": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, fields, match):
    with pytest.raises(openai.BadRequestError, match=match):
        client.responses.create(**{"model": "m", "input": "hello", **fields})


async def test_a_client_that_leaves_ends_its_stored_response():
    async with make_world(make_config(enable_response_store=True), step_seconds=0.01) as world:
        call = RawCall(world.app, "/v1/responses", b'{"input": "hello", "stream": true}')
        await call.first_event()
        await call.leave()
        text = b"".join(m.get("body", b"") for m in call.sent).decode()
        found = text.partition('"id":"')[2].partition('"')[0]
        assert (await world.client.get(f"/v1/responses/{found}")).json()["status"] == "cancelled"
        await world.idle()


def test_the_store_keeps_what_it_may():
    def stored(name, status="completed"):
        return Stored({"id": name, "status": status, "background": False}, [{"text": "x" * 1000}])

    store = ResponseStore(most=3, most_bytes=10**9)
    for i in range(5):
        store.add(stored(str(i)))
    assert len(store) == 3
    assert store.get("4").response["id"] == "4"
    small = ResponseStore(most=100, most_bytes=3500)
    small.add(stored("runs", "in_progress"))
    for i in range(5):
        small.add(stored(str(i)))
    assert small.get("runs")
    assert len(small) == 3
    assert limits.MAX_STORED_RESPONSES > 100


async def test_origins_may_call_when_allowed():
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with make_world(make_config(api_key="key", allowed_origins=("https://a.example",))) as world:
        reply = await world.client.options("/v1/chat/completions", headers=asked)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        other = await world.client.options("/v1/chat/completions", headers=asked | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        assert (await world.client.get("/v1/models", headers=asked)).status_code == 401
    async with make_world() as world:
        reply = await world.client.options("/v1/chat/completions", headers=asked)
        assert "access-control-allow-origin" not in reply.headers


def test_polling_a_stored_response_as_a_stream_is_refused(server):
    reply = httpx.get(f"{server[0]}/v1/responses/x?stream=true", headers={"authorization": "Bearer key"})
    assert reply.status_code == 400


def test_input_items_come_in_pages(client):
    items = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    made = client.responses.create(model="m", input=items, max_output_tokens=3, store=True)
    listed = client.responses.input_items.list
    assert [i.content for i in listed(made.id)] == ["c", "b", "a"]
    assert [i.content for i in listed(made.id, order="asc", limit=1)] == ["a", "b", "c"], "the SDK asks for every page"
    first = listed(made.id, order="asc", limit=2)
    assert first.has_more
    assert [i.content for i in listed(made.id, order="asc", after=first.last_id).data] == ["c"]
    with pytest.raises(openai.BadRequestError, match="limit"):
        listed(made.id, limit=101)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"reasoning": {"zzz": 1}}, "reasoning.zzz"),
        ({"text": {"zzz": 1}}, "text.zzz"),
        ({"tools": [{"type": "function", "name": "f", "zzz": 1}]}, "tools[0].zzz"),
        ({"tools": [{"type": "function", "name": "f", "allowed_callers": ["programmatic"]}]}, "allowed_callers"),
        ({"input": []}, "input is empty"),
    ],
)
def test_nothing_inside_is_ignored_in_silence(client, fields, place):
    body = {"input": "x", "max_output_tokens": 3, **fields}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="m", input=body.pop("input"), extra_body=body)
    assert place in error.value.message


def test_a_tool_that_the_model_may_call_itself_is_taken(client):
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "allowed_callers": ["direct"]}
    made = client.responses.create(model="m", input="x", max_output_tokens=3, tools=[{**tool, "defer_loading": False}])
    assert made.output
