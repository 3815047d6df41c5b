"""What was cached once and is not any more: the last evictions, so that a miss can be explained.

Owns a bounded log of evicted runs and the hashes that say which prefix they followed; it holds tokens but no slots,
and forgetting it changes no answer. The hash of a prefix is a polynomial over its tokens modulo 2**64 (Karp and Rabin
1987), so it does not depend on where the tree happens to cut its edges; a found run is compared token by token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ceiba.cache.base import Node
from ceiba.cache.keys import CacheKey, Int32, common_prefix

MAX_RUNS = 4096
MAX_BYTES = 16 << 20
"""Tokens of the remembered runs, as int32 bytes; older ones are forgotten first."""

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 64) - 1


def prefix_hashes(tokens: Int32, start: int = 0, before: int = 0) -> np.ndarray:
    """Hash of every prefix that ends inside ``tokens``, uint64 [N], given their position and the hash before them."""
    n = len(tokens)
    powers = np.empty(n, np.uint64)
    if n:
        powers[0] = pow(_MULTIPLIER, start, 1 << 64)
        powers[1:] = _MULTIPLIER
        np.multiply.accumulate(powers, out=powers)
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers, dtype=np.uint64) + np.uint64(before)


def hash_before(node: Node) -> int:
    """Hash of the tokens from the root to ``node``'s first one. Remembered on the nodes above it."""
    above: list[Node] = []
    at = node.parent
    while at is not None and at.parent is not None and at.end_hash is None:
        above.append(at)
        at = at.parent
    value = 0 if at is None or at.parent is None else at.end_hash or 0
    for at in reversed(above):
        value = int(prefix_hashes(at.tokens, at.start, value)[-1])
        at.end_hash = value
    return value


@dataclass(frozen=True, slots=True)
class EvictedRun:
    namespace: str
    start: int
    """Tokens before it."""
    before: int
    """Their hash."""
    data: bytes
    """The tokens that were dropped, int32."""
    at: float
    cause: str
    """Request that needed the room, or what else did."""

    @property
    def tokens(self) -> Int32:
        return np.frombuffer(self.data, np.int32)

    @property
    def length(self) -> int:
        return len(self.data) // 4


class EvictionHistory:
    """The cache reports to it; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float], max_runs: int = MAX_RUNS, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._runs: deque[EvictedRun] = deque()
        self._max_runs = max_runs
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def evicted(self, node: Node, keep: int, cause: str) -> None:
        """``node`` is about to lose its tokens from ``keep`` on. Called before the cache changes it."""
        before = hash_before(node)
        if keep:
            before = int(prefix_hashes(node.tokens[:keep], node.start, before)[-1])
        self._add(EvictedRun(node.namespace, node.start + keep, before, node.data[4 * keep :], self._clock(), cause))

    def clear(self) -> None:
        self._runs.clear()
        self._bytes = 0

    def missing(self, key: CacheKey, matched: int) -> list[EvictedRun]:
        """The evicted runs that would have carried a match of ``key`` on from ``matched`` tokens, in prompt order.

        Each is cut to the part that ``key`` shares. Where a position was evicted more than once, the last time counts.
        """
        hashes = prefix_hashes(key.tokens)
        found: list[EvictedRun] = []
        at = matched
        while at < len(key):
            run = self._covering(key, at, hashes)
            if run is None:
                break
            found.append(run)
            at = run.start + run.length
        return found

    def _covering(self, key: CacheKey, at: int, hashes: np.ndarray) -> EvictedRun | None:
        for run in reversed(self._runs):
            if not run.start <= at < run.start + run.length or run.namespace != key.namespace:
                continue
            if run.before != (int(hashes[run.start - 1]) if run.start else 0):
                continue
            shared = common_prefix(run.tokens, key.tokens[run.start :])
            if run.start + shared > at:
                gone = run.tokens[at - run.start : shared].tobytes()
                before = int(hashes[at - 1]) if at else 0
                return EvictedRun(run.namespace, at, before, gone, run.at, run.cause)
        return None

    def _add(self, run: EvictedRun) -> None:
        self._runs.append(run)
        self._bytes += len(run.data)
        while self._runs and (len(self._runs) > self._max_runs or self._bytes > self._max_bytes):
            self._bytes -= len(self._runs.popleft().data)
