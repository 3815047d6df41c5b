"""Who owns which KV slots: the one owner of every running request's committed length, allocated length and slots.

A lease is a row. Of its positions, [0, shared) lie in the prefix cache under this row's lock, [shared, allocated) are
the row's own, and three lengths are kept apart:

* ``committed``: KV that an applied step has computed; only this may enter the cache;
* ``launched``: KV that some step computes or has computed; the next step of the row starts here;
* ``allocated``: positions that have a slot (whole pages), so launched <= allocated.

Chunked prefill, overlap's extra token, drafts, retraction, abort and finish all go through ``extend``, ``commit``,
``take_back``, ``share`` and ``close``; nothing else may free a row's slots. Slots may be reused as soon as a row is
closed although a step that writes them is still in flight: the runner executes plans in order, so a later owner writes
after it.
"""

from __future__ import annotations

import numpy as np

from ceiba.cache.allocator import SlotAllocator
from ceiba.cache.base import FULL, Match, Node, PrefixCache
from ceiba.cache.keys import CacheKey, Int32, ceil_page, floor_page
from ceiba.cache.pins import PinBoard
from ceiba.core.lazy import sparse_table


class LeaseTable:
    """Leases of up to ``max_rows`` rows of at most ``max_len`` positions; arrays are indexed by row."""

    def __init__(
        self,
        cache: PrefixCache,
        allocator: SlotAllocator,
        max_rows: int,
        max_len: int,
        pins: PinBoard | None = None,
    ) -> None:
        if cache.page_size != allocator.page_size:
            raise ValueError(f"cache pages of {cache.page_size}, allocator pages of {allocator.page_size} slots")
        self.cache = cache
        self.allocator = allocator
        self.pins = PinBoard(cache, 0) if pins is None else pins
        self.cause = ""
        """Who asks for slots now: what the cache's history calls the reason of an eviction."""
        self.page_size = allocator.page_size
        self.slots = sparse_table(max_rows, ceil_page(max_len, self.page_size))
        self.committed = np.zeros(max_rows, np.int32)
        self.launched = np.zeros(max_rows, np.int32)
        self.allocated = np.zeros(max_rows, np.int32)
        self.shared = np.zeros(max_rows, np.int32)
        self._open = np.zeros(max_rows, bool)
        self._locks: list[Node | None] = [None] * max_rows
        self._duplicates: dict[int, list[Int32]] = {}
        self._in_flight = 0
        self._ahead = min(512, allocator.total // 256)
        """Evicted beyond what is missing, so that a full pool is not swept anew every decode step."""
        self._page_offsets = np.arange(self.page_size, dtype=np.int32)
        self.evicted_tokens = 0

    @property
    def in_flight(self) -> int:
        """Slots that rows own outside the cache, duplicates included."""
        return self._in_flight

    @property
    def available(self) -> int:
        """Slots that are free or that eviction can free."""
        return self.allocator.free + self.cache.evictable

    def is_open(self, row: int) -> bool:
        return bool(self._open[row])

    def has_duplicates(self, row: int) -> bool:
        """Whether closing the row would free slots whose content the cache holds as well."""
        return row in self._duplicates

    def reclaimable(self, row: int) -> int:
        """Slots that ``close`` would make available: the row's own, and the cached ones that only it holds."""
        count = int(self.allocated[row]) - int(self.shared[row])
        count += sum(map(len, self._duplicates.get(row, [])))
        node = self._locks[row]
        while node is not None and node.parent is not None and node.locks == 1:
            count += len(node)
            node = node.parent
        return count

    def held_node(self, row: int) -> Node | None:
        """The far end of the row's locked prefix in the cache."""
        return self._locks[row]

    def open(self, row: int, match: Match, *, hit: bool = True) -> Int32:
        """Take ``row`` with a cached prefix; returns the prefix's slots, int32 [match.length].

        Locks the match; ``hit``: as the request's first use of it. The prefix counts as committed and launched.
        """
        if self._open[row]:
            raise RuntimeError(f"row {row} is leased already")
        prefix = match.handles(FULL)
        self._locks[row] = self.cache.lock(match, hit=hit)
        n = len(prefix)
        self.slots[row, :n] = prefix
        self.committed[row] = self.launched[row] = self.allocated[row] = self.shared[row] = n
        self._open[row] = True
        return prefix

    def shortfall(self, row: int, count: int) -> int:
        """Slots that ``extend(row, count)`` would take from the allocator."""
        return max(0, ceil_page(int(self.launched[row]) + count, self.page_size) - int(self.allocated[row]))

    def extend(self, row: int, count: int) -> Int32:
        """Launch ``count`` more positions of one row; returns their slots, int32 [count].

        Evicts what it must; ``OutOfSlots`` when even that is not enough (ask ``shortfall`` and ``available`` first).
        """
        start = int(self.launched[row])
        wanted = self.shortfall(row, count)
        if wanted:
            at = int(self.allocated[row])
            self.slots[row, at : at + wanted] = self._take(wanted // self.page_size)
            self.allocated[row] += wanted
        self.launched[row] = start + count
        return self.slots[row, start : start + count].copy()

    def shortfall_each(self, rows: Int32) -> int:
        """Slots that ``extend_each(rows)`` would take from the allocator."""
        return int(np.count_nonzero(self.launched[rows] >= self.allocated[rows])) * self.page_size

    def extend_each(self, rows: Int32) -> Int32:
        """Launch one more position of each row, in a fixed number of array operations; returns slots, int32 [B]."""
        starts = self.launched[rows]
        full = starts >= self.allocated[rows]
        count = int(np.count_nonzero(full))
        if count:
            pages = self._take(count)
            growing, at = rows[full], starts[full]
            if self.page_size == 1:
                self.slots[growing, at] = pages
            else:
                self.slots[growing[:, None], at[:, None] + self._page_offsets] = pages.reshape(count, -1)
            self.allocated[growing] += self.page_size
        self.launched[rows] = starts + 1
        return self.slots[rows, starts]

    def commit(self, rows: Int32, lengths: Int32) -> None:
        """An applied step computed the rows' positions up to ``lengths`` (exclusive)."""
        self.committed[rows] = lengths

    def take_back(self, rows: Int32, lengths: Int32) -> None:
        """Positions past ``lengths`` held drafts that were wrong: they are launched again, into the slots they have."""
        self.launched[rows] = lengths

    def share(self, row: int, key: CacheKey, priority: int = 0) -> None:
        """Give the committed part of a live row to the cache (whole pages), and hold it there.

        ``key`` names the row's tokens, at least the committed ones. Where the cache had the tokens already, this row's
        slots are duplicates. The runner's slot table still names them, so they stay this row's, counted as in flight,
        until ``close``: freeing them now would let another request overwrite KV that this row reads.
        """
        if self.cache.enabled:
            self._offer(row, key, priority)

    def close(self, row: int, key: CacheKey | None, priority: int = 0) -> None:
        """End the lease. With ``key`` the committed part goes to the cache; with None nothing more does.

        Frees every slot that the cache did not take: duplicates, the rest of the last page, positions that a dropped
        step computed. Unlocks the row's prefix.
        """
        if not self._open[row]:
            raise RuntimeError(f"row {row} is not leased")
        if key is not None and self.cache.enabled:
            self._offer(row, key, priority)
        loose = [*self._duplicates.pop(row, []), self.slots[row, self.shared[row] : self.allocated[row]]]
        for slots in loose:
            self.allocator.release(slots)
            self._in_flight -= len(slots)
        self.cache.unlock(self._locks[row])
        self._locks[row] = None
        self._open[row] = False
        self.committed[row] = self.launched[row] = self.allocated[row] = self.shared[row] = 0

    def lend(self, tokens: int) -> Int32:
        """Slots for KV that comes from another tier, int32 [tokens], whole pages; in flight until ``settle``.

        Evicts what it must; ``OutOfSlots`` when even that is not enough.
        """
        return self._take(tokens // self.page_size)

    def settle(self, tokens: int, spare: Int32) -> None:
        """``tokens`` lent slots are the cache's now, but for the ``spare`` ones, which are free again."""
        self._in_flight -= tokens
        self.allocator.release(spare)

    def flush(self) -> int:
        """Empty the cache, pins included (no request may use it); returns how many tokens it held."""
        self.pins.clear()
        freed = self.cache.reset().get(FULL, np.empty(0, np.int32))
        self.allocator.release(freed)
        return len(freed)

    def owned(self) -> Int32:
        """Slots that rows own outside the cache, for audits."""
        parts = [self.slots[row, self.shared[row] : self.allocated[row]] for row in np.flatnonzero(self._open)]
        parts += [slots for many in self._duplicates.values() for slots in many]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _offer(self, row: int, key: CacheKey, priority: int) -> None:
        length, shared = floor_page(int(self.committed[row]), self.page_size), int(self.shared[row])
        if length <= shared:
            return
        prefix = CacheKey(key.namespace, key.tokens[:length])
        result = self.cache.insert(prefix, {FULL: self.slots[row, :length]}, priority)
        if result.existing > shared:
            self._duplicates.setdefault(row, []).append(self.slots[row, shared : result.existing].copy())
        old, self._locks[row] = self._locks[row], self.cache.lock(result.match)
        self.cache.unlock(old)
        self.shared[row] = length
        self._in_flight -= length - max(shared, result.existing)

    def _take(self, num_pages: int) -> Int32:
        wanted = num_pages * self.page_size
        missing = wanted - self.allocator.free
        if missing > 0:
            freed = self.cache.evict(missing + self._ahead, self.cause).get(FULL)
            if freed is not None:
                self.allocator.release(freed)
                self.evicted_tokens += len(freed)
        slots = self.allocator.alloc(num_pages)
        self._in_flight += wanted
        return slots
