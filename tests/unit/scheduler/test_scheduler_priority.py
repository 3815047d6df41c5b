"""Priorities: order, pre-emption, and that nobody takes turns. ``finish`` fails on five idle rounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scheduler_policy import admitted

from support.scheduler_world import make_world, prompt

ON = {"enable_priority_scheduling": True}


def ask(world, rid, seed, priority, n=10, new=20):
    world.ask(rid, prompt(seed, n), max_new_tokens=new, ignore_eos=True, priority=priority)


@pytest.mark.parametrize("low_first", [False, True])
def test_larger_goes_first_or_smaller_where_low_values_do(low_first):
    world = make_world(rows=1, policy="fcfs", low_priority_first=low_first, default_priority=4, **ON)
    order = admitted(world)
    for rid, priority in (("3", 3), ("9", 9), ("none", None), ("5", 5), ("5b", 5)):
        ask(world, rid, 1, priority, new=2)
    world.finish()
    assert order == (["3", "none", "5", "5b", "9"] if low_first else ["9", "5", "5b", "none", "3"])


@pytest.mark.parametrize(("gap", "preempted"), [(10, 0), (11, 1)])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_full_running_set_yields_above_the_threshold_only(gap, preempted, overlap):
    world = make_world(rows=2, overlap=overlap, **ON)
    ask(world, "low", 1, 0, new=40)
    ask(world, "mid", 2, 5, new=40)
    world.step(5)
    ask(world, "high", 3, gap, new=5)
    world.step(3)
    assert world.scheduler.counters.preemptions == preempted
    running = {request.rid for request in world.scheduler.rows.live()}
    assert running == ({"mid", "high"} if preempted else {"low", "mid"})
    world.finish()
    for rid in ("low", "mid", "high"):
        world.check(rid)
    assert world.scheduler.counters.preemptions == preempted


def test_the_one_with_the_least_priority_gives_way_and_comes_back_with_its_work_cached():
    world = make_world(rows=2, **ON)
    ask(world, "a", 1, 3, new=30)
    ask(world, "b", 2, 1, new=30)
    world.step(8)
    before = world.scheduler.counters.prefill_tokens
    ask(world, "high", 3, 50, n=12, new=5)
    world.finish()
    # b computes again no more than the token that was on its way and the one after the cached prefix.
    assert world.scheduler.counters.prefill_tokens - before <= 12 + 2
    assert world.scheduler.counters.preemptions == 1
    for rid in ("a", "b", "high"):
        world.check(rid)


def test_kv_is_reason_enough_and_no_more_give_way_than_needed():
    world = make_world(rows=16, pool=120, context=100, conservativeness=0.0, **ON)
    for i in range(4):
        ask(world, str(i), i, i, n=20, new=8)
    world.step(2)
    assert world.scheduler.rows.num_used == 4
    ask(world, "high", 9, 100, n=50, new=5)
    world.step(2)
    running = {request.rid for request in world.scheduler.rows.live()}
    assert "high" in running
    assert running >= {"2", "3"}
    world.finish()
    for rid in world.asked:
        world.check(rid)


def test_nobody_gives_way_for_nothing():
    """The one who waits does not fit even without the lower one, so that one goes on."""
    world = make_world(rows=4, pool=100, context=100, **ON)
    ask(world, "equal", 1, 50, n=40, new=20)
    ask(world, "low", 2, 0, n=10, new=20)
    world.step(3)
    ask(world, "high", 3, 50, n=70, new=2)
    world.step(5)
    assert world.scheduler.counters.preemptions == 0
    world.finish()
    for rid in world.asked:
        world.check(rid)


def test_without_preemption_it_only_goes_first():
    world = make_world(rows=1, preemption_threshold=None, **ON)
    order = admitted(world)
    ask(world, "low", 1, 0, new=30)
    world.step(3)
    ask(world, "mid", 2, 1, new=2)
    ask(world, "high", 3, 100, new=2)
    world.finish()
    assert order == ["low", "high", "mid"]
    assert world.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(("threshold", "mixed"), list(itertools.product([0, 10], [True, False])))
def test_two_requests_never_take_turns(threshold, mixed):
    """Every pre-emption makes room for a strictly higher priority, so there are fewer than pairs of requests."""
    world = make_world(
        rows=2,
        pool=90,
        context=80,
        preemption_threshold=threshold,
        enable_mixed_chunk=mixed,
        conservativeness=0.0,
        **ON,
    )
    for i in range(8):
        ask(world, str(i), i, 11 * (i % 4), n=25, new=25)
        world.step(2)
    world.finish()
    assert world.scheduler.counters.preemptions <= 8 * 7 // 2
    for rid in world.asked:
        world.check(rid)


def test_priority_retraction_takes_whoever_matters_least():
    world = make_world(
        rows=8, pool=60, context=60, conservativeness=0.0, retraction_policy="priority", default_priority=0
    )
    for i, priority in enumerate((5, 1, 9)):
        ask(world, str(priority), i, priority, n=8, new=40)
    while not world.scheduler.counters.retractions:
        world.step()
    retracted = {request.rid for request in world.scheduler.queue}
    assert "1" in retracted
    assert "9" not in retracted
    world.finish()
    for rid in world.asked:
        world.check(rid)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    st.sampled_from(["fcfs", "lof"]),
    st.sampled_from([0, 3, 10]),
    st.sampled_from([-1, 7, 64]),
    st.booleans(),
    st.sampled_from([60, 150]),
    st.sampled_from([1, 4]),
)
def test_answers_are_those_of_an_isolated_run_however_priorities_push(seed, policy, gap, chunk, overlap, pool, page):
    rng = np.random.default_rng(seed)
    world = make_world(
        rows=3, pool=pool, context=56, page=page, policy=policy, preemption_threshold=gap, overlap=overlap,
        chunked_prefill_size=chunk, conservativeness=float(rng.random()), retraction_policy="priority", **ON,
    )  # fmt: skip
    for i in range(10):
        world.ask(
            str(i),
            rng.integers(0, 50, int(rng.integers(1, 30))),
            max_new_tokens=int(rng.integers(1, 30)),
            priority=int(rng.integers(-20, 20)),
        )
        world.step(int(rng.integers(0, 4)))
    world.finish()
    for rid in world.asked:
        world.check(rid)
