"""Models that give numbers: the routes over the fake engine, the SDKs, and leaving."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import ollama
import openai
import pytest

from ceiba.core.messages import Finish
from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, make_config, vector_of
from support.front_world import RawCall
from support.http_server import serving


def expected(text, dimensions=None):
    vector = np.array(vector_of(list(text.encode()), 0, 4)[:dimensions])
    return (vector / np.linalg.norm(vector)).tolist()


@pytest.fixture(scope="module")
def server():
    def make():
        engine = FakeEngine()
        return Front(make_config(task="embed"), ByteTokenizer(), None, engine), engine

    with serving(make) as made:
        yield made


@pytest.fixture
async def embedder(worlds):
    return await worlds(make_config(task="embed", context=16), template=None)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_openai_sdk(server, encoding):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        texts = ["one", "three", "a longer one"]
        answer = client.embeddings.create(model="m", input=texts, encoding_format=encoding)
        got = [e.embedding for e in answer.data]
        if encoding == "base64":
            got = [np.frombuffer(base64.b64decode(e), "<f4").tolist() for e in got]
        assert got == [pytest.approx(expected(t), abs=1e-6) for t in texts]
        assert [e.index for e in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, texts))
        small = client.embeddings.create(model="m", input="one", dimensions=2)
        assert small.data[0].embedding == pytest.approx(expected("one", 2), abs=1e-6)
        ids = client.embeddings.create(model="m", input=[[111, 110, 101]])
        assert ids.data[0].embedding == pytest.approx(expected("one"), abs=1e-6)


def test_the_ollama_sdk(server):
    client = ollama.Client(host=server[0])
    answer = client.embed("m", ["one", "two"])
    assert [list(e) for e in answer.embeddings] == [pytest.approx(expected(t), abs=1e-6) for t in ("one", "two")]
    assert list(client.embeddings("m", "one").embedding) == vector_of(list(b"one"), 0, 4)
    assert client.show("m").capabilities == ["embedding"]


async def test_more_texts_than_may_run(embedder):
    """HAZARD 16's shape: three texts where two may run at once."""
    embedder.engine.max_running = 2
    reply = await embedder.client.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
    assert [e["embedding"] for e in reply.json()["data"]] == [pytest.approx(expected(t), abs=1e-6) for t in "abc"]


async def test_encode_gives_the_vector_as_it_is(embedder):
    one = (await embedder.client.post("/encode", json={"text": "one"})).json()
    assert one["embedding"] == vector_of(list(b"one"), 0, 4)
    many = (await embedder.client.post("/encode", json={"input_ids": [[1, 2], [3]]})).json()
    assert [m["meta_info"]["prompt_tokens"] for m in many] == [2, 1]


async def test_classes(worlds):
    world = await worlds(make_config(task="classify"), template=None)
    reply = (await world.client.post("/v1/classify", json={"input": ["x", "yy"]})).json()
    for entry, text in zip(reply["data"], ("x", "yy"), strict=True):
        logits = np.array(vector_of(list(text.encode()), 0, 4))
        probs = np.exp(logits - logits.max())
        assert entry["probs"] == pytest.approx((probs / probs.sum()).tolist())
        assert entry["label"] == f"LABEL_{int(logits.argmax())}"
    assert (await world.client.post("/classify", json={"text": "x"})).status_code == 200


async def test_ranks(worlds):
    world = await worlds(make_config(task="rerank"), template=None)
    world.engine.width = 3
    body = {"query": "q", "documents": ["a", {"text": "bbb"}, "cc"], "top_n": 2}
    ranked = (await world.client.post("/v1/rerank", json=body)).json()
    assert [r["index"] for r in ranked] == [1, 2]
    assert [r["document"] for r in ranked] == ["bbb", "cc"]
    assert ranked[0]["score"] == pytest.approx(1 / (1 + np.exp(-3)))
    sent = world.engine.received[1]
    assert (bytes(sent.input_ids[::4]), sent.second) == (b"qbbb", 3)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"input": [999]}, "input"),
        ("/v1/embeddings", {"input": "x" * 17}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 4097}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "no_such": 1}, "no_such"),
        ("/encode", {}, "text"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(embedder, path, body, param):
    reply = await embedder.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert embedder.engine.idle


async def test_ollama_cuts_what_is_too_long(embedder):
    reply = await embedder.client.post("/api/embed", json={"input": "x" * 40})
    assert reply.json()["prompt_eval_count"] == 16
    reply = await embedder.client.post("/api/embed", json={"input": "x" * 40, "truncate": False})
    assert reply.status_code == 400


async def test_each_kind_of_model_says_what_the_others_need(world, embedder):
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}),
        ("/v1/classify", {"input": "x"}),
        ("/encode", {"text": "x"}),
        ("/api/embed", {"input": "x"}),
    ):
        assert (await world.client.post(path, json=body)).status_code == 400, path
    assert (await embedder.client.post("/v1/rerank", json={"query": "q", "documents": ["d"]})).status_code == 400
    reply = await embedder.client.post("/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 400
    assert "generates no text" in reply.json()["error"]["message"]
    assert (await embedder.client.get("/health_generate")).status_code == 200


async def test_a_client_that_leaves_aborts_its_texts(embedder):
    embedder.engine.frozen = True
    call = RawCall(embedder.app, "/v1/embeddings", json.dumps({"input": ["a", "b"]}).encode())
    while len(embedder.front.pool) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await call.leave()
    assert len(embedder.front.pool) == 0
    await embedder.idle()
    assert len(embedder.engine.aborted) == 2


async def test_one_bad_text_fails_its_request_only(embedder):
    embedder.engine.faults["pool-1#1"] = Finish(kind="error", message="no", status=500)
    bad, good = await asyncio.gather(
        embedder.client.post("/v1/embeddings", json={"input": ["a", "b", "c"]}),
        embedder.client.post("/v1/embeddings", json={"input": ["d"]}),
    )
    assert (bad.status_code, good.status_code) == (500, 200)
    await embedder.idle()


async def test_an_engine_that_is_lost_ends_every_text(embedder):
    embedder.engine.frozen = True
    call = asyncio.create_task(embedder.client.post("/v1/embeddings", json={"input": "a"}))
    while not len(embedder.front.pool):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    embedder.front.fail("gone")
    assert (await call).status_code == 503
