"""The seam for structured output: what the loop asks of a grammar between applying a result and sampling the next.

Owns the protocols and the list of requests whose grammar is still compiling; the scheduler never learns which grammar
library stands behind them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from ceiba.core.errors import CeibaError
from ceiba.core.messages import Finish
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import Int32
from ceiba.scheduler.request import Request


class GrammarState(Protocol):
    """Where one request stands in its grammar."""

    @property
    def terminated(self) -> bool:
        """Whether the grammar is complete: the request ends, no further mask is asked for."""

    @property
    def problem(self) -> str:
        """Why the grammar cannot go on (a limit was reached); empty while it can."""

    def fill(self, bits: Int32) -> bool:
        """Write the allowed tokens into ``bits``, int32 [ceil(vocab / 32)]; False when none is allowed."""

    def accept(self, token: int) -> bool:
        """Advance by a sampled token; False when the grammar does not allow it (the state is then unchanged)."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens, for drafts that were not kept. ValueError where a limit was
        reached in between."""

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, where there is only one way to go on; often none."""


def broken(state: GrammarState, why: str) -> Finish:
    """How a request ends whose grammar cannot go on: the grammar's fault where it says so, else ours."""
    if state.problem:
        message = f"the grammar became too complex to go on with: {state.problem}"
        return Finish(kind="error", status=400, message=message, code="grammar_too_complex")
    return Finish(kind="error", status=500, message=why)


def undo(state: GrammarState, count: int) -> None:
    """Take back ``count`` tokens that were accepted on trial. A state that met a limit on the way cannot: it says so
    when it is asked for its next mask or token, and its request ends then."""
    with contextlib.suppress(ValueError):
        state.rollback(count)


class GrammarTicket(Protocol):
    """A grammar that may still be compiling, on other threads and in other processes."""

    def ready(self) -> bool:
        """Whether ``state`` would answer at once."""

    def state(self) -> GrammarState:
        """The state at the start of the output. Raises ``CeibaError`` for a grammar that cannot be served."""

    def cancel(self) -> None:
        """The request has ended: nobody waits any more. Safe to call again."""


class GrammarProvider(Protocol):
    def create(self, sampling: SamplingParams) -> GrammarTicket:
        """Begin; returns at once. Raises ``CeibaError`` for what is refused at sight."""

    def fill(self, states: Sequence[GrammarState], bits: Int32) -> np.ndarray:
        """Masks of several states: row i of ``bits``, int32 [N, ceil(vocab / 32)] and all zeros, belongs to state i.
        Returns bool [N]: whether any token is allowed."""


class Compiling:
    """Requests in the queue that cannot be admitted yet. They hold no row and no KV, and hold nobody up."""

    def __init__(self) -> None:
        self._tickets: dict[str, tuple[Request, GrammarTicket]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, request: Request, ticket: GrammarTicket) -> None:
        request.compiling = True
        self._tickets[request.rid] = (request, ticket)

    def drop(self, request: Request) -> None:
        """It ended, by whatever way. Harmless for a request that does not wait here."""
        entry = self._tickets.pop(request.rid, None)
        if entry is not None:
            request.compiling = False
            entry[1].cancel()

    def settle(self) -> Iterator[tuple[Request, CeibaError]]:
        """Hand out the grammars that are done; yields the requests whose grammar cannot be served, with the reason."""
        for request, ticket in [entry for entry in self._tickets.values() if entry[1].ready()]:
            del self._tickets[request.rid]
            request.compiling = False
            try:
                request.grammar = ticket.state()
            except CeibaError as error:
                yield request, error
