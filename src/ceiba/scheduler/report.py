"""The log lines of the scheduler, in the words operators know. Owns their format and the throughput between two."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ceiba.core.step import Runner, StepPlan
from ceiba.scheduler.rows import RowTable
from ceiba.scheduler.stats import Counters
from ceiba.scheduler.waiting import WaitingQueue

log = logging.getLogger("ceiba.scheduler")


class StepLog:
    """One line per prefill step, one per ``interval`` decode steps. ``usage``: KV slots held, and their share."""

    def __init__(
        self,
        interval: int,
        rows: RowTable,
        queue: WaitingQueue,
        counters: Counters,
        usage: Callable[[], tuple[int, float]],
        runner: Runner,
        clock: Callable[[], float],
        *,
        drafts: bool = False,
    ) -> None:
        self._interval = max(1, interval)
        self._rows, self._queue, self._counters = rows, queue, counters
        self._usage = usage
        self._graphs = 0.0
        self._runner = runner
        self._clock = clock
        self._since = clock()
        self._tokens = 0
        self._drafts = drafts
        self._before = (0, 0, 0)
        """Decode rows, drafts and right ones at the last decode line."""
        self.throughput = 0.0
        """Output tokens per second between the last two decode lines."""

    def planned(self, plan: StepPlan) -> None:
        """Count a step and log it if it is due."""
        counters = self._counters
        prompts = plan.num_prefill - plan.num_jumps
        decode = plan.num_segments - prompts
        prefill_tokens = int(plan.lengths[:prompts].sum()) if prompts else 0
        counters.forwards += 1
        counters.prefill_tokens += prefill_tokens
        counters.decode_tokens += plan.num_tokens - prefill_tokens
        if prompts:
            counters.prefill_forwards += 1
            if log.isEnabledFor(logging.INFO):
                self._prefill_line(plan, prefill_tokens)
        counters.decode_rows += decode
        if decode:
            counters.decode_forwards += 1
            if counters.decode_forwards % self._interval == 0:
                self._decode_line()

    def idle(self) -> None:
        """Nothing runs: the next throughput starts from here."""
        self._since = self._clock()
        self._tokens = self._counters.generation_tokens
        self.throughput = 0.0

    def _prefill_line(self, plan: StepPlan, tokens: int) -> None:
        log.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d",
            len(plan.opened), tokens, sum(len(row.prefix_slots) for row in plan.opened), self._usage()[1],
            self._rows.num_used, len(self._queue),
        )  # fmt: skip

    def _decode_line(self) -> None:
        now, made = self._clock(), self._counters.generation_tokens
        self.throughput = (made - self._tokens) / max(now - self._since, 1e-9)
        self._since, self._tokens = now, made
        if not log.isEnabledFor(logging.INFO):
            return
        tokens, usage = self._usage()
        before, self._graphs = self._graphs, self._runner.stats().get("graph_hits", 0.0)
        log.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, %scuda graph: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            self._rows.num_used, tokens, usage, self._acceptance(), self._graphs > before, self.throughput,
            len(self._queue),
        )  # fmt: skip

    def _acceptance(self) -> str:
        """What drafts have brought since the last line, where there are any."""
        if not self._drafts:
            return ""
        counters, (rows, drafted, right) = self._counters, self._before
        self._before = (counters.decode_rows, counters.spec_draft_tokens, counters.spec_accepted_tokens)
        length, rate = counters.accept_length(rows, right), counters.accept_rate(drafted, right)
        return f"accept len: {length:.2f}, accept rate: {rate:.2f}, "
