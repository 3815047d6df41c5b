"""Whether the engine is alive, from the scheduler's heartbeats and the supervisor's word. Looks, never asks.

Owns the one rule: green while the heartbeats of scheduler and detokenizer come and the loop goes round, red when they
stay away, when the loop has been stuck for the watchdog's time, or when a process has died. Must never send anything to
the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

STALE_SECONDS = 10.0
"""Heartbeats come every half second, from a thread of their own; so long without one means the process is stopped."""

State = Literal["starting", "ok", "stuck", "failed", "stopping"]


@dataclass(frozen=True, slots=True)
class Health:
    state: State
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "ok"


class HealthMonitor:
    """Fed by the front's receive task, read by /health; constant time, no side effect."""

    def __init__(self, watchdog: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._watchdog = watchdog
        self._clock = clock
        self._beat_at: float | None = None
        self._round_at = 0.0
        self._text_at: float | None = None
        self._stopped: Health | None = None
        self.stats: Mapping[str, float] = {}
        """What the last heartbeat said."""

    def beat(self, round_at: float, stats: Mapping[str, float]) -> None:
        """A heartbeat came; ``round_at``: when the scheduler's loop last went round (monotonic, same machine)."""
        self._beat_at = self._clock()
        self._round_at = round_at
        self.stats = stats

    def text_beat(self) -> None:
        """The detokenizer's loop went round."""
        self._text_at = self._clock()

    def fail(self, reason: str) -> None:
        self._stopped = Health("failed", reason)

    def drain(self) -> None:
        if self._stopped is None:
            self._stopped = Health("stopping", "the server is shutting down")

    def stalled(self) -> float:
        """Seconds since the slower of scheduler and detokenizer last went round; 0 before their first sign."""
        now = self._clock()
        loop = 0.0 if self._beat_at is None else now - self._round_at
        return max(loop, self._mute(now))

    def _mute(self, now: float) -> float:
        """Seconds without a sign of the detokenizer."""
        return 0.0 if self._text_at is None else now - self._text_at

    @property
    def stopped(self) -> Health | None:
        """Set once no request can be served any more."""
        return self._stopped

    def now(self) -> Health:
        if self._stopped is not None:
            return self._stopped
        if self._beat_at is None:
            return Health("starting", "no heartbeat from the scheduler yet")
        now = self._clock()
        silence = now - self._beat_at
        if silence > STALE_SECONDS:
            return Health("stuck", f"no heartbeat from the scheduler for {silence:.0f} s")
        mute = self._mute(now)
        if mute > STALE_SECONDS:
            return Health("stuck", f"no heartbeat from the detokenizer for {mute:.0f} s")
        stuck = now - self._round_at
        if stuck > self._watchdog:
            return Health("stuck", f"the scheduler's loop has not gone round for {stuck:.0f} s")
        return Health("ok")
