"""The books of the KV pool: every slot is free, cached, locked or in flight, exactly once, per component.

Owns the check and its words; changes nothing. Runs in tests after every event and when the engine is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ceiba.cache.base import FULL
from ceiba.cache.lease import LeaseTable
from ceiba.cache.radix import RadixCache


class LedgerError(AssertionError):
    """KV slots are lost or owned twice. A bug, never a load condition."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Slots of one component by state; ``cached`` can be evicted, ``locked`` is cached and in use."""

    component: str
    free: int
    cached: int
    locked: int
    in_flight: int
    total: int

    @property
    def balanced(self) -> bool:
        return self.free + self.cached + self.locked + self.in_flight == self.total

    def __str__(self) -> str:
        found = self.free + self.cached + self.locked + self.in_flight
        return (
            f"{self.component}: free {self.free} + cached {self.cached} + locked {self.locked} + in-flight "
            f"{self.in_flight} = {found} of {self.total} slots"
        )


def read_ledger(leases: LeaseTable) -> Ledger:
    """The counters, O(1)."""
    cache, allocator = leases.cache, leases.allocator
    return Ledger(FULL, allocator.free, cache.evictable, cache.locked, leases.in_flight, allocator.total)


def assert_ledger(leases: LeaseTable, *, idle: bool = False) -> Ledger:
    """Recount everything from the structures themselves, O(pool + tree), and compare with the counters.

    Raises ``LedgerError`` naming the component, the four counts and the first slots that are lost or owned twice. With
    ``idle`` nothing may be locked, pins apart, or in flight either.
    """
    ledger = read_ledger(leases)
    if not ledger.balanced:
        lost = ledger.total - (ledger.free + ledger.cached + ledger.locked + ledger.in_flight)
        raise LedgerError(f"KV ledger out of balance, {abs(lost)} slots {'lost' if lost > 0 else 'too many'}: {ledger}")
    owners = np.zeros(ledger.total, np.int64)
    for slots in (leases.allocator.free_slots(), leases.cache.handles(FULL), leases.owned()):
        np.add.at(owners, slots, 1)
    for bad, what in ((np.flatnonzero(owners > 1), "owned twice"), (np.flatnonzero(owners == 0), "lost")):
        if len(bad):
            raise LedgerError(f"KV slots {what}: {bad[:16].tolist()} ({len(bad)} of {ledger.total}); {ledger}")
    if isinstance(leases.cache, RadixCache):
        _audit_tree(leases.cache, ledger)
    pins = leases.pins
    if isinstance(leases.cache, RadixCache):
        pinned = sum(len(node) for node in leases.cache.nodes() if node.pins)
        if pinned != pins.tokens or pins.tokens > pins.budget:
            raise LedgerError(f"pins hold {pinned} tokens, the books say {pins.tokens} of {pins.budget}")
    if idle and (ledger.locked != pins.tokens or ledger.in_flight):
        raise LedgerError(f"the engine is idle but KV is still held: {ledger}")
    return ledger


def _audit_tree(cache: RadixCache, ledger: Ledger) -> None:
    locked = cached = 0
    for node in cache.nodes():
        for name, handles in node.handles.items():
            if len(handles) != len(node):
                raise LedgerError(f"a node of {len(node)} tokens holds {len(handles)} handles of component {name}")
        if any(child.parent is not node for child in node.children.values()):
            raise LedgerError("a cache node's child names another parent")
        if sum(child.locks for child in node.children.values()) > node.locks:
            raise LedgerError("a cache node is locked less often than its children")
        above = node.parent
        outgrown = above is not None and above.parent is not None and node.reach > above.reach
        if above is None or node.start != above.end or outgrown or node.pins > node.locks:
            raise LedgerError("a cache node's position, reach or pins do not fit its parent's")
        if len(node) == 0 or len(node) % cache.page_size:
            raise LedgerError(f"a cache node of {len(node)} tokens with pages of {cache.page_size}")
        if node.locks:
            locked += len(node)
        else:
            cached += len(node)
    if (cached, locked) != (ledger.cached, ledger.locked):
        raise LedgerError(f"the tree holds cached {cached} + locked {locked} tokens; {ledger}")
