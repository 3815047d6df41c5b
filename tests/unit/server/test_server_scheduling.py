"""Deadlines, tenants, priorities, pins, explanations and sessions over HTTP, on the real scheduler."""

from __future__ import annotations

import asyncio

import pytest

from ceiba.core.messages import Control, Generate
from ceiba.core.tenants import key_digest
from support.scheduler_front import scheduled_world

LONG = "The manual says that the valve opens at noon and closes at dusk. " * 4


def generate(text, new=4, **fields):
    sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0}
    return {"text": text, "sampling_params": sampling, **fields}


def sent(world):
    return [message for message in world.ports.seen if isinstance(message, Generate)]


async def test_usage_says_what_came_from_which_tier():
    async with scheduled_world() as world:
        await world.post("/generate", generate(LONG))
        meta = (await world.post("/generate", generate(LONG)))["meta_info"]
        assert meta["cached_tokens"] == len(LONG) - 1
        assert meta["cached_tokens_details"] == {"device": len(LONG) - 1}
        body = {"model": "m", "prompt": LONG, "max_tokens": 2}
        details = (await world.post("/v1/completions", body))["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": len(LONG) - 1, "cached_tokens_by_tier": {"device": len(LONG) - 1}}


async def test_a_request_that_waits_longer_than_it_wants_gets_504_and_the_reason():
    async with scheduled_world(rows=1, context=500) as world:
        first = asyncio.create_task(world.post("/generate", generate("a", 450)))
        while not sent(world):  # noqa: ASYNC110
            await asyncio.sleep(0)
        error = (await world.post("/generate", generate("b", queue_timeout=0.001), 504))["error"]
        assert "longer than its limit" in error["message"]
        await first
        for bad in (0, -1, 1e9):
            error = (await world.post("/generate", generate("b", queue_timeout=bad), 400))["error"]
            assert error["param"] == "queue_timeout"


async def test_a_full_queue_is_503_with_retry_after():
    async with scheduled_world(rows=1, max_queued_requests=1) as world:
        tasks = [asyncio.create_task(world.client.post("/generate", json=generate(f"{i}", 200))) for i in range(4)]
        answers = await asyncio.gather(*tasks)
        codes = sorted(answer.status_code for answer in answers)
        assert codes[0] == 200
        assert codes[-1] == 503
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"]
        assert "--max-queued-requests 1" in refused.json()["error"]["message"]


@pytest.mark.parametrize("share", ["off", "routing-key", "api-key"])
async def test_whose_share_a_request_is_charged_to(share):
    async with scheduled_world(fair_share=share) as world:
        headers = {"authorization": "Bearer sk-secret"}
        await world.post("/generate", generate("a", routing_key="team"), headers=headers)
        body = {"model": "m", "prompt": "a", "max_tokens": 2, "routing_key": "team"}
        await world.post("/v1/completions", body, headers=headers)
        expected = {"off": "", "routing-key": "team", "api-key": key_digest("sk-secret")}[share]
        assert [message.tenant for message in sent(world)] == [expected] * 2


async def test_a_priority_is_taken_where_it_changes_something():
    async with scheduled_world() as world:
        error = (await world.post("/generate", generate("a", priority=3), 400))["error"]
        assert "--enable-priority-scheduling" in error["message"]
    for fields in (
        {"enable_priority_scheduling": True},
        {"radix_eviction_policy": "priority"},
        {"retraction_policy": "priority"},
    ):
        async with scheduled_world(**fields) as world:
            await world.post("/generate", generate("a", priority=3))
            assert sent(world)[-1].priority == 3


async def test_cache_control_keeps_a_prompt_through_a_flood_of_others():
    async with scheduled_world(pool=800, cache_pin_budget=300) as world:
        control = {"type": "ephemeral", "ttl": "1h"}
        body = {"model": "m", "prompt": LONG, "max_tokens": 2, "cache_control": control}
        details = (await world.post("/v1/completions", body))["usage"]["prompt_tokens_details"]
        assert details["pinned_tokens"] == len(LONG)
        for i in range(8):
            await world.post("/generate", generate(f"{i} " * 150))
        meta = (await world.post("/generate", generate(LONG)))["meta_info"]
        assert meta["cached_tokens"] == len(LONG) - 1
        pins = (await world.client.get("/cache/pins")).json()
        assert [pin["tokens"] for pin in pins["pins"]] == [len(LONG)]
        assert 3500 < pins["pins"][0]["expires_in"] <= 3600


async def test_cache_control_is_refused_where_it_means_nothing():
    async with scheduled_world(cache_pin_budget=100) as world:
        for control in ({"type": "x"}, {"type": "ephemeral", "ttl": "2m"}, {"type": "ephemeral", "more": 1}):
            error = (await world.post("/generate", generate("a", cache_control=control), 400))["error"]
            assert error["param"] == "cache_control"
    async with scheduled_world() as world:
        error = (await world.post("/generate", generate("a", cache_control={"type": "ephemeral"}), 400))["error"]
        assert "--cache-pin-budget" in error["message"]


async def test_explain_in_words_and_texts():
    async with scheduled_world() as world:
        await world.post("/generate", generate("The manual says yes.", 1))
        facts = await world.post("/cache/explain", {"prompt": "The manual knows no."})
        assert (facts["reason"], facts["cached_tokens"], facts["token_text"]) == ("diverges", 11, "k")
        assert facts["before_text"] == "The manual "
        assert facts["cached_instead_texts"][0].startswith("says yes.")
        assert "From token 11 on" in facts["why"]
        chat = await world.post("/cache/explain", {"messages": [{"role": "user", "content": "hi"}]})
        assert chat["prompt_tokens"] == len("<user>hi\n<assistant>")
        again = await world.post("/cache/explain", {"input_ids": list(b"The manual says yes.")})
        assert again["reason"] == "cached"
        for body in ({}, {"prompt": "a", "input_ids": [1]}, {"input_ids": [9999]}, {"input_ids": []}):
            await world.post("/cache/explain", body, 400)


async def test_an_explanation_names_the_request_that_needed_the_room():
    async with scheduled_world(pool=400, context=390) as world:
        await world.post("/generate", generate(LONG, rid="first"))
        await world.post("/generate", generate("x" * 300, 1, rid="greedy"))
        facts = await world.post("/cache/explain", {"prompt": LONG})
        assert facts["reason"] == "evicted"
        assert facts["evictions"][0]["for"].startswith("greedy")
        assert "to make room for request greedy" in facts["why"]


async def test_the_tree_shows_texts():
    async with scheduled_world() as world:
        for end in ("a", "b"):
            await world.post("/generate", generate(f"shared beginning {end}", 1))
        tree = (await world.client.get("/cache/tree?depth=2&width=3")).json()
        node = tree["namespaces"][0]["children"][0]
        assert node["text"] == "shared beginning"
        assert node["hits"] == 1
        assert len(node["children"]) == 2


async def test_pin_computes_what_is_missing_and_unpin_releases():
    async with scheduled_world(pool=1000, cache_pin_budget=300) as world:
        pinned = await world.post("/cache/pin", {"prompt": LONG, "name": "manual"})
        assert pinned["pinned_tokens"] == len(LONG)
        error = (await world.post("/cache/pin", {"prompt": "y" * 200}, 400))["error"]
        assert "no room for 200 more" in error["message"]
        error = (await world.post("/cache/pin", {"prompt": "y" * 301}, 400))["error"]
        assert "--cache-pin-budget is 300" in error["message"]
        assert await world.post("/cache/unpin", {"name": "manual"}) == {"released": 1}
        await world.post("/cache/pin", {"prompt": "y" * 200})
        assert await world.post("/cache/unpin", {"all": True}) == {"released": 1}
        await world.post("/cache/unpin", {}, 400)


async def test_a_session_continues_without_resending_and_without_recomputing():
    async with scheduled_world(pool=1500, cache_pin_budget=400) as world:
        name = await world.post("/open_session", {"capacity_of_str_len": 400})
        first = await world.post(
            "/generate", generate("Hello there, engine.", 6, rid="t1", session_params={"id": name})
        )
        for i in range(10):
            await world.post("/generate", generate(f"{i} " * 100))
        turn = generate(" And now?", 6, rid="t2", session_params={"id": name, "rid": "t1"})
        second = await world.post("/generate", turn)
        assert second["meta_info"]["prompt_tokens"] == 20 + 6 + 9
        assert second["meta_info"]["cached_tokens"] == 20 + 5
        # The same as sending everything.
        ids = [*b"Hello there, engine.", *first["output_ids"], *b" And now?"]
        alone = await world.post("/generate", {**generate("", 6), "text": None, "input_ids": ids})
        assert alone["output_ids"] == second["output_ids"]
        assert await world.post("/close_session", {"session_id": name}) == {"closed": name}
        assert (await world.client.get("/cache/pins")).json()["budget_used"] == 0
        error = (await world.post("/generate", turn, 404))["error"]
        assert error["code"] == "no_session"


async def test_branches_offsets_and_replacing():
    async with scheduled_world(cache_pin_budget=400) as world:
        name = await world.post("/open_session", {})

        def turn(text, called, **params):
            return world.post("/generate", generate(text, 2, rid=called, session_params={"id": name, **params}))

        def prompt_of(rid):
            return next(bytes(m.input_ids[::4]) for m in sent(world) if m.rid.startswith(rid))

        await turn("abcdef", "1")
        await turn("X", "2", rid="1", offset=3)
        await turn("Y", "3", rid="1", drop_previous_output=True)
        assert prompt_of("2") == b"abcX"
        assert prompt_of("3") == b"abcdefY"
        await turn("Z", "4", rid="1", replace=True, drop_previous_output=True)
        error = await world.post("/generate", generate("q", session_params={"id": name, "rid": "2"}), 400)
        assert "no finished turn '2'" in error["error"]["message"]
        await turn("new", "5", replace=True)
        for params, part in (
            ({"rid": "1"}, "no finished turn"),
            ({"rid": "5", "offset": 99}, "offset must lie in"),
            ({"offset": 1}, "need rid"),
            ({"rid": "5", "colour": 1}, "session_params"),
        ):
            error = await world.post("/generate", generate("q", session_params={"id": name, **params}), 400)
            assert part in error["error"]["message"]


async def test_limits_of_sessions():
    async with scheduled_world(cache_pin_budget=400) as world:
        name = await world.post("/open_session", {"capacity_of_str_len": 10, "session_id": "mine", "timeout": 60})
        assert name == "mine"
        await world.post("/open_session", {"session_id": "mine"}, 400)
        await world.post("/open_session", {"timeout": -1}, 400)
        error = (await world.post("/generate", generate("x" * 11, session_params={"id": name}), 400))["error"]
        assert error["code"] == "session_full"
        slow = asyncio.create_task(world.post("/generate", generate("x", 300, session_params={"id": name})))
        while not sent(world):  # noqa: ASYNC110
            await asyncio.sleep(0)
        error = (await world.post("/generate", generate("y", session_params={"id": name}), 400))["error"]
        assert error["code"] == "busy"
        await slow
        await world.post("/generate", generate("y", session_params={"id": name}))
        await world.post("/close_session", {"session_id": "other"}, 404)
        two = {**generate("", session_params={"id": name}), "text": ["a", "b"]}
        await world.post("/generate", two, 400)
        assert any(isinstance(message, Control) for message in world.ports.seen) is False


async def test_the_turns_of_all_sessions_have_one_budget(monkeypatch):
    async with scheduled_world(cache_pin_budget=400) as world:
        first, second = [await world.post("/open_session", {}) for _ in range(2)]
        turn = await world.post("/generate", generate("abc", session_params={"id": first}))
        monkeypatch.setattr("ceiba.server.sessions.MAX_BYTES", 16)
        error = (await world.post("/generate", generate("x", session_params={"id": second}), 503))["error"]
        assert error["code"] == "sessions_full"
        after = {"id": first, "rid": turn["meta_info"]["id"], "replace": True}
        error = (await world.post("/generate", generate("x", session_params=after), 503))["error"]
        assert error["code"] == "sessions_full", "nothing follows that turn: nothing is forgotten"
        monkeypatch.setattr("ceiba.server.sessions.MAX_TURNS", 1)
        again = {"id": first, "replace": True}
        turn = await world.post("/generate", generate("abc", session_params=again))
        await world.post("/generate", generate("ab", session_params=again))
        assert turn["meta_info"]["id"]
        await world.post("/close_session", {"session_id": first})
        await world.post("/generate", generate("x", session_params={"id": second}))
