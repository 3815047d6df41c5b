from __future__ import annotations

from dataclasses import dataclass

import pytest

from ceiba.cache.eviction import LRU, EvictionQueue, make_policy


@dataclass(eq=False)
class Leaf:
    name: str
    last_access: int
    hits: int = 0
    priority: int = 0
    queued: bool = False
    evictable: bool = True

    def __len__(self):
        return 1


def test_order_follows_access_at_the_time_of_eviction():
    queue = EvictionQueue(LRU())
    a, b, c = Leaf("a", 1), Leaf("b", 2), Leaf("c", 3)
    for leaf in (c, a, b):
        queue.push(leaf)
    a.last_access = 9
    assert [queue.pop(), queue.pop(), queue.pop(), queue.pop()] == [b, c, a, None]


def test_stale_entries_are_dropped_and_come_back_when_pushed_again():
    queue = EvictionQueue(LRU())
    leaf = Leaf("a", 1)
    queue.push(leaf)
    queue.push(leaf)
    assert len(queue) == 1
    leaf.evictable = False
    assert queue.pop() is None
    leaf.evictable = True
    queue.push(leaf)
    assert queue.pop() is leaf


def test_cost_of_evicting_is_near_linear():
    """k evictions examine each entry once: pops are counted through the policy."""

    class Counting(LRU):
        looked = 0

        def key(self, node):
            Counting.looked += 1
            return super().key(node)

    queue = EvictionQueue(Counting())
    for i in range(1000):
        queue.push(Leaf(str(i), i))
    Counting.looked = 0
    for _ in range(100):
        queue.pop()
    assert Counting.looked == 100


def test_unknown_policy_names_the_known_ones():
    with pytest.raises(ValueError, match="lru"):
        make_policy("nope")
