"""The compiled loops of the tree against the Python ones: the same tree, to the last statistic, after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ceiba.cache.base import FULL, Node
from ceiba.cache.eviction import POLICIES, make_policy
from ceiba.cache.history import EvictionHistory
from ceiba.cache.keys import CacheKey
from ceiba.cache.paths import NATIVE, PYTHON
from ceiba.cache.pins import PinBoard
from ceiba.cache.radix import RadixCache

needs_native = pytest.mark.skipif(NATIVE is None, reason="the package was installed without a compiler")


def key(tokens, namespace=""):
    return CacheKey(namespace, np.array(tokens, np.int32))


class Twin:
    """One cache with everything that hangs on it, and what it answered."""

    def __init__(self, paths, page, policy):
        self.history = EvictionHistory(lambda: 0.0)
        self.cache = RadixCache(page, make_policy(policy), history=self.history, paths=paths)
        self.pins = PinBoard(self.cache, 12)
        self.held = []
        self.slot = 0

    def insert(self, tokens, namespace, priority):
        handles = np.arange(self.slot, self.slot + len(tokens), dtype=np.int32)
        self.slot += len(tokens)
        result = self.cache.insert(key(tokens, namespace), {FULL: handles}, priority)
        return result.existing, result.match.length, result.match.handles().tolist()

    def match(self, tokens, namespace, limit):
        match = self.cache.match(key(tokens, namespace), limit)
        return match.length, len(match.path), match.handles().tolist(), match.unlocked

    def lock(self, tokens, namespace, hit):
        self.held.append(self.cache.lock(self.cache.match(key(tokens, namespace)), hit=hit))

    def unlock(self, which):
        if self.held:
            self.cache.unlock(self.held.pop(which % len(self.held)))

    def pin(self, tokens, namespace):
        match = self.cache.match(key(tokens, namespace))
        return self.pins.pin(str(len(tokens)), match, displaceable=len(tokens) % 2 == 0), self.pins.tokens

    def evict(self, count):
        return self.cache.evict(count, "a test")[FULL].tolist()

    def missing(self, tokens, namespace):
        found = self.history.missing(key(tokens, namespace), 0)
        return [(run.start, run.data, run.cause) for run in found]

    def picture(self):
        fields = ("namespace", "start", "data", "locks", "pins", "hits", "last_access", "priority", "reach")
        nodes = [
            (*(getattr(node, name) for name in fields), node.handles[FULL].tolist()) for node in self.cache.nodes()
        ]
        cache = self.cache
        for node in (*cache.roots.values(), *cache.nodes()):  # what is looked at first must not outlive its place
            assert node.branch is None or any(child is node.branch for child in node.children.values())
        return sorted(nodes), cache.evictable, cache.locked, cache.version, sorted(cache.roots)


TOKENS = st.lists(st.integers(0, 2), max_size=14)
NAMESPACE = st.sampled_from(["", "x"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), TOKENS, NAMESPACE, st.integers(-2, 3)),
        st.tuples(st.just("match"), TOKENS, NAMESPACE, st.one_of(st.none(), st.integers(0, 14))),
        st.tuples(st.just("lock"), TOKENS, NAMESPACE, st.booleans()),
        st.tuples(st.just("unlock"), st.integers(0, 9)),
        st.tuples(st.just("pin"), TOKENS, NAMESPACE),
        st.tuples(st.just("evict"), st.integers(1, 9)),
        st.tuples(st.just("missing"), TOKENS, NAMESPACE),
    ),
    max_size=40,
)


@needs_native
@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([1, 2, 3]), st.sampled_from(sorted(POLICIES)))
def test_both_forms_give_the_same_answers_and_leave_the_same_tree(steps, page, policy):
    python, native = Twin(PYTHON, page, policy), Twin(NATIVE, page, policy)
    for name, *args in steps:
        assert getattr(native, name)(*args) == getattr(python, name)(*args), name
        assert native.picture() == python.picture(), name


@needs_native
def test_the_child_used_last_is_looked_at_first_and_only_first():
    """Whatever it says: the other children, those that nothing begins with, and a child that is gone are as ever."""
    cache = RadixCache(paths=NATIVE)
    for tail in ([5, 5], [6, 6], [7], [8, 1], [9, 9, 9]):
        cache.insert(key([1, 2, *tail]), {FULL: np.arange(2 + len(tail), dtype=np.int32)})
    top = cache.match(key([1, 2])).path[0]
    for tail in ([5, 5], [9, 9, 9], [8, 1], [7], [6, 6]):
        match = cache.match(key([1, 2, *tail]))
        assert match.length == 2 + len(tail)
        cache.unlock(cache.lock(match))
        assert top.branch is match.path[1]
        assert cache.match(key([1, 2, 4])).length == 2
        assert cache.match(key([1, 2, tail[0], 0])).length == 3
    assert top.branch.tokens.tolist() == [6, 6]
    held = cache.lock(cache.match(key([1, 2, 6])))  # cut between the two
    assert (top.branch, held.branch.tokens.tolist()) == (held, [6])
    cache.unlock(held)
    cache.evict(100)
    assert top.branch is None
    assert cache.match(key([1, 2, 6])).length == 0


@needs_native
@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 80))
def test_runs_are_compared_to_the_token(length, differs, cut):
    """Around the block size of the compiled compare."""
    node, root = np.arange(length, dtype=np.int32), Node("", b"", {}, None)
    if length:
        root.children[node[:1].tobytes()] = Node("", node.tobytes(), {}, root)
    wanted = np.arange(80, dtype=np.int32)
    wanted[differs:] += 1000
    expected = 0
    while expected < min(length, cut) and wanted[expected] == expected:
        expected += 1
    for paths in (PYTHON, NATIVE):
        assert paths.walk(root, wanted, cut, 1)[1] == expected


@needs_native
def test_the_compiled_form_refuses_what_is_no_node():
    class Loose:
        children = {}

    with pytest.raises(TypeError, match="not a node"):
        NATIVE.lock(Loose(), 1, False)
    with pytest.raises(TypeError, match="not a node"):
        NATIVE.unlocked([object()])
    with pytest.raises(TypeError, match="__slots__"):
        type(NATIVE)(Loose)
    with pytest.raises(ValueError, match="out of range"):
        NATIVE.walk(Node("", b"", {}, None), np.arange(3, dtype=np.int32), 4, 1)


@pytest.mark.parametrize("paths", [PYTHON, pytest.param(NATIVE, marks=needs_native)], ids=["python", "native"])
def test_misuse_is_the_same_error_in_both_forms(paths):
    cache = RadixCache(paths=paths)
    cache.insert(key([1, 2]), {FULL: np.arange(2, dtype=np.int32)})
    match = cache.match(key([1, 2]))
    held = cache.lock(match)
    cache.unlock(held)
    with pytest.raises(RuntimeError, match="more often"):
        cache.unlock(held)
    with pytest.raises(ValueError, match="fewer handles"):
        paths.gather(match.path, FULL, np.empty(3, np.int32))
    with pytest.raises(KeyError):
        paths.gather(match.path, "draft", np.empty(2, np.int32))
    assert paths.lock(None, 1, False) == paths.unlock(None) == 0


@needs_native
def test_no_reference_is_lost_or_kept():
    import gc
    import weakref

    class Marked(np.ndarray):
        """Handles that tell when they go."""

    cache = RadixCache(paths=NATIVE)
    for i in range(20):
        cache.insert(key([1, 2, i, i]), {FULL: np.arange(4, dtype=np.int32)})
    gone = []
    for node in cache.nodes():
        node.handles[FULL] = node.handles[FULL].view(Marked)
        weakref.finalize(node.handles[FULL], gone.append, 1)
    count = len(cache.nodes())
    for i in range(20):
        match = cache.match(key([1, 2, i, i]))
        match.handles()
        cache.unlock(cache.lock(match, hit=True))
    del match, node
    gc.collect()
    assert gone == []
    cache.evict(100)
    gc.collect()
    assert len(gone) == count
