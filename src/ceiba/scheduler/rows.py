"""The running batch as arrays over rows, so that a decode step costs the same few array operations at any size.

Owns which request sits in which row, its known tokens and the numbers the hot path compares. Slots and KV lengths are
``cache.lease``'s. A row's *epoch* changes when it is closed: results of a step that was planned for an earlier epoch
are dropped, whoever has the row now.
"""

from __future__ import annotations

import numpy as np

from ceiba.cache.keys import CacheKey, Int32
from ceiba.core.lazy import sparse_table
from ceiba.scheduler.request import Request, State


class RowTable:
    def __init__(self, max_rows: int, max_len: int) -> None:
        self.requests: list[Request | None] = [None] * max_rows
        self.tokens = sparse_table(max_rows, max_len)
        self.known = np.zeros(max_rows, np.int32)
        """Tokens known on the host: the prompt and the applied output."""
        self.prompt_len = np.zeros(max_rows, np.int32)
        self.max_len = np.zeros(max_rows, np.int32)
        self.reported = np.zeros(max_rows, np.int32)
        """Tokens that the detokenizer has (the prompt counts)."""
        self.interval = np.ones(max_rows, np.int32)
        """Output tokens per report."""
        self.min_new = np.zeros(max_rows, np.int32)
        self.ends_on_eos = np.zeros(max_rows, bool)
        """Whether the model's end ids end the row, so that a vectorised compare settles it."""
        self.special = np.zeros(max_rows, bool)
        """Needs a look of its own per token: own stop ids, log-probabilities, a grammar."""
        self.constrained = np.zeros(max_rows, bool)
        self.epoch = np.zeros(max_rows, np.int64)
        self._free = list(range(max_rows - 1, -1, -1))
        self._running = np.zeros(max_rows, bool)
        self._running_rows: Int32 | None = None
        self._closed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.requests) - len(self._free)

    def running(self) -> Int32:
        """Rows in state RUNNING, ascending. Cached between changes of the batch."""
        if self._running_rows is None:
            self._running_rows = np.flatnonzero(self._running).astype(np.int32)
        return self._running_rows

    def live(self) -> list[Request]:
        """Every request that has a row."""
        return [request for request in self.requests if request is not None]

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None
        return request

    def open(self, request: Request, interval: int) -> int:
        """Give ``request`` a row, in state PREFILLING; returns the row."""
        row = self._free.pop()
        request.row = row
        request.to(State.PREFILLING)
        n = len(request.tokens)
        self.requests[row] = request
        self.tokens[row, :n] = request.tokens
        self.known[row] = n
        self.prompt_len[row] = request.prompt_len
        self.max_len[row] = request.max_len
        self.reported[row] = request.reported
        self.interval[row] = interval
        self.min_new[row] = request.sampling.min_new_tokens
        self.ends_on_eos[row] = not request.sampling.ignore_eos
        self.constrained[row] = request.grammar is not None
        self.special[row] = (
            bool(request.sampling.stop_token_ids) or request.logprob.wanted or request.grammar is not None
        )
        return row

    def start_running(self, row: int) -> None:
        """All known tokens of the row are launched: it decodes from the next step on."""
        self.request(row).to(State.RUNNING)
        self._running[row] = True
        self._running_rows = None

    def key(self, row: int) -> CacheKey:
        """Cache key of the row's known tokens; a view, valid until the row changes."""
        return CacheKey(self.request(row).namespace, self.tokens[row, : self.known[row]])

    def close(self, row: int, state: State) -> Request:
        """Take the row back; the request goes to ``state`` (FINISHED, or QUEUED with its tokens when retracted)."""
        request = self.request(row)
        if state is State.QUEUED:
            request.tokens = self.tokens[row, : self.known[row]].copy()
        request.reported = int(self.reported[row])
        request.to(state)
        request.row = -1
        self.requests[row] = None
        self.epoch[row] += 1
        self._free.append(row)
        self._closed.append(row)
        if self._running[row]:
            self._running[row] = False
            self._running_rows = None
        return request

    def take_closed(self) -> Int32:
        """Rows closed since the last call, for the next plan."""
        closed = np.array(self._closed, np.int32)
        self._closed.clear()
        return closed
