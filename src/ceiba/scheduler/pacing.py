"""How much prefill a step takes while requests decode: enough that first tokens do not wait, little enough that the
running requests' next tokens do not either. Owns the rule; costs are measured elsewhere, nobody is admitted here.

While prompts trickle in, a step decodes as well and its chunk is what keeps it within a target, or one prompt of up to
twice that: in two steps it would wait for what decodes twice. When more wait, most steps compute prompts alone, one or
two in each, so that the first need not wait for the last. When very many do, and until none is left, steps are as large
as they may be, where the device is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from ceiba.scheduler.costs import StepCosts

GRAIN = 128
"""Steps are multiples of this, decoding rows included: rows of a matrix product's tile, and the distance between
captured sizes."""
STRETCH = 2.0
"""Steps may take so many times what they take without prefill, whatever the target: where that is long already, cutting
further delays first tokens and hardly shortens gaps."""
WHOLE = 2.0
"""One prompt may take so many times what the target allows."""
PILE = 2.0
"""Prompts that wait pile up when computing them takes longer than so many targets."""
SHARE = 4
"""When they do, a step computes at least one part in so many of what waits."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of a step. ``uncut``: no prompt up to this length is cut; a step's first one may take so much."""

    tokens: int
    uncut: int = 0


@dataclass(slots=True)
class Pacer:
    """``target``: seconds that a step with decoding requests should take. ``see`` before each step what waits."""

    costs: StepCosts
    target: float
    _waiting: int = 0
    _many: bool = False
    """Whether very many prompts wait, or did since one waited last."""

    @property
    def pile(self) -> int:
        """Waiting prompt tokens from which on they pile up; 0 before the first prefill."""
        return int(PILE * self.target / self.costs.token) if self.costs.token else 0

    def see(self, waiting: int) -> None:
        """So many prompt tokens wait; beyond ``SHARE`` piles and chunks more make no difference."""
        self._waiting = waiting
        self._many = self.pile > 0 and (waiting > SHARE * self.pile or (self._many and waiting > 0))

    @property
    def piled_up(self) -> bool:
        """Whether steps should compute prompts alone."""
        return self._many or 0 < self.pile < self._waiting

    def beside(self, most: int, decode: int) -> Chunk:
        """For a step of at most ``most`` prompt tokens in which ``decode`` rows decode. ``most`` until both costs are
        known."""
        token, base = self.costs.token, self.costs.base
        if not token or not base:
            return Chunk(most)
        within = (max(self.target, STRETCH * base) - base) / token
        uncut = most if self._many else _grained(WHOLE * within, decode, most)
        if self.piled_up:
            within = max(within, self._waiting / SHARE)
        return Chunk(_grained(within, decode, most), uncut)

    def alone(self, most: int) -> Chunk:
        """For a step of at most ``most`` prompt tokens in which nobody decodes."""
        if not self.pile:
            return Chunk(most)
        tokens = min(max(self.pile, self._waiting // SHARE), most)
        return Chunk(tokens, most if self._many or not self.piled_up else tokens)


def _grained(wanted: float, decode: int, most: int) -> int:
    """``wanted`` prompt tokens, at most ``most``, so that with ``decode`` rows the step is a multiple of GRAIN."""
    if wanted >= most:
        return most
    return min(most, max((int(wanted) + decode) // GRAIN * GRAIN - decode, GRAIN))
