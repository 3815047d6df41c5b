"""The radix tree over token ids: finds the longest cached prefix of a prompt and decides what leaves.

Owns nodes, their locks and the eviction order; it never allocates or frees a slot (handles come in with ``insert`` and
go out with ``evict``) and never sees a request. Structure: a compressed trie per namespace (Morrison's PATRICIA),
edges cut at page borders, children found by the bytes of their first page. What visits every node of a path is
``paths``', compiled where that is possible.

Invariant: a lock counts on every node up to the root, so the nodes below an unlocked node are unlocked and all
unlocked tokens can be evicted, leaves first.
"""

from __future__ import annotations

import numpy as np

from ceiba.cache.base import FULL, Handles, Inserted, Match, Node
from ceiba.cache.eviction import LRU, EvictionPolicy, EvictionQueue
from ceiba.cache.history import EvictionHistory
from ceiba.cache.keys import CacheKey, Int32, floor_page
from ceiba.cache.paths import FASTEST, PathOps

_NO_TOKENS = np.empty(0, np.int32)


class RadixCache:
    """``components`` names the per-token handle arrays that every node holds; ``history`` hears of each eviction;
    ``paths``: the loops over nodes, in Python or compiled."""

    enabled = True
    node_type: type[Node] = Node

    def __init__(
        self,
        page_size: int = 1,
        policy: EvictionPolicy | None = None,
        components: tuple[str, ...] = (FULL,),
        history: EvictionHistory | None = None,
        paths: PathOps = FASTEST,
    ) -> None:
        self.page_size = page_size
        self.components = components
        self._page_bytes = 4 * page_size
        self.roots: dict[str, Node] = {}
        """Namespace -> root, which holds no tokens itself."""
        self.version = 0
        self._policy = policy or LRU()
        self._history = history
        self._paths = paths
        self._queue: EvictionQueue[Node] = EvictionQueue(self._policy)
        self._clock = 0
        self._evictable = 0
        self._locked = 0

    @property
    def evictable(self) -> int:
        return self._evictable

    @property
    def locked(self) -> int:
        return self._locked

    def match(self, key: CacheKey, limit: int | None = None) -> Match:
        """Longest cached prefix of at most ``limit`` tokens, in whole pages.

        Locks nothing and mutates nothing, statistics included, so policies may probe freely. O(matched tokens) in
        compares of whole runs plus one dictionary look-up per node.
        """
        length = len(key) if limit is None else max(0, min(limit, len(key)))
        root = self.roots.get(key.namespace)
        if root is None:
            return Match()
        return self._walk(root, key.tokens, length)

    def continuation(self, key: CacheKey, most: int) -> Int32:
        """The tokens that follow the whole of ``key`` in the cache, at most ``most``; none where it does not hold all
        of it. Of several ways on the one used last. Locks nothing, mutates nothing."""
        match = self.match(key)
        rest = key.tokens[match.length :].tobytes()
        if not match.path or len(rest) >= self._page_bytes:
            return _NO_TOKENS
        node, found = match.path[-1], b""
        data = node.data[4 * (match.length - node.start) :]
        while len(found) < len(rest) + 4 * most:
            if not data:  # whole pages: a rest lies within the first
                below = [child for child in node.children.values() if found or child.data.startswith(rest)]
                if not below:
                    break
                node = max(below, key=lambda child: child.last_access)
                data = node.data
            if not found and not data.startswith(rest):
                break
            found, data = found + data, b""
        return np.frombuffer(found, np.int32)[len(rest) // 4 :][:most]

    def lock(self, match: Match, *, hit: bool = False) -> Node | None:
        """Hold the matched prefix until ``unlock``; nothing on it will be evicted.

        Mutates: splits the last node when the match ends inside it, raises the lock count up to the root, and touches
        the path's access time and, with ``hit``, its hits. ``match`` must be fresh.
        """
        if not match.path:
            return None
        node = match.path[-1]
        if match.length < node.end:
            node = self._split(node, match.length - node.start)
        self._clock += 1
        gained = self._paths.lock(node, self._clock, hit)
        self._evictable -= gained
        self._locked += gained
        return node

    def unlock(self, node: Node | None) -> None:
        """Undo one ``lock`` that returned ``node``. Mutates lock counts up to the root; frees nothing."""
        lost = self._paths.unlock(node)
        self._locked -= lost
        self._evictable += lost
        if node is not None and node.evictable:
            self._queue.push(node)  # those above it have a child

    def insert(self, key: CacheKey, handles: Handles, priority: int = 0) -> Inserted:
        """Add a prefix (cut to whole pages); the tree owns ``handles[existing:]`` from now on.

        The first ``existing`` tokens were cached already: the tree keeps its own handles for them and the caller's are
        duplicates, still the caller's to free. Locks nothing. Mutates: may split one node, may add one leaf, touches
        access time and priority of the path. Arrays are copied, so the caller may reuse its buffers.
        """
        length = floor_page(len(key), self.page_size)
        if length == 0:
            return Inserted(Match(), 0)
        root = self.roots.get(key.namespace)
        if root is None:
            root = self.roots[key.namespace] = self.node_type(key.namespace, b"", {}, None)
        match = self._walk(root, key.tokens, length)
        existing = match.length
        if existing < length:
            parent = match.path[-1] if match.path else root
            if existing < parent.end:
                parent = self._split(parent, existing - parent.start)
                match.path[-1] = parent
            new = {name: np.array(handles[name][existing:length], np.int32) for name in self.components}
            leaf = self.node_type(key.namespace, key.tokens[existing:length].tobytes(), new, parent)
            parent.children[leaf.data[: self._page_bytes]] = leaf
            match.path.append(leaf)
            match.length = length
            self._evictable += len(leaf)
            self.version += 1
        self._clock += 1
        self._paths.touch(match.path, self._clock, priority, length)
        if match.path[-1].evictable:
            self._queue.push(match.path[-1])
        return Inserted(match, existing)

    def evict(self, tokens: int, cause: str = "") -> dict[str, Int32]:
        """Drop at least ``tokens`` unlocked tokens, or all there are, in the policy's order, rounded up to pages.

        Never touches a locked node. Mutates: removes leaves (their parents become candidates) and cuts the tail of
        a victim that is longer than what is wanted or than what the policy lets go at its rank. Returns the freed
        handles by component, the caller's to free.
        """
        freed: dict[str, list[Int32]] = {name: [] for name in self.components}
        gone = 0
        while gone < tokens:
            node = self._queue.pop()
            if node is None:
                break
            # Rounded down: what is dropped is whole pages, at least one.
            wanted = min(max(self._policy.yields(node), self.page_size), tokens - gone)
            keep = floor_page(max(0, len(node) - wanted), self.page_size)
            if self._history is not None:
                self._history.evicted(node, keep, cause)
            for name in self.components:
                freed[name].append(node.handles[name][keep:])
            gone += len(node) - keep
            if keep:
                node.data = node.data[: 4 * keep]
                node.end_hash = None
                node.handles = {name: handles[:keep] for name, handles in node.handles.items()}
                self._queue.push(node)
            else:
                self._remove(node)
        self._evictable -= gone
        self.version += gone > 0
        return {name: np.concatenate(parts) if parts else _NO_TOKENS for name, parts in freed.items()}

    def reset(self) -> dict[str, Int32]:
        """Forget everything. RuntimeError while anything is locked; returns all handles, the caller's to free."""
        if self._locked:
            raise RuntimeError(f"the cache cannot be flushed while {self._locked} of its tokens are in use")
        freed = {name: self.handles(name) for name in self.components}
        for node in self.nodes():
            node.parent = None  # a stale lock handle must not walk a dead tree
        self.roots.clear()
        self._queue.clear()
        self._evictable = 0
        self.version += 1
        return freed

    def nodes(self) -> list[Node]:
        """Every node below the roots, parents first; for audits."""
        found: list[Node] = []
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                found.append(node)
            stack.extend(node.children.values())
        return found

    def handles(self, component: str = FULL) -> Int32:
        parts = [node.handles[component] for node in self.nodes()]
        return np.concatenate(parts) if parts else _NO_TOKENS

    def _walk(self, root: Node, tokens: Int32, length: int) -> Match:
        path, covered = self._paths.walk(root, np.ascontiguousarray(tokens), length, self.page_size)
        return Match(covered, path, self._paths)

    def _split(self, node: Node, at: int) -> Node:
        """Cut ``node`` after ``at`` tokens and return the new upper part.

        The old object stays the lower part, so locks that name it still cover the whole path. Both parts get copies:
        evicting one must give its memory back.
        """
        parent = node.parent
        assert parent is not None
        upper = self.node_type(node.namespace, node.data[: 4 * at], {}, parent)
        upper.handles = {name: handles[:at].copy() for name, handles in node.handles.items()}
        upper.locks, upper.last_access, upper.hits = node.locks, node.last_access, node.hits
        upper.pins, upper.reach = node.pins, node.reach
        upper.priority, upper.residence = node.priority, node.residence
        parent.children[upper.data[: self._page_bytes]] = upper
        node.data = node.data[4 * at :]
        node.handles = {name: handles[at:].copy() for name, handles in node.handles.items()}
        node.parent = upper
        node.start += at
        self.version += 1
        upper.children[node.data[: self._page_bytes]] = node
        if parent.branch is node:
            parent.branch, upper.branch = upper, node
        return upper

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.data[: self._page_bytes]]
        if parent.branch is node:
            parent.branch = None
        node.parent = None
        if parent.evictable:
            self._queue.push(parent)
        elif parent.parent is None and not parent.children:
            self.roots.pop(parent.namespace, None)
