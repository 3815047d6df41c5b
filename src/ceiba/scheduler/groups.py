"""Which decode rows begin with the same KV slots, so that attention can read those slots once for all of them.

Rows that hang under one node of the prefix tree share its tokens' slots. Owns the choice of nodes that are worth it;
it is made again only when the rows or what they hold in the tree has changed, so a steady step costs two comparisons.
Knows the tree's nodes and the lease table, never how attention reads.
"""

from __future__ import annotations

import numpy as np

from ceiba.cache.base import FULL, Node
from ceiba.cache.keys import Int32
from ceiba.cache.lease import LeaseTable
from ceiba.core.step import PrefixGroup

LEAST_TOKENS = 64
"""A shared stretch shorter than this is cheaper to read again."""
LEAST_SAVED = 1024
"""Token reads a group must save in a step; the attention backend weighs the whole step by its own costs."""


class PrefixGroups:
    def __init__(self, leases: LeaseTable) -> None:
        self._leases = leases
        self._rows: Int32 = np.empty(0, np.int32)
        self._nodes: list[Node | None] = []
        self._groups: list[PrefixGroup] = []

    def find(self, rows: Int32, first_segment: int = 0) -> list[PrefixGroup]:
        """Groups among decode ``rows`` int32 [B], whose segments are numbered from ``first_segment``; a group nested in
        another is longer and holds some of its segments. The list must not be changed.
        """
        held = self._leases.held_node
        nodes = [held(row) for row in rows.tolist()]
        if nodes != self._nodes or not np.array_equal(rows, self._rows):
            self._rows, self._nodes = rows.copy(), nodes
            self._groups = self._compute(rows, nodes)
        if not first_segment or not self._groups:
            return self._groups
        return [PrefixGroup(group.length, group.segments + np.int32(first_segment)) for group in self._groups]

    def _compute(self, rows: Int32, nodes: list[Node | None]) -> list[PrefixGroup]:
        members: dict[Node, list[int]] = {}
        for segment, node in enumerate(nodes):
            if node is None:
                continue
            if self._leases.has_duplicates(int(rows[segment])):
                node = self._own_end(int(rows[segment]), node)
            while node is not None and node.parent is not None:
                members.setdefault(node, []).append(segment)
                node = node.parent
        wide = [node for node, segments in members.items() if len(segments) > 1]
        if not wide:
            return []
        # Where all rows of a node go on into one child, the child says more.
        passed = {node.parent for node in wide if len(members[node]) == len(members.get(node.parent, ()))}  # type: ignore[arg-type]
        depths: dict[Node, int] = {}
        kept: dict[Node, int] = {}
        for node in sorted(wide, key=lambda node: _depth(node, depths)):
            if node in passed:
                continue
            above = node.parent
            while above is not None and above not in kept:
                above = above.parent
            stretch = depths[node] - (kept[above] if above is not None else 0)
            if stretch >= LEAST_TOKENS and (len(members[node]) - 1) * stretch >= LEAST_SAVED:
                kept[node] = depths[node]
        return [PrefixGroup(depth, np.array(members[node], np.int32)) for node, depth in kept.items()]

    def _own_end(self, row: int, node: Node) -> Node | None:
        """The last node on the path to ``node`` up to which the row uses the tree's slots and not duplicates."""
        path = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            path.append(at)
            at = at.parent
        found, start = None, 0
        for at in reversed(path):
            end = start + len(at)
            if not np.array_equal(at.handles[FULL], self._leases.slots[row, start:end]):
                break
            found, start = at, end
        return found


def _depth(node: Node, known: dict[Node, int]) -> int:
    """Tokens from the root to the node's far end."""
    path = []
    at: Node | None = node
    while at is not None and at.parent is not None and at not in known:
        path.append(at)
        at = at.parent
    depth = known.get(at, 0) if at is not None else 0
    for at in reversed(path):
        depth += len(at)
        known[at] = depth
    return depth
