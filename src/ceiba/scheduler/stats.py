"""What the scheduler counts, for metrics, /server_info and log lines. Owns numbers; decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ceiba.cache.lease import LeaseTable
from ceiba.core.step import Runner
from ceiba.scheduler.budget import NewTokenRatio
from ceiba.scheduler.request import Request
from ceiba.scheduler.rows import RowTable
from ceiba.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    forwards: int = 0
    prefill_forwards: int = 0
    decode_forwards: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed (retracted ones count again)."""
    decode_tokens: int = 0
    decode_rows: int = 0
    """Rows of all decode steps: without forced or guessed tokens as many as there are tokens."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached or not."""
    cached_tokens: int = 0
    """Of those, served by the cache."""
    generation_tokens: int = 0
    """Tokens of outputs."""
    jumped_tokens: int = 0
    """Of those, forced by a grammar and never sampled."""
    spec_verify_calls: int = 0
    """Times that a row's drafts were verified."""
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    """Of those, right."""
    dropped_tokens: int = 0
    """Sampled after a request's end, because results come one step late."""
    requests_received: int = 0
    requests_admitted: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    requests_rejected: int = 0
    retractions: int = 0
    preemptions: int = 0
    """Of those, made for a request of higher priority."""
    retracted_input_tokens: int = 0
    retracted_output_tokens: int = 0
    forward_seconds: float = 0.0
    """Time in which at least one step was on the device."""
    idle_seconds: float = 0.0
    """Time spent waiting for a first message."""
    queue_seconds: float = 0.0
    """Sum over admitted requests of the time from arrival to admission."""

    def admitted(self, request: Request) -> None:
        self.requests_admitted += 1
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.cached_tokens
        if request.admitted_at is not None:
            self.queue_seconds += max(0.0, request.admitted_at - request.arrival)

    def retracted(self, request: Request, produced: int) -> None:
        self.retractions += 1
        self.retracted_input_tokens += request.prompt_len
        self.retracted_output_tokens += produced

    def accept_length(self, rows: int = 0, accepted: int = 0) -> float:
        """Tokens that a row gets from a step in the mean, its right drafts and one more; since start or since there
        were so many decode ``rows`` and ``accepted`` drafts. 0 where nothing was decoded."""
        since = self.decode_rows - rows
        return 1 + (self.spec_accepted_tokens - accepted) / since if since > 0 else 0.0

    def accept_rate(self, drafted: int = 0, accepted: int = 0) -> float:
        """Share of drafts that were right, likewise."""
        return (self.spec_accepted_tokens - accepted) / max(1, self.spec_draft_tokens - drafted)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


class Gauges:
    """Reads the state of all parts into one flat dictionary; writes nothing, caches included, so any thread may ask."""

    def __init__(
        self,
        counters: Counters,
        rows: RowTable,
        queue: WaitingQueue,
        leases: LeaseTable,
        ratio: NewTokenRatio,
        runner: Runner,
        throughput: Callable[[], float],
    ) -> None:
        self._counters, self._rows, self._queue, self._leases = counters, rows, queue, leases
        self._ratio, self._runner, self._throughput = ratio, runner, throughput

    @property
    def tokens_used(self) -> int:
        """KV slots that requests hold; cached tokens that nobody holds are free for use."""
        return self._leases.cache.locked + self._leases.in_flight

    @property
    def usage(self) -> float:
        return self.tokens_used / self._leases.allocator.total

    def read(self) -> dict[str, float]:
        counters, leases, rows = self._counters, self._leases, self._rows
        graphs = self._runner.stats().get("graph_hits", 0.0)
        values = {
            "running": rows.num_used,
            "waiting": len(self._queue),
            "num_retracted_reqs": self._queue.num_retracted,
            "token_usage": self.usage,
            "tokens_used": self.tokens_used,
            "kv_used_tokens": self.tokens_used,
            "tokens_total": leases.allocator.total,
            "tokens_free": leases.allocator.free,
            "tokens_evictable": leases.cache.evictable,
            "tokens_in_flight": leases.in_flight,
            "evicted_tokens": leases.evicted_tokens,
            "tokens_pinned": leases.pins.tokens,
            "pins": len(leases.pins),
            "decode_sum_seq_lens": int(leases.launched.sum()),
            "utilization": rows.num_used / len(rows.requests),
            "cache_hit_rate": counters.cached_tokens / max(1, counters.prompt_tokens),
            "gen_throughput": self._throughput(),
            "new_token_ratio": self._ratio.value,
            "page_size": leases.page_size,
            "num_pages": leases.allocator.num_pages,
            "context_len": self._runner.info.context_len,
            "realtime_tokens_total": counters.prefill_tokens + counters.decode_tokens,
            "num_retracted_input_tokens_total": counters.retracted_input_tokens,
            "num_retracted_output_tokens_total": counters.retracted_output_tokens,
            "cuda_graph_passes_total": graphs,
            "scheduler_idle_seconds_total": counters.idle_seconds,
            "scheduler_process_cpu_seconds_total": time.process_time(),
        }
        return {**counters.as_dict(), **{name: float(value) for name, value in values.items()}}
