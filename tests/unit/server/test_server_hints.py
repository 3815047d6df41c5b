"""Advice is named in the answer's header, on every protocol and at every depth; what has an effect is not."""

from __future__ import annotations

import msgspec
import pytest

from ceiba.server.anthropic.schemas import MessagesRequest
from ceiba.server.embeddings import EmbeddingsRequest, OllamaEmbedRequest
from ceiba.server.hints import hints_of
from ceiba.server.native_schemas import GenerateRequest
from ceiba.server.ollama.schemas import OllamaChatRequest, OllamaOptions
from ceiba.server.openai.schemas import ChatRequest, CompletionRequest
from ceiba.server.responses.schemas import ReasoningParam, ResponsesRequest
from ceiba.server.scoring import DecisionRequest, ScoreRequest
from support.fake_engine import PlainTemplate, make_config

MESSAGES = [{"role": "user", "content": "hi"}]


class SilentTemplate(PlainTemplate):
    """Knows no thinking and no tools."""

    def source(self) -> str:
        return "{{ messages }}"


CHAT = {"messages": MESSAGES, "max_tokens": 2}
CASES = [
    ("/v1/chat/completions", {**CHAT, "prediction": {"type": "content", "content": "x"}}, "prediction"),
    ("/v1/chat/completions", {**CHAT, "thinking_budget": 5}, "thinking_budget"),
    ("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort"),
    ("/v1/chat/completions", {**CHAT, "service_tier": "auto", "store": False}, ""),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "user": "u"}, "user"),
    ("/generate", {"text": "x", "log_metrics": True}, "log_metrics"),
    (
        "/v1/responses",
        {"input": "x", "reasoning": {"effort": "low", "summary": "auto"}, "max_tool_calls": 3},
        "reasoning.summary,max_tool_calls,reasoning.effort",
    ),
    ("/v1/messages", {"model": "m", **CHAT, "metadata": {"user_id": "u"}}, "metadata"),
    ("/v1/messages", {"model": "m", **CHAT, "cache_control": {"type": "ephemeral"}}, ""),
    (
        "/v1/messages",
        {"model": "m", **CHAT, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        "thinking,output_config.effort",
    ),
    ("/api/chat", {"messages": MESSAGES, "stream": False, "think": True}, "think"),
    ("/api/generate", {"prompt": "", "keep_alive": 0}, "keep_alive"),
    ("/api/show", {"model": "m", "verbose": True}, "verbose"),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "user": "u"}, "user"),
]


@pytest.mark.parametrize(("path", "body", "named"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
async def test_the_header_names_them(worlds, path, body, named):
    world = await worlds(make_config(), template=SilentTemplate())
    reply = await world.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-ceiba-hints", "") == named


async def test_embeddings_name_them_too(worlds):
    world = await worlds(make_config(task="embed"), template=None)
    reply = await world.client.post("/v1/embeddings", json={"input": "x", "user": "u"})
    assert reply.headers["x-ceiba-hints"] == "user"
    reply = await world.client.post("/api/embed", json={"input": "x", "options": {"num_ctx": 1}, "keep_alive": 0})
    assert reply.headers["x-ceiba-hints"] == "options,keep_alive"


@pytest.mark.parametrize(
    "kind",
    [
        ChatRequest,
        CompletionRequest,
        GenerateRequest,
        ResponsesRequest,
        ReasoningParam,
        MessagesRequest,
        OllamaChatRequest,
        OllamaOptions,
        EmbeddingsRequest,
        OllamaEmbedRequest,
        ScoreRequest,
        DecisionRequest,
    ],
)
def test_every_field_described_as_a_hint_is_found(kind):
    described = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    hints = {name for name, field in described.items() if field.get("description", "").startswith("Hint")}
    assert hints
    required = {field.name: "x" for field in msgspec.structs.fields(kind) if field.required}
    body = kind(**{**required, **dict.fromkeys(hints, "given")})
    assert set(hints_of(body)) == hints
