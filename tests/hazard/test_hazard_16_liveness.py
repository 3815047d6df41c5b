"""Hazard 16, component level: queued work and free resources must schedule. ``finish`` fails on 5 idle rounds."""

from __future__ import annotations

import itertools

import pytest

from support.scheduler_world import make_world, prompt


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_chunk_64_with_one_running(mixed, overlap):
    world = make_world(rows=1, chunked_prefill_size=64, context=400, enable_mixed_chunk=mixed, overlap=overlap)
    for i, n in enumerate((200, 64, 65, 1, 128)):
        world.ask(str(i), prompt(i, n), max_new_tokens=5)
    world.finish()
    for i in range(5):
        world.check(str(i))


def test_three_requests_with_two_running():
    world = make_world(rows=2)
    for i in range(3):
        world.ask(str(i), prompt(i, 5), max_new_tokens=1)
    world.finish()
    for i in range(3):
        world.check(str(i))


@pytest.mark.parametrize(("page", "chunk"), list(itertools.product([1, 7, 16, 64], [-1, 1, 17])))
def test_a_request_that_needs_the_whole_pool_runs(page, chunk):
    world = make_world(pool=128, context=1000, page=page, chunked_prefill_size=chunk)
    whole = 128 // page * page
    world.ask("small", prompt(1, 9), max_new_tokens=20)
    world.ask("whole", prompt(2, whole - 20), max_new_tokens=1000, ignore_eos=True)
    world.ask("nearly all prompt", prompt(3, whole - 1), max_new_tokens=10, ignore_eos=True)
    world.ask("small too", prompt(4, 9), max_new_tokens=20)
    world.finish()
    assert len(world.answer("whole").tokens) == 20
    assert world.answer("whole").finish.kind == "length"
    for rid in world.asked:
        world.check(rid)


@pytest.mark.parametrize("page", [1, 16])
def test_a_full_cache_never_keeps_a_request_waiting(page):
    world = make_world(pool=128, page=page)
    for i in range(10):
        world.ask(str(i), prompt(i, 50), max_new_tokens=20, ignore_eos=True)
        world.finish()
        world.check(str(i))
    assert world.scheduler.leases.evicted_tokens > 0


@pytest.mark.parametrize("conservativeness", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_pool_too_small_for_all_still_serves_all(conservativeness, overlap):
    world = make_world(pool=100, context=90, conservativeness=conservativeness, overlap=overlap, rows=8)
    for i in range(12):
        world.ask(str(i), prompt(i, 8), max_new_tokens=60, ignore_eos=True)
    world.finish()
    for i in range(12):
        world.check(str(i))


def test_retraction_is_reported_and_goes_to_the_front(caplog):
    world = make_world(pool=60, context=60, conservativeness=0.0, rows=4)
    for i in range(4):
        world.ask(str(i), prompt(i, 8), max_new_tokens=40, ignore_eos=True)
    world.ask("late", prompt(9, 8), max_new_tokens=2, ignore_eos=True)
    while not world.scheduler.counters.retractions:
        world.step()
    assert "KV cache pool is full. Retract requests." in caplog.text
    waiting = [request.rid for request in world.scheduler.queue]
    assert waiting[-1] == "late"
    assert len(waiting) > 1
    world.finish()
    for rid in world.asked:
        world.check(rid)


def test_mixed_prefill_keeps_a_share_of_the_chunk():
    """More decoding rows than the chunk has tokens: the waiting prompt is still computed."""
    world = make_world(rows=16, pool=2000, chunked_prefill_size=4, enable_mixed_chunk=True)
    for i in range(12):
        world.ask(str(i), prompt(i, 3), max_new_tokens=100, ignore_eos=True)
    world.step(20)
    world.ask("new", prompt(50, 30), max_new_tokens=2, ignore_eos=True)
    for _ in range(60):
        world.step()
        if "new" in world.port.answers and world.answer("new").finish:
            break
    assert world.answer("new").finish.kind == "length"
    assert world.scheduler.rows.num_used == 12
    world.finish()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_full_running_set_yields_to_a_higher_priority_and_nobody_takes_turns(overlap):
    """One row, requests of rising priority one after the other: each takes the row over once, and all end right."""
    world = make_world(rows=1, overlap=overlap, enable_priority_scheduling=True, preemption_threshold=0)
    for i in range(5):
        world.ask(str(i), prompt(i, 10), max_new_tokens=30, ignore_eos=True, priority=i)
        world.step(4)
        assert [request.rid for request in world.scheduler.rows.live()] == [str(i)]
    world.finish()
    assert world.scheduler.counters.preemptions == 4
    ends = list(world.port.answers)
    for rid in ends:
        world.check(rid)


@pytest.mark.parametrize("policy", ["lof", "random", "routing-key", "dfs-weight", "hrrn", "shortest-prefill-first"])
def test_every_policy_serves_everyone_with_a_pool_too_small_for_all(policy):
    world = make_world(pool=100, context=90, policy=policy, conservativeness=0.0, rows=8, chunked_prefill_size=16)
    for i in range(12):
        world.ask(str(i), prompt(i % 5, 8 + i), max_new_tokens=60, ignore_eos=True)
    world.finish()
    for i in range(12):
        world.check(str(i))


def test_pins_never_keep_a_request_waiting_for_ever():
    world = make_world(pool=128, context=128, cache_pin_budget=128)
    world.ask("pinned", prompt(1, 100), max_new_tokens=1, pin="kept")
    world.finish()
    assert world.scheduler.leases.pins.tokens == 100
    world.ask("whole", prompt(2, 100), max_new_tokens=28, ignore_eos=True)
    world.finish()
    world.check("whole")
