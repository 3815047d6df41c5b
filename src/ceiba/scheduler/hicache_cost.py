"""Whether bringing cached KV back is quicker than computing it again. Owns two running estimates and one comparison.

Restoring costs a fixed delay (a hand-over between threads, a scheduling round) and little per token; computing costs
per token. Both are measured while the server runs; a model on a fast device and a slow host link may cross over late.
"""

from __future__ import annotations

from ceiba.scheduler.costs import Rate, StepCosts

UNMEASURED = 32
"""Tokens from which a restore is worth it while nothing has been measured."""
LEAST = 8
"""Fewer tokens are never worth a round's delay."""
TRIED = 16
"""One in so many refusals is tried all the same: a restore that was slow by chance would otherwise be the last."""


class CostGate:
    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._copied, self._delay = Rate(), Rate()
        self._refused = 0

    def copied(self, tokens: int, copying: float, waited: float) -> None:
        """A restore copied for ``copying`` seconds and was noticed after ``waited`` seconds in all."""
        self._copied.observe(tokens, copying)
        self._delay.observe(1, max(0.0, waited - copying))

    @property
    def threshold(self) -> float:
        """Tokens from which restoring is the quicker way; infinite where it never is."""
        if not self._costs.token or not self._copied.value:
            return UNMEASURED
        gain = self._costs.token - self._copied.value
        return max(LEAST, self._delay.value / gain) if gain > 0 else float("inf")

    def worth(self, tokens: int) -> bool:
        """Whether to restore ``tokens``; asked once for each time."""
        if tokens < LEAST:
            return False
        if tokens >= self.threshold:
            return True
        self._refused += 1
        return self._refused % TRIED == 0
