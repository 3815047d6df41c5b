"""The books of the KV pool: every slot is free, cached, locked or in flight, exactly once, per component.

Owns the check and its words; changes nothing. Runs in tests after every event and when the engine is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ceiba.cache.base import FULL, Node, Tier
from ceiba.cache.host import HostCopy, Kind
from ceiba.cache.lease import LeaseTable
from ceiba.cache.radix import RadixCache
from ceiba.cache.tiers import TieredCache, TierNode


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


def read_host_ledger(cache: TieredCache) -> Ledger:
    """Slots of host memory, O(tree): ``locked`` are those that a copy under way uses."""
    copies = [node.host for node in cache.nodes() if isinstance(node, TierNode) and node.host is not None]
    used = sum(len(copy) for copy in copies if copy.operations)
    drifting = sum(len(copy) for copy in cache.adrift) + sum(
        op.tokens for op in cache.operations.values() if op.kind is Kind.UNPACK
    )
    cached = sum(map(len, copies)) - used
    return Ledger("host", cache.host.free, cached, used, drifting, cache.host.total)


def assert_ledger(leases: LeaseTable, *, idle: bool = False) -> Ledger:
    """Recount everything from the structures themselves, O(pool + tree), and compare with the counters.

    Raises ``LedgerError`` naming the component, the four counts and the first slots that are lost or owned twice. With
    ``idle`` nothing may be locked, pins apart, or in flight either.
    """
    ledger = read_ledger(leases)
    if not ledger.balanced:
        lost = ledger.total - (ledger.free + ledger.cached + ledger.locked + ledger.in_flight)
        raise LedgerError(f"KV ledger out of balance, {abs(lost)} slots {'lost' if lost > 0 else 'too many'}: {ledger}")
    held = [leases.allocator.free_slots(), leases.cache.handles(FULL), leases.owned()]
    if isinstance(leases.cache, TieredCache):
        held += [op.slots for op in leases.cache.operations.values() if op.kind is Kind.RESTORE]
    _audit_slots(held, ledger)
    if isinstance(leases.cache, RadixCache):
        _audit_tree(leases.cache, ledger)
    if isinstance(leases.cache, TieredCache):
        _audit_tiers(leases.cache)
    pins = leases.pins
    if isinstance(leases.cache, RadixCache):
        pinned = sum(len(node) for node in leases.cache.nodes() if node.pins)
        if pinned != pins.tokens or pins.tokens > pins.budget:
            raise LedgerError(f"pins hold {pinned} tokens, the books say {pins.tokens} of {pins.budget}")
    if idle and (ledger.locked != pins.tokens or ledger.in_flight):
        raise LedgerError(f"the engine is idle but KV is still held: {ledger}")
    return ledger


def _audit_slots(held: list[np.ndarray], ledger: Ledger) -> None:
    owners = np.zeros(ledger.total, np.int64)
    for slots in held:
        np.add.at(owners, slots, 1)
    for bad, what in ((np.flatnonzero(owners > 1), "owned twice"), (np.flatnonzero(owners == 0), "lost")):
        if len(bad):
            raise LedgerError(f"KV slots {what}: {bad[:16].tolist()} ({len(bad)} of {ledger.total}); {ledger}")


def _audit_tiers(cache: TieredCache) -> None:
    """Host slots, and that every node lies where it says and can be reached there."""
    ledger = read_host_ledger(cache)
    nodes = [node for node in cache.nodes() if isinstance(node, TierNode)]
    copies: list[HostCopy] = [node.host for node in nodes if node.host is not None]
    held = [cache.host.free_slots(), *(copy.slots for copy in (*copies, *cache.adrift))]
    held += [op.slots for op in cache.operations.values() if op.kind is Kind.UNPACK]
    _audit_slots(held, ledger)
    roots = [root for root in cache.roots.values() if isinstance(root, TierNode)]
    for node in (*roots, *nodes):
        children: list[Node] = list(node.children.values())
        below = [child for child in children if isinstance(child, TierNode)]
        if node.device_children != sum(child.on_device for child in below):
            raise LedgerError("a cache node miscounts its children on the device")
        if node.host_children != sum(child.host is not None for child in below):
            raise LedgerError("a cache node miscounts its children on the host")
    for node in nodes:
        above = node.parent
        if node.on_device != bool(node.handles) or node.on_device != (Tier.DEVICE in node.residence):
            raise LedgerError("a cache node does not lie on the device where it says so")
        if node.on_device and above is not None and above.parent is not None and Tier.DEVICE not in above.residence:
            raise LedgerError("a cache node lies on the device and the one above it does not")
        if not node.on_device and (node.host is None or node.locks):
            raise LedgerError("a cache node is nowhere, or held where it is not")
        if node.host is not None and (len(node.host) != len(node) or node.host.node is not node):
            raise LedgerError("a host copy does not fit its node")
    if any(not copy.operations for copy in cache.adrift):
        raise LedgerError("host slots wait for an operation that has ended")


def _audit_children(nodes: list[Node]) -> None:
    for node in nodes:
        children = node.children.values()
        if any(child.parent is not node for child in children):
            raise LedgerError("a cache node's child names another parent")
        if node.branch is not None and all(child is not node.branch for child in children):
            raise LedgerError("a cache node remembers a child that it does not have")


def _audit_tree(cache: RadixCache, ledger: Ledger) -> None:
    locked = cached = 0
    nodes = cache.nodes()
    _audit_children([*cache.roots.values(), *nodes])
    for node in nodes:
        for name, handles in node.handles.items():
            if len(handles) != len(node):
                raise LedgerError(f"a node of {len(node)} tokens holds {len(handles)} handles of component {name}")
        if sum(child.locks for child in node.children.values()) > node.locks:
            raise LedgerError("a cache node is locked less often than its children")
        above = node.parent
        outgrown = above is not None and above.parent is not None and node.reach > above.reach
        if above is None or node.start != above.end or outgrown or node.pins > node.locks:
            raise LedgerError("a cache node's position, reach or pins do not fit its parent's")
        if len(node) == 0 or len(node) % cache.page_size:
            raise LedgerError(f"a cache node of {len(node)} tokens with pages of {cache.page_size}")
        if Tier.DEVICE not in node.residence:
            continue
        if node.locks:
            locked += len(node)
        else:
            cached += len(node)
    if (cached, locked) != (ledger.cached, ledger.locked):
        raise LedgerError(f"the tree holds cached {cached} + locked {locked} tokens; {ledger}")
