"""The OpenAPI document describes every field, and errors have one shape on every route."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import pytest

from ceiba.server import answers, native_schemas, unavailable
from ceiba.server.anthropic import schemas as anthropic
from ceiba.server.ollama import schemas as ollama
from ceiba.server.openai import schemas
from ceiba.server.responses import schemas as responses
from support.fake_engine import make_config
from support.front_world import make_world


async def document():
    async with make_world() as world:
        reply = await world.client.get("/openapi.json")
        assert reply.status_code == 200
        return reply.json(), world.app


def properties(schema, where=""):
    """(place, property schema) of all properties below ``schema``."""
    if isinstance(schema, dict):
        for name, inner in schema.get("properties", {}).items():
            if isinstance(inner, dict):
                yield f"{where}.{name}", inner
        for key, inner in schema.items():
            yield from properties(inner, f"{where}.{key}")
    elif isinstance(schema, list):
        for i, inner in enumerate(schema):
            yield from properties(inner, f"{where}[{i}]")


async def test_every_field_of_every_schema_is_described():
    doc, _ = await document()
    found = list(properties(doc["components"]["schemas"]))
    assert len(found) > 200
    bare = [place for place, schema in found if not schema.get("description")]
    assert bare == []


async def test_every_working_route_is_in_the_document_with_its_body_and_errors():
    doc, app = await document()
    refused = {path for path, *_ in unavailable.ROUTES}
    for route in app.routes:
        if route.path in refused or route.path == "/" or route.path.startswith(("/docs", "/openapi", "/ui/")):
            continue
        entry = doc["paths"][route.path.replace(":path}", "}")]
        for method in route.methods - {"HEAD"}:
            operation = entry[method.lower()]
            assert operation["summary"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert all(p.get("description") for p in operation.get("parameters", []))
    body = doc["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/ChatRequest")
    names = {e for entry in doc["paths"].values() for op in entry.values() for e in [op["operationId"]]}
    assert len(names) == sum(len(entry) for entry in doc["paths"].values())


async def test_references_resolve():
    doc, _ = await document()
    text = msgspec.json.encode(doc).decode()
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in doc["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3}}),
    ],
)
async def test_events_of_a_stream_are_what_the_document_says(path, body):
    async with make_world() as world:
        doc = (await world.client.get("/openapi.json")).json()
        reply = await world.client.post(path, json={**body, "stream": True})
    word, text = shown_events(doc, path)["properties"]["data"]["anyOf"]
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert word == {"enum": data[-1:]}
    assert len(data) > 3
    for event in [*data[:-1], '{"error": {"message": "lost", "type": "server_error", "param": null, "code": null}}']:
        jsonschema.validate(json.loads(event), {**text["contentSchema"], "components": doc["components"]})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"error": 3}, {**text["contentSchema"], "components": doc["components"]})


async def test_streams_of_other_protocols_end_without_a_word():
    doc, _ = await document()
    for path in ("/v1/messages", "/v1/responses"):
        assert shown_events(doc, path)["properties"]["data"]["contentMediaType"] == "application/json"


def shown_events(doc, path):
    return doc["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]


@pytest.mark.parametrize(
    ("struct", "tables"),
    [
        (schemas.ChatRequest, [schemas.REFUSED_CHAT]),
        (schemas.CompletionRequest, [schemas.REFUSED_COMPLETION]),
        (native_schemas.GenerateRequest, [native_schemas.REFUSED_GENERATE]),
        (native_schemas.SamplingFields, [native_schemas.REFUSED_SAMPLING]),
        (anthropic.MessagesRequest, [anthropic.REFUSED_MESSAGES]),
        (anthropic.CountRequest, [anthropic.REFUSED_COUNT]),
        (responses.ResponsesRequest, [responses.REFUSED]),
        (ollama.OllamaOptions, [ollama.REFUSED_OPTIONS]),
        (ollama.OllamaGenerateRequest, [ollama.REFUSED_GENERATE]),
    ],
)
def test_fields_described_as_refused_are_refused(struct, tables):
    info = msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"]
    described = {name for name, field in info.items() if field.get("description", "").startswith("Refused")}
    table = set().union(*tables)
    assert table <= set(info)
    assert described <= table


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing/here", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/generate", 405),
        ("POST", "/v1/completions", 400),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/audio/transcriptions", 501),
        ("GET", "/v1/responses/none", 404),
        ("POST", "/load_lora_adapter", 501),
        ("POST", "/v1/models/load", 501),
        ("POST", "/abort_request", 400),
    ],
)
async def test_errors_have_openais_shape(method, path, status):
    async with make_world() as world:
        reply = await world.client.request(method, path)
        assert reply.status_code == status
        assert reply.headers["content-type"] == "application/json"
        error = msgspec.json.decode(reply.content, type=answers.ErrorAnswer).error
        assert error.message
        if status == 405:
            assert reply.headers["allow"]


@pytest.mark.parametrize("body", [b"", b"   ", b"null", b"[]", b"3", b'{"a"', b"\xff\xfe", b'{"prompt": "\xff"}'])
async def test_bodies_that_are_no_object_are_400(body):
    async with make_world() as world:
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/abort_request"):
            reply = await world.client.post(path, content=body)
            assert reply.status_code == 400, (path, reply.text)


async def test_an_unexpected_error_is_a_500_without_a_traceback():
    async with make_world() as world:

        def broken(*args, **kwargs):
            raise ZeroDivisionError("internal detail")

        world.front.tokenizer.encode = broken
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            reply = await world.client.post(path, json=body)
            assert reply.status_code == 500
            assert "internal detail" not in reply.text
            assert reply.json()["error"]["code"] == "internal_error"
        assert world.front.num_live == 0


async def test_state_routes():
    async with make_world(make_config()) as world:
        models = msgspec.json.decode((await world.client.get("/v1/models")).content, type=answers.ModelList)
        assert [m.id for m in models.data] == ["fake-model"]
        assert models.data[0].max_model_len == 512
        card = await world.client.get("/v1/models/fake-model")
        assert msgspec.json.decode(card.content, type=answers.ModelCard) == models.data[0]
        for path in ("/model_info", "/get_model_info"):
            assert (await world.client.get(path)).json()["model_path"] == "/models/fake"
        for path in ("/server_info", "/get_server_info"):
            info = (await world.client.get(path)).json()
            assert info["internal_states"] == [{"running": 0}]
            assert info["config"]["server"]["api_key"] is None
        for path in ("/v1/loads", "/get_load"):
            assert (await world.client.get(path)).json() == [{"dp_rank": 0, "running": 0, "waiting": 0}]


async def test_server_info_answers_while_the_scheduler_does_not(monkeypatch):
    monkeypatch.setattr("ceiba.server.state.CONTROL_SECONDS", 0.1)
    async with make_world() as world:
        world.engine._control = lambda message: None
        world.engine._take = lambda: None
        info = (await world.client.get("/server_info")).json()
        assert info["internal_states"] == []
        assert "did not answer" in info["reason"]


async def test_flush_is_refused_while_requests_run_and_works_after():
    async with make_world() as world:
        assert (await world.client.get("/flush_cache")).json()["success"] is True
        assert (await world.client.post("/flush_cache")).status_code == 200
        assert world.engine.flushes == 2
        reply = msgspec.json.decode((await world.client.post("/flush_cache")).content, type=answers.FlushAnswer)
        assert reply.detail == {"flushed_tokens": 1}
