"""Policies, priorities, fair share, pins and explanations on the real server with the real model."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from live_server import LiveServer


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 49000) for _ in range(count)]


async def send_all(server: LiveServer, bodies: list[dict], headers: list[dict] | None = None) -> list[dict]:
    """Answers in order; each with ``seconds`` until it was whole."""

    async def one(client: httpx.AsyncClient, i: int) -> dict:
        start = time.perf_counter()
        response = await client.post("/generate", json=bodies[i], headers=headers[i] if headers else None)
        assert response.status_code == 200, response.text
        return {**response.json(), "seconds": time.perf_counter() - start}

    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(one(client, i) for i in range(len(bodies))))


def generate(prompt: list[int], new: int, **fields) -> dict:
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": new, "ignore_eos": True, "temperature": 0},
        **fields,
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_100_requests_with_one_new_manual_compute_it_once(policy):
    manual = ids(7, 3000)
    with LiveServer("--schedule-policy", policy) as server:
        bodies = [generate([*manual, *ids(100 + i, 10)], 2) for i in range(100)]
        answers = asyncio.run(send_all(server, bodies))
        assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) >= 99 * 3000
        state = server.get("/server_info").json()["internal_states"][0]
        assert state["prefill_tokens"] <= 3000 + 100 * 10 + 200  # and the warm-up
        assert server.post("/generate", json=generate([1, 2, 3], 2)).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fair_share_bounds_the_wait_of_a_light_tenant():
    """24 requests of one tenant at 4 at a time, then one of another: it is served with the next free row."""
    waits = {}
    for share in ("off", "routing-key"):
        with LiveServer("--max-running-requests", "4", "--fair-share", share) as server:
            heavy = [generate(ids(i, 60), 30, routing_key="heavy") for i in range(24)]
            light = generate(ids(99, 20), 4, routing_key="light")

            async def both(server=server, heavy=heavy, light=light) -> dict:
                crowd = asyncio.create_task(send_all(server, heavy))
                await asyncio.sleep(0.3)
                answer = (await send_all(server, [light]))[0]
                await crowd
                return answer

            waits[share] = asyncio.run(both())["meta_info"]["queue_time"]
    print(f"queue time of the light tenant: fcfs {waits['off']:.2f} s, fair share {waits['routing-key']:.2f} s")
    assert waits["routing-key"] < 0.6 * waits["off"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_high_priority_pre_empts_and_both_answers_are_right():
    flags = ("--max-running-requests", "1", "--enable-priority-scheduling")
    with LiveServer(*flags) as server:
        length = {1: 300, 2: 60}  # the first still runs when the second comes
        alone = {n: server.post("/generate", json=generate(ids(n, 40), length[n])).json()["output_ids"] for n in (1, 2)}
        assert server.post("/flush_cache").status_code == 200

        async def both() -> tuple[dict, dict]:
            low = asyncio.create_task(send_all(server, [generate(ids(1, 40), length[1], priority=0)]))
            while not (await asyncio.to_thread(server.get, "/v1/loads")).json()[0]["running"]:  # noqa: ASYNC110 - it asks another process
                await asyncio.sleep(0.01)
            high = (await send_all(server, [generate(ids(2, 40), length[2], priority=100)]))[0]
            return (await low)[0], high

        low, high = asyncio.run(both())
        state = server.get("/server_info").json()["internal_states"][0]
        assert state["preemptions"] == 1
        assert high["seconds"] < low["seconds"]
        assert (low["output_ids"], high["output_ids"]) == (alone[1], alone[2])


def test_the_server_explains_pins_and_remembers_a_conversation(fresh):
    text = "The harbour master keeps a ledger of every ship, with its cargo and its captain. " * 6
    text = text.strip()
    first = fresh.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 4}}).json()
    assert first["meta_info"]["cached_tokens_details"] == {}
    facts = fresh.post("/cache/explain", json={"prompt": text + " Tonight"}).json()
    assert facts["reason"] == "diverges"
    assert "Tonight".startswith(facts["token_text"].strip())
    assert facts["cached_tokens"] == first["meta_info"]["prompt_tokens"]
    tree = fresh.get("/cache/tree").json()
    assert tree["namespaces"][0]["children"][0]["text"].startswith("The harbour master")
    pinned = fresh.post("/cache/pin", json={"prompt": text, "name": "ledger"}).json()
    assert pinned["pinned_tokens"] == first["meta_info"]["prompt_tokens"]
    session = fresh.post("/open_session", json={}).json()
    turn = {"text": text, "rid": "s1", "sampling_params": {"max_new_tokens": 8}, "session_params": {"id": session}}
    one = fresh.post("/generate", json=turn).json()
    turn |= {"text": " And then", "rid": "s2", "session_params": {"id": session, "rid": "s1"}}
    two = fresh.post("/generate", json=turn).json()["meta_info"]
    said = one["meta_info"]["prompt_tokens"] + one["meta_info"]["completion_tokens"]
    assert two["cached_tokens"] == said - 1
    assert two["prompt_tokens"] > said
    assert fresh.post("/close_session", json={"session_id": session}).status_code == 200
    assert fresh.post("/cache/unpin", json={"all": True}).json() == {"released": 1}
