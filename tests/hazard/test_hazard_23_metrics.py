"""HAZARD 23: metrics never raise into the request path, and gauges return to zero when nothing runs."""

from __future__ import annotations

import asyncio
import json

from prometheus_client.parser import text_string_to_metric_families

from ceiba.config.records import ObsConfig
from ceiba.obs.metrics import FrontMetrics
from support.fake_engine import make_config
from support.front_world import RawCall, make_world

CONFIG = make_config(obs=ObsConfig(enable_metrics=True))
RUNNING = ("sglang:num_running_reqs", "sglang_batch_size_current", "sglang_kv_cache_usage_ratio", "sglang:token_usage")
TEXT = "/v1/completions"


def samples(text: str) -> dict[str, float]:
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


async def scrape(world) -> dict[str, float]:
    reply = await world.client.get("/metrics")
    assert reply.status_code == 200
    return samples(reply.text)


async def test_gauges_rise_and_return_to_zero():
    async with make_world(CONFIG, step_seconds=0.01) as world:
        call = RawCall(world.app, TEXT, json.dumps({"prompt": "x", "max_tokens": 400}).encode())
        for _ in range(300):
            busy = await scrape(world)
            if busy["sglang:num_running_reqs"]:
                break
            await asyncio.sleep(0.01)
        assert all(busy[name] > 0 for name in RUNNING)
        assert busy["ceiba:live_choices"] == 1
        await call.leave()
        for _ in range(300):
            idle = await scrape(world)
            if not idle["sglang:num_running_reqs"]:
                break
            await asyncio.sleep(0.01)
        assert all(idle[name] == 0 for name in RUNNING)
        assert idle["ceiba:live_choices"] == 0
        assert idle["sglang:num_aborted_requests_total"] == 1


async def test_a_metric_that_breaks_breaks_no_request():
    async with make_world(CONFIG) as world:

        def broken(*args, **kwargs):
            raise RuntimeError("broken")

        class Broken:
            inc = observe = labels = broken

        for name in ("_requests", "_ttft", "_itl", "_e2e", "_http_requests", "_http_responses", "_prompt_tokens"):
            setattr(world.front.metrics, name, Broken())
        for stream in (False, True):
            reply = await world.client.post(TEXT, json={"prompt": "x", "max_tokens": 5, "stream": stream})
            assert reply.status_code == 200
        assert world.front.num_live == 0


def test_heartbeats_of_any_content_are_taken():
    metrics = FrontMetrics(True, "m")
    for stats in ({}, {"running": float("nan")}, {"unknown": 1.0}, {"running": 3.0, "waiting": 0.0}):
        metrics.heartbeat(stats)
        assert samples(metrics.render().decode())
    metrics.heartbeat({"running": "not a number"})
    assert samples(metrics.render().decode())["sglang:num_running_reqs"] == 3.0


def test_gauges_of_a_silent_scheduler_read_zero():
    now = [0.0]
    metrics = FrontMetrics(True, "m", clock=lambda: now[0])
    metrics.heartbeat({"running": 3.0, "token_usage": 0.7})
    assert samples(metrics.render().decode())["sglang:num_running_reqs"] == 3.0
    now[0] = 60.0
    assert samples(metrics.render().decode())["sglang:num_running_reqs"] == 0.0
