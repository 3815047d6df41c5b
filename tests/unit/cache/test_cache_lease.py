"""Tree, allocator and leases together: a state machine whose ledger is recounted after every event."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ceiba.cache.allocator import SlotAllocator
from ceiba.cache.keys import CacheKey, ceil_page
from ceiba.cache.lease import LeaseTable
from ceiba.cache.ledger import LedgerError, assert_ledger, read_ledger
from ceiba.cache.none import NoCache
from ceiba.cache.radix import RadixCache


def table(slots=64, page=1, rows=4, length=64, cache=None):
    return LeaseTable(cache or RadixCache(page), SlotAllocator(slots, page), rows, length)


def key(tokens):
    return CacheKey("", np.array(tokens, np.int32))


def run(leases, row, tokens):
    """Open ``row``, compute all of ``tokens`` and commit."""
    leases.open(row, leases.cache.match(key(tokens), len(tokens) - 1))
    leases.extend(row, len(tokens) - int(leases.launched[row]))
    leases.commit(np.array([row]), np.array([len(tokens)]))


def test_dropped_overlap_token_is_freed_once_and_never_cached():
    leases = table()
    run(leases, 0, [1, 2, 3])
    leases.extend_each(np.array([0], np.int32))  # launched, never committed
    leases.close(0, key([1, 2, 3, 4]))
    assert leases.cache.match(key([1, 2, 3, 4])).length == 3
    assert read_ledger(leases).free == 61
    assert_ledger(leases, idle=True)


def test_duplicate_stays_with_its_row_until_the_row_closes():
    leases = table()
    run(leases, 0, [1, 2, 3, 4])
    run(leases, 1, [1, 2, 3, 4])
    own = leases.slots[1, :4].copy()
    leases.share(0, key([1, 2, 3, 4]))
    leases.share(1, key([1, 2, 3, 4]))
    assert leases.has_duplicates(1)
    assert not leases.has_duplicates(0)
    assert leases.slots[1, :4].tolist() == own.tolist()  # the runner's table still names these
    assert not np.isin(own, leases.allocator.free_slots()).any()
    assert_ledger(leases)
    leases.close(1, key([1, 2, 3, 4]))
    assert np.isin(own, leases.allocator.free_slots()).all()
    leases.close(0, key([1, 2, 3, 4]))
    assert_ledger(leases, idle=True)


def test_extend_each_equals_extend():
    for page in (1, 4):
        one, many = table(page=page), table(page=page)
        for leases in (one, many):
            run(leases, 0, [1, 2, 3])
            run(leases, 2, [7, 8, 9, 10])
        rows = np.array([0, 2], np.int32)
        for _ in range(6):
            assert many.shortfall_each(rows) == one.shortfall(0, 1) + one.shortfall(2, 1)
            got = many.extend_each(rows)
            expected = [one.extend(0, 1)[0], one.extend(2, 1)[0]]
            if page == 1:
                assert got.tolist() == expected
            assert (got % page).tolist() == [int(s) % page for s in expected]
            assert many.launched.tolist() == one.launched.tolist()
        assert_ledger(many)


def test_closed_without_a_key_frees_everything_not_shared():
    leases = table()
    run(leases, 0, [1, 2, 3])
    leases.close(0, None)
    assert read_ledger(leases).free == 64


def test_disabled_cache_needs_no_branch():
    leases = table(cache=NoCache())
    run(leases, 0, [1, 2, 3])
    leases.share(0, key([1, 2, 3]))
    leases.close(0, key([1, 2, 3]))
    assert assert_ledger(leases, idle=True).free == 64


def test_the_ledger_names_what_is_wrong():
    leases = table()
    run(leases, 0, [1, 2, 3])
    leases.allocator.alloc(2)
    with pytest.raises(LedgerError, match=r"2 slots lost: full: free 59 \+ cached 0 \+ locked 0 \+ in-flight 3 = 62"):
        assert_ledger(leases)


def test_the_ledger_sees_a_slot_owned_twice():
    leases = table()
    run(leases, 0, [1, 2, 3])
    run(leases, 1, [4, 5, 6])
    leases.slots[0, 0] = leases.slots[1, 0]
    with pytest.raises(LedgerError, match="owned twice"):
        assert_ledger(leases)


def test_idle_ledger_refuses_held_slots():
    leases = table()
    run(leases, 0, [1, 2, 3])
    with pytest.raises(LedgerError, match="idle"):
        assert_ledger(leases, idle=True)


def test_flush_gives_all_slots_back():
    leases = table()
    run(leases, 0, [1, 2, 3])
    leases.close(0, key([1, 2, 3]))
    assert leases.flush() == 3
    assert read_ledger(leases).free == 64


class Leases(RuleBasedStateMachine):
    """Rows open with a match, grow, commit, share, close or are dropped, in any order; content is checked by slot."""

    page = 1
    ROWS = 4

    def __init__(self):
        super().__init__()
        self.leases = table(slots=40, page=self.page, rows=self.ROWS, length=24)
        self.tokens: dict[int, list[int]] = {}
        self.written: dict[int, tuple[int, ...]] = {}
        """slot -> the prefix whose KV it holds"""

    @rule(row=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def open(self, row, tokens):
        if row in self.tokens:
            return
        match = self.leases.cache.match(key(tokens), len(tokens) - 1)
        need = ceil_page(len(tokens) - match.length, self.page)
        if need > self.leases.available - match.unlocked:
            return
        prefix = self.leases.open(row, match)
        for n, slot in enumerate(prefix.tolist()):
            assert self.written[slot] == tuple(tokens[: n + 1])
        self.tokens[row] = tokens
        self.write(row, self.leases.extend(row, len(tokens) - len(prefix)))

    @precondition(lambda self: self.tokens)
    @rule(token=st.integers(0, 1))
    def grow_all(self, token):
        rows = np.array([row for row in sorted(self.tokens) if len(self.tokens[row]) < 24], np.int32)
        if not len(rows) or self.leases.shortfall_each(rows) > self.leases.available:
            return
        slots = self.leases.extend_each(rows)
        for row, slot in zip(rows.tolist(), slots, strict=True):
            self.tokens[row].append(token)
            self.write(row, np.array([slot]))

    @rule(row=st.integers(0, 3), back=st.integers(0, 2))
    def commit(self, row, back):
        if row in self.tokens:
            length = max(int(self.leases.committed[row]), int(self.leases.launched[row]) - back)
            self.leases.commit(np.array([row]), np.array([length]))

    @rule(row=st.integers(0, 3))
    def share(self, row):
        if row in self.tokens:
            self.leases.share(row, key(self.tokens[row]))

    @rule(row=st.integers(0, 3), keep=st.booleans())
    def close(self, row, keep):
        if row in self.tokens:
            self.leases.close(row, key(self.tokens[row]) if keep else None)
            del self.tokens[row]

    def write(self, row, slots):
        end = int(self.leases.launched[row])
        for n, slot in enumerate(slots.tolist(), end - len(slots)):
            self.written[slot] = tuple(self.tokens[row][: n + 1])

    @invariant()
    def balanced(self):
        assert_ledger(self.leases, idle=not self.tokens)

    @invariant()
    def content_is_intact(self):
        for row, tokens in self.tokens.items():
            for n, slot in enumerate(self.leases.slots[row, : self.leases.launched[row]].tolist()):
                assert self.written[slot] == tuple(tokens[: n + 1])


class PagedLeases(Leases):
    page = 4


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestPagedLeases = PagedLeases.TestCase
TestPagedLeases.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
