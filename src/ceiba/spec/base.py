"""What the scheduler asks of whoever guesses. Owns the protocol; knows neither rows, slots nor acceptance."""

from __future__ import annotations

from typing import Protocol

from ceiba.core.step import Int32


class Guesser(Protocol):
    """The guesses of one request. It lives as long as the request, through retractions too."""

    def propose(self, tokens: Int32, most: int) -> Int32:
        """What may follow ``tokens`` int32 [N], all that the request has, prompt included: at most ``most`` tokens,
        often none. From call to call ``tokens`` only grow."""


class Drafter(Protocol):
    """One algorithm."""

    def begin(self) -> Guesser:
        """For a new request; returns at once."""
