"""The radix tree against a naive model: a dictionary from every cached prefix to the handle of its last token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ceiba.cache.base import FULL
from ceiba.cache.keys import CacheKey, ceil_page, common_prefix, floor_page
from ceiba.cache.none import NoCache
from ceiba.cache.paths import FASTEST, PYTHON
from ceiba.cache.radix import RadixCache


def key(tokens, namespace=""):
    return CacheKey(namespace, np.array(tokens, np.int32))


def slots(start, count):
    return {FULL: np.arange(start, start + count, dtype=np.int32)}


def test_match_finds_longest_prefix_inside_a_node():
    cache = RadixCache()
    cache.insert(key([1, 2, 3, 4]), slots(10, 4))
    match = cache.match(key([1, 2, 3, 9]))
    assert match.length == 3
    assert match.handles().tolist() == [10, 11, 12]
    assert cache.match(key([2])).length == 0


def test_match_mutates_nothing_and_lock_splits():
    cache = RadixCache()
    cache.insert(key([1, 2, 3, 4]), slots(0, 4))
    (node,) = cache.nodes()
    before = (node.last_access, node.hits, node.locks, len(node))
    match = cache.match(key([1, 2]))
    assert (node.last_access, node.hits, node.locks, len(node)) == before
    held = cache.lock(match)
    assert (cache.locked, cache.evictable) == (2, 2)
    assert sorted(len(n) for n in cache.nodes()) == [2, 2]
    cache.unlock(held)
    assert (cache.locked, cache.evictable) == (0, 4)


def test_split_of_a_locked_node_keeps_the_whole_path_locked():
    cache = RadixCache()
    cache.insert(key([1, 2, 3, 4]), slots(0, 4))
    held = cache.lock(cache.match(key([1, 2, 3, 4])))
    cache.insert(key([1, 2, 7]), slots(20, 3))
    assert cache.locked == 4
    assert cache.evict(100)[FULL].tolist() == [22]
    cache.unlock(held)
    assert cache.locked == 0


def test_insert_reports_duplicates_and_keeps_its_own_handles():
    cache = RadixCache()
    cache.insert(key([1, 2, 3]), slots(0, 3))
    result = cache.insert(key([1, 2, 3, 4, 5]), slots(100, 5))
    assert result.existing == 3
    assert result.match.handles().tolist() == [0, 1, 2, 103, 104]
    assert cache.insert(key([1, 2]), slots(50, 2)).existing == 2


def test_namespaces_share_nothing():
    cache = RadixCache()
    cache.insert(key([1, 2, 3], "a"), slots(0, 3))
    assert cache.match(key([1, 2, 3], "b")).length == 0
    assert cache.match(key([1, 2, 3])).length == 0


def test_emptied_namespaces_leave_nothing_behind():
    cache = RadixCache()
    for i in range(50):
        cache.insert(key([1, 2], str(i)), slots(2 * i, 2))
    cache.evict(100)
    assert cache.roots == {}


def test_evicts_least_recently_used_first_and_only_what_is_needed():
    cache = RadixCache()
    cache.insert(key([1, 1, 1, 1]), slots(0, 4))
    cache.insert(key([2, 2, 2, 2]), slots(10, 4))
    cache.unlock(cache.lock(cache.match(key([1, 1, 1, 1]))))
    assert sorted(cache.evict(3)[FULL].tolist()) == [11, 12, 13]
    assert cache.match(key([2, 2, 2])).length == 1
    assert sorted(cache.evict(2)[FULL].tolist()) == [3, 10]


def test_parent_becomes_a_candidate_after_its_leaves():
    cache = RadixCache()
    cache.insert(key([1, 2, 3]), slots(0, 3))
    cache.insert(key([1, 2, 4]), slots(10, 3))
    assert len(cache.evict(10)[FULL]) == 4
    assert cache.evictable == 0


def test_pages_align_match_insert_and_evict():
    cache = RadixCache(page_size=4)
    tokens = list(range(10))
    result = cache.insert(key(tokens), slots(0, 10))
    assert result.match.length == 8
    assert cache.match(key([*range(6), 99, 99])).length == 4
    assert cache.match(key(tokens), limit=7).length == 4
    assert len(cache.evict(1)[FULL]) == 4


def test_reset_refuses_while_locked():
    cache = RadixCache()
    cache.insert(key([1, 2]), slots(0, 2))
    held = cache.lock(cache.match(key([1])))
    with pytest.raises(RuntimeError, match="1 of its tokens"):
        cache.reset()
    cache.unlock(held)
    assert sorted(cache.reset()[FULL].tolist()) == [0, 1]
    assert cache.match(key([1, 2])).length == 0


def test_unlock_twice_is_an_error():
    cache = RadixCache()
    cache.insert(key([1, 2]), slots(0, 2))
    held = cache.lock(cache.match(key([1, 2])))
    cache.unlock(held)
    with pytest.raises(RuntimeError, match="more often"):
        cache.unlock(held)


def test_every_component_is_split_matched_and_evicted_together():
    cache = RadixCache(components=(FULL, "draft"))
    cache.insert(key([1, 2, 3]), {FULL: np.arange(3, dtype=np.int32), "draft": np.arange(50, 53, dtype=np.int32)})
    match = cache.match(key([1, 2]))
    assert match.handles("draft").tolist() == [50, 51]
    cache.unlock(cache.lock(match))
    freed = cache.evict(3)
    assert sorted(freed[FULL].tolist()) == [0, 1, 2]
    assert sorted(freed["draft"].tolist()) == [50, 51, 52]


def test_no_cache_keeps_nothing():
    cache = NoCache(4)
    result = cache.insert(key([1, 2, 3, 4]), slots(0, 4))
    assert (result.existing, result.match.length, cache.match(key([1, 2, 3, 4])).length) == (0, 0, 0)


def test_key_wants_int32():
    with pytest.raises(TypeError, match="int32"):
        CacheKey("", np.arange(3))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_counts_as_a_loop_does(a, b):
    expected = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        expected += 1
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


@given(st.integers(0, 1000), st.integers(1, 64))
def test_page_rounding(n, page):
    assert floor_page(n, page) % page == 0
    assert n - page < floor_page(n, page) <= n <= ceil_page(n, page) < n + page


TOKENS = st.lists(st.integers(0, 2), max_size=12)
NAMESPACES = st.sampled_from(["", "x"])


class TreeAgainstDictionary(RuleBasedStateMachine):
    """The model maps (namespace, tokens up to the end of the page, position) to a handle.

    Eviction may remove any entries but never a locked one.
    """

    page = 1
    paths = FASTEST

    def __init__(self):
        super().__init__()
        self.cache = RadixCache(page_size=self.page, paths=self.paths)
        self.model: dict[tuple[str, tuple[int, ...], int], int] = {}
        self.held: list[tuple[object, str, tuple[int, ...]]] = []
        self.handle = 0

    def longest(self, namespace, tokens):
        n = floor_page(len(tokens), self.page)
        while n and self.entry(namespace, tokens, n) not in self.model:
            n -= self.page
        return n

    def entry(self, namespace, tokens, n):
        """Name of the n-th token (counted from 1) of a sequence: equal sequences up to its page's end share it."""
        return namespace, tuple(tokens[: ceil_page(n, self.page)]), n

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def insert(self, tokens, namespace):
        handles = np.arange(self.handle, self.handle + len(tokens), dtype=np.int32)
        self.handle += len(tokens)
        existing = self.cache.insert(key(tokens, namespace), {FULL: handles}).existing
        assert existing == self.longest(namespace, tokens)
        for n in range(existing + 1, floor_page(len(tokens), self.page) + 1):
            self.model[self.entry(namespace, tokens, n)] = int(handles[n - 1])

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.one_of(st.none(), st.integers(0, 12)))
    def match(self, tokens, namespace, limit):
        match = self.cache.match(key(tokens, namespace), limit)
        assert match.length == self.longest(namespace, tokens[:limit])
        found = [self.entry(namespace, tokens, n + 1) for n in range(match.length)]
        assert match.handles().tolist() == [self.model[entry] for entry in found]
        assert match.unlocked == len(set(found) - self.locked())

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def lock(self, tokens, namespace):
        match = self.cache.match(key(tokens, namespace))
        self.held.append((self.cache.lock(match), namespace, tuple(tokens[: match.length])))

    @rule(which=st.integers(0, 30))
    def unlock(self, which):
        if self.held:
            self.cache.unlock(self.held.pop(which % len(self.held))[0])

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        evictable = self.cache.evictable
        gone = set(self.cache.evict(count)[FULL].tolist())
        assert len(gone) == min(ceil_page(count, self.page), evictable)
        lost = {entry for entry, handle in self.model.items() if handle in gone}
        assert not lost & self.locked()
        assert len(lost) == len(gone)
        for entry in lost:
            del self.model[entry]

    def locked(self):
        return {self.entry(ns, tokens, n + 1) for _, ns, tokens in self.held for n in range(len(tokens))}

    @invariant()
    def counts_agree(self):
        locked = self.locked()
        assert self.cache.locked == len(locked)
        assert self.cache.evictable == len(self.model) - len(locked)
        assert sorted(self.cache.handles().tolist()) == sorted(self.model.values())


class PagedTreeAgainstDictionary(TreeAgainstDictionary):
    page = 3


class PythonTreeAgainstDictionary(TreeAgainstDictionary):
    paths = PYTHON


TestTree = TreeAgainstDictionary.TestCase
TestTree.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestPagedTree = PagedTreeAgainstDictionary.TestCase
TestPagedTree.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestPythonTree = PythonTreeAgainstDictionary.TestCase
TestPythonTree.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
