"""What steps cost on this device, learnt from those that were: without prefill, and more for each prompt token. Owns
two running estimates; decides nothing and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FORGET = 0.9
"""What a new step leaves of the weight of those before it."""
HITCH = 4.0
"""A step that takes longer than so many times what was expected (a kernel was compiled, another process had the device)
counts as this; two in a row that take less than so small a part show that those before were such."""
CLEAR = 1.75
"""Steps with prompts tell what a token costs if they take so many times what steps without do: below that, prompts
are computed while the weights are read."""
LEAST_TOKENS = 64
"""A prefill below this says more about the step than about a token."""


@dataclass(slots=True)
class Rate:
    """Seconds of a unit, as lately measured."""

    _seconds: float = 0.0
    _count: float = 0.0
    _low: float = 0.0
    """The last measurement where it was far below those before, otherwise 0. One alone says nothing: where the host
    came late to the end of a step, that one seems long and the next short."""

    @property
    def value(self) -> float:
        """0 before the first measurement."""
        return self._seconds / self._count if self._count else 0.0

    def observe(self, count: int, seconds: float) -> None:
        low = HITCH * seconds < self.value * count
        if not self._count or (low and self._low):
            self._seconds, self._count = max(seconds, self._low * count), float(count)
        else:
            self._seconds = FORGET * self._seconds + min(seconds, HITCH * self.value * count)
            self._count = FORGET * self._count + count
        self._low = seconds / count if low else 0.0


@dataclass(slots=True)
class StepCosts:
    _steps: Rate = field(default_factory=Rate)
    _tokens: Rate = field(default_factory=Rate)

    @property
    def base(self) -> float:
        """Seconds of a step without its prefill, as the last ones were; 0 before the first."""
        return self._steps.value

    @property
    def token(self) -> float:
        """Seconds of a prompt token; 0 before the first prefill that tells."""
        return self._tokens.value

    def expected(self, prefill: int, decode: int) -> float:
        """Seconds of a step of so many prompt tokens and decoding rows; 0 where what it needs is not known."""
        if (decode and not self.base) or (prefill and not self.token):
            return 0.0
        return (self.base if decode else 0.0) + self.token * prefill

    def observe(self, prefill: int, decode: int, seconds: float) -> None:
        """A step of so many prompt tokens and decoding rows took the device ``seconds``."""
        if not prefill:
            self._steps.observe(1, seconds)
        elif prefill >= LEAST_TOKENS and seconds >= CLEAR * self.base:
            self._tokens.observe(prefill, seconds - (self.base if decode else 0.0))
