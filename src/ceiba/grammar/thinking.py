"""A grammar that begins after the thinking part. Owns the wait for the ids that end it."""

from __future__ import annotations

from ceiba.core.step import Int32
from ceiba.grammar.base import State


class AfterThinking:
    """Everything but an end is allowed until ``end_ids`` have come, one after the other; then ``inner`` rules.

    An end within the thinking would leave an answer without the shape that was asked for, so it is held back.
    """

    def __init__(self, inner: State, end_ids: tuple[int, ...], anything: Int32) -> None:
        self.inner = inner
        self._end_ids = end_ids
        self._anything = anything
        self._tail: list[int] = []
        self._history: list[bool] = []
        """For each accepted token, whether it went to ``inner``."""
        self.thinking = True

    @property
    def terminated(self) -> bool:
        return not self.thinking and self.inner.terminated

    @property
    def problem(self) -> str:
        return self.inner.problem

    def fill(self, bits: Int32) -> bool:
        if not self.thinking:
            return self.inner.fill(bits)
        bits[:] = self._anything
        return True

    def accept(self, token: int) -> bool:
        if not self.thinking:
            if not self.inner.accept(token):
                return False
            self._history.append(True)
            return True
        self._tail.append(token)
        self._history.append(False)
        self.thinking = tuple(self._tail[-len(self._end_ids) :]) != self._end_ids
        return True

    def rollback(self, count: int) -> None:
        if not count:
            return
        taken = self._history[-count:]
        del self._history[-count:]
        inner = sum(taken)
        self.inner.rollback(inner)
        if len(taken) > inner:
            del self._tail[len(self._tail) - (len(taken) - inner) :]
            self.thinking = True

    def forced_tokens(self) -> list[int]:
        return [] if self.thinking else self.inner.forced_tokens()
