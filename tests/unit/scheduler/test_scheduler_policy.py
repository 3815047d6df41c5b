from __future__ import annotations

import pytest

from ceiba.config.records import SchedulerConfig
from ceiba.scheduler import policy, retract
from ceiba.scheduler.budget import NewTokenRatio, PrefillBudget
from support.scheduler_world import make_world, prompt


def admitted(world):
    """Names in order of admission."""
    order = []
    original = world.scheduler.admission._open

    def record(request, match, now):
        order.append(request.rid)
        return original(request, match, now)

    world.scheduler.admission._open = record
    return order


def warm(world, *prompts):
    for i, tokens in enumerate(prompts):
        world.ask(f"warm{i}", tokens, max_new_tokens=1)
        world.finish()


def test_fcfs_admits_in_order_of_arrival():
    world = make_world(rows=1, in_batch_check_threshold=-1)
    warm(world, prompt(2, 40))
    order = admitted(world)
    for rid, tokens in (("a", prompt(1, 10)), ("b", prompt(2, 40)), ("c", prompt(3, 10))):
        world.ask(rid, tokens, max_new_tokens=3)
    world.finish()
    assert order == ["a", "b", "c"]


def test_lpm_admits_the_longest_cached_prefix_first():
    world = make_world(rows=1, policy="lpm")
    warm(world, prompt(2, 40), prompt(3, 20))
    order = admitted(world)
    for rid, tokens in (("a", prompt(1, 10)), ("b", prompt(3, 20)), ("c", prompt(2, 40)), ("d", prompt(4, 10))):
        world.ask(rid, tokens, max_new_tokens=3)
    world.finish()
    assert order == ["c", "b", "a", "d"]


@pytest.mark.parametrize(("waiting", "first"), [(128, "cached"), (129, "0")])
def test_lpm_falls_back_to_arrival_when_more_than_128_wait(waiting, first):
    world = make_world(rows=1, policy="lpm")
    warm(world, prompt(2, 40))
    order = admitted(world)
    for i in range(waiting - 1):
        world.ask(str(i), prompt(100 + i, 5), max_new_tokens=1)
    world.ask("cached", prompt(2, 40), max_new_tokens=1)
    world.finish()
    assert order[0] == first


def test_lpm_without_a_cache_is_fcfs():
    world = make_world(rows=1, policy="lpm", disable_radix_cache=True)
    order = admitted(world)
    for rid, seed in (("a", 1), ("b", 2)):
        world.ask(rid, prompt(seed, 10), max_new_tokens=2)
    world.finish()
    assert order == ["a", "b"]


@pytest.mark.parametrize("name", ["fcfs", "lpm"])
@pytest.mark.parametrize("overlap", [True, False])
def test_twins_wait_for_one_prefill_and_reuse_it(name, overlap):
    world = make_world(policy=name, overlap=overlap)
    for i in range(8):
        world.ask(str(i), [*prompt(1, 60), i], max_new_tokens=5, ignore_eos=True)
    world.finish()
    assert [world.answer(str(i)).usages[0].cached_tokens for i in range(8)] == [0] + [60] * 7
    # One prefill for the first, one for all others right behind it, then decoding: nobody waits any longer.
    assert world.scheduler.counters.prefill_forwards == 2
    assert world.scheduler.counters.forwards == 2 + 4
    for i in range(8):
        world.check(str(i))


@pytest.mark.parametrize(("length", "waits"), [(31, False), (32, True)])
def test_thresholds_of_twins(length, waits):
    world = make_world()
    world.ask("a", [*prompt(1, length), 1], max_new_tokens=2, ignore_eos=True)
    world.ask("b", [*prompt(1, length), 2], max_new_tokens=2, ignore_eos=True)
    world.finish()
    assert world.scheduler.counters.prefill_forwards == (2 if waits else 1)


def test_more_than_32_cached_tokens_do_not_wait():
    world = make_world()
    warm(world, prompt(1, 33))
    for i in range(2):
        world.ask(str(i), prompt(1, 33) + prompt(2, 30) + [i], max_new_tokens=2, ignore_eos=True)
    before = world.scheduler.counters.prefill_forwards
    world.finish()
    assert world.scheduler.counters.prefill_forwards == before + 1


def test_whoever_overtakes_a_waiting_twin_takes_nothing_it_needs():
    """b waits a round for a; the long c behind it may not become the partial request and be served first."""
    world = make_world(chunked_prefill_size=64, context=400)
    order = admitted(world)
    world.ask("a", prompt(1, 40), max_new_tokens=2, ignore_eos=True)
    world.ask("b", [*prompt(1, 40), 1], max_new_tokens=2, ignore_eos=True)
    world.ask("c", prompt(3, 300), max_new_tokens=2, ignore_eos=True)
    world.finish()
    assert order == ["a", "b", "c"]


def test_aborting_the_first_twin_frees_the_others():
    world = make_world(chunked_prefill_size=16)
    world.ask("a", prompt(1, 60), max_new_tokens=2)
    world.ask("b", prompt(1, 60), max_new_tokens=2)
    world.step()
    world.abort("a")
    world.finish()
    world.check("b")


def test_unknown_policies_name_the_known():
    with pytest.raises(ValueError, match="schedule policy 'nope' is not available; available: "):
        policy.make_policy(SchedulerConfig(policy="nope"))
    with pytest.raises(ValueError, match="retraction policy 'nope' is not available; available: "):
        retract.make_policy("nope")


def test_retraction_takes_short_outputs_and_long_inputs_first():
    class R:
        def __init__(self, n):
            self.prompt_len, self.arrival = n, 0.0

    key = retract.make_policy("length")
    entries = [(R(10), 5), (R(99), 5), (R(10), 2), (R(10), 7)]
    assert [entries.index(e) for e in sorted(entries, key=lambda e: key(*e))] == [2, 1, 0, 3]


def test_ratio_decays_to_its_floor_and_jumps_after_a_retraction():
    ratio = NewTokenRatio(1.0)
    assert ratio.value == pytest.approx(0.7)
    for _ in range(600):
        ratio.decayed()
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.retracted(produced=40, allowed=100, rows=1)
    assert ratio.value == pytest.approx(60 / 101)
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)
    assert NewTokenRatio(9.0).value == 1.0


def test_prefill_budget():
    budget = PrefillBudget(tokens=10, requests=2, chunked=True)
    assert budget.take(25, may_cut=True) == 10
    assert budget.take(25, may_cut=False) == 0
    budget.spend(8)
    assert budget.take(2, may_cut=False) == 2
    budget.spend(2)
    assert budget.take(1, may_cut=True) == 0
    whole = PrefillBudget(tokens=10, requests=5, chunked=False)
    assert whole.take(25, may_cut=False) == 25
    whole.spend(25)
    assert whole.take(1, may_cut=False) == 0
