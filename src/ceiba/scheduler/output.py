"""What leaves the scheduler for the detokenizer: one ``TokenBatch`` a step. Owns message assembly; ends nobody.

The detokenizer needs every token at once only for streams and stop strings; of other requests it hears rarely.
"""

from __future__ import annotations

import numpy as np

from ceiba.cache.keys import Int32
from ceiba.core.messages import DetokOpen, Finish, TokenBatch, TopLogprobs, Usage, ids_to_bytes
from ceiba.core.ports import SchedulerPort
from ceiba.scheduler.request import Request
from ceiba.scheduler.rows import RowTable

PROMPT_TAIL = 16
"""Prompt ids sent along, so that a tokenizer which merges across the border decodes the first output right."""

COALESCE = 64
"""Output tokens per report of a request that neither streams nor has stop strings: nobody needs them sooner."""


def report_interval(request: Request, stream_interval: int) -> int:
    """Output tokens per report; the first of a stream goes out at once."""
    sampling = request.sampling
    if sampling.stop or sampling.stop_regex:
        return 1
    if not request.stream:
        return COALESCE
    return (sampling.stream_interval or stream_interval) if request.opened else 1


class Outbox:
    def __init__(self, rows: RowTable, stream_interval: int) -> None:
        self._rows = rows
        self._stream_interval = stream_interval
        self._reset()

    def _reset(self) -> None:
        self._rids: list[str] = []
        self._counts: list[Int32] = []
        self._tokens: list[Int32] = []
        self._opened: list[DetokOpen] = []
        self._finishes: dict[int, Finish] = {}
        self._usages: dict[int, Usage] = {}
        self._logprobs: dict[int, TopLogprobs] = {}
        self._prompt_logprobs: dict[int, TopLogprobs] = {}

    def report(self, rows: Int32) -> None:
        """Report the new tokens of live rows (distinct), in a fixed number of array operations."""
        if not len(rows):
            return
        table = self._rows
        known, reported = table.known[rows], table.reported[rows]
        counts = known - reported
        if np.count_nonzero(counts == 1) == len(rows):
            tokens = table.tokens[rows, reported]
        else:
            total = int(counts.sum())
            ends = np.cumsum(counts)
            offsets = np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
            tokens = table.tokens[np.repeat(rows, counts), np.repeat(reported, counts) + offsets]
        base = len(self._rids)
        requests = table.requests
        self._rids += [requests[row].rid for row in rows.tolist()]
        self._counts.append(counts)
        self._tokens.append(tokens)
        table.reported[rows] = known
        for i in ((reported == table.prompt_len[rows]) | table.special[rows]).nonzero()[0].tolist():
            request = table.request(int(rows[i]))
            if not request.opened:
                self._first(base + i, request, int(counts[i]))
            self._attach(base + i, request)

    def finish(self, request: Request, finish: Finish) -> None:
        """The last report of ``request``, with whatever tokens are still unreported. Call before its row closes."""
        if request.row >= 0:
            row = request.row
            known, reported = int(self._rows.known[row]), int(self._rows.reported[row])
            tokens = self._rows.tokens[row, reported:known].copy()
            self._rows.reported[row] = known
        else:
            known, tokens = len(request.tokens), request.tokens[request.reported :]
            request.reported = known
        index = len(self._rids)
        self._rids.append(request.rid)
        self._counts.append(np.array([len(tokens)], np.int32))
        self._tokens.append(tokens)
        if not request.opened:
            self._open(request)
        self._attach(index, request)
        self._usages[index] = self._usage(request, known - request.prompt_len)
        self._finishes[index] = finish

    def refuse(self, opening: DetokOpen, finish: Finish, prompt_tokens: int) -> None:
        """First and last report of a choice that never became a request."""
        index = len(self._rids)
        self._rids.append(opening.rid)
        self._counts.append(np.zeros(1, np.int32))
        self._opened.append(opening)
        self._finishes[index] = finish
        self._usages[index] = Usage(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=0)

    def flush(self, port: SchedulerPort) -> None:
        """Send what has gathered since the last flush, if anything. Called before a forward pass may block."""
        if not self._rids:
            return
        port.to_detokenizer(
            TokenBatch(
                rids=self._rids,
                counts=b"".join(map(ids_to_bytes, self._counts)),
                tokens=b"".join(map(ids_to_bytes, self._tokens)),
                opened=self._opened,
                finishes=self._finishes,
                usages=self._usages,
                logprobs=self._logprobs,
                prompt_logprobs=self._prompt_logprobs,
            )
        )
        self._reset()

    def _first(self, index: int, request: Request, completion_tokens: int) -> None:
        self._open(request)
        self._usages[index] = self._usage(request, completion_tokens)
        self._rows.interval[request.row] = report_interval(request, self._stream_interval)

    def _open(self, request: Request) -> None:
        request.opened = True
        tail = request.tokens[: request.prompt_len][-PROMPT_TAIL:]
        self._opened.append(
            DetokOpen(rid=request.rid, stream=request.stream, sampling=request.sampling, prompt_tail=ids_to_bytes(tail))
        )

    def _attach(self, index: int, request: Request) -> None:
        logprobs, prompt = request.output_logprobs.drain(), request.prompt_logprobs.drain()
        if logprobs is not None:
            self._logprobs[index] = logprobs
        if prompt is not None:
            self._prompt_logprobs[index] = prompt

    def _usage(self, request: Request, completion_tokens: int) -> Usage:
        waited = 0.0 if request.admitted_at is None else max(0.0, request.admitted_at - request.arrival)
        return Usage(
            prompt_tokens=request.prompt_len,
            cached_tokens=request.cached_tokens,
            completion_tokens=completion_tokens,
            queue_time=waited,
            cached_by_tier=request.cached_by_tier
            or ({"device": request.cached_tokens} if request.cached_tokens else {}),
            pinned_tokens=request.pinned_tokens,
        )
