"""The prefix cache of ``--disable-radix-cache``: it never keeps anything, so no caller needs a branch."""

from __future__ import annotations

import numpy as np

from ceiba.cache.base import FULL, Handles, Inserted, Match, Node
from ceiba.cache.keys import CacheKey, Int32


class NoCache:
    """Matches nothing, takes nothing over, has nothing to evict."""

    enabled = False
    version = 0
    evictable = 0
    locked = 0

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size

    def match(self, key: CacheKey, limit: int | None = None) -> Match:
        return Match()

    def continuation(self, key: CacheKey, most: int) -> Int32:
        return np.empty(0, np.int32)

    def lock(self, match: Match, *, hit: bool = False) -> Node | None:
        return None

    def unlock(self, node: Node | None) -> None:
        return None

    def insert(self, key: CacheKey, handles: Handles, priority: int = 0) -> Inserted:
        return Inserted(Match(), 0)

    def evict(self, tokens: int, cause: str = "") -> dict[str, Int32]:
        return {}

    def reset(self) -> dict[str, Int32]:
        return {}

    def handles(self, component: str = FULL) -> Int32:
        return np.empty(0, np.int32)
