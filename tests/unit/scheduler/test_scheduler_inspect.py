"""What the scheduler says of its cache, and pins, through the same messages that the front sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceiba.core.messages import Control, ids_to_bytes
from support.scheduler_world import make_world, prompt


def call(world, op, **args):
    if "tokens" in args:
        args["input_ids"] = ids_to_bytes(args.pop("tokens"))
    world.port.push(Control(id=len(world.port.replies), op=op, args=args))
    world.step()
    reply = world.port.replies[-1]
    assert reply.ok, reply.error
    return reply.value


def serve(world, rid, tokens, **fields):
    world.ask(rid, tokens, **{"max_new_tokens": 1, "ignore_eos": True, **fields})
    world.finish()


def test_a_prompt_nobody_has_sent_is_new():
    world = make_world()
    facts = call(world, "cache_explain", tokens=prompt(1, 30))
    assert (facts["reason"], facts["cached_tokens"], facts["diverges_at"]) == ("new", 0, 0)


def test_where_a_prompt_diverges_and_what_is_there_instead():
    world = make_world()
    serve(world, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    facts = call(world, "cache_explain", tokens=[1, 2, 3, 4, 40, 41, 42])
    assert (facts["reason"], facts["cached_tokens"], facts["diverges_at"]) == ("diverges", 4, 4)
    assert (facts["before"], facts["token"]) == ([1, 2, 3, 4], 40)
    assert facts["cached_instead"] == [[5, 6, 7, 8]]
    assert facts["cached_by_tier"] == {"device": 4}


def test_a_served_prompt_is_cached_but_for_its_last_token():
    world = make_world()
    serve(world, "a", prompt(1, 30))
    facts = call(world, "cache_explain", tokens=prompt(1, 30))
    assert (facts["reason"], facts["cached_tokens"], facts["usable_tokens"]) == ("cached", 30, 29)


def test_what_was_evicted_when_and_for_whom():
    world = make_world(pool=100)
    serve(world, "old", prompt(1, 60))
    world.now[0] = 50.0
    serve(world, "big one", prompt(2, 80))
    world.now[0] = 60.0
    facts = call(world, "cache_explain", tokens=prompt(1, 60))
    assert facts["reason"] == "evicted"
    at = facts["cached_tokens"]
    (gone,) = facts["evictions"]
    assert gone == {"start": at, "tokens": 60 - at, "seconds_ago": 10.0, "for": "big one"}
    assert 0 < at <= 20


def test_another_salt_is_told_apart_from_a_real_miss():
    world = make_world()
    serve(world, "a", prompt(1, 30), namespace="tenant-a")
    facts = call(world, "cache_explain", tokens=prompt(1, 30), namespace="tenant-b")
    assert (facts["reason"], facts["cached_tokens"], facts["elsewhere"]) == ("new", 0, 30)


def test_the_tree_by_subtree_within_its_limits():
    world = make_world(context=200, pool=2000)
    for i in range(5):
        serve(world, f"a{i}", [*prompt(1, 40), i, 10 + i])
    serve(world, "b", prompt(2, 10))
    serve(world, "c", prompt(3, 7), namespace="x")
    world.ask("run", [*prompt(1, 40), 0, 10, 20], max_new_tokens=90, ignore_eos=True)
    world.step(4)
    tree = call(world, "cache_tree", depth=1, width=2)
    first, second = tree["namespaces"]
    assert (first["namespace"], second["namespace"]) == ("", "x")
    assert (first["children_omitted"], len(first["children"])) == (0, 2)
    heavy = first["children"][0]
    assert (heavy["start"], heavy["tokens"], heavy["subtree_nodes"], heavy["locks"]) == (0, 40, 7, 1)
    # a1 to a4 and the one that runs began with it; a0 computed it.
    assert heavy["hits"] == 5
    assert (heavy["children"], heavy["children_omitted"]) == ([], 5)
    assert heavy["token_ids"] == prompt(1, 16)
    assert tree["tokens"] == sum(entry["subtree_tokens"] for entry in tree["namespaces"])
    world.finish()
    bare = call(world, "cache_tree", depth=0, width=1)
    assert (bare["namespaces"][0]["children"], bare["namespaces_omitted"]) == ([], 1)


def test_without_a_cache_it_says_so():
    world = make_world(disable_radix_cache=True)
    assert call(world, "cache_explain", tokens=[1, 2])["reason"] == "off"
    for op in ("cache_tree", "cache_pin"):
        world.port.push(Control(id=1, op=op, args={"name": "x", "input_ids": ids_to_bytes([1])}))
        world.step()
        assert "the prefix cache is off" in world.port.replies[-1].error


def test_a_missing_argument_is_named():
    world = make_world()
    world.port.push(Control(id=1, op="cache_explain"))
    world.step()
    assert "'input_ids'" in world.port.replies[-1].error


def test_pin_survives_pressure_and_unpin_frees_it():
    world = make_world(pool=200, cache_pin_budget=50)
    serve(world, "a", prompt(1, 40))
    assert call(world, "cache_pin", tokens=prompt(1, 40), name="a")["pinned_tokens"] == 40
    for i in range(8):
        serve(world, str(i), prompt(10 + i, 70), max_new_tokens=30)
    assert call(world, "cache_explain", tokens=prompt(1, 40))["cached_tokens"] == 40
    assert [pin["name"] for pin in call(world, "cache_pins")["pins"]] == ["a"]
    assert call(world, "cache_unpin", name="a") == {"released": 1}
    assert call(world, "cache_unpin", name="a") == {"released": 0}
    for i in range(8):
        serve(world, f"x{i}", prompt(30 + i, 70), max_new_tokens=30)
    assert call(world, "cache_explain", tokens=prompt(1, 40))["cached_tokens"] < 40


def test_a_request_pins_its_prompt_for_a_time_and_says_how_much():
    world = make_world(pool=200, cache_pin_budget=60)
    serve(world, "a", prompt(1, 40), pin="prompt:a", pin_seconds=300.0)
    assert world.answer("a").usages[-1].pinned_tokens == 40
    assert call(world, "cache_pins")["budget_used"] == 40
    world.now[0] = 300.0
    world.step()
    assert call(world, "cache_pins")["budget_used"] == 0


def test_a_session_pins_its_answer_too_and_replaces_its_own_pin():
    world = make_world(pool=300, cache_pin_budget=100)
    serve(world, "t1", prompt(1, 20), max_new_tokens=5, pin="session:s", pin_output=True)
    assert call(world, "cache_pins")["budget_used"] == 24  # the last token's KV is never computed
    turn2 = prompt(1, 20) + world.answer("t1").tokens + prompt(2, 10)
    serve(world, "t2", turn2, max_new_tokens=5, pin="session:s", pin_output=True)
    assert world.answer("t2").usages[-1].cached_tokens == 24
    pins = call(world, "cache_pins")
    assert (pins["budget_used"], len(pins["pins"])) == (39, 1)


@pytest.mark.parametrize("chunk", [-1, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_pins_give_way_before_anyone_is_stuck(chunk, overlap):
    """A pool of 100, 50 of it pinned, and a request that needs 95: it runs, and the pin has gone."""
    world = make_world(pool=100, context=100, cache_pin_budget=50, chunked_prefill_size=chunk, overlap=overlap)
    serve(world, "a", prompt(1, 50), pin="keep")
    assert world.scheduler.leases.pins.tokens == 50
    world.ask("big", prompt(2, 80), max_new_tokens=15, ignore_eos=True)
    world.finish()
    world.check("big")
    assert len(world.scheduler.leases.pins) == 0


def test_pins_do_not_give_way_to_ordinary_pressure():
    world = make_world(pool=120, context=100, cache_pin_budget=40, conservativeness=0.0)
    serve(world, "a", prompt(1, 40), pin="keep")
    for i in range(6):
        world.ask(str(i), prompt(10 + i, 15), max_new_tokens=50, ignore_eos=True)
    world.finish()
    assert world.scheduler.counters.retractions > 0
    assert len(world.scheduler.leases.pins) == 1
    for i in range(6):
        world.check(str(i))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    st.sampled_from(["lru", "lfu", "slru", "priority", "tlru"]),
    st.sampled_from([64, 120]),
    st.sampled_from([1, 4]),
    st.sampled_from([0, 16, 60]),
    st.booleans(),
    st.sampled_from(["off", "routing-key"]),
)
def test_answers_are_those_of_an_isolated_run_with_pins_in_the_way(seed, eviction, pool, page, budget, overlap, share):
    rng = np.random.default_rng(seed)
    world = make_world(
        pool=pool, context=60, page=page, rows=4, radix_eviction_policy=eviction, overlap=overlap,
        cache_pin_budget=budget // page * page, conservativeness=0.1, chunked_prefill_size=17, fair_share=share,
    )  # fmt: skip
    heads = [rng.integers(0, 50, 30) for _ in range(3)]
    for i in range(12):
        tokens = np.concatenate([heads[int(rng.integers(3))][: int(rng.integers(1, 31))], rng.integers(0, 50, 3)])
        pin = f"p{int(rng.integers(3))}" if rng.random() < 0.5 else ""
        world.ask(
            str(i),
            tokens,
            max_new_tokens=int(rng.integers(1, 25)),
            pin=pin,
            pin_seconds=float(rng.integers(0, 5)),
            pin_output=bool(rng.random() < 0.5),
            tenant=str(rng.integers(3)),
        )
        world.now[0] += 1.0
        world.step(int(rng.integers(0, 4)))
        if rng.random() < 0.2:
            call(world, "cache_unpin", name=f"p{int(rng.integers(3))}")
    world.finish()
    for rid in world.asked:
        world.check(rid)
    call(world, "cache_unpin", everything=True)
    assert world.scheduler.leases.cache.locked == 0
