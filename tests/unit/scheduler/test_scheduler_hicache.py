"""Cached KV in lower tiers: when it is copied down, when it comes back, who waits for it, and what fails with it."""

from __future__ import annotations

import pytest

from ceiba.cache.ledger import read_host_ledger
from ceiba.cache.tiers import Residence, TierNode
from ceiba.core.messages import Control, ids_to_bytes
from ceiba.core.tiers import StorageStatus
from ceiba.scheduler import hicache as module
from ceiba.scheduler.costs import StepCosts
from ceiba.scheduler.hicache_cost import LEAST, TRIED, UNMEASURED, CostGate
from support.scheduler_world import prompt
from support.tier_world import PAGE, make_tier_world


def computed(world) -> float:
    return world.scheduler.stats()["prefill_tokens"]


def nodes(world) -> list[TierNode]:
    return world.scheduler.leases.cache.nodes()


def fill(world, count: int = 6, length: int = 50) -> None:
    for i in range(count):
        world.serve(f"fill{i}", prompt(i, length))


# ── device and host ──────────────────────────────────────────────────────────


def test_what_was_evicted_from_the_device_comes_back_without_being_computed():
    world = make_tier_world(pool=100, host=400)
    fill(world)
    before = computed(world)
    for i in range(6):
        assert world.serve(f"again{i}", prompt(i, 50)) == {"host": 49}
    assert computed(world) - before == 6  # the last token of each


def test_only_the_part_that_a_request_needs_is_restored():
    world = make_tier_world(pool=100, host=400)
    fill(world)
    moved = world.tiers.counts.get("restore", 0)
    assert world.serve("part", [*prompt(0, 50)[:20], 1, 2, 3, 4, 5]) == {"host": 20}
    assert world.tiers.counts["restore"] - moved == 20
    assert world.serve("whole", prompt(0, 50)) == {"device": 20, "host": 29}


def test_two_requests_share_one_restore():
    world = make_tier_world(pool=100, host=400, eager=False)
    world.tiers.eager = True
    fill(world)
    world.tiers.eager = False
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.ask("b", [*prompt(0, 50)[:40], 7, 7], max_new_tokens=2, ignore_eos=True)
    world.step(3)
    assert len([op for op in world.scheduler.leases.cache.operations.values() if op.nodes]) == 1
    assert world.scheduler.hicache.waiting == 2
    world.tiers.eager = True
    world.finish()
    assert world.tiers.counts["restore"] == 49
    for rid in "ab":
        world.check(rid)


def test_others_go_on_while_one_waits_for_its_restore():
    world = make_tier_world(pool=200, host=400)
    fill(world, 6)
    world.tiers.eager = False
    world.ask("waits", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.ask("goes", prompt(77, 20), max_new_tokens=5, ignore_eos=True)
    world.step(12)
    assert world.answer("goes").finish is not None
    assert "waits" not in world.port.answers
    world.tiers.eager = True
    world.finish()
    world.check("waits")
    world.check("goes")


def evict_all(world) -> None:
    leases = world.scheduler.leases
    leases.allocator.release(leases.cache.evict(1000)["full"])


@pytest.mark.parametrize("pool", [130, 150, 200])
def test_slots_that_a_restore_was_lent_are_not_asked_for_twice(pool):
    """A short request behind one whose restore is under way is served while there is room for both."""
    world = make_tier_world(pool=pool, context=95, instant=False)
    world.serve("a", prompt(0, 50))
    evict_all(world)
    world.tiers.eager = False
    world.ask("runs", prompt(9, 5), max_new_tokens=30, ignore_eos=True)
    world.step(3)
    world.ask("waits", [*prompt(0, 49), *prompt(3, 31)], max_new_tokens=2, ignore_eos=True)
    world.step()
    world.ask("goes", prompt(5, 6), max_new_tokens=1, ignore_eos=True)
    world.step(6)
    assert world.scheduler.hicache.waiting == 1
    assert world.answer("goes").finish is not None
    world.tiers.eager = True
    world.finish()
    for rid in world.asked:
        world.check(rid)


def test_pins_do_not_give_way_for_what_a_restore_has_been_lent_already():
    world = make_tier_world(pool=100, context=95, instant=False, cache_pin_budget=20)
    world.serve("a", prompt(0, 50))
    evict_all(world)
    world.serve("p", prompt(7, 12), pin="p")
    world.tiers.eager = False
    world.ask("b", [*prompt(0, 49), *prompt(3, 31)], max_new_tokens=2, ignore_eos=True)
    world.step(4)
    assert world.scheduler.hicache.waiting == 1
    world.tiers.eager = True
    world.finish()
    world.check("b")
    assert world.scheduler.leases.pins.tokens == 12


def test_write_through_copies_at_once_selective_what_was_hit_and_write_back_what_leaves():
    for policy, after_first, after_second in (
        ("write_through", True, True),
        ("write_through_selective", False, True),
        ("write_back", False, False),
    ):
        world = make_tier_world(pool=300, host=400, hicache={"write_policy": policy})
        world.serve("a", prompt(0, 40))
        assert bool(world.tiers.counts.get("backup")) == after_first, policy
        world.serve("b", [*prompt(0, 40), 5, 6, 7])
        hosted = sum(len(node) for node in nodes(world) if node.hosted)
        assert (hosted >= 40) == after_second, policy
        world.scheduler.leases.allocator.release(world.scheduler.leases.cache.evict(1000)["full"])
        world.settle()
        left = {"write_through": {"host": 43}, "write_through_selective": {"host": 40}, "write_back": {"host": 43}}
        assert world.serve("c", [*prompt(0, 40), 5, 6, 7, 8]) == left[policy]


def test_write_back_gives_slots_away_at_once_behind_a_fence():
    world = make_tier_world(pool=100, host=400, hicache={"write_policy": "write_back"}, eager=False)
    world.serve("a", prompt(0, 60))
    assert not world.tiers.fenced
    world.ask("b", prompt(1, 60), max_new_tokens=2, ignore_eos=True)
    world.step()
    assert world.tiers.fenced  # the copy is ordered before whatever writes there next
    assert any(node.state is Residence.ARRIVING for node in nodes(world))
    world.tiers.eager = True
    world.finish()
    world.settle()
    world.check("b")
    assert world.serve("again", prompt(0, 60)).get("host", 0) > 0


def test_states_of_a_node():
    world = make_tier_world(pool=100, host=400, eager=False)
    world.ask("a", prompt(0, 60), max_new_tokens=1, ignore_eos=True)
    world.step(2)
    assert {node.state for node in nodes(world)} <= {Residence.RESIDENT, Residence.BACKING_UP}
    world.step(3)
    assert {node.state for node in nodes(world)} == {Residence.BACKING_UP}
    world.tiers.tick(5)
    world.step()
    assert {node.state for node in nodes(world)} == {Residence.BACKED_UP}
    world.scheduler.leases.allocator.release(world.scheduler.leases.cache.evict(1000)["full"])
    assert {node.state for node in nodes(world)} == {Residence.HOSTED}
    world.ask("b", prompt(0, 60), max_new_tokens=1, ignore_eos=True)
    world.step()
    assert Residence.LOADING in {node.state for node in nodes(world)}
    world.tiers.eager = True
    world.finish()
    world.check("b")


def test_the_host_evicts_by_its_own_order_and_what_is_nowhere_is_computed():
    world = make_tier_world(pool=60, host=120)
    for i in range(4):
        world.serve(f"a{i}", prompt(i, 50))
    before = computed(world)
    assert world.serve("newest", prompt(2, 50))["host"] >= 39  # a few were left on the device
    assert computed(world) - before == 1
    assert world.serve("oldest", prompt(0, 50)).get("host", 0) < 49
    assert world.scheduler.stats()["hicache_dropped_tokens"] > 0
    host = read_host_ledger(world.scheduler.leases.cache)
    assert host.total == 120
    assert host.balanced


def test_a_failed_restore_is_computed_instead_and_not_tried_for_ever():
    world = make_tier_world(pool=100, host=400)
    fill(world)
    world.tiers.fail = lambda kind: kind == "restore"
    before = computed(world)
    assert world.serve("a", prompt(0, 50)) == {}
    assert computed(world) - before == 50
    world.tiers.fail = lambda kind: False
    world.serve("away", prompt(50, 70))
    before = computed(world)
    assert world.serve("b", prompt(0, 50))["host"] > 0
    assert computed(world) - before == 1


def test_a_failed_backup_leaves_the_device_copy_as_it_is():
    world = make_tier_world(pool=100, host=400)
    world.tiers.fail = lambda kind: kind == "backup"
    world.serve("a", prompt(0, 50))
    world.settle()
    assert world.scheduler.leases.cache.host_used == 0
    assert world.serve("b", prompt(0, 50)) == {"device": 49}


def test_aborting_whoever_waits_leaves_nothing_behind():
    world = make_tier_world(pool=100, host=400)
    fill(world)
    world.tiers.eager = False
    world.ask("a", prompt(0, 50), max_new_tokens=2)
    world.step(2)
    assert world.scheduler.hicache.waiting == 1
    world.abort("a")
    world.step()
    assert world.scheduler.hicache.reserved() == 0
    world.tiers.eager = True
    world.settle()
    assert world.scheduler.leases.cache.locked == 0
    assert world.serve("b", prompt(0, 50)) == {"device": 49}  # the restore was not in vain


def restore_that_meets_another(length: int):
    """A world where the restore of prompt 0 is under way for "a", and "b" has computed its first tokens meanwhile."""
    world = make_tier_world(pool=100, host=400, instant=False)
    fill(world)
    world.tiers.eager = False
    world.scheduler.hicache.cost.worth = lambda tokens: tokens == 49
    world.ask("b", prompt(0, length), max_new_tokens=1, ignore_eos=True)
    world.step()
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.step(3)
    assert world.answer("b").finish is not None
    assert world.scheduler.hicache.waiting == 1
    return world


def finish_restore(world) -> None:
    """The copy arrives; the books must balance at once and to the end."""
    world.tiers.tick(1)
    world.step()
    world.tiers.eager = True
    world.finish()
    for rid in world.asked:
        world.check(rid)
    assert world.answer("a").usages[-1].cached_tokens == 49


def test_a_restore_gives_back_the_slots_of_a_part_that_was_computed_and_split_meanwhile():
    world = restore_that_meets_another(30)
    world.ask("c", [*prompt(0, 20), 7, 7], max_new_tokens=1, ignore_eos=True)
    world.step()
    assert 20 in [node.end for node in nodes(world) if node.on_device]
    finish_restore(world)
    assert world.answer("a").usages[-1].cached_by_tier == {"device": 30, "host": 19}


def test_a_restore_brings_what_was_computed_and_evicted_again_meanwhile():
    world = restore_that_meets_another(20)
    evict_all(world)
    assert not any(node.on_device for node in nodes(world))
    finish_restore(world)


def test_running_requests_take_back_what_waiting_ones_hold():
    world = make_tier_world(pool=100, host=400, rows=2, context=90, conservativeness=0.0)
    fill(world, 4, 40)
    world.ask("runs", prompt(90, 20), max_new_tokens=68, ignore_eos=True)
    world.step(3)
    world.tiers.eager = False
    world.ask("waits", prompt(0, 40), max_new_tokens=30, ignore_eos=True)
    world.step(60)
    world.tiers.eager = True
    world.finish()
    world.check("runs")
    world.check("waits")


def test_requests_that_do_not_fit_together_do_not_take_each_others_restores_for_ever():
    """Nothing runs and each of several needs nearly the whole pool: the first in line gets it, the others wait."""
    world = make_tier_world(pool=44, host=400, context=44, rows=4)
    for i in range(4):
        world.serve(f"a{i}", prompt(i, 34))
    for i in range(4):
        world.ask(f"b{i}", prompt(i, 34), max_new_tokens=6, ignore_eos=True)
    world.finish(rounds=200)
    for i in range(4):
        world.check(f"b{i}")
        assert world.answer(f"b{i}").usages[-1].cached_by_tier["host"] > 0


def test_few_tokens_are_not_worth_a_restore():
    def computed(seconds: float) -> CostGate:
        costs = StepCosts()
        costs.observe(1000, 0, seconds)
        return CostGate(costs)

    assert CostGate(StepCosts()).threshold == UNMEASURED
    gate = computed(1.0)  # 1 ms a token
    assert gate.threshold == UNMEASURED
    gate.copied(1000, 0.01, 0.06)  # 0.01 ms a token, 50 ms until somebody looked
    assert 50 < gate.threshold < 51
    assert not gate.worth(50)
    assert gate.worth(51)
    gate = computed(1.0)
    gate.copied(1000, 0.001, 0.001)
    assert gate.threshold == LEAST
    assert not gate.worth(LEAST - 1)
    gate = computed(0.001)
    gate.copied(1000, 1.0, 1.0)  # a host slower than the device computes
    assert not gate.worth(10**9)


def test_a_restore_that_was_slow_by_chance_is_not_the_last():
    costs = StepCosts()
    costs.observe(1000, 0, 1.0)
    gate = CostGate(costs)
    gate.copied(100, 0.001, 0.5)  # half a second until somebody looked
    assert not gate.worth(100)
    tries = 0
    for _ in range(2 * TRIED):
        if gate.worth(100):
            tries += 1
            gate.copied(100, 0.001, 0.005)
    assert tries >= 2
    assert gate.worth(100)


def test_the_cost_decides():
    world = make_tier_world(pool=100, host=400, always=False)
    fill(world)
    world.scheduler.hicache.cost = CostGate(StepCosts())
    assert world.serve("short", [*prompt(0, 50)[: UNMEASURED - 1], 1, 2]) == {}
    assert world.serve("long", prompt(1, 50)) == {"host": 49}


def test_lpm_counts_what_the_host_holds():
    world = make_tier_world(pool=100, host=400, policy="lpm", rows=1)
    fill(world, 3)
    world.ask("new", prompt(70, 50), max_new_tokens=1, ignore_eos=True)
    world.ask("host", prompt(0, 50), max_new_tokens=1, ignore_eos=True)
    order = []
    for _ in range(60):
        world.step()
        order += [rid for rid in ("new", "host") if rid in world.port.answers and rid not in order]
    assert order == ["host", "new"]


# ── storage ──────────────────────────────────────────────────────────────────


def stored_world(**fields):
    """A storage that holds six prompts of 50 tokens, and a fresh world on it."""
    storage: dict = {}
    fill(make_tier_world(pool=100, storage=storage))
    return make_tier_world(pool=100, storage=storage, **fields)


def test_whole_pages_outlive_the_server():
    world = stored_world()
    before = computed(world)
    for i in range(6):
        assert world.serve(f"a{i}", prompt(i, 50)) == {"storage": 48}
    assert computed(world) - before == 6 * 2


def test_less_than_the_threshold_is_computed():
    world = stored_world(hicache={"prefetch_threshold": 56})
    assert world.serve("a", prompt(0, 50)) == {}
    world = stored_world(hicache={"prefetch_threshold": 48})
    assert world.serve("a", prompt(0, 50)) == {"storage": 48}


def test_best_effort_does_not_wait_and_uses_what_has_come():
    world = stored_world(hicache={"prefetch_policy": "best_effort"}, eager=False)
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.finish()
    world.check("a")
    assert world.answer("a").usages[-1].cached_tokens == 0


def test_wait_complete_waits_and_gives_up_only_on_silence():
    world = stored_world(hicache={"prefetch_policy": "wait_complete"}, eager=False)
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    for _ in range(5):
        world.now[0] += 20
        world.tiers.tick(0, 1)
        world.step(2)
    assert "a" not in world.port.answers  # 100 s, but a page every 20 s
    world.now[0] += module.NO_NEWS
    world.tiers.eager = False
    for _ in range(20):
        world.step()
        world.tiers.tick(5, 0)
    world.finish()
    world.check("a")
    assert world.answer("a").usages[-1].cached_by_tier["storage"] == 4 * PAGE  # the first tick found no job yet


@pytest.mark.parametrize(("seconds", "expected"), [(0.9, 0), (1.2, 16)])
def test_the_timeout_grows_with_the_tokens(seconds, expected):
    base, per_ki = 1.0, 1.0
    world = stored_world(hicache={"prefetch_timeout_base": base, "prefetch_timeout_per_ki_token": per_ki}, eager=False)
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.step()
    world.tiers.tick(0, 2)
    world.step()  # two pages of six are there
    world.now[0] += seconds
    for _ in range(6):
        world.step()
        world.tiers.tick(5, 0)
    waits = "a" not in world.port.answers
    assert waits == (expected == 0)
    if expected:
        assert world.answer("a").usages[-1].cached_by_tier == {"storage": expected}
        assert world.scheduler.hicache.counters.prefetch_unfulfilled_tokens == 48 - expected


def test_the_timeout_has_an_end():
    world = stored_world(hicache={"prefetch_timeout_per_ki_token": 30.0, "prefetch_timeout_base": 29.0}, eager=False)
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.step()
    assert next(iter(world.scheduler.hicache._fetches.values())).deadline == module.MAX_TIMEOUT


def test_a_damaged_page_is_computed():
    world = stored_world()
    world.tiers.corrupt.add(sorted(world.tiers.stored)[0])
    served = [world.serve(f"a{i}", prompt(i, 50)).get("storage", 0) for i in range(6)]
    assert sorted(served)[0] < 48
    assert sorted(served)[1:] == [48] * 5


def test_a_store_that_fails_costs_hits_only():
    world = stored_world()
    world.tiers.fail = lambda kind: kind in {"fetch", "store"}
    assert world.serve("a", prompt(0, 50)) == {}
    assert world.serve("b", prompt(60, 50)) == {}
    assert world.scheduler.hicache.counters.storage_errors > 0


def test_a_suspended_store_is_not_asked():
    world = stored_world()
    world.tiers.storage = lambda: StorageStatus("file", "suspended")
    assert world.serve("a", prompt(0, 50)) == {}
    assert "fetch" not in world.tiers.counts


def test_pages_that_find_no_host_room_are_tried_again_and_then_given_up():
    world = stored_world(host=64, hicache={"prefetch_retry_interval": 3, "prefetch_retry_attempts": 2})
    world.scheduler.leases.cache._host_room = lambda tokens: False
    assert world.serve("a", prompt(0, 50)) == {}
    counters = world.scheduler.hicache.counters
    assert counters.prefetch_deferred_tokens == 3 * 48  # the first attempt and two more
    assert counters.prefetch_unfulfilled_tokens == 48


def test_pages_that_somebody_else_computed_meanwhile_are_left_out():
    world = stored_world(hicache={"prefetch_policy": "wait_complete"}, eager=False)
    world.ask("a", prompt(0, 50), max_new_tokens=1, ignore_eos=True)
    world.step()
    world.ask("b", prompt(0, 21), max_new_tokens=1, ignore_eos=True)
    world.step()
    world.scheduler.hicache._stop(world.scheduler.hicache._fetches["b"])
    for _ in range(8):
        world.step()  # b computes 21 tokens: two of a's pages and a part of the third
    assert world.answer("b").finish is not None
    world.tiers.eager = True
    world.finish()
    for rid in "ab":
        world.check(rid)
    assert world.answer("a").usages[-1].cached_by_tier == {"device": 21, "storage": 27}


def test_what_the_device_has_is_not_fetched_again():
    world = stored_world()
    world.serve("a", prompt(0, 50))
    pages = world.tiers.counts["fetch"]
    assert world.serve("b", prompt(0, 50)) == {"device": 49}
    assert world.tiers.counts["fetch"] == pages


# ── at run time ──────────────────────────────────────────────────────────────


def ask(world, op: str, **args):
    world.port.push(Control(id=len(world.port.replies), op=op, args=args))
    world.step(3)
    return world.port.replies[-1]


def test_attach_offers_what_the_host_has_and_detach_forgets_it():
    world = make_tier_world(pool=100)
    fill(world)
    assert ask(world, "hicache_status").value["state"] == "detached"
    assert "no storage is attached" in ask(world, "hicache_detach").error
    reply = ask(
        world, "hicache_attach", backend="file", options='{"path": "/x", "prefetch_threshold": 16}',
        prefetch_policy="wait_complete", write_policy="write_back",
    )  # fmt: skip
    assert reply.ok, reply.error
    assert reply.value["hicache_storage_prefetch_policy"] == "wait_complete"
    assert reply.value["hicache_write_policy"] == "write_back"
    assert reply.value["prefetch_threshold"] == 16
    world.settle()
    assert len(world.tiers.stored) == 36
    assert "detach it first" in ask(world, "hicache_attach", backend="file").error
    assert any(node.stored for node in nodes(world))
    assert ask(world, "hicache_clear").value == {"deleted_pages": 36}
    assert ask(world, "hicache_detach").ok
    assert not any(node.stored for node in nodes(world))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"backend": "hf3fs"}, "not available; available: file"),
        ({"backend": "file", "options": "{"}, "no JSON"),
        ({"backend": "file", "prefetch_policy": "now"}, "choose from best_effort"),
        ({"backend": "file", "options": {"page_tokens": 8}}, "fixed when the server starts"),
        ({"backend": "dynamic", "options": {"module_path": "os", "class_name": "system"}}, "loads code"),
        ({}, "needs the argument 'backend'"),
    ],
)
def test_attaching_what_cannot_work_is_refused(args, text):
    reply = ask(make_tier_world(), "hicache_attach", **args)
    assert not reply.ok
    assert text in reply.error


def test_detaching_in_the_middle_of_a_fetch_lets_the_request_go_on():
    world = stored_world(eager=False)
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.step(2)
    assert world.scheduler.hicache.waiting == 1
    assert ask(world, "hicache_detach").ok
    world.tiers.eager = True
    world.finish()
    world.check("a")


@pytest.mark.parametrize("op", ["hicache_attach", "hicache_clear"])
def test_detaching_answers_whoever_waits_for_the_storage(op):
    world = make_tier_world() if op == "hicache_attach" else stored_world()
    world.port.push(Control(id=0, op=op, args={"backend": "file"} if op == "hicache_attach" else {}))
    world.port.push(Control(id=1, op="hicache_detach", args={}))
    world.step(3)
    waited, detached = sorted(world.port.replies, key=lambda reply: reply.id)
    assert (waited.ok, detached.ok) == (False, True)
    assert "detached meanwhile" in waited.error
    assert not world.scheduler.hicache.busy


def test_tree_and_explain_know_the_tiers():
    world = make_tier_world(pool=100)
    fill(world)
    tree = ask(world, "cache_tree", depth=2, width=8).value
    assert tree["tokens_by_tier"]["host"] == 6 * 51
    assert tree["tokens_by_tier"]["device"] <= 100
    states = {child["state"] for child in tree["namespaces"][0]["children"]}
    assert states == {"hosted", "backed_up"}
    explained = ask(world, "cache_explain", input_ids=ids_to_bytes(prompt(0, 50))).value
    assert explained["cached_by_tier"] == {"host": 50}
    assert explained["reason"] == "cached"
    world = stored_world()
    explained = ask(world, "cache_explain", input_ids=ids_to_bytes(prompt(0, 50))).value
    assert explained["cached_by_tier"] == {"storage": 48}


def test_a_flush_empties_the_host_too():
    world = make_tier_world(pool=100, eager=False)
    world.ask("a", prompt(0, 50), max_new_tokens=2, ignore_eos=True)
    world.finish()
    assert ask(world, "flush_cache").ok
    assert world.scheduler.leases.cache.host_used == 0
    world.tiers.eager = True
    assert world.serve("b", prompt(0, 50)) == {}


@pytest.mark.parametrize(("length", "new"), [(24, 1), (23, 2)])
def test_a_request_that_runs_alone_waits_for_copies_that_hold_the_pool(length, new):
    """What could be evicted for it is being read for the host: neither its prompt nor its next token finds room, and
    nobody is there to give way. It goes back to the queue until the copies are done."""
    world = make_tier_world(
        pool=44, host=80, rows=4, context=40, eager=False, instant=False, chunked_prefill_size=16, overlap=False,
        hicache={"write_policy": "write_through"},
    )  # fmt: skip
    world.tiers.eager = False

    def ask(rid, tokens, max_new):
        world.ask(rid, tokens, max_new_tokens=max_new, ignore_eos=True)
        world.step(4)

    base = prompt(0, 40)
    other = prompt(1000, 40)
    ask("1", base[:21], 1)
    ask("2", base[:8], 3)
    ask("3", [*base[:10], *other[:20]], 3)
    ask("4", base[:22], 1)
    world.abort("4")
    ask("5", [*prompt(1, 40)[:10], *other][:length], new)
    world.step(20)
    assert "5" not in world.port.answers or world.answer("5").finish is None
    world.tiers.eager = True
    world.finish()
    for rid in "1235":
        world.check(rid)
