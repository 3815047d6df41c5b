"""Each eviction policy against a model that knows nothing of heaps or trees: it looks at every leaf, every time."""

from __future__ import annotations

import numpy as np
import pytest

from ceiba.cache.base import FULL
from ceiba.cache.eviction import POLICIES, EvictionQueue, make_policy
from ceiba.cache.keys import CacheKey
from ceiba.cache.radix import RadixCache

TLRU = {"threshold": 6, "next_prompt": 2}


class Naive:
    """Sequences as plain token tuples, one entry per cached token position (its path), with each one's statistics."""

    def __init__(self, name):
        self.name = name
        self.clock = 0
        self.stats = {}
        """path -> [last_access, hits, priority, reach]; a path is a tuple of tokens from the root on"""

    def paths(self, tokens):
        return [tuple(tokens[: i + 1]) for i in range(len(tokens))]

    def match(self, tokens):
        n = 0
        while n < len(tokens) and tuple(tokens[: n + 1]) in self.stats:
            n += 1
        return n

    def use(self, tokens, hit, priority):
        self.clock += 1
        for path in self.paths(tokens):
            entry = self.stats.setdefault(path, [0, 0, 0, 0])
            entry[0] = self.clock
            entry[1] += hit
            entry[2] = max(entry[2], priority)

    def reach(self, tokens):
        for path in self.paths(tokens):
            self.stats[path][3] = max(self.stats[path][3], len(tokens))

    def leaves(self):
        inner = {path[:-1] for path in self.stats}
        return [path for path in self.stats if path not in inner]

    def rank(self, path):
        access, hits, priority, reach = self.stats[path]
        match self.name:
            case "lru":
                return (access,)
            case "lfu":
                return (hits, access)
            case "slru":
                return (hits >= 1, access)
            case "priority":
                return (priority, access)
            case "tlru":
                # What the next turn would compute if this token goes too.
                return (reach - len(path) + 1 + TLRU["next_prompt"] > TLRU["threshold"], access)

    def evict_one(self):
        """Drop the last token of the worst leaf; returns its rank and the paths of all leaves of that rank."""
        ranks = {path: self.rank(path) for path in self.leaves()}
        worst = min(ranks.values())
        return {path for path, rank in ranks.items() if rank == worst}


class Leaf:
    """An evictable leaf by its statistics alone."""

    evictable, queued, priority, start, reach = True, False, 0, 0, 0

    def __init__(self, size, hits, last_access):
        self.size, self.hits, self.last_access = size, hits, last_access

    def __len__(self):
        return self.size


def held(cache):
    """Every cached path of the tree."""
    found = set()
    for node in cache.nodes():
        above, at = [], node.parent
        while at is not None:
            above = [*at.tokens.tolist(), *above]
            at = at.parent
        for i in range(len(node)):
            found.add(tuple([*above, *node.tokens[: i + 1].tolist()]))
    return found


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(6))
def test_token_by_token_it_evicts_what_the_naive_model_would(name, seed):
    rng = np.random.default_rng((seed, len(name)))
    options = {"tlru": TLRU, "slru": {"protected_percent": 100}}.get(name)
    cache, model = RadixCache(policy=make_policy(name, options)), Naive(name)
    slot = 0
    for _ in range(120):
        if rng.random() < 0.7:
            # A request: match, use, insert, as a scheduler does.
            tokens = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()
            priority = int(rng.integers(0, 3))
            key = CacheKey("", np.array(tokens, np.int32))
            match = cache.match(key)
            assert match.length == model.match(tokens)
            node = cache.lock(match, hit=True)
            if match.length:
                model.use(tokens[: match.length], True, 0)
            result = cache.insert(key, {FULL: np.arange(slot, slot + len(tokens), dtype=np.int32)}, priority)
            slot += len(tokens)
            model.use(tokens, False, priority)
            model.reach(tokens)
            again = cache.lock(result.match)
            model.use(tokens, False, 0)
            cache.unlock(node)
            cache.unlock(again)
        else:
            for _ in range(int(rng.integers(1, 10))):
                if not model.stats:
                    break
                candidates = model.evict_one()
                before = held(cache)
                cache.evict(1)
                gone = before - held(cache)
                assert len(gone) == 1
                assert gone <= candidates
                del model.stats[gone.pop()]
        assert held(cache) == set(model.stats)


def test_slru_keeps_hot_prefixes_through_a_flood_of_documents_and_lru_does_not():
    """What the policy is for: a prompt that many reuse, and a run of new texts larger than the cache."""
    kept = {}
    for name in ("lru", "slru", "lfu"):
        cache = RadixCache(policy=make_policy(name))
        hot = CacheKey("", np.arange(50, dtype=np.int32))
        cache.insert(hot, {FULL: np.arange(50, dtype=np.int32)})
        for _ in range(3):
            cache.unlock(cache.lock(cache.match(hot), hit=True))
        for i in range(20):
            tokens = np.arange(1000 * (i + 1), 1000 * (i + 1) + 40, dtype=np.int32)
            cache.insert(CacheKey("", tokens), {FULL: np.arange(40, dtype=np.int32)})
            cache.evict(max(0, cache.evictable - 200))
        kept[name] = cache.match(hot).length
    assert kept == {"lru": 0, "slru": 50, "lfu": 50}


def hits_of_new_prefixes(percent):
    """A pool of 100 tokens full of prefixes that were reused once, long ago; then 60 new ones of 5 tokens, each of them
    asked for again when three more have come. How often is one found?"""
    cache = RadixCache(policy=make_policy("slru", {"protected_percent": percent}))
    free, found = 100, 0

    def use(name):
        nonlocal free
        key = CacheKey("", np.arange(5, dtype=np.int32) + 100 * name)
        match = cache.match(key)
        cache.unlock(cache.lock(match, hit=True))
        if match.length < 5:
            free += len(cache.evict(5 - match.length - free)[FULL]) if free < 5 - match.length else 0
            free -= 5 - match.length
            cache.insert(key, {FULL: np.arange(5, dtype=np.int32)})
        return match.length == 5

    for name in range(20):
        use(name)
        assert use(name)
    for name in range(100, 160):
        use(name)
        if name >= 103:
            found += use(name - 3)
    return found


def test_slru_leaves_new_prefixes_room_to_come_back():
    assert hits_of_new_prefixes(100) == 0  # what was reused once fills the pool, and nothing new survives
    assert hits_of_new_prefixes(80) == 57


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("percent", [0, 50, 80])
def test_slru_takes_a_protected_victim_only_where_its_segment_is_too_large_or_alone(seed, percent):
    rng = np.random.default_rng(seed)
    policy = make_policy("slru", {"protected_percent": percent})
    queue = EvictionQueue(policy)
    leaves = [Leaf(int(rng.integers(1, 9)), int(rng.integers(0, 3)), i) for i in range(60)]
    for leaf in leaves:
        queue.push(leaf)
    left = set(leaves)
    while left:
        sizes = [sum(len(leaf) for leaf in left if (leaf.hits > 0) == side) for side in (False, True)]
        first = [min((leaf.last_access for leaf in left if (leaf.hits > 0) == side), default=None) for side in (0, 1)]
        victim = queue.pop()
        too_large = sizes[1] * 100 > percent * sum(sizes)
        assert (victim.hits > 0) == (first[0] is None or (too_large and first[1] is not None))
        assert victim.last_access == first[victim.hits > 0]
        left.remove(victim)
    assert queue.pop() is None
    assert len(queue) == 0


def test_tlru_trims_the_ends_of_conversations_before_it_drops_a_long_one():
    """Five conversations of 100 tokens; with 30 tokens of spare end each, 150 tokens go without touching the rest."""
    cache = RadixCache(policy=make_policy("tlru", {"threshold": 40, "next_prompt": 10}))
    keys = [CacheKey("", np.arange(1000 * i, 1000 * i + 100, dtype=np.int32)) for i in range(5)]
    for key in keys:
        cache.insert(key, {FULL: np.arange(100, dtype=np.int32)})
    cache.evict(150)
    assert [cache.match(key).length for key in keys] == [70] * 5
    cache.evict(70)  # nothing is spare any more: the oldest goes
    assert [cache.match(key).length for key in keys] == [0, 70, 70, 70, 70]


def test_a_requests_own_locks_are_no_hits():
    cache = RadixCache()
    key = CacheKey("", np.arange(10, dtype=np.int32))
    result = cache.insert(key, {FULL: np.arange(10, dtype=np.int32)})
    cache.unlock(cache.lock(result.match))
    assert [node.hits for node in cache.nodes()] == [0]
    cache.unlock(cache.lock(cache.match(key), hit=True))
    assert [node.hits for node in cache.nodes()] == [1]
