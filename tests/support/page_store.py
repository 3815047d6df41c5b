"""A store of pages in memory that is as slow, as full and as broken as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ceiba.memory.storage.base import StoreError, StoreFull


class FakeStore:
    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.capacity = 10**9
        self.fail: Callable[[str], bool] = lambda operation: False
        self.gate = threading.Event()
        """Cleared: every operation hangs until it is set."""
        self.gate.set()
        self.calls: list[str] = []
        self.closed = False

    def _enter(self, operation: str) -> None:
        self.calls.append(operation)
        self.gate.wait()
        if self.fail(operation):
            raise StoreError(f"told to fail at {operation}")

    def exists(self, keys):
        self._enter("exists")
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, key):
        self._enter("get")
        return self.pages.get(key)

    def put(self, key, parts):
        self._enter("put")
        if key in self.pages:
            return 0
        data = b"".join(bytes(part) for part in parts)
        if len(data) + sum(map(len, self.pages.values())) > self.capacity:
            raise StoreFull("told to be full")
        self.pages[key] = data
        return len(data)

    def delete(self, key):
        self._enter("delete")
        self.pages.pop(key, None)

    def clear(self):
        self._enter("clear")
        count = len(self.pages)
        self.pages.clear()
        return count

    def stats(self):
        return {"pages": len(self.pages)}

    def close(self):
        self.closed = True
