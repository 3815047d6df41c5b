"""The loops of the tree that visit every node of a path, in Python and compiled.

Owns nothing: both forms work on the same nodes and give the same results (the Python one is the reference in tests and
the fallback where the package was installed without a compiler). They decide nothing either; ``radix`` does.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ceiba.cache import native
from ceiba.cache.base import Node
from ceiba.cache.keys import Int32, common_prefix, floor_page


class PathOps(Protocol):
    def walk(self, root: Node, tokens: Int32, length: int, page: int) -> tuple[list[Node], int]:
        """Nodes below ``root`` along the first ``length`` tokens, and how many of these they cover in whole pages;
        the last node may be covered in part."""

    def lock(self, node: Node | None, clock: int, hit: bool) -> int:
        """One more lock on ``node`` and every node above it, touched at ``clock``; returns the tokens that were not
        locked before."""

    def unlock(self, node: Node | None) -> int:
        """One lock less on ``node`` and every node above it; returns the tokens that nobody holds any more."""

    def touch(self, path: list[Node], clock: int, priority: int, reach: int) -> None:
        """Mark a path as used at ``clock`` by a request of ``priority`` whose tokens reach ``reach``."""

    def gather(self, path: list[Node], component: str, out: Int32) -> None:
        """Fill ``out`` with the first handles along the path; ValueError where it holds fewer."""

    def unlocked(self, path: list[Node]) -> int:
        """Tokens of the nodes that nobody holds."""


class PythonPaths:
    def walk(self, root: Node, tokens: Int32, length: int, page: int) -> tuple[list[Node], int]:
        path: list[Node] = []
        data, step = tokens[:length].tobytes(), 4 * page
        node, at, end = root, 0, 4 * floor_page(length, page)
        while at < end:
            child = node.children.get(data[at : at + step])
            if child is None:
                break
            path.append(child)
            if not data.startswith(child.data, at):
                same = common_prefix(child.tokens, tokens[at // 4 : length])
                at += 4 * floor_page(same, page)
                break
            at += len(child.data)
            node = child
        return path, at // 4

    def lock(self, node: Node | None, clock: int, hit: bool) -> int:
        gained = 0
        at = node
        while at is not None and at.parent is not None:
            if at.locks == 0:
                gained += len(at)
            at.locks += 1
            at.last_access = clock
            at.hits += hit
            at = at.parent
        return gained

    def unlock(self, node: Node | None) -> int:
        lost = 0
        at = node
        while at is not None and at.parent is not None:
            if at.locks <= 0:
                raise RuntimeError("a cache node was unlocked more often than locked")
            at.locks -= 1
            if at.locks == 0:
                lost += len(at)
            at = at.parent
        return lost

    def touch(self, path: list[Node], clock: int, priority: int, reach: int) -> None:
        for node in path:
            node.last_access = clock
            node.priority = max(node.priority, priority)
            node.reach = max(node.reach, reach)

    def gather(self, path: list[Node], component: str, out: Int32) -> None:
        found = np.concatenate([node.handles[component] for node in path])
        if len(found) < len(out):
            raise ValueError("gather: the path holds fewer handles than wanted")
        out[:] = found[: len(out)]

    def unlocked(self, path: list[Node]) -> int:
        return sum(len(node) for node in path if node.locks == 0)


PYTHON: PathOps = PythonPaths()
NATIVE: PathOps | None = native._tree.PathOps(Node) if native.available else None
FASTEST: PathOps = NATIVE or PYTHON
