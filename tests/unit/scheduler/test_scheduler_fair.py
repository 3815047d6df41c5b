"""Fair share: the bound of the paper, weights, and that a light tenant hardly notices a heavy one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceiba.config.records import SchedulerConfig
from ceiba.scheduler import fair
from ceiba.scheduler.simulate import simulate
from ceiba.scheduler.traces import make_trace
from support.scheduler_world import VOCAB, make_world, prompt

ON = {"fair_share": "routing-key"}


def ask(world, rid, tenant, n=10, new=10, seed=None):
    """Without ``seed`` no prompt begins as one of the last fifty did: what is cached is free, and would shift turns."""
    count = len(world.asked)
    tokens = [count % VOCAB, *prompt(count, n - 1)] if seed is None else prompt(seed, n)
    world.ask(rid, tokens, max_new_tokens=new, ignore_eos=True, tenant=tenant)


def order_of(world):
    order = []
    original = world.scheduler.admission._open

    def record(request, match, now):
        order.append(request.rid)
        return original(request, match, now)

    world.scheduler.admission._open = record
    return order


def test_tenants_take_turns_whatever_one_has_queued():
    world = make_world(rows=1, **ON)
    order = order_of(world)
    for i in range(6):
        ask(world, f"heavy{i}", "heavy")
    for i in range(3):
        ask(world, f"light{i}", "light")
    world.finish()
    assert [rid[:5] for rid in order[:6]] == ["heavy", "light"] * 3
    assert order[6:] == ["heavy3", "heavy4", "heavy5"]
    for rid in world.asked:
        world.check(rid)


def test_a_weight_of_three_gets_three_times_the_service():
    world = make_world(rows=1, fair_share_weights={"gold": 3.0}, **ON)
    order = order_of(world)
    for i in range(40):
        ask(world, f"gold{i}", "gold")
        ask(world, f"iron{i}", "iron")
    while len(order) < 33:
        world.step()
    gold = sum(rid.startswith("gold") for rid in order[:32])
    assert gold == pytest.approx(24, abs=1)
    world.abort(everything=True)
    world.finish()


def test_idling_saves_nothing_up():
    """b comes after a has had much service; it takes turns from there, not the whole engine until it has caught up."""
    world = make_world(rows=1, **ON)
    for i in range(10):
        ask(world, f"a{i}", "a")
    world.step(60)
    order = order_of(world)
    for i in range(6):
        ask(world, f"b{i}", "b")
        ask(world, f"aa{i}", "a")
    world.finish()
    late = [rid[0] for rid in order if rid[:2] != "a"]
    assert "bbb" not in "".join(late)


def test_cached_tokens_are_not_charged():
    world = make_world(rows=1, **ON)
    ask(world, "x", "a", n=50, new=1, seed=1)
    world.finish()
    assert world.scheduler.fair.service("a") == 50 + 2
    ask(world, "y", "b", n=50, new=1, seed=1)
    world.finish()
    # b starts where a stood (nobody waits meanwhile) and pays for the one token that is always computed.
    assert world.scheduler.fair.service("b") == 52 + 1 + 2


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 6]),
    st.sampled_from([-1, 16]),
    st.sampled_from(["fcfs", "lpm", "lof"]),
)
def test_two_backlogged_tenants_stay_within_the_bound(seed, rows, chunk, policy):
    """Theorem 4.4 of the paper: with w_p = 1, w_q = 2 the services of two tenants that both always have something
    waiting differ by at most 2 * max(w_p * longest input, w_q * KV pool)."""
    rng = np.random.default_rng(seed)
    pool = 200
    world = make_world(rows=rows, pool=pool, context=60, policy=policy, chunked_prefill_size=chunk, **ON)
    for i in range(24):
        for tenant in "ab":
            n, new = (int(rng.integers(1, 30)) for _ in range(2))
            ask(world, f"{tenant}{i}", tenant, n=n, new=new, seed=int(rng.integers(2**31)))
    bound = 2 * max(fair.INPUT_WEIGHT * 30, fair.OUTPUT_WEIGHT * pool)
    worst = 0.0
    while True:
        world.step()
        waiting = {request.tenant for request in world.scheduler.queue}
        if waiting != {"a", "b"}:
            break
        worst = max(worst, abs(world.scheduler.fair.service("a") - world.scheduler.fair.service("b")))
    assert worst <= bound
    world.finish()
    for rid in world.asked:
        world.check(rid)


def test_a_light_tenant_waits_a_bounded_time_beside_a_heavy_one():
    """In simulation: one tenant sends far more than the engine can do, another now and then one request. Under fcfs the
    light one waits as long as the queue is; under fair share never longer than until the next rows come free."""
    trace = make_trace("tenants", 400, 6.0, seed=0)
    light = [i for i, request in enumerate(trace) if request.tenant == "light"]
    assert 5 <= len(light) <= 60
    config = SchedulerConfig(max_running_requests=32, max_total_tokens=60_000, max_prefill_tokens=32768)
    import msgspec

    waits = {}
    for share in ("off", "routing-key"):
        figures = simulate(trace, msgspec.structs.replace(config, fair_share=share), detail=True)
        waits[share] = max(figures["queue_times"][i] for i in light)
    print(f"longest wait of the light tenant: fcfs {waits['off']:.1f} s, fair share {waits['routing-key']:.1f} s")
    # The longest request of the heavy tenant: 600 output tokens of 15 ms with 32 rows.
    assert waits["routing-key"] < 10 < waits["off"]


def test_counters_of_idle_tenants_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(fair, "MAX_TENANTS", 50)
    world = make_world(**ON)
    for i in range(300):
        ask(world, str(i), f"tenant{i}", n=3, new=1)
        world.finish()
    assert len(world.scheduler.fair.services()) <= 50
