"""Metric names, and that the numbers are those of the requests that ran."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ceiba.config.records import ObsConfig
from ceiba.core.messages import Usage
from ceiba.obs.metrics import COUNTERS, GAUGES, FrontMetrics
from support.fake_engine import make_config
from support.front_world import make_world

CONFIG = make_config(obs=ObsConfig(enable_metrics=True))


def samples(text: str) -> dict[str, float]:
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


async def test_off_means_a_404_that_says_how_to_turn_it_on():
    async with make_world() as world:
        reply = await world.client.get("/metrics")
        assert reply.status_code == 404
        assert "--enable-metrics" in reply.json()["error"]["message"]


async def test_counts_are_those_of_the_requests():
    async with make_world(CONFIG) as world:
        for stream in (False, True):
            reply = await world.client.post(
                "/v1/completions", json={"prompt": "hello", "max_tokens": 6, "n": 2, "stream": stream}
            )
            assert reply.status_code == 200
        await world.client.post("/v1/completions", json={"prompt": ""})
        await world.client.get("/no/such/route")
        text = (await world.client.get("/metrics")).text
        got = samples(text)
    assert got["sglang:num_requests_total"] == 4
    assert got["sglang:prompt_tokens_total"] == 20
    assert got["sglang:generation_tokens_total"] == 24
    sources = dict(re.findall(r'sglang:cached_tokens_total\{cache_source="(\w+)",[^}]*\} (\S+)', text))
    assert {tier: float(value) for tier, value in sources.items()} == {"device": 3 * 4, "host": 0, "storage": 0}
    assert got["sglang:time_to_first_token_seconds_count"] == 2
    assert got["sglang:inter_token_latency_seconds_count"] == 10
    assert got["sglang:e2e_request_latency_seconds_count"] == 4
    assert got["sglang_request_duration_seconds_count"] == 4
    assert got["sglang:queue_time_seconds_count"] == 4


async def test_http_responses_are_counted_by_declared_path():
    async with make_world(CONFIG) as world:
        for path in ("/v1/models", "/nowhere/a", "/nowhere/b"):
            await world.client.get(path)
        text = (await world.client.get("/metrics")).text
    assert 'sglang:http_responses_total{method="GET",path="/v1/models",status_code="200"} 1.0' in text
    assert 'sglang:http_responses_total{method="GET",path="other",status_code="404"} 2.0' in text
    assert "nowhere" not in text


def test_every_known_stat_becomes_its_metric():
    metrics = FrontMetrics(True, "m")
    stats = {name: 2.0 for name in [*GAUGES, *COUNTERS]}
    metrics.heartbeat(stats)
    got = samples(metrics.render().decode())
    for name, *_ in GAUGES.values():
        assert got[name] == 2.0
    for name, _ in COUNTERS.values():
        assert got[f"{name}_total"] == 2.0


def test_utilization_is_the_share_of_time_in_forward_passes():
    now = [10.0]
    metrics = FrontMetrics(True, "m", clock=lambda: now[0])
    metrics.heartbeat({"running": 1.0, "forward_seconds": 5.0})
    now[0] = 12.0
    metrics.heartbeat({"running": 1.0, "forward_seconds": 6.5})
    assert samples(metrics.render().decode())["sglang_gpu_utilization"] == pytest.approx(0.75)


def test_disabled_metrics_cost_nothing_and_show_nothing():
    metrics = FrontMetrics(False, "m")
    metrics.started(1)
    metrics.finished("stop", 1.0, Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1))
    metrics.heartbeat({"running": 1.0})
    assert metrics.render() == b""


def test_what_the_tiers_moved_is_shown_where_there_are_tiers():
    from dataclasses import fields

    from ceiba.scheduler.hicache_stats import TierCounters

    counters = TierCounters(**{field.name: i + 1 for i, field in enumerate(fields(TierCounters))})
    metrics = FrontMetrics(True, "m")
    metrics.heartbeat({"hicache_host_total_tokens": 100.0, "hicache_host_used_tokens": 40.0, **counters.as_dict()})
    got = samples(metrics.render().decode())
    assert got["sglang:hicache_host_used_tokens"] == 40
    assert got["sglang:load_back_duration_seconds_sum"] == counters.load_back_seconds
    assert got["sglang:load_back_duration_seconds_count"] == counters.load_back_ops
    assert got["sglang:prefetched_tokens_total"] == counters.prefetched_tokens
    assert got["sglang:prefetch_bandwidth"] == pytest.approx(counters.prefetch_bytes / counters.prefetch_seconds / 1e9)
    metrics.heartbeat({"running": 1.0})
    assert not [name for name in samples(metrics.render().decode()) if "load_back" in name or "hicache" in name]
