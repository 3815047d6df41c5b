"""How far a step may go: tokens and requests of one prefill, and the guess how much KV the running rows still need.

Owns two small pieces of arithmetic; admits nobody itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ceiba.cache.keys import Int32

CLIP_NEW_TOKENS = 4096
"""No request reserves KV for more output than this: a huge max_new_tokens is a limit, not a forecast."""


class NewTokenRatio:
    """Which share of their allowed output the running requests are expected to produce.

    Starts at 0.7 × conservativeness, decays linearly to a seventh of that over some 600 decode steps in which the pool
    was large enough, and jumps up after a retraction to what the running batch shows.
    """

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(0.7 * conservativeness, 1.0)
        self.minimum = self.initial * 0.14
        self.value = self.initial
        self._decay = (max(self.initial, 0.7) - self.minimum) / 600  # also a jump far above the start passes

    def decayed(self) -> None:
        self.value = max(self.value - self._decay, self.minimum)

    def retracted(self, produced: int, allowed: int, rows: int) -> None:
        """After a retraction: ``rows`` left, having ``produced`` of ``allowed`` output tokens together."""
        estimate = (produced + 20 * rows) / (allowed + 1)  # look 20 tokens ahead of what they have now
        self.value = min(max(estimate, self.value), 1.0)

    def reset(self) -> None:
        self.value = self.initial

    def reserve(self, remaining: Int32) -> int:
        """KV slots to keep for requests with ``remaining`` output tokens allowed, int32 [N]."""
        return int(np.minimum(remaining, CLIP_NEW_TOKENS).sum() * self.value) if len(remaining) else 0


@dataclass(slots=True)
class PrefillBudget:
    """What one step's prefill may still take."""

    tokens: int
    requests: int
    chunked: bool
    """Whether a prompt may be cut where the tokens end."""
    uncut: int = 0
    """Chunked: a prompt up to this length is not cut; the first of a step may take so much, others wait."""
    used: bool = False

    def take(self, wanted: int, *, may_cut: bool) -> int:
        """Tokens granted to a prompt that has ``wanted`` left: all of them, a part if it may be cut, or 0.

        Without chunking the first prompt of a step is taken whole whatever its length, so that it can run at all.
        """
        if self.requests <= 0:
            return 0
        room = self.tokens if self.used else max(self.tokens, self.uncut)
        if wanted <= room or (not self.chunked and not self.used):
            return wanted
        return max(room, 0) if self.chunked and may_cut and wanted > self.uncut else 0

    def spend(self, tokens: int) -> None:
        self.tokens -= tokens
        self.requests -= 1
        self.used = True
