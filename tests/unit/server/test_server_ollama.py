"""Ollama's protocol: the real SDK against uvicorn on loopback, and what is refused."""

from __future__ import annotations

import httpx
import ollama
import pytest

import ceiba
from ceiba.config.records import ModelFacts
from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, ThinkingTemplate, make_config, text_for
from support.front_world import make_world
from support.http_server import serving

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = list(b"<user>hello\n<assistant>")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"


@pytest.fixture(scope="module")
def server():
    def make():
        engine = FakeEngine(0.0002)
        config = make_config(context=4096, reasoning_parser="auto")
        return Front(config, ByteTokenizer(), ThinkingTemplate(), engine), engine

    with serving(make) as made:
        yield made


@pytest.fixture
def engine(server):
    yield server[1]
    server[1].speak = None


@pytest.fixture
def client(server):
    return ollama.Client(host=server[0])


def test_chat(client, engine):
    answer = client.chat(
        "any", MESSAGES, options={"num_predict": 10, "temperature": 0.5, "top_k": 0, "seed": 3, "num_ctx": 99}
    )
    assert answer.message.content == text_for(PROMPT, 3)[:10]
    assert answer.model == "any"
    assert answer.done
    assert answer.done_reason == "length"
    assert (answer.prompt_eval_count, answer.eval_count) == (len(PROMPT), 10)
    assert answer.total_duration > 0
    sampling = engine.received[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, -1)


def test_a_stream_adds_up_to_the_whole(client, engine):
    engine.speak = SAID
    whole = client.chat("m", MESSAGES, tools=[WEATHER], think=True)
    lines = list(client.chat("m", MESSAGES, tools=[WEATHER], think=True, stream=True))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line.message.content for line in lines) == whole.message.content == "Let me see."
    assert "".join(line.message.thinking or "" for line in lines) == whole.message.thinking == "hm"
    calls = [call for line in lines for call in line.message.tool_calls or ()]
    assert [c.function.name for c in calls] == ["weather"]
    assert calls[0].function.arguments == whole.message.tool_calls[0].function.arguments == {"city": "Bern"}
    assert lines[-1].done_reason == "stop"
    assert lines[-1].eval_count == whole.eval_count


def test_generate(client, engine):
    answer = client.generate("m", "hello", system="Be short.", options={"num_predict": 5, "stop": ["~"]})
    assert bytes(engine.received[-1].input_ids[::4]) == b"<system>Be short.\n<user>hello\n<assistant>"
    assert answer.eval_count == 5
    client.generate("m", "hello", raw=True, options={"num_predict": 5})
    assert bytes(engine.received[-1].input_ids[::4]) == b"hello"
    lines = list(client.generate("m", "hello", raw=True, stream=True, options={"num_predict": 5}))
    assert "".join(line.response for line in lines) == text_for(list(b"hello"), None)[:5]


def test_a_request_without_a_question_loads(client):
    assert client.generate("m").done_reason == "load"
    assert client.chat("m").done_reason == "load"


def test_a_conversation_with_calls_reaches_the_template(client, engine):
    engine.speak = "sunny"
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    assert client.chat("m", messages).message.content == "sunny"


def test_logprobs(client):
    answer = client.chat("m", MESSAGES, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert len(answer.logprobs) == 3
    assert len(answer.logprobs[0].top_logprobs) == 2
    lines = list(client.chat("m", MESSAGES, logprobs=True, stream=True, options={"num_predict": 3}))
    assert sum(len(line.logprobs or ()) for line in lines) == 3


def test_lists_and_facts(client, server):
    assert [m.model for m in client.list().models] == ["fake-model"]
    assert [m.model for m in client.ps().models] == ["fake-model"]
    shown = client.show("fake-model")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == ThinkingTemplate.sources["default"]
    assert httpx.get(f"{server[0]}/api/version").json() == {"version": ceiba.__version__}
    root = httpx.get(server[0])
    assert root.status_code == 200
    assert "Ollama is running" in root.text


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"messages": [{"role": "user", "content": "x", "images": [b"abc"]}]}, "images"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z"),
        ({"options": {"num_predict": 0}}, "num_predict"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"no_such": 1}}, "no_such"),
        ({"think": "gigantic"}, "think"),
        ({"top_logprobs": 2}, "logprobs"),
    ],
)
def test_what_cannot_be_is_refused_in_ollamas_shape(client, fields, match):
    with pytest.raises(ollama.ResponseError, match=match) as error:
        client.chat(**{"model": "m", "messages": MESSAGES, **fields})
    assert error.value.status_code == 400


@pytest.mark.parametrize("name", ["suffix", "template", "context", "images"])
def test_fields_of_generate_that_cannot_be(server, name):
    value = [1] if name == "context" else "x"
    reply = httpx.post(f"{server[0]}/api/generate", json={"model": "m", "prompt": "x", name: value})
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(name)


def test_advice_is_named(server):
    body = {"model": "m", "messages": MESSAGES, "keep_alive": "5m", "options": {"num_ctx": 5, "num_predict": 1}}
    reply = httpx.post(f"{server[0]}/api/chat", json={**body, "stream": False})
    assert reply.headers["x-ceiba-hints"] == "options.num_ctx,keep_alive"
    reply = httpx.post(f"{server[0]}/api/chat", json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"


async def test_show_says_what_the_header_says():
    """The names that clients of Ollama look for (``general.architecture``, then ``<it>.context_length``)."""
    facts = ModelFacts(
        architecture="Qwen2ForCausalLM", num_layers=24, hidden_size=896, num_heads=14, num_kv_heads=2, head_dim=64,
        vocab_size=257, context_len=32768, weight_bytes=1, num_params=494_032_768, quantized="gguf",
    )  # fmt: skip
    async with make_world(make_config(context=64)) as world:
        world.front.facts = facts
        shown = (await world.client.post("/api/show", json={"model": "m"})).json()
        info, details = shown["model_info"], shown["details"]
        assert (details["family"], details["parameter_size"], details["quantization_level"]) == (
            "qwen2",
            "494.0M",
            "gguf",
        )
        name = info["general.architecture"]
        assert (name, info[f"{name}.context_length"], info[f"{name}.block_count"]) == ("qwen2", 64, 24)
        assert info["general.parameter_count"] == 494_032_768
