"""HAZARD 19: a client that leaves, and an abort by id, reach a request in every state it can be in."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from ceiba.core.messages import Abort, Generate
from support.fake_engine import PlainTemplate, make_config
from support.front_world import RawCall, World, make_world, until

TEXT = "/v1/completions"


def body(**fields):
    return json.dumps({"prompt": "hello", "max_tokens": 400, **fields}).encode()


def sent(world: World, kind: type) -> list:
    return [m for m in world.engine.received if isinstance(m, kind)]


async def serves(world: World) -> None:
    await world.idle()
    assert world.front._live == {}
    assert world.front._by_rid == {}
    reply = await world.client.post(TEXT, json={"prompt": "x", "max_tokens": 1})
    assert reply.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
async def test_leaving_while_running(stream, n):
    async with make_world(step_seconds=0.01) as world:
        call = RawCall(world.app, TEXT, body(stream=stream, n=n))
        await until(lambda: len(world.engine._running) == n)
        if stream:
            await call.first_event()
        await call.leave()
        await until(lambda: len(world.engine.aborted) == n)
        await serves(world)


async def test_leaving_while_waiting_in_the_queue():
    async with make_world(step_seconds=0.01) as world:
        world.engine.max_running = 1
        first = RawCall(world.app, TEXT, body(rid="first"))
        await until(lambda: world.engine._running)
        second = RawCall(world.app, TEXT, body(rid="second"))
        await until(lambda: world.engine._waiting)
        await second.leave()
        await until(lambda: world.engine.aborted == ["second#0"])
        assert list(world.engine._running) == ["first#0"]
        await first.leave()
        await serves(world)


async def test_leaving_while_the_template_renders():
    gate = threading.Event()

    class Slow(PlainTemplate):
        def render(self, *args, **kwargs):
            gate.wait(60)
            return super().render(*args, **kwargs)

    async with make_world(template=Slow()) as world:
        data = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
        call = RawCall(world.app, "/v1/chat/completions", data)
        await until(lambda: world.front.num_live == 1)
        call._gone.set()
        await until(lambda: world.front.num_live == 0)
        gate.set()
        await asyncio.wait_for(call.task, 30)
        assert sent(world, Generate) == []
        await serves(world)


async def test_leaving_while_a_long_text_is_tokenized():
    gate = threading.Event()
    async with make_world(make_config(context=200_000, pool=200_000)) as world:
        tokenizer = world.front.tokenizer
        encode_batch = tokenizer.encode_batch

        def slow(*args, **kwargs):
            gate.wait(60)
            return encode_batch(*args, **kwargs)

        tokenizer.encode_batch = slow
        call = RawCall(world.app, TEXT, body(prompt="x" * 100_000))
        await until(lambda: world.front.num_live == 1)
        call._gone.set()
        await until(lambda: world.front.num_live == 0)
        gate.set()
        await asyncio.wait_for(call.task, 30)
        assert sent(world, Generate) == []
        await serves(world)


async def test_leaving_a_slow_reader_does_not_stop_others():
    async with make_world(step_seconds=0.002) as world:
        leaver = RawCall(world.app, TEXT, body(stream=True, rid="leaver"))
        stayer = RawCall(world.app, TEXT, body(stream=True, rid="stayer", max_tokens=50))
        await leaver.first_event()
        await leaver.leave()
        await asyncio.wait_for(stayer.task, 30)
        assert b'"finish_reason":"length"' in b"".join(m.get("body", b"") for m in stayer.sent)
        assert world.engine.aborted == ["leaver#0"]
        await serves(world)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("state", ["running", "waiting"])
async def test_abort_by_id_ends_the_clients_request(everything, state):
    async with make_world(step_seconds=0.01) as world:
        if state == "waiting":
            world.engine.max_running = 0
        call = RawCall(world.app, TEXT, body(rid="mine", n=2))
        await until(lambda: len(world.engine.live) == 2)
        command = {"abort_all": True} if everything else {"rid": "mine"}
        reply = await world.client.post("/abort_request", json=command)
        assert reply.json() == {"aborted": 2}
        await asyncio.wait_for(call.task, 30)
        answer = json.loads(call.sent[-1]["body"])
        assert [c["finish_reason"] for c in answer["choices"]] == ["abort", "abort"]
        world.engine.max_running = 64
        await serves(world)


async def test_abort_by_id_while_the_template_renders():
    gate = threading.Event()

    class Slow(PlainTemplate):
        def render(self, *args, **kwargs):
            gate.wait(60)
            return super().render(*args, **kwargs)

    async with make_world(template=Slow()) as world:
        data = json.dumps({"messages": [{"role": "user", "content": "x"}], "rid": "mine"}).encode()
        call = RawCall(world.app, "/v1/chat/completions", data)
        await until(lambda: world.front.num_live == 1)
        reply = await world.client.post("/abort_request", json={"rid": "mine"})
        assert reply.json() == {"aborted": 1}
        gate.set()
        await asyncio.wait_for(call.task, 30)
        assert json.loads(call.sent[-1]["body"])["choices"][0]["finish_reason"] == "abort"
        assert sent(world, Generate) == []
        await serves(world)


async def test_one_prompt_of_a_batch_can_be_aborted():
    async with make_world(step_seconds=0.01) as world:
        data = {"text": ["a", "b"], "rid": ["one", "two"], "sampling_params": {"max_new_tokens": 30}}
        call = RawCall(world.app, "/generate", json.dumps(data).encode())
        await until(lambda: len(world.engine._running) == 2)
        world.engine.frozen = True  # neither ends before the abort is in
        assert (await world.client.post("/abort_request", json={"rid": "one"})).json() == {"aborted": 1}
        world.engine.frozen = False
        await asyncio.wait_for(call.task, 30)
        kinds = [a["meta_info"]["finish_reason"]["type"] for a in json.loads(call.sent[-1]["body"])]
        assert kinds == ["abort", "length"]
        await serves(world)


async def test_an_engine_that_never_confirms_an_abort_does_not_hang_the_client(monkeypatch):
    monkeypatch.setattr("ceiba.server.front.ABORT_GRACE", 0.05)
    async with make_world(step_seconds=0.01) as world:
        world.engine.answers_aborts = False
        call = RawCall(world.app, TEXT, body(rid="mine"))
        await until(lambda: world.engine._running)
        await world.client.post("/abort_request", json={"rid": "mine"})
        await asyncio.wait_for(call.task, 30)
        assert json.loads(call.sent[-1]["body"])["choices"][0]["finish_reason"] == "abort"
        await serves(world)


async def test_an_unknown_id_aborts_nothing():
    async with make_world() as world:
        assert (await world.client.post("/abort_request", json={"rid": "nobody"})).json() == {"aborted": 0}
        assert sent(world, Abort) == []


async def test_late_text_of_an_aborted_request_never_reaches_a_new_one_of_its_name():
    async with make_world(step_seconds=0.01) as world:
        first = RawCall(world.app, TEXT, body(rid="same", stream=True))
        await first.first_event()
        await first.leave()
        second = RawCall(world.app, TEXT, body(rid="same", max_tokens=3))
        await asyncio.wait_for(second.task, 30)
        answer = json.loads(second.sent[-1]["body"])
        assert answer["id"] == "same"
        assert answer["usage"]["completion_tokens"] == 3
        rids = [m.rid for m in sent(world, Generate)]
        assert len(set(rids)) == 2
        await serves(world)


async def test_an_id_in_use_is_refused():
    async with make_world(step_seconds=0.01) as world:
        first = RawCall(world.app, TEXT, body(rid="same"))
        await until(lambda: world.engine._running)
        reply = await world.client.post(TEXT, json={"prompt": "x", "rid": "same"})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "rid"
        await first.leave()
        await serves(world)


async def test_closing_the_iterator_aborts_without_http():
    from ceiba.server.request import EngineRequest, Input, TextPrompt

    async with make_world(step_seconds=0.005) as world:
        request = EngineRequest([Input(TextPrompt("hello"))], rid="plain", stream=True)
        chunks = world.front.generate(request)
        assert (await anext(chunks)).count == 1
        await chunks.aclose()
        await until(lambda: world.engine.aborted == ["plain#0"])
        await serves(world)


async def test_one_failed_choice_ends_the_others_with_one_error():
    from ceiba.core.messages import Finish

    async with make_world(step_seconds=0.01) as world:
        world.engine.faults["x#1"] = Finish(kind="error", message="non-finite logits", status=500)
        call = RawCall(world.app, TEXT, body(rid="x", n=3))
        await asyncio.wait_for(call.task, 30)
        assert call.sent[0]["status"] == 500
        assert "non-finite logits" in json.loads(call.sent[-1]["body"])["error"]["message"]
        await until(lambda: set(world.engine.aborted) == {"x#0", "x#2"})
        await serves(world)
