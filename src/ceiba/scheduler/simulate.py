"""The real scheduler on a simulated device and clock. Owns the run and its figures; the command is elsewhere.

Everything but the forward pass is what the server runs, so a change of policy shows here in seconds. The device is
``fake.CostModel``: linear in tokens, rows and context; fit it to yours with the --cost flags.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ceiba.cache.ledger import assert_ledger
from ceiba.config.records import SchedulerConfig
from ceiba.core.messages import Abort, Finish, Generate, Heartbeat, Reply, TokenBatch, ToScheduler, Usage, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import RunnerInfo
from ceiba.scheduler.fake import CostModel, FakeRunner, SimClock
from ceiba.scheduler.loop import LINGER_WAIT, Scheduler
from ceiba.scheduler.traces import VOCAB, TraceRequest


class TracePort:
    """Delivers a trace when its time comes and notes when what came back. Jumps the clock over idle time."""

    def __init__(self, trace: list[TraceRequest], clock: SimClock) -> None:
        self._trace = trace
        self._clock = clock
        events = [(request.at, 0, i) for i, request in enumerate(trace)]
        events += [(r.at + r.abort_after, 1, i) for i, r in enumerate(trace) if r.abort_after is not None]
        self._events = sorted(events)
        self._next = 0
        n = len(trace)
        self.first_token = np.full(n, np.nan)
        self.ended = np.full(n, np.nan)
        self.output = np.zeros(n, np.int64)
        self.usages: dict[int, Usage] = {}
        self.admitted = np.full(n, np.nan)
        self.finishes: dict[int, Finish] = {}

    @property
    def delivered(self) -> bool:
        return self._next == len(self._events)

    def receive(self, timeout: float) -> list[ToScheduler]:
        if timeout > 0 and not self.delivered:
            at = self._events[self._next][0]  # an idle scheduler would only ask again
            self._clock.advance_to(at if timeout > LINGER_WAIT else min(at, self._clock.now + timeout))
        messages: list[ToScheduler] = []
        while not self.delivered and self._events[self._next][0] <= self._clock.now:
            at, leaves, i = self._events[self._next]
            self._next += 1
            messages.append(Abort(rids=[str(i)]) if leaves else self._generate(i, at))
        return messages

    def to_detokenizer(self, batch: TokenBatch) -> None:
        counts = np.frombuffer(batch.counts, np.int32)
        entries = np.array([int(rid) for rid in batch.rids])
        now = self._clock.now
        got = entries[counts > 0]
        self.first_token[got[np.isnan(self.first_token[got])]] = now
        np.add.at(self.output, entries, counts)
        for index, finish in batch.finishes.items():
            self.ended[entries[index]] = now
            self.finishes[int(entries[index])] = finish
        for index, usage in batch.usages.items():
            self.usages[int(entries[index])] = usage
            self.admitted[entries[index]] = self._trace[int(entries[index])].at + usage.queue_time

    def to_front(self, message: Reply | Heartbeat) -> None:
        return None

    def _generate(self, i: int, at: float) -> Generate:
        request = self._trace[i]
        return Generate(
            rid=str(i),
            input_ids=ids_to_bytes(request.ids),
            sampling=SamplingParams(max_new_tokens=request.output, ignore_eos=True),
            stream=True,
            arrival=at,
            priority=request.priority,
            routing_key=request.tenant,
            tenant=request.tenant,
            queue_timeout=request.queue_timeout,
        )


def simulate(
    trace: list[TraceRequest],
    config: SchedulerConfig,
    *,
    context_len: int = 32768,
    cost: CostModel | None = None,
    progress: Any = None,
    detail: bool = False,
) -> dict[str, Any]:
    """Run ``trace`` to its end; returns figures (seconds, tokens) that depend on the arguments only.

    With ``detail`` also ``timeline`` (columns over time, for a report) and ``queue_times`` (seconds, per request of
    the trace; None for those that never ran). ``progress`` is called with the number of ended requests now and then.
    Raises ``LedgerError`` if KV was lost.
    """
    clock = SimClock()
    info = RunnerInfo(
        num_slots=config.max_total_tokens,
        max_rows=config.max_running_requests,
        vocab_size=max(VOCAB, 1 + max(int(request.ids.max()) for request in trace)),
        context_len=context_len,
        page_size=config.page_size,
        device="simulated",
    )
    runner = FakeRunner(info, clock=clock, cost=cost or CostModel(), strict=False)
    port = TracePort(trace, clock)
    scheduler = Scheduler(config, runner, port, clock=clock)
    queue: list[tuple[float, int, int]] = []
    rounds = 0
    while not (port.delivered and scheduler.idle):
        scheduler.step()
        rounds += 1
        queue.append((clock.now, len(scheduler.queue), scheduler.rows.num_used))
        if progress is not None and rounds % 64 == 0:
            progress(len(port.finishes))
    assert_ledger(scheduler.leases, idle=True)
    figures = _figures(trace, port, scheduler, runner, clock, np.array([entry[1] for entry in queue]))
    if detail:
        waits = port.admitted - np.array([request.at for request in trace])
        figures["queue_times"] = [None if np.isnan(wait) else float(wait) for wait in waits]
        figures["timeline"] = timeline(trace, port, np.array(queue))
    return figures


BUCKETS = 120
"""Points of a timeline."""
HIT_WINDOW = 10
"""Points that a hit rate looks back over: single admissions are all or nothing."""


def timeline(trace: list[TraceRequest], port: TracePort, queue: np.ndarray) -> dict[str, list[float | None]]:
    """Columns over simulated time, one value per bucket (None: nothing happened in it): ``t`` (seconds, middle of the
    bucket), ``queue`` and ``running`` (requests, mean), ``hit_rate`` (of the prompts admitted lately) and ``ttft``
    (seconds, median and 99th percentile of the requests that arrived then)."""
    end = max(float(queue[-1, 0]), 1e-9)
    edges = np.linspace(0.0, end, BUCKETS + 1)
    at = np.array([request.at for request in trace])
    cached = np.array([port.usages[i].cached_tokens if i in port.usages else 0 for i in range(len(trace))])
    length = np.array([len(request.ids) for request in trace])

    def split(times: np.ndarray) -> list[np.ndarray]:
        where = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, BUCKETS - 1)
        return [np.flatnonzero((where == i) & ~np.isnan(times)) for i in range(BUCKETS)]

    rounds, admissions, arrivals = split(queue[:, 0]), split(port.admitted), split(at)
    ttft = port.first_token - at
    waits = [ttft[members][~np.isnan(ttft[members])] for members in arrivals]
    return {
        "t": [float(t) for t in (edges[:-1] + edges[1:]) / 2],
        "queue": [float(queue[m, 1].mean()) if len(m) else None for m in rounds],
        "running": [float(queue[m, 2].mean()) if len(m) else None for m in rounds],
        "hit_rate": [
            float(cached[lately].sum() / length[lately].sum()) if len(admissions[i]) else None
            for i in range(BUCKETS)
            for lately in [np.concatenate(admissions[max(0, i - HIT_WINDOW + 1) : i + 1])]
        ],
        "ttft_p50": [float(np.percentile(w, 50)) if len(w) else None for w in waits],
        "ttft_p99": [float(np.percentile(w, 99)) if len(w) else None for w in waits],
    }


def _figures(
    trace: list[TraceRequest],
    port: TracePort,
    scheduler: Scheduler,
    runner: FakeRunner,
    clock: SimClock,
    queue: np.ndarray,
) -> dict[str, Any]:
    at = np.array([request.at for request in trace])
    kinds = [port.finishes[i].kind for i in range(len(trace))]
    ttft = port.first_token - at
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(port.output > 1, (port.ended - port.first_token) / (port.output - 1), np.nan)
    waited = np.array([usage.queue_time for usage in port.usages.values()])
    counters = scheduler.counters
    seconds = max(clock.now, 1e-9)
    return {
        "requests": len(trace),
        "finished": sum(kind in {"stop", "length"} for kind in kinds),
        "aborted": kinds.count("abort"),
        "failed": kinds.count("error"),
        "simulated_s": seconds,
        "hit_rate": counters.cached_tokens / max(1, counters.prompt_tokens),
        "prompt_tokens": counters.prompt_tokens,
        "cached_tokens": counters.cached_tokens,
        "output_tokens": int(port.output.sum()),
        "output_tokens_per_s": float(port.output.sum()) / seconds,
        "total_tokens_per_s": (float(port.output.sum()) + counters.prompt_tokens) / seconds,
        "requests_per_s": len(trace) / seconds,
        "by_tenant": _by_tenant(trace, ttft),
        "ttft_s": _percentiles(ttft),
        "tpot_s": _percentiles(tpot),
        "e2e_s": _percentiles(port.ended - at),
        "queue_time_s": _percentiles(waited),
        "queue_length": {"mean": float(queue.mean()), "max": int(queue.max())},
        "forwards": counters.forwards,
        "retractions": counters.retractions,
        "preemptions": counters.preemptions,
        "dropped_tokens": counters.dropped_tokens,
        "device_busy": runner.busy_seconds / seconds,
        "ledger": "balanced",
    }


def _by_tenant(trace: list[TraceRequest], ttft: np.ndarray) -> dict[str, dict[str, float]]:
    """First-token times per tenant, where the trace names several."""
    names = [request.tenant for request in trace]
    if len(set(names)) < 2:
        return {}
    return {
        name: _percentiles(ttft[[i for i, other in enumerate(names) if other == name]]) for name in sorted(set(names))
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "mean": float(values.mean())}
