"""HAZARDS 20 (the front's part) and 21: health follows the heartbeat, a death ends every request at once."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from ceiba.core.messages import Generate
from ceiba.server.health import STALE_SECONDS, HealthMonitor
from support.front_world import RawCall, events, make_world, until

TEXT = "/v1/completions"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_green_while_beats_come_red_when_they_stop():
    clock = Clock()
    monitor = HealthMonitor(300, clock)
    assert monitor.now().state == "starting"
    monitor.beat(clock.now, {})
    assert monitor.now().ok
    clock.now += STALE_SECONDS - 0.1
    assert monitor.now().ok
    clock.now += 0.2
    assert monitor.now().state == "stuck"
    monitor.beat(clock.now, {})
    assert monitor.now().ok


def test_a_long_step_is_green_and_a_stuck_loop_red():
    clock = Clock()
    monitor = HealthMonitor(300, clock)
    started = clock.now
    for _ in range(590):
        clock.now += 0.5
        monitor.beat(started, {})
        assert monitor.now().ok
    clock.now += 10
    monitor.beat(started, {})
    assert monitor.now().state == "stuck"
    assert "loop" in monitor.now().reason
    monitor.beat(clock.now, {})
    assert monitor.now().ok


def test_a_silent_detokenizer_is_red_and_counts_as_no_progress():
    clock = Clock()
    monitor = HealthMonitor(300, clock)
    monitor.beat(clock.now, {})
    monitor.text_beat()
    for _ in range(30):
        clock.now += 0.5
        monitor.beat(clock.now, {})
    assert monitor.now().state == "stuck"
    assert "detokenizer" in monitor.now().reason
    assert monitor.stalled() == 15
    monitor.text_beat()
    assert monitor.now().ok
    assert monitor.stalled() == 0


def test_a_failure_is_final():
    monitor = HealthMonitor(300)
    monitor.fail("the scheduler died")
    monitor.beat(time.monotonic(), {})
    assert monitor.now().state == "failed"
    monitor.drain()
    assert monitor.now().reason == "the scheduler died"


async def test_health_answers_at_once_while_nothing_moves():
    async with make_world() as world:
        world.engine.frozen = True
        call = RawCall(world.app, TEXT, json.dumps({"prompt": "x"}).encode())
        await asyncio.sleep(0.1)
        started = time.monotonic()
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            reply = await world.client.get(path)
            assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
        assert time.monotonic() - started < 2
        world.engine.frozen = False
        await asyncio.wait_for(call.task, 30)


async def test_probes_share_one_token_when_idle_and_make_none_when_busy():
    async with make_world(step_seconds=0.005) as world:
        replies = await asyncio.gather(*(world.client.get("/health_generate") for _ in range(50)))
        assert {r.status_code for r in replies} == {200}
        probes = [m for m in world.engine.received if isinstance(m, Generate)]
        assert len(probes) == 1
        assert probes[0].sampling.max_new_tokens == 1
        call = RawCall(world.app, TEXT, json.dumps({"prompt": "x", "max_tokens": 300}).encode())
        await until(lambda: world.engine._running)
        replies = await asyncio.gather(*(world.client.get("/health_generate") for _ in range(20)))
        assert {r.status_code for r in replies} == {200}
        assert len([m for m in world.engine.received if isinstance(m, Generate)]) == 2
        await call.leave()


async def test_a_probe_that_gets_no_token_is_red(monkeypatch):
    async with make_world() as world:
        world.engine.frozen = True
        with monkeypatch.context() as patch:
            patch.setattr("ceiba.server.front.PROBE_SECONDS", 0.1)
            reply = await world.client.get("/health_generate")
        assert reply.status_code == 503
        assert reply.json()["status"] == "stuck"
        world.engine.frozen = False
        await world.idle()
        assert (await world.client.get("/health_generate")).status_code == 200


async def test_a_death_ends_every_request_with_an_error_and_turns_health_red():
    async with make_world(step_seconds=0.01) as world:
        whole = RawCall(world.app, TEXT, json.dumps({"prompt": "a", "max_tokens": 400}).encode())
        stream = RawCall(world.app, TEXT, json.dumps({"prompt": "b", "max_tokens": 400, "stream": True}).encode())
        control = asyncio.create_task(world.front.control("never"))
        await stream.first_event()
        world.engine.frozen = True
        started = time.monotonic()
        world.front.fail("the scheduler died (signal 9)")
        await asyncio.wait_for(asyncio.gather(whole.task, stream.task), 2)
        assert time.monotonic() - started < 2
        assert whole.sent[0]["status"] == 503
        assert "signal 9" in json.loads(whole.sent[1]["body"])["error"]["message"]
        data = events(b"".join(m.get("body", b"") for m in stream.sent).decode())
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["type"] == "service_unavailable_error"
        assert "choices" in json.loads(data[0])
        with pytest.raises(Exception, match=r"signal 9|not known"):
            await control
        for path in ("/health", "/health_generate", "/ready"):
            reply = await world.client.get(path)
            assert reply.status_code == 503
            assert "signal 9" in reply.json()["reason"]
        reply = await world.client.post(TEXT, json={"prompt": "x"})
        assert reply.status_code == 503
        assert world.front.num_live == 0


async def test_draining_refuses_new_requests_and_lets_old_ones_end():
    async with make_world(step_seconds=0.01) as world:
        call = RawCall(world.app, TEXT, json.dumps({"prompt": "a", "max_tokens": 10}).encode())
        await until(lambda: world.engine._running)
        world.front.drain()
        assert (await world.client.post(TEXT, json={"prompt": "x"})).status_code == 503
        assert (await world.client.get("/ready")).status_code == 503
        await asyncio.wait_for(call.task, 30)
        assert call.sent[0]["status"] == 200


async def test_a_full_queue_is_a_503_with_retry_after():
    async with make_world(step_seconds=0.01) as world:
        world.engine.max_running, world.engine.max_waiting = 1, 1
        calls = [RawCall(world.app, TEXT, json.dumps({"prompt": "a", "max_tokens": 300}).encode())]
        await until(lambda: world.engine._running)
        calls.append(RawCall(world.app, TEXT, json.dumps({"prompt": "b", "max_tokens": 300}).encode()))
        await until(lambda: world.engine._waiting)
        for stream in (False, True):
            reply = await world.client.post(TEXT, json={"prompt": "c", "stream": stream})
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["type"] == "overloaded_error"
        for call in calls:
            await call.leave()
        await world.idle()


async def test_a_scheduler_that_does_not_answer_a_control_is_an_error():
    async with make_world() as world:
        world.engine.frozen = True
        world.engine._take = lambda: None
        started = time.monotonic()
        with pytest.raises(Exception, match="did not answer"):
            await world.front.control("state", seconds=0.1)
        assert time.monotonic() - started < 2
        assert world.front._controls == {}
