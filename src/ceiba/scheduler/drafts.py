"""Whom the scheduler guesses tokens for, how many, and whether that pays. Owns each row's record of right guesses; the
guesses come from ``spec`` and the prefix tree, the runner finds out which are right, ``planner`` makes room for them.

A token more in a step costs about a quarter of a step of one row (measured on CPUs; the weights are read once), so with
B rows a guess pays while more than B / (B + 3) of them are right. Who is below that is tried now and then with one.
"""

from __future__ import annotations

import numpy as np

from ceiba.cache.lease import LeaseTable
from ceiba.core.step import Int32
from ceiba.scheduler.grammar import undo
from ceiba.scheduler.request import Request
from ceiba.scheduler.rows import RowTable
from ceiba.scheduler.stats import Counters
from ceiba.spec.base import Drafter

PRICE = 3
"""See above: one less than a row's step costs in tokens of a larger step."""
FIRST_RATE = 0.5
"""Share of right guesses that a request is credited with at first."""
FIRST_LENGTH = 4
LONGEST_PAUSE = 64
"""Steps between two trials, at most: they double after a wrong guess and halve after a right one."""


class Drafts:
    """``most``: drafts of a row in a step."""

    def __init__(self, drafter: Drafter, most: int, rows: RowTable, leases: LeaseTable, counters: Counters) -> None:
        self.most = most
        self._drafter = drafter
        self._rows = rows
        self._leases = leases
        self._counters = counters
        size = len(rows.requests)
        self._epoch = np.full(size, -1, np.int64)
        """Of whom the columns below tell."""
        self._rate = np.zeros(size)
        """Share of right guesses, the latest ones counting most."""
        self._length = np.zeros(size, np.int32)
        """How many to guess next, if it pays."""
        self._due = np.zeros(size, np.int64)
        self._pause = np.zeros(size, np.int64)
        self._step = 0

    def stats(self) -> dict[str, float]:
        """Gauges for metrics and /server_info."""
        return {
            "spec_accept_length": self._counters.accept_length(),
            "spec_accept_rate": self._counters.accept_rate(),
            "spec_num_draft_tokens": float(self.most + 1),
        }

    def wanted(self) -> bool:
        """Whether some row should be guessed for in the next step, for which its last token must be known."""
        rows = self._rows.running()
        return bool(len(rows)) and bool(self._chosen(rows)[0].any())

    def propose(self, rows: Int32, room: int) -> dict[int, Int32]:
        """Row → its drafts, for running ``rows`` all of whose tokens are known; together at most ``room`` tokens."""
        self._step += 1
        found: dict[int, Int32] = {}
        chosen, pays = self._chosen(rows)
        for i in np.flatnonzero(chosen).tolist():
            row = int(rows[i])
            known = int(self._rows.known[row])
            # The last token that the row may have is sampled behind the last draft.
            most = min(int(self._length[row]) if pays[i] else 1, int(self._rows.max_len[row]) - known - 1, room)
            if most > 0 and len(guesses := self._guess(row, known, most)):
                found[row] = guesses
                room -= len(guesses)
        return found

    def judge(self, row: int, drafted: int, right: int) -> None:
        """``right`` of the row's ``drafted`` guesses were; the one after them, if any, was wrong."""
        counters = self._counters
        counters.spec_verify_calls += 1
        counters.spec_draft_tokens += drafted
        counters.spec_accepted_tokens += right
        self._rate[row] += (right / drafted - self._rate[row]) / 4
        length = int(self._length[row])
        self._length[row] = min(2 * max(length, drafted), self.most) if right == drafted else max(1, right)
        pause = int(self._pause[row])
        self._pause[row] = max(1, pause // 2) if right else min(2 * pause, LONGEST_PAUSE)
        self._due[row] = self._step + self._pause[row]

    def _chosen(self, rows: Int32) -> tuple[np.ndarray, np.ndarray]:
        """bool [N] each: whether to guess for a row, and whether because it pays."""
        new = rows[self._epoch[rows] != self._rows.epoch[rows]]
        if len(new):
            self._epoch[new] = self._rows.epoch[new]
            self._rate[new], self._length[new] = FIRST_RATE, min(FIRST_LENGTH, self.most)
            self._due[new], self._pause[new] = self._step, 1
        pays = self._rate[rows] >= len(rows) / (len(rows) + PRICE)
        return pays | (self._due[rows] <= self._step), pays

    def _guess(self, row: int, known: int, most: int) -> Int32:
        request = self._rows.request(row)
        guesses = np.empty(0, np.int32)
        if request.on_path:  # what an earlier request with all these tokens went on with
            guesses = self._leases.cache.continuation(self._rows.key(row), most)
            request.on_path = len(guesses) > 0
        if not len(guesses):
            if request.guesser is None:
                request.guesser = self._drafter.begin()
            guesses = request.guesser.propose(self._rows.tokens[row, :known], most)
        return guesses[: _fitting(request, guesses.tolist())]


def _fitting(request: Request, guesses: list[int]) -> int:
    """How many of the guesses may stand in an output with another token behind them: none that ends it, none that its
    grammar does not allow, and none behind which the grammar takes over."""
    ends = request.end_ids
    grammar = request.grammar
    fitting = taken = 0
    for token in guesses:
        if token in ends:
            break
        if grammar is not None:
            if not grammar.accept(token):
                break
            taken += 1
            if grammar.terminated or (request.jumps and grammar.forced_tokens()):
                break
        fitting += 1
    if grammar is not None and taken:
        undo(grammar, taken)
    return fitting
