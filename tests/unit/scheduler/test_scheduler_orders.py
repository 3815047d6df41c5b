"""The order of every schedule policy, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from test_scheduler_policy import admitted, warm

from ceiba.scheduler.policy import POLICIES
from support.scheduler_world import make_world, prompt


def ask_all(world, requests, **common):
    for rid, tokens, fields in requests:
        world.ask(rid, tokens, **{"max_new_tokens": 2, "ignore_eos": True, **common, **fields})


def test_lof_admits_the_longest_output_first():
    world = make_world(rows=1, policy="lof")
    order = admitted(world)
    ask_all(world, [(str(n), prompt(n, 5), {"max_new_tokens": n}) for n in (3, 30, 7, 12)])
    world.finish()
    assert order == ["30", "12", "7", "3"]


def test_lof_under_priorities_looks_at_those_first():
    world = make_world(rows=1, policy="lof", enable_priority_scheduling=True)
    order = admitted(world)
    ask_all(
        world,
        [
            ("long", prompt(1, 5), {"max_new_tokens": 30}),
            ("high", prompt(2, 5), {"max_new_tokens": 3, "priority": 5}),
            ("higher", prompt(3, 5), {"max_new_tokens": 2, "priority": 9}),
        ],
    )
    world.finish()
    assert order == ["higher", "high", "long"]


def test_random_depends_on_the_seed_and_leaves_nobody_out():
    orders = []
    for seed in (1, 1, 2):
        world = make_world(rows=1, policy="random", random_seed=seed)
        order = admitted(world)
        ask_all(world, [(str(i), prompt(i, 5), {}) for i in range(12)])
        world.finish()
        assert sorted(order, key=int) == [str(i) for i in range(12)]
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0], key=int)


def test_routing_key_prefers_the_key_that_runs_most():
    world = make_world(rows=4, policy="routing-key")
    ask_all(
        world,
        [(f"r{i}", prompt(i, 5), {"routing_key": key}) for i, key in enumerate("aabb")],
        max_new_tokens=60,
    )
    world.abort("r3")
    world.step()
    order = admitted(world)
    ask_all(world, [(rid, prompt(9, 5), {"routing_key": rid[0]}) for rid in ("c1", "b1", "a1", "b2", "a2")])
    world.abort("r0", "r1")
    world.step(2)
    # Only r2 (key b) runs, then what was admitted adds to its key's weight.
    assert order[0] == "b1"
    world.finish()
    assert sorted(order) == ["a1", "a2", "b1", "b2", "c1"]


def test_dfs_weight_walks_the_heavier_subtree_first_and_keeps_it_together():
    world = make_world(rows=1, policy="dfs-weight", in_batch_check_threshold=-1)
    heavy, light = prompt(1, 20), prompt(2, 20)
    deep = heavy + prompt(3, 20)
    warm(world, deep, light)
    ask_all(world, [("running", prompt(8, 5), {})], max_new_tokens=50)
    world.step(2)
    ask_all(
        world,
        [
            ("light", [*light, 1], {}),
            ("heavy1", [*heavy, 7, 1], {}),
            ("none", prompt(9, 10), {}),
            ("deep", [*deep, 2], {}),
            ("heavy2", [*heavy, 8, 2], {}),
        ],
    )
    world.step()
    # Three wait below heavy, one below light; what matches most of a node comes first, what was never cached last.
    order = [request.rid for request in world.scheduler.admission.order()]
    assert order == ["deep", "heavy1", "heavy2", "light", "none"]
    world.finish()


def test_hrrn_weighs_waiting_against_length():
    world = make_world(rows=1, policy="hrrn", context=200)
    order = admitted(world)
    ask_all(world, [("a", prompt(1, 40), {}), ("b", prompt(2, 50), {})])
    world.step()
    ask_all(world, [("d", prompt(4, 20), {})])
    assert order == ["a"]
    world.finish()
    # After a's end: b has waited for 40 prefilled tokens (40/50), d for none: b first.
    assert order == ["a", "b", "d"]


def test_hrrn_lets_a_short_one_overtake_and_falls_back_above_128():
    for extra, expected in ((0, "short"), (127, "long")):
        world = make_world(rows=1, policy="hrrn", context=200, pool=3000)
        ask_all(world, [("a", prompt(1, 40), {})])
        world.step()
        order = admitted(world)
        ask_all(world, [("long", prompt(2, 100), {}), ("short", prompt(3, 10), {})])
        ask_all(world, [(str(i), prompt(50 + i, 4), {}) for i in range(extra)])
        for request in world.scheduler.port.inbox:
            request.arrival = 0.0
        world.step()
        world.scheduler.counters.prefill_tokens += 100  # others' work meanwhile
        world.finish()
        assert order[0] == expected


def test_shortest_prefill_first_counts_uncached_tokens():
    world = make_world(rows=1, policy="shortest-prefill-first")
    warm(world, prompt(1, 60))
    order = admitted(world)
    ask_all(
        world,
        [("30", prompt(2, 30), {}), ("5 of 65", prompt(1, 60) + prompt(3, 5), {}), ("10", prompt(4, 10), {})],
    )
    world.finish()
    assert order == ["5 of 65", "10", "30"]


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill-first"])
def test_a_long_prompt_in_chunks_leaves_a_share_to_short_ones(policy):
    """Chunk 32: shortest-prefill-first keeps 8 tokens a step for whoever fits, so the short one starts at once."""
    world = make_world(context=600, policy=policy, chunked_prefill_size=32)
    ask_all(world, [("long", prompt(1, 500), {})])
    world.step()
    ask_all(world, [("short", prompt(2, 8), {})])
    world.step(2)
    started = any(request.rid == "short" for request in world.scheduler.rows.live())
    assert started == (policy == "shortest-prefill-first")
    before = int(world.scheduler.leases.launched.max())
    assert before == (96 if policy == "fcfs" else 32 + 24 + 32)
    world.finish()
    for rid in ("long", "short"):
        world.check(rid)


@pytest.mark.parametrize("policy", ["lpm", "hrrn", "dfs-weight", "shortest-prefill-first"])
def test_a_blocked_queue_is_matched_once_as_long_as_the_cache_stays_the_same(policy):
    world = make_world(rows=1, policy=policy, pool=3000, context=400)
    ask_all(world, [("a", prompt(1, 20), {})], max_new_tokens=300)
    world.step(3)
    ask_all(world, [(str(i), prompt(10 + i, 30), {}) for i in range(100)])
    world.step(3)
    world.scheduler.rows._free.append(99)  # a row seems free, so that the queue is ordered every round
    world.scheduler.admission.config = type("C", (), {})  # and whoever asked for its budget would fail
    calls = []
    cache = world.scheduler.leases.cache
    original = cache.match
    cache.match = lambda *a: calls.append(a) or original(*a)
    for _ in range(5):
        list(world.scheduler.admission.order())
    assert len(calls) == 100


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "random"])
@pytest.mark.parametrize("fair", ["off", "routing-key"])
def test_an_order_that_is_kept_is_the_one_that_would_be_made_anew(policy, fair):
    rng = np.random.default_rng(5)
    fair = "off" if policy == "priority" else fair
    world = make_world(rows=3, pool=300, policy=policy, fair_share=fair, eager=True)
    shared = [prompt(i, 40) for i in range(3)]
    for i in range(60):
        if rng.random() < 0.5:
            tokens = [*shared[int(rng.integers(3))][: int(rng.integers(41))], int(rng.integers(50))]
            key = str(int(rng.integers(3)))
            world.ask(str(i), tokens, max_new_tokens=int(rng.integers(2, 20)), routing_key=key, tenant=key)
        world.step(int(rng.integers(0, 3)))
        admission = world.scheduler.admission
        kept = [request.rid for request in admission.order()]
        again = [request.rid for request in admission.order()]
        admission._ordered.stamp = "another"
        if admission.fair is not None:
            admission.fair._stamp = "another"
        assert kept == again == [request.rid for request in admission.order()]
    world.finish()


def test_the_ranked_part_is_bounded_and_the_rest_keeps_its_order():
    world = make_world(rows=1, policy="shortest-prefill-first", pool=20_000)
    ask_all(world, [("run", prompt(0, 5), {})], max_new_tokens=100)
    world.step()
    rng = np.random.default_rng(0)
    ask_all(world, [(str(i), prompt(i, int(rng.integers(1, 40))), {}) for i in range(600)])
    world.step()
    order = [request.rid for request in world.scheduler.admission.order()]
    matches = world.scheduler.admission.matches
    lengths = [matches.uncached(world.scheduler._requests[rid]) for rid in order[:512]]
    assert lengths == sorted(lengths)
    assert order[512:] == [str(i) for i in range(512, 600)]
    # Who stands further back is ranked as soon as there is room in front.
    world.abort(*order[:88])
    world.step()
    order = [request.rid for request in world.scheduler.admission.order()]
    lengths = [matches.uncached(world.scheduler._requests[rid]) for rid in order]
    assert len(order) == 512
    assert lengths == sorted(lengths)
