"""How much prefill a step that also decodes may take: enough that first tokens do not wait, little enough that the
running requests' next tokens do not either. Owns two measured costs and the rule; it admits nobody and reads no clock.

A step is believed to cost what the last ones did without their prefill, plus so much for each prompt token. The chunk
is the larger of two: what keeps the step within its target, and what clears the waiting prompts in time. While prompts
trickle in the first decides, and tokens come evenly; when they pile up the second does, and the device works in the
large chunks it is fastest at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GRAIN = 128
"""Steps are multiples of this, decoding rows included: rows of a matrix product's tile, and the distance between
captured sizes."""
STRETCH = 2.0
"""Steps may take so many times what they take without prefill, whatever the target: where that is long already, cutting
further delays first tokens and hardly shortens gaps."""
FORGET = 0.9
"""What a new step leaves of the weight of those before it."""
HITCH = 4.0
"""A step that takes longer than so many times what was expected (a kernel was compiled, another process had the device)
counts as this."""
LEAST_TOKENS = 64
"""A prefill below this says more about the step than about a token."""


@dataclass(slots=True)
class Pacer:
    """``target``: seconds that a step with decoding requests should take; ``clear``: seconds in which the prompts that
    wait should have been computed."""

    target: float
    clear: float
    base: float = 0.0
    """Seconds of a step without its prefill; 0 before the first."""
    _seconds: float = field(default=0.0)
    _tokens: float = field(default=0.0)

    @property
    def token(self) -> float:
        """Seconds of a prompt token; 0 before the first prefill."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def most_waiting(self) -> int:
        """Waiting prompt tokens from which on more make no difference to ``chunk``."""
        return int(self.clear / self.token) + 1 if self.token else 1

    def observe(self, prefill: int, decode: int, seconds: float) -> None:
        """A step of so many prompt tokens and decoding rows took the device ``seconds``."""
        if self.base and (self.token or not prefill):
            seconds = min(seconds, HITCH * (self.base + self.token * prefill))
        if not prefill:
            self.base = seconds if not self.base else FORGET * self.base + (1 - FORGET) * seconds
        elif prefill >= LEAST_TOKENS:
            own = max(seconds - (self.base if decode else 0.0), 0.0)
            self._seconds = FORGET * self._seconds + own
            self._tokens = FORGET * self._tokens + prefill

    def chunk(self, waiting: int, most: int, decode: int) -> int:
        """Prompt tokens, at most ``most``, for a step in which ``decode`` rows decode while ``waiting`` prompt tokens
        wait. ``most`` until both costs are known."""
        token, base = self.token, self.base
        if not token or not base:
            return most
        within = (max(self.target, STRETCH * base) - base) / token
        spare = self.clear - token * waiting
        clearing = base * waiting / spare if spare > 0 else float(most)
        wanted = min(max(within, clearing, GRAIN), most)
        return min(most, max((int(wanted) + decode) // GRAIN * GRAIN - decode, GRAIN))
