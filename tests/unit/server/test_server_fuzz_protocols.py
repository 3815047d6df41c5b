"""Any JSON at all on the routes of every protocol: an answer or a 4xx in that protocol's shape, never a 5xx."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ceiba.server import embeddings, parsing, scoring
from ceiba.server.anthropic import schemas as anthropic
from ceiba.server.files import routes as files
from ceiba.server.ollama import schemas as ollama
from ceiba.server.openai import schemas as openai
from ceiba.server.responses import schemas as responses
from support.fake_engine import ThinkingTemplate, make_config
from support.front_world import make_world

NUMBERS = st.integers(-3, 70) | st.sampled_from([2**63, -(2**70), 0.5, -1.5, 1e300])
WORDS = st.sampled_from(
    [
        *("user", "assistant", "system", "tool", "text", "type", "role", "content", "name", "function", "auto", "none"),
        *("required", "any", "enabled", "disabled", "json_schema", "json_object", "message", "function_call", "low"),
        *("tool_use", "tool_result", "thinking", "input_text", "output_text", "predicate", "choice", "score", "call"),
        *("reasoning", "function_call_output", "batch", "qwen25", "deepseek-r1", "gpt-oss", "m", ""),
    ]
)
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=6)
KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "function", "parameters", "arguments", "id", "input", "call_id"),
        *("tool_use_id", "input_schema", "schema", "json_schema", "effort", "budget_tokens", "format", "output"),
        *("instructions", "choices", "levels", "label", "value", "num_predict", "stop", "tool_calls", "thinking"),
        *("summary", "source", "data", "required", "properties", "strict", "description", "title", "enum"),
    ]
)
ANY = st.recursive(
    LEAVES,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), x, max_size=5),
    max_leaves=14,
)
OBJECTS = st.dictionaries(KEYS, ANY, max_size=6)
FUNCTION = st.fixed_dictionaries({"name": WORDS | st.text(max_size=4)}, optional={"parameters": ANY, "strict": ANY})
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION})
    | st.fixed_dictionaries({"type": st.just("function"), "name": WORDS, "parameters": OBJECTS})
    | st.fixed_dictionaries({"name": WORDS, "input_schema": OBJECTS})
    | ANY,
    max_size=3,
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": WORDS}, optional={"text": ANY, "id": ANY, "input": ANY, "content": ANY}) | ANY,
    max_size=3,
)
ROLES = st.sampled_from(["user", "assistant", "user", "system", "tool"])
SAY = st.text(min_size=1, max_size=5)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES | ROLES | WORDS, "content": SAY | SAY | PARTS},
        optional={"tool_calls": ANY, "name": ANY, "type": WORDS, "thinking": ANY, "reasoning_content": ANY},
    ),
    min_size=1,
    max_size=3,
)
ITEMS = SAY | st.lists(
    st.fixed_dictionaries(
        {"type": WORDS}, optional={"role": WORDS, "content": ANY, "call_id": ANY, "name": ANY, "arguments": ANY}
    ),
    max_size=3,
)
FIELDS = {"messages": MESSAGES, "tools": TOOLS, "input": ITEMS, "stream": st.booleans(), "system": PARTS}


def body(struct, **usual):
    names = [name for name in struct.__struct_fields__ if name not in usual]
    picked = st.lists(st.sampled_from(names), max_size=2, unique=True)
    return picked.flatmap(
        lambda chosen: st.fixed_dictionaries({**usual, **{n: FIELDS.get(n, ANY) | ANY for n in chosen}})
    )


SMALL = st.integers(1, 5)
QUESTIONS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["predicate", "score"]) | WORDS, "instructions": SAY | PARTS},
        optional={"choices": ANY, "levels": st.just([{"label": "a"}, {"label": "b"}]) | ANY},
    ),
    max_size=2,
)
REQUESTS = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), body(openai.ChatRequest, messages=MESSAGES, max_tokens=SMALL)),
    st.tuples(
        st.just("/v1/chat/completions"),
        body(openai.ChatRequest, messages=MESSAGES, max_tokens=SMALL, tools=TOOLS, tool_choice=WORDS | ANY),
    ),
    st.tuples(
        st.just("/v1/messages"),
        body(anthropic.MessagesRequest, model=WORDS, messages=MESSAGES, max_tokens=SMALL, tools=TOOLS),
    ),
    st.tuples(st.just("/v1/messages/count_tokens"), body(anthropic.CountRequest, model=WORDS, messages=MESSAGES)),
    st.tuples(st.just("/v1/responses"), body(responses.ResponsesRequest, input=ITEMS, max_output_tokens=SMALL)),
    st.tuples(
        st.just("/api/chat"),
        body(ollama.OllamaChatRequest, messages=MESSAGES, options=st.just({"num_predict": 3}) | ANY),
    ),
    st.tuples(
        st.just("/api/generate"),
        body(ollama.OllamaGenerateRequest, prompt=WORDS, options=st.just({"num_predict": 3}) | ANY),
    ),
    st.tuples(
        st.just("/v1/score"), body(scoring.ScoreRequest, query=WORDS, items=ANY, label_token_ids=st.just([1]) | ANY)
    ),
    st.tuples(st.just("/v1/decisions"), body(scoring.DecisionRequest, input=ITEMS, questions=QUESTIONS | ANY)),
    st.tuples(st.just("/parse_function_call"), body(parsing.ParseCallRequest, text=ANY, tools=TOOLS)),
    st.tuples(st.just("/separate_reasoning"), body(parsing.SeparateRequest, text=ANY)),
    st.tuples(st.just("/v1/batches"), body(files.BatchRequest, input_file_id=WORDS, endpoint=WORDS)),
    st.tuples(st.sampled_from(["/v1/embeddings", "/encode", "/v1/rerank", "/classify", "/api/embed"]), ANY),
    st.tuples(st.just("/v1/embeddings"), body(embeddings.EmbeddingsRequest, input=ANY)),
    st.tuples(st.just("/v1/rerank"), body(embeddings.RerankRequest, query=WORDS, documents=ANY)),
    st.tuples(st.just("/v1/files"), ANY),
)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
SAID = '<think>hm</think>x <tool_call>{"name": "f", "arguments": {}}</tool_call>'


@settings(max_examples=40, **QUIET)
@given(st.lists(REQUESTS, min_size=1, max_size=12), st.sampled_from(["generate", "embed", "rerank"]))
def test_no_body_breaks_a_protocol(requests, task):
    asyncio.run(try_all(requests, task))


@pytest.mark.slow
@settings(max_examples=400, **QUIET)
@given(st.lists(REQUESTS, min_size=1, max_size=12), st.sampled_from(["generate", "generate", "embed", "rerank"]))
def test_no_body_breaks_a_protocol_at_length(requests, task):
    asyncio.run(try_all(requests, task))


async def try_all(requests, task):
    config = make_config(context=256, reasoning_parser="auto", enable_response_store=True, task=task)
    async with make_world(config, template=ThinkingTemplate()) as world:
        world.engine.speak = SAID
        for path, value in requests:
            reply = await world.client.post(path, content=msgspec.json.encode(value))
            event(f"{path} {reply.status_code}")
            assert reply.status_code < 500, (path, value, reply.text)
            if reply.status_code != 200:
                error = reply.json()["error"]
                message = error if path.startswith("/api/") else error["message"]
                assert message
                assert (reply.json().get("type") == "error") == path.startswith("/v1/messages")
        await world.idle()
