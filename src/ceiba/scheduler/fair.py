"""Who of several tenants is served next, so that a heavy one cannot make a light one wait.

Owns one counter per tenant: the service it has had, in weighted tokens. This is the virtual token counter of Sheng et
al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588): the waiting tenant with the smallest
counter goes next, and a tenant that comes back from idling starts no lower than those who waited meanwhile, so nobody
saves up. Two tenants that both wait without a break are never further apart than twice the most that one step adds.
Within a tenant the order is the schedule policy's. It knows requests and rows, never tokens or slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ceiba.cache.keys import Int32
from ceiba.scheduler.request import Request

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""An output token costs a tenant as much as two computed prompt tokens (the weights of the paper's evaluation)."""

MAX_TENANTS = 4096
"""Counters kept; beyond that, idle tenants with the least service are forgotten, which a return would lift anyway."""


class FairShare:
    """``weights``: tenant -> share; a tenant of weight 2 gets twice the service of one of weight 1 (the default)."""

    def __init__(self, max_rows: int, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._index: dict[str, int] = {}
        self._free: list[int] = []
        self._service = np.zeros(16)
        self._cost = np.ones(16)
        """1 / weight."""
        self._waiting = np.zeros(16, np.int64)
        self._live = np.zeros(16, np.int64)
        self._row_tenant = np.zeros(max_rows, np.int64)
        self._last = ""
        """The tenant that left the queue last."""
        self._lanes: dict[str, list[Request]] = {}
        self._back: list[Request] = []
        """Retracted requests."""
        self._stamp: object = None

    def service(self, tenant: str) -> float:
        """Weighted tokens ``tenant`` has had, divided by its weight."""
        at = self._index.get(tenant)
        return 0.0 if at is None else float(self._service[at])

    def services(self) -> dict[str, float]:
        return {tenant: float(self._service[at]) for tenant, at in self._index.items()}

    def arrived(self, request: Request) -> None:
        """A new request joins the queue."""
        at = self._tenant(request.tenant)
        self._live[at] += 1
        if not self._waiting[at]:
            others = self._waiting > 0
            low = float(self._service[others].min()) if others.any() else self.service(self._last)
            self._service[at] = max(self._service[at], low)
        self._waiting[at] += 1

    def left_queue(self, request: Request) -> None:
        """It was admitted for the first time, or ended while it waited for that."""
        at = self._index[request.tenant]
        self._waiting[at] -= 1
        self._last = request.tenant

    def admitted(self, request: Request, computed: int) -> None:
        """It has a row; ``computed`` prompt tokens come from no cache. A retracted one is not charged again."""
        at = self._index[request.tenant]
        self._row_tenant[request.row] = at
        if not request.retractions:
            self._service[at] += INPUT_WEIGHT * computed * self._cost[at]

    def produced(self, rows: Int32) -> None:
        """One output token of each of ``rows``."""
        tenants = self._row_tenant[rows]
        np.add.at(self._service, tenants, OUTPUT_WEIGHT * self._cost[tenants])

    def ended(self, request: Request) -> None:
        self._live[self._index[request.tenant]] -= 1

    def order(self, requests: Iterable[Request], stamp: object) -> Iterator[Request]:
        """Retracted requests first (their service is paid for), then by tenant, each in the policy's order, which is
        that of ``requests``. Follows charges while it is read. ``stamp``: equal for equal requests (see ``policy``)."""
        if stamp is None or stamp != self._stamp:
            self._lanes, self._back = {}, []
            for request in requests:
                if request.retractions:
                    self._back.append(request)
                else:
                    self._lanes.setdefault(request.tenant, []).append(request)
            self._stamp = stamp
        lanes = {tenant: iter(lane) for tenant, lane in self._lanes.items()}
        yield from self._back
        heap = [(self.service(tenant), i, tenant) for i, tenant in enumerate(lanes)]
        heapq.heapify(heap)
        while heap:
            seen, i, tenant = heap[0]
            current = self.service(tenant)
            if current > seen:
                heapq.heapreplace(heap, (current, i, tenant))
                continue
            following = next(lanes[tenant], None)
            if following is None:
                heapq.heappop(heap)
            else:
                yield following

    def _tenant(self, name: str) -> int:
        at = self._index.get(name)
        if at is not None:
            return at
        if len(self._index) >= MAX_TENANTS:
            self._forget()
        at = self._free.pop() if self._free else len(self._index)
        if at >= len(self._service):
            grow = len(self._service)
            for field in ("_service", "_cost", "_waiting", "_live"):
                old = getattr(self, field)
                setattr(self, field, np.concatenate([old, np.zeros(grow, old.dtype)]))
        self._index[name] = at
        self._service[at] = 0.0
        self._cost[at] = 1.0 / self._weights.get(name, 1.0)
        return at

    def _forget(self) -> None:
        idle = sorted((self._service[at], name) for name, at in self._index.items() if not self._live[at])
        for _, name in _half(idle):
            self._free.append(self._index.pop(name))


def _half(entries: list[tuple[float, str]]) -> Iterable[tuple[float, str]]:
    return entries[: max(1, len(entries) // 2)]
