"""The radix tree over several tiers: nodes whose KV lies on the device, in host memory, or both.

Owns residence: which copies a node has, which are under way, and what leaves which tier. It allocates host slots, asks
``core.tiers.TierIO`` to copy, and learns from ``finish`` how that ended; it never waits and never sees bytes. When to
copy is the caller's decision (``scheduler.hicache``), with one exception: a device copy that has to go takes care of
itself.

States of a node, with what lies where:

    RESIDENT    device                 -> BACKING_UP, or out of the tree
    BACKING_UP  device, host arriving  -> BACKED_UP, or ARRIVING when the device copy goes first
    ARRIVING    host arriving          -> HOSTED
    BACKED_UP   device and host        -> HOSTED (device evicted) or RESIDENT (host evicted)
    HOSTED      host                   -> LOADING, BACKED_UP (somebody computed it again), or out of the tree
    LOADING     host, device arriving  -> BACKED_UP when it has arrived, or as soon as somebody computes it; HOSTED if
                                          the restore fails or is cancelled

A node that is computed while a restore still brings it is BACKED_UP and stays claimed (``loading``): evicted again
before the restore has ended, it is LOADING again.

Invariants: what is on the device is closed towards the root, so plain matches and locks see a plain tree; every node
has a copy somewhere or one arriving. Device slots that leave while a copy still reads them are fenced, not waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ceiba.cache.allocator import SlotAllocator
from ceiba.cache.base import FULL, Handles, Inserted, Match, Node, Tier
from ceiba.cache.eviction import EvictionPolicy, EvictionQueue
from ceiba.cache.history import EvictionHistory
from ceiba.cache.host import HostCopy, Kind, Operation
from ceiba.cache.keys import CacheKey, Int32, floor_page
from ceiba.cache.radix import RadixCache
from ceiba.core.tiers import CopyDone, TierIO

_NO_SLOTS = np.empty(0, np.int32)


class Residence(Enum):
    RESIDENT = "resident"
    BACKING_UP = "backing_up"
    ARRIVING = "arriving"
    BACKED_UP = "backed_up"
    HOSTED = "hosted"
    LOADING = "loading"


class TierNode(Node):
    """A node that may lie in several tiers."""

    __slots__ = ("device_children", "fetched", "host", "host_children", "loading", "on_device", "stored")

    def __init__(self, namespace: str, data: bytes, handles: dict[str, Int32], parent: Node | None) -> None:
        super().__init__(namespace, data, handles, parent)
        self.on_device = parent is not None and bool(handles)
        self.device_children = 0
        self.host: HostCopy | None = None
        self.host_children = 0
        """Children with a host copy, arriving ones too."""
        self.loading: Operation | None = None
        """The restore that brings it, until that has ended, though somebody may have computed it meanwhile: a part that
        is split off belongs to the restore as well."""
        self.stored = False
        """Whether the storage took its pages; it may have dropped them since."""
        self.fetched = False
        """Whether the storage brought it here and no request has used it since."""

    @property
    def evictable(self) -> bool:
        """Its device copy may go: nobody holds it, and nothing below it is on the device."""
        return self.on_device and self.locks == 0 and self.device_children == 0 and self.parent is not None

    @property
    def hosted(self) -> bool:
        """Whether the host has it, arrived."""
        return self.host is not None and self.host.ready

    @property
    def state(self) -> Residence:
        if self.on_device:
            if self.host is None:
                return Residence.RESIDENT
            return Residence.BACKED_UP if self.host.ready else Residence.BACKING_UP
        if not self.hosted:
            return Residence.ARRIVING
        return Residence.HOSTED if self.loading is None else Residence.LOADING

    def mark(self) -> None:
        """Bring ``residence`` up to date."""
        tiers = Tier.DEVICE if self.on_device else Tier(0)
        if self.hosted:
            tiers |= Tier.HOST
        self.residence = tiers | Tier.STORAGE if self.stored else tiers


@dataclass(slots=True)
class TierMatch:
    """The longest prefix of a key that device and host hold together. As short-lived as a ``Match``."""

    device: Match
    beyond: list[TierNode]
    """Host nodes after the device part, from the top; the last may be used in part."""
    length: int
    """Tokens of both parts."""
    waits_for: Operation | None = None
    """A restore that brings a part of ``beyond`` already."""

    @property
    def host(self) -> int:
        """Tokens that would come from the host."""
        return self.length - self.device.length


class TieredCache(RadixCache):
    """``write_back``: what leaves the device is copied to the host first, if it is not there yet."""

    node_type = TierNode

    def __init__(
        self,
        io: TierIO,
        page_size: int = 1,
        policy: EvictionPolicy | None = None,
        history: EvictionHistory | None = None,
        *,
        write_back: bool = False,
    ) -> None:
        super().__init__(page_size, policy, (FULL,), history)
        self.io = io
        self.write_back = write_back
        self.host = SlotAllocator(io.info.host_tokens, page_size)
        self._host_queue: EvictionQueue[HostCopy] = EvictionQueue(self._policy)
        self.operations: dict[int, Operation] = {}
        """Ticket -> copy under way."""
        self.adrift: list[HostCopy] = []
        """Dead copies whose slots an operation still uses."""
        self.touched: deque[TierNode] = deque()
        """Nodes that were inserted or hit since the caller last looked; of a hit path the last one."""
        self.host_dropped_tokens = 0
        """Tokens that left the host, and those that found no room there."""
        self.backup_dropped_tokens = 0

    @property
    def host_used(self) -> int:
        return self.host.total - self.host.free

    # ── looking ──────────────────────────────────────────────────────────────

    def match_tiers(self, key: CacheKey, limit: int | None = None) -> TierMatch:
        """What device and host hold of ``key`` together. Mutates nothing."""
        length = len(key) if limit is None else max(0, min(limit, len(key)))
        root = self.roots.get(key.namespace)
        if root is None:
            return TierMatch(Match(), [], 0)
        whole = self._everything(root, key.tokens, length)
        device = self._leading(whole, 0, lambda node: node.on_device)
        both = self._leading(whole, len(device.path), lambda node: node.hosted)
        beyond: list[TierNode] = both.path[len(device.path) :]  # type: ignore[assignment]
        waits = next((node.loading for node in beyond if node.loading is not None), None)
        return TierMatch(device, beyond, both.length, waits)

    def handles(self, component: str = FULL) -> Int32:
        parts = [node.handles[component] for node in self.nodes() if node.handles]
        return np.concatenate(parts) if parts else _NO_SLOTS

    # ── the plain interface ──────────────────────────────────────────────────

    def lock(self, match: Match, *, hit: bool = False) -> Node | None:
        node = super().lock(match, hit=hit)
        if hit and isinstance(node, TierNode):
            self.touched.append(node)
        return node

    def insert(self, key: CacheKey, handles: Handles, priority: int = 0) -> Inserted:
        """As ``RadixCache.insert``; nodes that only the host had take the caller's handles over, which restores them
        for nothing."""
        length = floor_page(len(key), self.page_size)
        if length == 0:
            return Inserted(Match(), 0)
        root = self.roots.get(key.namespace)
        if root is None:
            root = self.roots[key.namespace] = TierNode(key.namespace, b"", {}, None)
        match = self._everything(root, key.tokens, length)
        path = match.path
        self._cut_last(match, only_off_device=match.length == length)
        existing = 0
        for node in path:
            assert isinstance(node, TierNode)
            if node.on_device:
                existing = min(node.end, match.length)
            else:
                self._enter_device(node, np.array(handles[FULL][node.start : node.end], np.int32))
                node.fetched = False
                self.touched.append(node)
        if match.length < length:
            parent = path[-1] if path else root
            new = {FULL: np.array(handles[FULL][match.length : length], np.int32)}
            leaf = TierNode(key.namespace, key.tokens[match.length : length].tobytes(), new, parent)
            parent.children[leaf.data[: self._page_bytes]] = leaf
            if isinstance(parent, TierNode):
                parent.device_children += 1
            path.append(leaf)
            match.length = length
            self._evictable += len(leaf)
            self.version += 1
            self.touched.append(leaf)
        self._clock += 1
        self._paths.touch(path, self._clock, priority, length)
        if path[-1].evictable:
            self._queue.push(path[-1])
        return Inserted(match, existing)

    def evict(self, tokens: int, cause: str = "") -> dict[str, Int32]:
        """As ``RadixCache.evict``. What has a host copy, or gets one now, stays in the tree without device slots."""
        freed: list[Int32] = []
        gone = 0
        fence = -1
        while gone < tokens:
            node = self._queue.pop()
            if node is None:
                break
            assert isinstance(node, TierNode)
            wanted = min(max(self._policy.yields(node), self.page_size), tokens - gone)
            keep = floor_page(max(0, len(node) - wanted), self.page_size)
            if keep:
                self._split(node, keep)
            slots = node.handles[FULL]
            freed.append(slots)
            gone += len(node)
            self._evictable -= len(node)
            fence = max(fence, self._leave_device(node, slots, cause))
        if fence >= 0:
            self.io.fence(fence)
        self.version += gone > 0
        return {FULL: np.concatenate(freed) if freed else _NO_SLOTS}

    def reset(self) -> dict[str, Int32]:
        """As ``RadixCache.reset``; host copies go too. No operation may be under way."""
        if self.operations:
            raise RuntimeError(f"the cache cannot be flushed while {len(self.operations)} copies are under way")
        for node in self.nodes():
            assert isinstance(node, TierNode)
            if node.host is not None:
                self.host.release(node.host.slots)
                node.host = None
        self._host_queue.clear()
        self.touched.clear()
        return super().reset()

    # ── device to host ───────────────────────────────────────────────────────

    def begin_backup(self, nodes: list[TierNode]) -> Operation | None:
        """Copy nodes that are on the device and have no host copy, as many from the front as the host has room for.

        Evicts host copies. None: nothing was begun.
        """
        taken: list[TierNode] = []
        total = 0
        for node in nodes:
            if not self._host_room(total + len(node)):
                self.backup_dropped_tokens += len(node)
                break
            taken.append(node)
            total += len(node)
        if not taken:
            return None
        slots = self.host.alloc(total // self.page_size)
        operation = Operation(Kind.BACKUP)
        at = 0
        for node in taken:
            self._enter_host(node, HostCopy(node, slots[at : at + len(node)]), operation)
            at += len(node)
        operation.ticket = self.io.backup(np.concatenate([node.handles[FULL] for node in taken]), slots)
        self.operations[operation.ticket] = operation
        return operation

    # ── host to device ───────────────────────────────────────────────────────

    def begin_restore(self, match: TierMatch, lend: Callable[[int], Int32]) -> Operation:
        """Bring all of ``match.beyond`` to the device, which must be fresh and not wait for another restore.

        ``lend`` gives device slots, and may evict. Holds the device part and the host copies until it ends.
        """
        operation = Operation(Kind.RESTORE, start=match.device.length)
        operation.held = self.lock(match.device)
        last = match.beyond[-1]
        if match.length < last.end:
            match.beyond[-1] = self._split(last, match.length - last.start)
        for node in match.beyond:
            assert node.host is not None
            node.loading = operation
            node.host.operations.append(operation)
            operation.copies.append(node.host)
            operation.nodes.append(node)
            operation.from_storage += len(node) if node.fetched else 0
        slots = np.concatenate([copy.slots for copy in operation.copies])
        operation.slots = lend(len(slots))
        operation.ticket = self.io.restore(slots, operation.slots)
        self.operations[operation.ticket] = operation
        return operation

    def cancel_restore(self, operation: Operation) -> Int32:
        """Give its device slots to somebody else at once; returns them. The bytes that still come are fenced off."""
        operation.cancelled = True
        self.io.fence(operation.ticket)
        for node in operation.nodes:
            node.loading = None
        self.unlock(operation.held)
        operation.held = None
        slots, operation.slots = operation.slots, _NO_SLOTS
        self.version += 1
        return slots

    # ── host and storage ─────────────────────────────────────────────────────

    def begin_pack(self, node: TierNode, page: int, first: int, limit: int) -> Operation | None:
        """Read up to ``limit`` storage pages that end inside ``node``, from page ``first`` on, out of host copies.

        None when no page ends there, or one of the copies is missing.
        """
        first = max(first, node.start // page)
        last = min(node.end // page, first + limit)
        if last <= first:
            return None
        path: list[TierNode] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            assert isinstance(at, TierNode)
            path.append(at)
            at = at.parent
        path.reverse()
        used = [part for part in path if part.end > first * page]
        if any(not part.hosted for part in used):
            return None
        slots = np.concatenate([part.host.slots for part in used if part.host is not None])
        skip = first * page - used[0].start
        pages = [slots[skip + i * page : skip + (i + 1) * page] for i in range(last - first)]
        operation = Operation(Kind.PACK, nodes=[node], first=first)
        tokens = np.frombuffer(b"".join(part.data for part in path), np.int32)[: last * page]
        operation.key = CacheKey(node.namespace, tokens)
        for part in used:
            assert part.host is not None
            part.host.operations.append(operation)
            operation.copies.append(part.host)
        operation.ticket = self.io.pack(pages)
        self.operations[operation.ticket] = operation
        return operation

    def begin_unpack(self, key: CacheKey, start: int, blobs: list[object], page: int) -> Operation | None:
        """Take ``blobs``, the storage pages of ``key`` that end with it, into the host from token ``start`` on.

        None when the host has no room.
        """
        total = len(key) - start
        if not self._host_room(total):
            return None
        operation = Operation(Kind.UNPACK, start=start, key=key, slots=self.host.alloc(total // self.page_size))
        begin = len(key) - len(blobs) * page
        known = (start - begin) // page  # whole pages that somebody else brought meanwhile
        blobs, begin = blobs[known:], begin + known * page
        skips = [max(0, start - (begin + i * page)) for i in range(len(blobs))]
        cuts = np.cumsum([page - skip for skip in skips])[:-1]
        operation.ticket = self.io.unpack(blobs, np.split(operation.slots, cuts), skips)
        self.operations[operation.ticket] = operation
        return operation

    # ── ends ─────────────────────────────────────────────────────────────────

    def finish(self, done: CopyDone) -> tuple[Operation, Int32]:
        """A copy has ended: all of it counts, or none. Returns it, and the device slots that are the caller's again."""
        operation = self.operations.pop(done.ticket)
        spare = _NO_SLOTS
        for copy in operation.copies:
            copy.operations.remove(operation)
        if operation.kind is Kind.BACKUP:
            self._end_backup(operation, not done.error)
        elif operation.kind is Kind.RESTORE:
            spare = self._end_restore(operation, not done.error)
        elif operation.kind is Kind.UNPACK:
            self._end_unpack(operation, not done.error)
        for copy in operation.copies:
            if copy.dead and not copy.operations:
                self.adrift.remove(copy)
                self.host.release(copy.slots)
            elif copy.evictable:
                self._host_queue.push(copy)
        self.version += 1
        return operation, spare

    def _end_backup(self, operation: Operation, arrived: bool) -> None:
        for copy in operation.copies:
            node = copy.node
            if node.host is not copy:
                continue
            if arrived:
                copy.ready = True
                node.mark()
                operation.nodes.append(node)
                continue
            self.backup_dropped_tokens += len(node)
            self._drop_host(node)
            if not node.on_device:
                self._drop_subtree(node, "a failed copy")
        operation.nodes.sort(key=lambda node: node.start)

    def _end_restore(self, operation: Operation, arrived: bool) -> Int32:
        if operation.cancelled:
            return _NO_SLOTS
        spare: list[Int32] = []
        for node in sorted(operation.nodes, key=lambda node: node.start):
            part = operation.slots[node.start - operation.start : node.end - operation.start]
            node.loading = None
            # One that somebody computed meanwhile may be off the device again: it is taken all the same, or what lies
            # below it would come to the device without it.
            if not arrived or node.on_device:
                spare.append(part)
                continue
            self._enter_device(node, part)
            node.fetched = False
        self.unlock(operation.held)
        operation.held = None
        for node in operation.nodes:
            if node.evictable:
                self._queue.push(node)
        return np.concatenate(spare) if spare else _NO_SLOTS

    def _end_unpack(self, operation: Operation, arrived: bool) -> None:
        """The pages become a node, as far as the tree has nothing there yet."""
        key, slots, start = operation.key, operation.slots, operation.start
        assert key is not None
        root = self.roots.get(key.namespace)
        match = Match()
        if arrived and root is not None:
            match = self._everything(root, key.tokens, len(key))
        if arrived and root is None and start == 0:
            root = self.roots[key.namespace] = TierNode(key.namespace, b"", {}, None)
        if not arrived or root is None or match.length < start or match.length >= len(key):
            self.host.release(slots)
            return
        self._cut_last(match)
        parent = match.path[-1] if match.path else root
        self.host.release(slots[: match.length - start])
        leaf = TierNode(key.namespace, key.tokens[match.length :].tobytes(), {}, parent)
        parent.children[leaf.data[: self._page_bytes]] = leaf
        leaf.stored = leaf.fetched = True
        self._clock += 1
        leaf.last_access = self._clock
        for node in match.path:
            node.last_access = self._clock
            node.reach = max(node.reach, leaf.end)
        copy = HostCopy(leaf, slots[match.length - start :].copy(), ready=True)
        self._enter_host(leaf, copy, None)
        self._host_queue.push(copy)

    # ── residence ────────────────────────────────────────────────────────────

    def _enter_device(self, node: TierNode, slots: Int32) -> None:
        node.handles = {FULL: slots}
        node.on_device = True
        parent = node.parent
        assert isinstance(parent, TierNode)
        parent.device_children += 1
        self._evictable += len(node)
        self.version += 1
        node.mark()

    def _leave_device(self, node: TierNode, slots: Int32, cause: str) -> int:
        """Returns the ticket of a copy that still reads ``slots``, or -1."""
        if node.host is None and (self.write_back or node.children):
            self.begin_backup([node])
        node.on_device = False
        node.handles = {}
        parent = node.parent
        assert isinstance(parent, TierNode)
        parent.device_children -= 1
        ticket = -1
        if node.host is None:
            self._drop_subtree(node, cause)
        else:
            node.mark()
            if not node.host.ready:
                ticket = max(operation.ticket for operation in node.host.operations)
        if parent.evictable:
            self._queue.push(parent)
        return ticket

    def _enter_host(self, node: TierNode, copy: HostCopy, operation: Operation | None) -> None:
        node.host = copy
        parent = node.parent
        assert isinstance(parent, TierNode)
        parent.host_children += 1
        if operation is not None:
            copy.operations.append(operation)
            operation.copies.append(copy)
        self.version += 1
        node.mark()

    def _drop_host(self, node: TierNode) -> None:
        """Its host copy goes; the slots are free at once, or when the last operation on them ends."""
        copy = node.host
        assert copy is not None
        node.host = None
        parent = node.parent
        assert isinstance(parent, TierNode)
        parent.host_children -= 1
        if copy.operations:
            copy.dead = True
            self.adrift.append(copy)
        else:
            self.host.release(copy.slots)
        if parent.host is not None and parent.host.evictable:
            self._host_queue.push(parent.host)
        self.version += 1
        node.mark()

    def _host_room(self, tokens: int) -> bool:
        """Evict host copies until ``tokens`` slots are free; False where that cannot be done."""
        if tokens > self.host.total:
            return False
        while self.host.free < tokens:
            copy = self._host_queue.pop()
            if copy is None:
                return False
            node, missing = copy.node, tokens - self.host.free
            wanted = min(max(self._policy.yields(copy), self.page_size), missing)
            keep = floor_page(max(0, len(node) - wanted), self.page_size)
            if keep:
                self._split(node, keep)
            self._drop_host(node)
            if not node.on_device:
                self.host_dropped_tokens += len(node)
                self._drop_subtree(node, "host memory")
        return True

    def _drop_subtree(self, node: TierNode, cause: str) -> None:
        """Take a node that is nowhere any more out of the tree, with what can only be reached through it."""
        if node.children:
            stack: list[Node] = list(node.children.values())
            while stack:
                below = stack.pop()
                assert isinstance(below, TierNode)
                stack.extend(below.children.values())
                self.host_dropped_tokens += len(below)
                if below.host is not None:
                    if below.host.operations:
                        below.host.dead = True
                        self.adrift.append(below.host)
                    else:
                        self.host.release(below.host.slots)
                    below.host = None
                below.parent = None
            node.children.clear()
        if self._history is not None:
            self._history.evicted(node, 0, cause)
        self._remove(node)
        self.version += 1

    # ── structure ────────────────────────────────────────────────────────────

    def _walk(self, root: Node, tokens: Int32, length: int) -> Match:
        return self._leading(self._everything(root, tokens, length), 0, lambda node: node.on_device)

    def _everything(self, root: Node, tokens: Int32, length: int) -> Match:
        """The path along ``tokens``, wherever its nodes lie."""
        return super()._walk(root, tokens, length)

    def _leading(self, match: Match, start: int, there: Callable[[TierNode], bool]) -> Match:
        """The beginning of a match whose nodes from ``path[start]`` on are all ``there``."""
        path = match.path
        count = start
        while count < len(path) and there(path[count]):  # type: ignore[arg-type]
            count += 1
        if count == len(path):
            return match
        return Match(path[count - 1].end, path[:count], self._paths) if count else Match()

    def _cut_last(self, match: Match, *, only_off_device: bool = False) -> None:
        """Split the last node where the match ends inside it, so that the path holds whole nodes."""
        if not match.path:
            return
        last = match.path[-1]
        assert isinstance(last, TierNode)
        if match.length < last.end and not (only_off_device and last.on_device):
            match.path[-1] = self._split(last, match.length - last.start)

    def _split(self, node: Node, at: int) -> TierNode:
        """As ``RadixCache._split``; copies and operations under way cover both parts afterwards."""
        upper = super()._split(node, at)
        assert isinstance(node, TierNode)
        assert isinstance(upper, TierNode)
        upper.on_device, upper.stored, upper.fetched = node.on_device, node.stored, node.fetched
        upper.device_children = int(node.on_device)
        if node.loading is not None:
            upper.loading = node.loading
            node.loading.nodes.append(upper)
        copy = node.host
        if copy is not None:
            above = HostCopy(upper, copy.slots[:at].copy(), ready=copy.ready)
            copy.slots = copy.slots[at:].copy()
            above.operations = list(copy.operations)
            for operation in copy.operations:
                operation.copies.append(above)
                if operation.kind is Kind.PACK and node in operation.nodes:
                    operation.nodes.append(upper)
            upper.host, upper.host_children = above, 1
        upper.mark()
        return upper

    def _remove(self, node: Node) -> None:
        parent = node.parent
        super()._remove(node)
        if isinstance(parent, TierNode) and parent.host is not None and parent.host.evictable:
            self._host_queue.push(parent.host)
