"""That the cache and the batch are real: counters, times and answers of the running server."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from ceiba.kernels import cpu


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 49000) for _ in range(count)]


def body(prompt: list[int], tokens: int, **more) -> dict:
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def cached(usage: dict) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def first_token(server, request: dict) -> tuple[float, dict]:
    """(seconds to the first event with a token, usage)."""
    import json

    start, ttft, usage = time.perf_counter(), None, None
    request = {**request, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if event["choices"] and ttft is None:
                    ttft = time.perf_counter() - start
                usage = event.get("usage") or usage
    return ttft, usage


def test_the_second_identical_request_of_1000_tokens_comes_from_the_cache(fresh):
    first_token(fresh, body(ids(99, 1000), 2))  # the same shapes once, so that first uses are paid for
    prompt = ids(1, 1000)
    cold, usage = first_token(fresh, body(prompt, 4))
    assert cached(usage) == 0
    warm = []
    for _ in range(3):
        seconds, usage = first_token(fresh, body(prompt, 4))
        assert cached(usage) >= 999
        warm.append(seconds)
    assert min(warm) <= cold / 5


def test_another_last_token_reuses_the_rest_and_answers_as_a_cold_run_does(fresh):
    prompt = ids(2, 300)
    fresh.post("/v1/completions", body(prompt, 4))
    changed = [*prompt[:-1], prompt[-1] - 1]
    warm = fresh.post("/v1/completions", body(changed, 16, logprobs=1)).json()
    assert cached(warm["usage"]) == 299
    assert fresh.post("/flush_cache").status_code == 200
    cold = fresh.post("/v1/completions", body(changed, 16, logprobs=1)).json()
    assert cached(cold["usage"]) == 0
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    values = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (warm, cold)]
    if cpu.available and cpu.same_bits():
        assert values[0] == values[1]
    else:
        assert values[0] == pytest.approx(values[1], abs=0.05)


def test_an_answer_is_cached_with_its_prompt(fresh):
    prompt = ids(3, 50)
    first = fresh.post("/generate", {"input_ids": prompt, "sampling_params": greedy(20)}).json()
    follow = [*prompt, *first["output_ids"], 1234]
    second = fresh.post("/generate", {"input_ids": follow, "sampling_params": greedy(2)}).json()
    assert second["meta_info"]["cached_tokens"] >= 69  # the last sampled token was never an input


def test_salts_keep_caches_apart(fresh):
    prompt = ids(4, 200)
    fresh.post("/v1/completions", body(prompt, 1, cache_salt="a"))
    assert cached(fresh.post("/v1/completions", body(prompt, 1, cache_salt="b")).json()["usage"]) == 0
    assert cached(fresh.post("/v1/completions", body(prompt, 1, cache_salt="a")).json()["usage"]) == 199


def greedy(tokens: int) -> dict:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def run_together(url: str, requests: list[dict]) -> float:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        start = time.perf_counter()
        responses = await asyncio.gather(*(client.post("/v1/completions", json=r) for r in requests))
        seconds = time.perf_counter() - start
    assert [r.json()["usage"]["completion_tokens"] for r in responses] == [r["max_tokens"] for r in requests]
    return seconds


def forwards(server) -> float:
    return server.info()["internal_states"][0]["forwards"]


def test_sixteen_at_once_take_about_the_forwards_of_one_and_have_many_times_the_throughput(fresh):
    """Three pairs of measurements say so. One request waits for memory and sixteen for multiplications, so the ratio is
    a property of the machine too: about three on two AVX2 cores, less in phases of fast memory. Others may use the
    machine meanwhile, so twelve pairs may be taken."""
    tokens, ratios = 128, []
    asyncio.run(run_together(fresh.url, [body(ids(50, 20), 8)] * 16))
    while sum(ratio >= 2.5 for ratio in ratios) < 3:
        assert len(ratios) < 12, f"throughput of sixteen over that of one: {ratios}"
        turn = len(ratios)
        before = forwards(fresh)
        single = asyncio.run(run_together(fresh.url, [body(ids(60 + turn, 20), tokens)]))
        one = forwards(fresh) - before
        assert tokens <= one <= tokens + 8
        before = forwards(fresh)
        prompts = [ids(100 * (turn + 1) + i, 20) for i in range(16)]
        together = asyncio.run(run_together(fresh.url, [body(prompt, tokens) for prompt in prompts]))
        assert forwards(fresh) - before <= 1.5 * one
        ratios.append(16 * single / together)


def test_the_ledger_balances_when_idle(fresh):
    asyncio.run(run_together(fresh.url, [body(ids(90 + i, 64), 8) for i in range(8)]))
    state = fresh.info()["internal_states"][0]
    assert state["running"] == 0
    assert state["waiting"] == 0
