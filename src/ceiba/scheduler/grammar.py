"""The seam for structured output: what the loop asks of a grammar between applying a result and sampling the next.

Owns two protocols and nothing else; the scheduler never learns which grammar library stands behind them.
"""

from __future__ import annotations

from typing import Protocol

from ceiba.core.sampling import SamplingParams
from ceiba.core.step import Int32


class GrammarState(Protocol):
    """Where one request stands in its grammar."""

    @property
    def terminated(self) -> bool:
        """Whether the grammar is complete: the request ends, no further mask is asked for."""

    def fill(self, bits: Int32) -> bool:
        """Write the allowed tokens into ``bits``, int32 [ceil(vocab / 32)]; False when none is allowed."""

    def accept(self, token: int) -> bool:
        """Advance by a sampled token; False when the grammar does not allow it (the state is then unchanged)."""


class GrammarProvider(Protocol):
    def create(self, sampling: SamplingParams) -> GrammarState:
        """The state at the start of the output. Raises ``CeibaError`` for a grammar it cannot serve."""
