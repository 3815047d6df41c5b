"""A drafter for tests and simulation: guesses right as often as it is told to, if it is given the answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ceiba.core.step import Int32


class FakeDrafter:
    """``answer``: tokens so far → the tokens that will follow. Each guess is right with probability ``right``, else it
    is another of ``vocab`` tokens; ``rng`` decides, and how long a proposal is."""

    def __init__(self, answer: Callable[[Int32, int], Int32], right: float, vocab: int, seed: int = 0) -> None:
        self._answer = answer
        self._right = right
        self._vocab = vocab
        self._rng = np.random.default_rng(seed)

    def begin(self) -> FakeDrafter:
        return self

    def propose(self, tokens: Int32, most: int) -> Int32:
        guesses = self._answer(tokens, int(self._rng.integers(0, most + 1))).astype(np.int32)
        wrong = self._rng.random(len(guesses)) >= self._right
        guesses[wrong] = (guesses[wrong] + 1 + self._rng.integers(0, self._vocab - 1, wrong.sum())) % self._vocab
        return guesses
