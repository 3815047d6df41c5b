"""Threads that make calls side by side and give the results in order. Owns the threads; knows nothing of stores.

They are not a ``ThreadPoolExecutor``'s, which Python waits for at its exit: a call here may hang for ever.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Crew:
    """``count`` threads; with one, calls are made by whoever asks."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for number in range(count if count > 1 else 0):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def results(self, call: Callable[[T], R], items: Iterable[T]) -> Generator[R]:
        """``call(item)`` of each item, in order, begun at most ``count`` ahead. An exception comes where the result
        would; what has begun by then is waited for, as it is when the iterator is closed."""
        if self._count == 1:
            yield from map(call, items)
            return
        begun: deque[Future[R]] = deque()
        try:
            for item in items:
                begun.append(self._begin(call, item))
                if len(begun) == self._count:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
            wait(begun)

    def close(self) -> None:
        """The threads end after what they do now; nothing may be asked of them any more."""
        for _ in range(self._count):
            self._calls.put(None)

    def _begin(self, call: Callable[[T], R], item: T) -> Future[R]:
        future: Future[R] = Future()
        self._calls.put((future, lambda: call(item)))
        return future

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call, task  # a result may be large: nobody but its taker keeps it
