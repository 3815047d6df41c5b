"""What the client sends, how it reads answers, and what it raises, against a scripted HTTP server."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from pydantic import BaseModel

import ceiba
from ceiba import client
from ceiba.client.api import Api
from ceiba.client.events import EventReader
from ceiba.client.exchange import RetryPolicy
from ceiba.core.errors import BadRequest, EngineFault, Forbidden, NotFound, Overloaded, Unauthorized, Unavailable
from support.scripted_server import Answer, error, events, scripted

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 8


class Company(BaseModel):
    name: str
    founded_year: int


@dataclass
class Point:
    x: int
    y: int


def native(text: str, reason: str = "stop", **meta: Any) -> dict[str, Any]:
    finish = {"type": reason}
    return {
        "text": text,
        "output_ids": [1],
        "meta_info": {"id": "r", "finish_reason": finish, "prompt_tokens": 5, "completion_tokens": 2, **meta},
    }


def chat(text: str, **message: Any) -> dict[str, Any]:
    return {
        "id": "c",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }


def test_the_package_exports_it_lazily() -> None:
    assert ceiba.Client is client.Client
    assert ceiba.SyncClient is client.SyncClient


async def test_generate_as_users_of_the_older_client_type_it() -> None:
    with scripted(Answer(native("Paris", cached_tokens=3))) as server:
        async with client.Client(server.url) as c:
            response = await c.generate(prompt="The capital of France is", max_tokens=50, temperature=0.7, seed=1)
    assert response == "Paris"
    assert isinstance(response, str)
    assert (response.finish_reason, response.usage) == ("stop", client.Usage(5, 2, 3))
    assert server.asked[0].path == "/generate"
    assert server.asked[0].body == {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 50, "temperature": 0.7, "sampling_seed": 1},
    }


async def test_chat_and_its_usage() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    with scripted(Answer(chat("hi", tool_calls=calls, reasoning_content="so"))) as server:
        async with client.Client(server.url, "key", model="m") as c:
            response = await c.chat(messages=[{"role": "user", "content": "hello"}], max_tokens=200)
    assert (response, response.usage, response.tool_calls, response.reasoning) == (
        "hi",
        client.Usage(9, 3, 4),
        calls,
        "so",
    )
    asked = server.asked[0]
    assert (asked.path, asked.headers["authorization"]) == ("/v1/chat/completions", "Bearer key")
    assert asked.body == {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}


def test_lists_of_prompts_and_several_choices() -> None:
    with scripted(Answer([native("a"), native("b")]), Answer([native("c"), native("d")])) as server:
        c = client.SyncClient(server.url)
        assert c.generate(["x", "y"]) == ["a", "b"]
        assert c.generate("x", n=2) == ["c", "d"]
    assert server.asked[0].body["text"] == ["x", "y"]
    assert server.asked[1].body["sampling_params"] == {"n": 2}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (Company, '{"name": "Apple", "founded_year": 1976}', Company(name="Apple", founded_year=1976)),
        (Point, '{"x": 1, "y": 2}', Point(1, 2)),
        (list[int], "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": null}', {"a": None}),
    ],
)
def test_structured_output_sends_the_schema_and_reads_an_instance(kind: Any, text: str, expected: Any) -> None:
    with scripted(Answer(native(text)), Answer(chat(text))) as server:
        c = client.SyncClient(server.url)
        assert c.generate("x", structured_output=kind) == expected
        assert c.chat("x", structured_output=kind) == expected
    sent = json.loads(server.asked[0].body["sampling_params"]["json_schema"])
    if kind is Company:
        assert sent == Company.model_json_schema()
    assert server.asked[1].body["response_format"]["json_schema"]["schema"] == sent


def test_an_answer_that_does_not_fit_is_an_error_with_its_text() -> None:
    with scripted(Answer(native('{"name": "App', "length"))) as server, pytest.raises(client.InvalidOutput) as caught:
        client.SyncClient(server.url).generate("x", structured_output=Company)
    assert caught.value.text == '{"name": "App'
    assert "max_tokens" in caught.value.message


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "schema": {"type": "object", "required": ["a"]}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["a"]}}},
    ],
)
def test_response_format_is_enforced_and_stays_text(given: dict[str, Any]) -> None:
    with scripted(Answer(native('{"a": 1}')), Answer(native("no json"))) as server:
        c = client.SyncClient(server.url)
        answer = c.generate("x", response_format=given)
        assert (answer, answer.json()) == ('{"a": 1}', {"a": 1})
        assert json.loads(server.asked[0].body["sampling_params"]["json_schema"])["required"] == ["a"]
        with pytest.raises(client.InvalidOutput):
            c.generate("x", response_format=given)
    with pytest.raises(BadRequest, match="response_format"):
        c.generate("x", response_format={"type": "xml"})


@pytest.mark.parametrize("given", [PNG, base64.b64encode(PNG).decode(), "https://example.org/cat.png"])
def test_images_go_through_the_template(given: str | bytes) -> None:
    with scripted(Answer(chat("a cat"))) as server:
        answer = client.SyncClient(server.url).generate(prompt="Describe", images=[given], max_tokens=150, seed=2)
    assert answer == "a cat"
    body = server.asked[0].body
    assert (body["max_tokens"], body["seed"]) == (150, 2)
    picture, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "Describe"}
    url = picture["image_url"]["url"]
    if isinstance(given, str) and given.startswith("https"):
        assert url == given
    else:
        assert url == "data:image/png;base64," + base64.b64encode(PNG).decode()


def test_what_is_no_image_is_refused_before_it_is_sent() -> None:
    c = client.SyncClient("http://127.0.0.1:9")
    with pytest.raises(BadRequest, match="neither a URL nor base64"):
        c.generate("x", images=["cat.jpg"])
    with pytest.raises(BadRequest, match="PNG"):
        c.generate("x", images=[b"plain text"])


async def test_streams_give_pieces_then_the_whole() -> None:
    line = "\u2028"  # a line separator to Python, none to SSE
    grown = [native("He", None), native("He" + line, None), native("He" + line + "llo")]
    data = events(*grown)
    with scripted(*[Answer(chunks=[data[:30], data[30:31], data[31:]]) for _ in range(2)]) as server:
        async with client.Client(server.url) as c:
            stream = c.generate("x", stream=True)
            assert [piece async for piece in stream] == ["He", line, "llo"]
            assert (stream.text, stream.text.usage.completion_tokens) == ("He" + line + "llo", 2)
            awaited = await c.generate("x", stream=True)
            assert await awaited.result() == "He" + line + "llo"
    assert server.asked[0].body["stream"] is True


def test_chat_streams_collect_calls_and_usage() -> None:
    def chunk(**delta: Any) -> dict[str, Any]:
        return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    pieces = [
        chunk(role="assistant", reasoning_content="hm"),
        chunk(content="Hel"),
        chunk(content="lo"),
        chunk(tool_calls=[{"index": 0, "id": "t", "function": {"name": "f", "arguments": '{"a'}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '": 1}'}}]),
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"id": "c", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    ]
    with scripted(Answer(chunks=[events(*pieces)])) as server:
        stream = client.SyncClient(server.url).chat("x", stream=True)
        assert list(stream) == ["Hel", "lo"]
    text = stream.text
    assert (text, text.reasoning, text.finish_reason, text.usage.completion_tokens) == ("Hello", "hm", "tool_calls", 2)
    assert text.tool_calls == [{"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    assert server.asked[0].body["stream_options"] == {"include_usage": True}


def test_a_stream_that_breaks_raises_after_its_last_piece() -> None:
    failed = {"error": {"message": "gone", "type": "internal_error"}}
    with scripted(
        Answer(chunks=[events(native("a"), done=False)]), Answer(chunks=[events(native("a"), failed, done=False)])
    ) as server:
        c = client.SyncClient(server.url)
        stream = iter(c.generate("x", stream=True))
        assert next(stream) == "a"
        with pytest.raises(client.ConnectionFailed, match="before its end"):
            next(stream)
        stream = iter(c.generate("x", stream=True))
        assert next(stream) == "a"
        with pytest.raises(EngineFault, match="gone"):
            next(stream)


def test_events_are_the_same_however_the_bytes_are_cut() -> None:
    data = events({"text": "ä\u2029"}, {"text": "b"})
    whole = list(EventReader().feed(data))
    for cut in range(len(data)):
        reader = EventReader()
        assert [*reader.feed(data[:cut]), *reader.feed(data[cut:])] == whole
        assert reader.done


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (500, EngineFault),
        (418, client.ServerError),
    ],
)
def test_errors_are_typed_and_carry_the_servers_message(status: int, kind: type[Exception]) -> None:
    with scripted(error(status, "because", param="prompt", code="why")) as server, pytest.raises(kind) as caught:
        client.SyncClient(server.url).generate("x")
    assert (caught.value.message, caught.value.param, caught.value.code, caught.value.status) == (
        "because",
        "prompt",
        "why",
        status,
    )
    assert len(server.asked) == 1


def test_a_full_server_is_tried_again_when_it_says() -> None:
    soon = format_datetime(datetime.now(UTC) - timedelta(seconds=5), usegmt=True)
    with scripted(
        error(503, "full", type="overloaded_error", headers={"Retry-After": "0.05"}),
        error(429, "slow down", headers={"Retry-After": soon}),
        Answer(native("ok")),
    ) as server:
        start = time.monotonic()
        assert client.SyncClient(server.url).generate("x") == "ok"
        assert time.monotonic() - start >= 0.05
    assert len(server.asked) == 3


def test_retries_end_and_long_waits_are_not_waited_for() -> None:
    full = {"type": "overloaded_error", "headers": {"Retry-After": "0"}}
    with scripted(*[error(503, "full", **full) for _ in range(9)]) as server:
        with pytest.raises(Overloaded, match="full"):
            client.SyncClient(server.url, retries=3).generate("x")
        assert len(server.asked) == 4
    with scripted(error(503, "stopping", type="service_unavailable_error", headers={"Retry-After": "600"})) as server:
        with pytest.raises(Unavailable):
            client.SyncClient(server.url).generate("x")
        assert len(server.asked) == 1


def test_waits_grow_and_stay_bounded() -> None:
    policy = RetryPolicy(retries=20, first_wait=0.25, longest_wait=10)
    for attempt in range(20):
        wait = policy.wait(attempt, None)
        assert wait is not None
        assert min(10, 0.25 * 2**attempt) / 2 <= wait <= 10
    assert policy.wait(20, None) is None
    assert policy.wait(0, 10.5) is None


async def test_time_outs_are_not_repeated() -> None:
    with scripted(Answer(native("late"), delay=4)) as server:
        async with client.Client(server.url, timeout=1) as c:
            with pytest.raises(client.RequestTimeout):
                await c.generate("x")
    assert len(server.asked) == 1


def test_no_server_is_a_connection_error_with_its_address() -> None:
    with pytest.raises(client.ConnectionFailed, match=r"127\.0\.0\.1:9"):
        client.SyncClient("127.0.0.1:9", retries=1).health()


def test_something_else_on_the_port() -> None:
    with scripted(Answer(b"<html>")) as server, pytest.raises(client.ServerError, match="not an answer of a Ceiba"):
        client.SyncClient(server.url).models()


def test_the_smaller_calls() -> None:
    answers = [
        Answer({"data": [{"id": "m"}]}),
        Answer({"status": "starting", "reason": "loading"}, 503),
        Answer({"aborted": 2}),
        Answer({"data": [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}], "usage": {}}),
        Answer({"data": [{"index": 0, "embedding": [3.0]}]}),
        Answer({"tokens": [1, 2], "count": 2}),
        Answer({"anything": True}),
    ]
    with scripted(*answers) as server:
        c = client.SyncClient(server.url + "/v1/", "user", admin_api_key="admin")
        assert c.models() == ["m"]
        assert c.health() == {"status": "starting", "reason": "loading"}
        assert c.abort("r") == 2
        assert c.embeddings(["a", "b"]) == [[1.0], [2.0]]
        assert c.embeddings("a") == [3.0]
        assert c.tokenize("x") == [1, 2]
        assert c.call("GET", "/somewhere") == {"anything": True}
    assert server.asked[2].headers["authorization"] == "Bearer admin"
    assert server.asked[3].headers["authorization"] == "Bearer user"
    with pytest.raises(BadRequest, match="rid"):
        c.abort()
    with pytest.raises(BadRequest, match="http"):
        client.SyncClient("ftp://x")


def test_both_clients_have_the_same_calls() -> None:
    calls = {name for name in vars(Api) if not name.startswith("_")}
    assert {"generate", "chat", "embeddings", "models", "health", "abort"} <= calls
    for kind in (client.Client, client.SyncClient):
        assert not calls & set(vars(kind))
