"""Whether bringing cached KV back is quicker than computing it again. Owns one running estimate and one comparison.

Restoring costs a fixed delay (a hand-over between threads, a scheduling round) and little per token; computing costs
per token. Both are measured while the server runs; a model on a fast device and a slow host link may cross over late.
"""

from __future__ import annotations

from ceiba.scheduler.costs import StepCosts

UNMEASURED = 32
"""Tokens from which a restore is worth it while nothing has been measured."""
LEAST = 8
"""Fewer tokens are never worth a round's delay."""
FADE = 0.9
"""Weight of what was known when a new measurement comes."""


class CostGate:
    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._copied_tokens = self._copied_seconds = 0.0
        self._delay: float | None = None

    def copied(self, tokens: int, copying: float, waited: float) -> None:
        """A restore copied for ``copying`` seconds and was noticed after ``waited`` seconds in all."""
        self._copied_tokens = FADE * self._copied_tokens + tokens
        self._copied_seconds = FADE * self._copied_seconds + copying
        extra = max(0.0, waited - copying)
        self._delay = extra if self._delay is None else FADE * self._delay + (1 - FADE) * extra

    @property
    def threshold(self) -> float:
        """Tokens from which restoring is the quicker way; infinite where it never is."""
        if not self._costs.token or not self._copied_tokens or self._delay is None:
            return UNMEASURED
        gain = self._costs.token - self._copied_seconds / self._copied_tokens
        return max(LEAST, self._delay / gain) if gain > 0 else float("inf")

    def worth(self, tokens: int) -> bool:
        return tokens > 0 and tokens >= self.threshold
