"""Running requests that give way to a waiting one of much higher priority. Owns the choice; the undoing is
``retract``'s.

Nobody gives way unless the one who waits can then be admitted: a victim that only went back to the queue and came in
again would have lost its work for nothing. Whoever gave way waits behind the one it made room for and is itself no
reason to pre-empt that one, since only a strictly higher priority is: two requests can never take turns.
"""

from __future__ import annotations

from ceiba.cache.keys import ceil_page
from ceiba.scheduler.admission import Admission
from ceiba.scheduler.request import Request


class Preemptor:
    """``threshold``: how much higher the priority must be; exactly that much is not enough."""

    def __init__(self, threshold: int, admission: Admission) -> None:
        self._threshold = threshold
        self._admission = admission

    def victims(self) -> list[Request]:
        """Whom to retract so that the first in the queue can be admitted; empty when that helps nobody."""
        admission = self._admission
        rows, leases = admission.rows, admission.leases
        first = admission.first()
        if first is None or not rows.num_used:
            return []
        match = admission.matches.of(first)
        if admission.twins.must_wait(first, match.length):
            return []
        need = ceil_page(len(first.tokens) - match.length, leases.page_size) + admission.future(first)
        room = leases.available - match.unlocked - admission.reserved()
        lacks_row = rows.num_free == 0
        if not lacks_row and need <= room:
            return []
        lower = [request for request in rows.live() if first.priority - request.priority > self._threshold]
        lower.sort(key=lambda request: (request.priority, -request.arrival))
        chosen: list[Request] = []
        for request in lower:
            chosen.append(request)
            room += leases.reclaimable(request.row) + admission.expected(request)
            if need <= room or len(chosen) == rows.num_used:  # alone it fits whatever the forecast says
                return chosen
        return []
