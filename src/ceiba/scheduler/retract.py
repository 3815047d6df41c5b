"""Who gives way when the KV pool runs short. Owns the order of victims and the undoing of their admission.

A retracted request keeps its tokens, loses its row and goes to the front of the queue; what it computed stays in the
cache until someone needs the room, so the recomputation is usually short. It is only done when no result is in flight:
then every token is known and recomputing gives the same output as an undisturbed run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from ceiba.scheduler.admission import Admission
from ceiba.scheduler.request import Request, State

log = logging.getLogger("ceiba.scheduler")

LOOKAHEAD = 20
"""Decode steps that must fit after a retraction, so that the next one is not due at once."""

VictimKey = Callable[[Request, int], tuple[float, ...]]
"""(request, output tokens so far) -> sort key, first victim smallest."""

POLICIES: dict[str, VictimKey] = {
    # The least work is lost with a short output; a long input gives the most room back.
    "length": lambda request, produced: (produced, -request.prompt_len, -request.arrival),
    # Whoever matters least, then as above.
    "priority": lambda request, produced: (request.priority, produced, -request.prompt_len, -request.arrival),
}


def make_policy(name: str) -> VictimKey:
    """The order of ``--retraction-policy``; ValueError names the known ones."""
    if name not in POLICIES:
        raise ValueError(f"retraction policy {name!r} is not available; available: {', '.join(POLICIES)}")
    return POLICIES[name]


class Retractor:
    def __init__(self, policy: str, admission: Admission) -> None:
        self._key = make_policy(policy)
        self._admission = admission

    def make_room(self) -> list[Request]:
        """Retract until every running row can grow, and a while longer. No result may be in flight.

        Pins give way when that is not enough. The last row is retracted only if it holds duplicates of cached KV, or
        while copies read what could be evicted: alone it fits otherwise, since no request is admitted that the whole
        pool cannot hold.
        """
        admission = self._admission
        rows, leases = admission.rows, admission.leases
        while not self._enough(after=False) and self._waiting_give_way():
            pass
        produced = {request.rid: int(rows.known[request.row]) - request.prompt_len for request in rows.live()}
        victims = sorted(rows.live(), key=lambda request: self._key(request, produced[request.rid]))
        retracted: list[Request] = []
        for request in victims:
            if self._enough(after=bool(retracted)):
                break
            if rows.num_used == 1 and not leases.has_duplicates(request.row) and not admission.copying:
                break
            self.retract(request)
            retracted.append(request)
        while not self._enough(after=False) and leases.pins.give_way(leases.page_size):
            pass
        if retracted:
            left = rows.live()
            allowed = sum(request.max_new for request in left)
            admission.ratio.retracted(sum(produced[request.rid] for request in left), allowed, len(left))
            admission.queue.add_front(retracted)
            log.warning(
                "KV cache pool is full. Retract requests. #retracted-req: %d, #new-token-ratio: %.4f, #running-req: %d",
                len(retracted), admission.ratio.value, rows.num_used,
            )  # fmt: skip
        return retracted

    def retract(self, request: Request) -> None:
        """Take ``request`` out of the batch; the caller puts it back into the queue."""
        admission = self._admission
        row = request.row
        admission.counters.retracted(request, int(admission.rows.known[row]) - request.prompt_len)
        admission.leases.close(row, admission.rows.key(row), request.priority)
        admission.rows.close(row, State.QUEUED)
        admission.forget(request)
        request.retractions += 1

    def _waiting_give_way(self) -> bool:
        """Take back what requests that have no row yet brought from lower tiers."""
        tiers = self._admission.hicache
        return tiers is not None and tiers.give_way(self._admission.leases.page_size)

    def _enough(self, *, after: bool) -> bool:
        rows, leases = self._admission.rows, self._admission.leases
        running = rows.running()
        steps = LOOKAHEAD if after else 1
        ends = np.maximum(leases.launched[running] + steps, rows.known[running])  # known: those that jump
        ends = ends.clip(max=rows.max_len[running] - 1)
        page = leases.page_size
        missing = (-(-ends // page) * page - leases.allocated[running]).clip(min=0)
        return int(missing.sum()) <= leases.available
