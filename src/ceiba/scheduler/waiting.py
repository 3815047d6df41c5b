"""The waiting queue: who waits, in what order they came, and who has waited too long.

Owns membership and deadlines; the order of admission is ``policy``'s.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from ceiba.scheduler.request import Request


class WaitingQueue:
    """Arrival order, with retracted requests in front; all operations O(1) or O(log n)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._deadlines: list[tuple[float, str]] = []
        """A heap; entries of requests that have left are dropped when they surface, or when they are the most."""
        self.version = 0
        """Changes with every change of the queue."""
        self.num_retracted = 0
        """How many of them have run before."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.rid) is request

    def add(self, request: Request) -> None:
        self.version += 1
        self._requests[request.rid] = request
        if request.deadline is not None:
            if len(self._deadlines) > 64 + 2 * len(self._requests):
                self._deadlines = [(r.deadline, r.rid) for r in self if r.deadline is not None and r is not request]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, request.rid))

    def add_front(self, requests: Iterable[Request]) -> None:
        """Put retracted requests before everyone else, the earliest arrival first. Their deadlines are over."""
        for request in sorted(requests, key=lambda request: request.arrival, reverse=True):
            self._requests[request.rid] = request
            self._requests.move_to_end(request.rid, last=False)
            self.num_retracted += 1
        self.version += 1

    def remove(self, request: Request) -> None:
        del self._requests[request.rid]
        self.version += 1
        self.num_retracted -= request.retractions > 0

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed before they were first admitted; they stay in the queue."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, rid = heapq.heappop(self._deadlines)
            request = self._requests.get(rid)
            if request is not None and request.deadline == deadline and request.admitted_at is None:
                late.append(request)
        return late
