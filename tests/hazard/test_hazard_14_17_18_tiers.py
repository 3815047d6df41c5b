"""HAZARDS 14, 17, 18 at every tier: what may not be shared is not, restored KV comes whole or not at all, and answers
do not depend on where the KV lay."""

from __future__ import annotations

from ceiba.cache.keys import CacheKey
from ceiba.config.records import SchedulerConfig
from ceiba.memory.storage.pages import identity_digest, page_keys
from support.scheduler_world import prompt
from support.tier_world import make_tier_world, np


def test_14_namespaces_share_nothing_on_device_host_or_storage():
    storage: dict = {}
    world = make_tier_world(pool=100, storage=storage)
    for i in range(4):
        world.serve(f"a{i}", prompt(i, 50), namespace="tenant-a")
    for i in range(4):
        assert world.serve(f"b{i}", prompt(i, 50), namespace="tenant-b") == {}
    assert len(storage) == 2 * 4 * 6  # the same tokens, and no page in common
    again = make_tier_world(pool=100, storage=storage)
    assert again.serve("c", prompt(0, 50), namespace="tenant-c") == {}
    assert again.serve("a", prompt(0, 50), namespace="tenant-a") == {"storage": 48}


def test_14_another_way_to_compute_has_other_keys():
    """Weights, data types, adapters, kernels, ranks: each alone makes every key another one."""
    base = {
        "weights": "w", "dtype": "bfloat16", "kv": [2, 2, 64, 64, "bf16"], "override": {}, "rank": [0, 1],
        "int8_activations": False, "device": "cpu",
    }  # fmt: skip
    tokens = np.arange(128, dtype=np.int32)
    keys = set(page_keys(identity_digest(base), "", tokens, 64))
    for field, value in (
        ("weights", "v"), ("dtype", "float32"), ("kv", [2, 2, 64, 64, "fp8"]), ("override", {"rope_theta": 1}),
        ("rank", [1, 2]), ("int8_activations", True), ("device", "cuda"),
    ):  # fmt: skip
        other = page_keys(identity_digest({**base, field: value}), "", tokens, 64)
        assert not keys & set(other), field


def test_17_a_restore_arrives_whole_or_not_at_all():
    """Several nodes of one restore: as long as it is under way none of them counts, and when it fails none does."""
    world = make_tier_world(pool=100, host=400)
    stem = prompt(0, 50)
    for cut in (10, 25, 40):
        world.serve(f"s{cut}", [*stem[:cut], 1, 2])
    world.serve("s50", stem)
    world.serve("away", prompt(1, 70))
    world.serve("away2", prompt(2, 70))
    cache = world.scheduler.leases.cache
    key = CacheKey("", np.array(stem, np.int32))
    before = cache.match(key).length
    assert len(cache.match_tiers(key).beyond) >= 2
    world.tiers.eager = False
    world.ask("a", stem, max_new_tokens=1, ignore_eos=True)
    world.step(4)
    assert world.scheduler.hicache.waiting == 1
    assert cache.match(key).length == before
    counters = world.scheduler.counters
    computed = counters.prefill_tokens
    world.tiers.fail = lambda kind: kind == "restore"
    world.tiers.tick(10)
    world.step()
    assert counters.prefill_tokens - computed == len(stem) - before
    world.tiers.eager = True
    world.finish()
    world.check("a")


def test_17_pages_behind_a_gap_are_not_used():
    storage: dict = {}
    world = make_tier_world(pool=100, storage=storage)
    world.serve("a", prompt(0, 50))
    keys = list(storage)
    for missing in range(6):
        held = {key: page for i, key in enumerate(keys) if i != missing for page in (storage[key],)}
        fresh = make_tier_world(pool=100, storage=held)
        assert fresh.serve("a", prompt(0, 50)).get("storage", 0) == 8 * missing


def test_18_answers_do_not_depend_on_where_the_prefix_lay():
    """Cold, from the device, from the host, from the storage, retracted: each is compared with the request alone."""
    storage: dict = {}
    for policy in ("write_through", "write_through_selective", "write_back"):
        world = make_tier_world(pool=100, host=300, storage=storage, hicache={"write_policy": policy}, rows=6)
        seen = set()
        for turn in range(3):
            for i in range(5):
                tiers = world.serve(f"{policy}{turn}{i}", prompt(i, 40), max_new_tokens=6)
                seen |= set(tiers)
            for i in range(5):
                world.ask(f"{policy}x{turn}{i}", [*prompt(i, 30), turn], max_new_tokens=20, ignore_eos=True)
            world.finish()
            for i in range(5):
                world.check(f"{policy}x{turn}{i}")
        assert seen >= {"host"}


def test_the_books_of_both_tiers_balance_with_priorities_and_preemption():
    world = make_tier_world(
        pool=80, host=200, rows=3, policy="fcfs", enable_priority_scheduling=True, preemption_threshold=1
    )
    assert SchedulerConfig().hicache is None
    for i in range(12):
        world.ask(f"r{i}", prompt(i % 4, 30), max_new_tokens=12, ignore_eos=True, priority=i % 5)
        world.step(2)
    world.finish()
    for i in range(12):
        world.check(f"r{i}")
