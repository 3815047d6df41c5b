"""The questions that the handbooks raise about policies and the cache, each as a test that names it."""

from __future__ import annotations

import pytest
from test_scheduler_policy import admitted, warm

from ceiba.config.records import SchedulerConfig
from ceiba.core.messages import Generate, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import RunnerInfo
from ceiba.scheduler import policy
from ceiba.scheduler.fake import FakeRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import MemoryPort
from support.scheduler_world import make_world, prompt


def test_does_lpm_reorder_the_queue():
    world = make_world(rows=1, policy="lpm")
    warm(world, prompt(2, 40))
    order = admitted(world)
    world.ask("first, nothing cached", prompt(1, 10), max_new_tokens=2)
    world.ask("second, 40 cached", prompt(2, 40), max_new_tokens=2)
    world.finish()
    assert order == ["second, 40 cached", "first, nothing cached"]


def test_is_priority_a_policy_name_that_works():
    world = make_world(rows=1, policy="priority")
    order = admitted(world)
    for priority in (1, 3, 2):
        world.ask(str(priority), prompt(priority, 5), max_new_tokens=2, priority=priority)
    world.finish()
    assert order == ["3", "2", "1"]


@pytest.mark.parametrize("name", sorted(policy.CACHE_AWARE))
def test_what_does_a_cache_aware_policy_do_without_a_cache(name):
    world = make_world(rows=1, policy=name, disable_radix_cache=True)
    order = admitted(world)
    for i, n in enumerate((30, 5, 20)):
        world.ask(str(i), prompt(i, n), max_new_tokens=2)
    world.finish()
    assert order == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["lpm", "hrrn"])
@pytest.mark.parametrize("waiting", [128, 129])
def test_what_happens_when_more_than_128_wait(name, waiting):
    world = make_world(rows=1, policy=name, pool=4000)
    warm(world, prompt(7, 40))
    calls = []
    cache = world.scheduler.leases.cache
    original = cache.match
    cache.match = lambda *args: calls.append(args) or original(*args)
    for i in range(waiting):
        world.ask(str(i), prompt(100 + i, 5), max_new_tokens=1)
    world.step()
    # A round matches everyone, or only those it admits.
    assert (len(calls) >= 128) == (waiting <= 128)
    world.finish()


@pytest.mark.parametrize("name", ["fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first"])
@pytest.mark.parametrize("rows", [100, 16])
def test_is_a_manual_that_100_requests_bring_at_once_computed_once(name, rows):
    """3,000 shared tokens and a question each: the cache serves at least 99 × 3,000 of them."""
    info = RunnerInfo(num_slots=20_000, max_rows=rows, vocab_size=32_000, context_len=4096, eos_ids=(2,))
    port = MemoryPort()
    config = SchedulerConfig(policy=name, max_running_requests=rows, chunked_prefill_size=2048)
    scheduler = Scheduler(config, FakeRunner(info, strict=False), port, clock=lambda: 0.0)
    manual = [(i * 7919) % 32_000 for i in range(3000)]
    for i in range(100):
        ids = [*manual, *range(1000 + 30 * i, 1000 + 30 * i + 20)]
        sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
        port.push(Generate(rid=str(i), input_ids=ids_to_bytes(ids), sampling=sampling))
    while not scheduler.idle or port.inbox:
        scheduler.step(wait=0.0)
    assert sum(answer.usages[-1].cached_tokens for answer in port.answers.values()) >= 99 * 3000
    assert scheduler.counters.prefill_tokens <= 3000 + 100 * 20
    assert all(answer.finish.kind == "length" for answer in port.answers.values())


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [48, 64, 100])
def test_a_manual_that_is_computed_in_chunks_is_still_computed_once(eager, overlap, chunk):
    """On a device that computes at once, the first chunks lie in the cache while the last is on its way: whoever
    finds them there waits for the rest instead of computing it beside it."""
    world = make_world(pool=4000, rows=12, context=400, chunked_prefill_size=chunk, eager=eager, overlap=overlap)
    manual = prompt(1, 250)
    for i in range(12):
        world.ask(str(i), [*manual, i, i], max_new_tokens=3, ignore_eos=True)
    world.finish()
    # 250 once, and of each question what the prompts before it do not share.
    assert world.scheduler.counters.prefill_tokens <= 250 + 12 * 2
    for rid in world.asked:
        world.check(rid)


def test_who_shares_only_the_chunks_that_are_cached_already_does_not_wait():
    world = make_world(pool=2000, context=600, chunked_prefill_size=100, policy="shortest-prefill-first", eager=True)
    head = prompt(1, 50)
    world.ask("long", head + prompt(2, 450), max_new_tokens=2, ignore_eos=True)
    world.step(2)
    world.ask("short", head + prompt(3, 10), max_new_tokens=2, ignore_eos=True)
    world.step(1)
    assert "short" in {request.rid for request in world.scheduler.rows.live()}
    world.finish()
    for rid in world.asked:
        world.check(rid)
