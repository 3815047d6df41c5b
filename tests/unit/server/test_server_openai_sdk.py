"""The official openai SDK, sync and async, against uvicorn on loopback with the fake engine behind it."""

from __future__ import annotations

import asyncio
import socket

import openai
import pytest

from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, make_config, text_for
from support.http_server import serving, wait_until

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = list(b"<user>hello\n<assistant>")


@pytest.fixture(scope="module")
def server():
    def make():
        engine = FakeEngine(0.0005)
        return Front(
            make_config(api_key="key", admin_api_key="admin"), ByteTokenizer(), PlainTemplate(), engine
        ), engine

    with serving(make) as made:
        yield made


@pytest.fixture
def slow(server):
    """The engine, at a pace at which a test is always faster than an answer."""
    engine = server[1]
    engine.aborted.clear()
    engine.step_seconds = 0.05
    yield engine
    engine.step_seconds = 0.0005


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model="any/name:x", messages=MESSAGES, max_tokens=10)
    assert answer.choices[0].message.content == text_for(PROMPT, None)[:10]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == len(PROMPT) + 10
    assert answer.model == "any/name:x"


def test_chat_stream_with_usage(client):
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=10, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == text_for(PROMPT, None)[:10]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_chat_with_three_seeded_choices(client):
    answer = client.chat.completions.create(model="m", messages=MESSAGES, n=3, seed=7, max_tokens=6, temperature=0.8)
    assert [c.message.content for c in answer.choices] == [text_for(PROMPT, 7 + k)[:6] for k in range(3)]
    again = client.chat.completions.create(model="m", messages=MESSAGES, n=3, seed=7, max_tokens=6, temperature=0.8)
    assert [c.message for c in again.choices] == [c.message for c in answer.choices]


def test_chat_stops(client):
    text = text_for(PROMPT, None)
    answer = client.chat.completions.create(model="m", messages=MESSAGES, stop=[text[4]], max_tokens=20)
    assert answer.choices[0].message.content == text[:4]
    assert answer.choices[0].finish_reason == "stop"


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=4, extra_body={"ignore_eos": True}
    )
    content = answer.choices[0].logprobs.content
    assert "".join(e.token for e in content) == answer.choices[0].message.content
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].logprob == e.logprob for e in content)


def test_cached_tokens_of_a_second_identical_request(client):
    ids = [5] * 200
    first = client.completions.create(model="m", prompt=ids, max_tokens=1)
    second = client.completions.create(model="m", prompt=ids, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 199


def test_completions_with_echo_and_logprobs(client):
    answer = client.completions.create(model="m", prompt="ab", echo=True, logprobs=2, max_tokens=2)
    assert answer.choices[0].text.startswith("ab")
    assert len(answer.choices[0].logprobs.tokens) == 4
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_models(client):
    assert [m.id for m in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").id == "fake-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 10**9}, "max_tokens"),
    ],
)
def test_errors_become_the_sdks_exceptions(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="m", messages=MESSAGES, **fields)
    assert error.value.param == param


def test_wrong_keys(server):
    client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


async def test_async_and_many_at_once(server):
    async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key="key", max_retries=0) as client:

        async def one(i: int) -> str:
            stream = await client.completions.create(model="m", prompt=f"p{i}", max_tokens=30, stream=True)
            return "".join([c.choices[0].text async for c in stream])

        texts = await asyncio.gather(*(one(i) for i in range(40)))
    assert texts == [text_for(list(f"p{i}".encode()), None)[:30] for i in range(40)]


def test_leaving_a_stream_aborts(slow, client):
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=480, stream=True, extra_body={"rid": "leaving"}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: slow.aborted == ["leaving#0"])


def test_closing_a_socket_aborts_a_request_that_does_not_stream(server, slow):
    host, port = server[0].removeprefix("http://").split(":")
    body = b'{"prompt": "x", "max_tokens": 480, "rid": "socket"}'
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        wait_until(lambda: "socket#0" in slow.live)
    wait_until(lambda: slow.aborted == ["socket#0"])


def test_an_error_in_mid_stream_reaches_the_sdk(slow, client):
    from ceiba.core.messages import Finish

    stream = client.completions.create(model="m", prompt="x", max_tokens=480, stream=True, extra_body={"rid": "faulty"})
    chunks = iter(stream)
    next(chunks)
    slow.faults["faulty#0"] = Finish(kind="error", message="the device fell off", status=500)
    with pytest.raises(openai.APIError, match="the device fell off"):
        list(chunks)


@pytest.mark.parametrize("where", ["header", "many headers", "path"])
def test_ten_megabytes_before_the_body_get_a_400_and_harm_nobody(server, client, where):
    host, port = server[0].removeprefix("http://").split(":")
    big = b"a" * (10 << 20)
    head = {
        "header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + big + b"\r\n\r\n",
        "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: 0123456789\r\n" * 500_000 + b"\r\n",
        "path": b"GET /" + big + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    }[where]
    with socket.create_connection((host, int(port))) as sock:
        sock.settimeout(20)
        sock.sendall(head)
        answer = sock.recv(65536)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 431", b"HTTP/1.1 414")), answer[:200]
    assert client.models.list().data
