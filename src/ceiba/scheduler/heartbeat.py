"""Signs of life while a forward pass runs long. Owns one thread that reads two attributes and calls one function.

A port belongs to one thread, so the beat goes out through a callable of its own (``launch`` gives it a socket), never
through the scheduler's port. Without that callable the loop sends beats itself between rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ceiba.core.messages import Heartbeat

INTERVAL = 0.4
"""Seconds; a beat is promised every half second."""

Beat = Callable[[Heartbeat], None]


class HeartbeatThread:
    """Sends ``latest()`` every ``INTERVAL`` seconds until closed. ``send`` is only ever called from this thread."""

    def __init__(self, send: Beat, latest: Callable[[], Heartbeat]) -> None:
        self._send = send
        self._latest = latest
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * INTERVAL)

    def _run(self) -> None:
        while True:
            self._send(self._latest())
            if self._stop.wait(INTERVAL):
                return
