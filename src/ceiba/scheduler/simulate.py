"""``ceiba simulate``: the real scheduler on a simulated device and clock. Owns the command and its figures.

Everything but the forward pass is what the server runs, so a change of policy shows here in seconds. The device is
``fake.CostModel``: linear in tokens, rows and context; fit it to yours with the --cost flags.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ceiba.cache.ledger import assert_ledger
from ceiba.config.records import SchedulerConfig
from ceiba.core.messages import Abort, Finish, Generate, Heartbeat, Reply, TokenBatch, ToScheduler, Usage, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import RunnerInfo
from ceiba.scheduler import policy
from ceiba.scheduler.fake import CostModel, FakeRunner, SimClock
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.traces import SYNTHETIC, VOCAB, TraceError, TraceRequest, make_trace, read_trace


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
        self.finishes: dict[int, Finish] = {}

    @property
    def delivered(self) -> bool:
        return self._next == len(self._events)

    def receive(self, timeout: float) -> list[ToScheduler]:
        if timeout > 0 and not self.delivered:
            self._clock.advance_to(self._events[self._next][0])
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

    def to_front(self, message: Reply | Heartbeat) -> None:
        return None

    def _generate(self, i: int, at: float) -> Generate:
        request = self._trace[i]
        sampling = SamplingParams(max_new_tokens=request.output, ignore_eos=True)
        return Generate(rid=str(i), input_ids=ids_to_bytes(request.ids), sampling=sampling, stream=True, arrival=at)


def simulate(
    trace: list[TraceRequest],
    config: SchedulerConfig,
    *,
    context_len: int = 32768,
    cost: CostModel | None = None,
    progress: Any = None,
) -> dict[str, Any]:
    """Run ``trace`` to its end; returns figures (seconds, tokens) that depend on the arguments only.

    ``progress`` is called with the number of ended requests now and then. Raises ``LedgerError`` if KV was lost.
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
    queue: list[int] = []
    rounds = 0
    while not (port.delivered and scheduler.idle):
        scheduler.step()
        rounds += 1
        queue.append(len(scheduler.queue))
        if progress is not None and rounds % 64 == 0:
            progress(len(port.finishes))
    assert_ledger(scheduler.leases, idle=True)
    return _figures(trace, port, scheduler, runner, clock, np.array(queue))


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
        "ttft_s": _percentiles(ttft),
        "tpot_s": _percentiles(tpot),
        "e2e_s": _percentiles(port.ended - at),
        "queue_time_s": _percentiles(waited),
        "queue_length": {"mean": float(queue.mean()), "max": int(queue.max())},
        "forwards": counters.forwards,
        "retractions": counters.retractions,
        "dropped_tokens": counters.dropped_tokens,
        "device_busy": runner.busy_seconds / seconds,
        "ledger": "balanced",
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "mean": float(values.mean())}


def _parser() -> argparse.ArgumentParser:
    defaults = SchedulerConfig(max_running_requests=256, max_total_tokens=400_000, chunked_prefill_size=8192)
    cost = CostModel()
    parser = argparse.ArgumentParser(
        prog="ceiba simulate",
        description="Run the real scheduler on a trace with a simulated device and clock.",
    )
    parser.add_argument("trace", nargs="?", type=Path, help="JSONL, one request a line (see traces.py)")
    parser.add_argument("--synthetic", choices=sorted(SYNTHETIC), help="a made-up trace instead of a file")
    parser.add_argument("--requests", type=int, default=1000, help="length of a made-up trace")
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals per second of a made-up trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule-policy", choices=sorted(policy.POLICIES), default=defaults.policy)
    parser.add_argument("--max-running-requests", type=int, default=defaults.max_running_requests)
    parser.add_argument("--max-queued-requests", type=int, default=None)
    parser.add_argument("--max-total-tokens", type=int, default=defaults.max_total_tokens)
    parser.add_argument("--chunked-prefill-size", type=int, default=defaults.chunked_prefill_size)
    parser.add_argument("--max-prefill-tokens", type=int, default=defaults.max_prefill_tokens)
    parser.add_argument("--page-size", type=int, default=defaults.page_size)
    parser.add_argument("--context-length", type=int, default=32768)
    parser.add_argument("--schedule-conservativeness", type=float, default=defaults.conservativeness)
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    parser.add_argument("--enable-mixed-chunk", action="store_true")
    parser.add_argument("--cost-step-ms", type=float, default=cost.step * 1e3, help="per forward pass")
    parser.add_argument("--cost-prefill-us", type=float, default=cost.prefill_token * 1e6, help="per prompt token")
    parser.add_argument("--cost-decode-us", type=float, default=cost.decode_row * 1e6, help="per decoding request")
    parser.add_argument("--cost-context-ns", type=float, default=cost.context_token * 1e9, help="per token attended to")
    parser.add_argument("--cost-host-ms", type=float, default=cost.host * 1e3, help="host work per forward pass")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument("--no-progress", action="store_true")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``ceiba simulate``; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.trace is None) == (args.synthetic is None):
        parser.error("give a trace file or --synthetic KIND, one of them")
    try:
        trace = (
            read_trace(args.trace, args.seed)
            if args.trace is not None
            else make_trace(args.synthetic, args.requests, args.rate, args.seed)
        )
    except (TraceError, OSError) as error:
        print(f"ceiba simulate: {error}", file=sys.stderr)
        return 2
    config = SchedulerConfig(
        policy=args.schedule_policy,
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        max_total_tokens=args.max_total_tokens,
        max_prefill_tokens=max(args.max_prefill_tokens, args.context_length),
        chunked_prefill_size=args.chunked_prefill_size,
        page_size=args.page_size,
        conservativeness=args.schedule_conservativeness,
        disable_radix_cache=args.disable_radix_cache,
        overlap=not args.disable_overlap_schedule,
        enable_mixed_chunk=args.enable_mixed_chunk,
        random_seed=args.seed,
    )
    cost = CostModel(
        step=args.cost_step_ms / 1e3,
        prefill_token=args.cost_prefill_us / 1e6,
        decode_row=args.cost_decode_us / 1e6,
        context_token=args.cost_context_ns / 1e9,
        host=args.cost_host_ms / 1e3,
    )
    started = time.perf_counter()
    with _quiet(), _progress(len(trace), hidden=args.no_progress or not sys.stderr.isatty()) as update:
        figures = simulate(trace, config, context_len=args.context_length, cost=cost, progress=update)
    wall = time.perf_counter() - started
    text = json.dumps(figures, indent=2)
    if args.json == "-":
        print(text)
        return 0
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    _print(figures, wall)
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """A log line per step would drown the figures."""
    log = logging.getLogger("ceiba.scheduler")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _progress(total: int, *, hidden: bool) -> Iterator[Any]:
    if hidden:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        yield lambda ended: bar.update(task, completed=ended)


def _print(figures: dict[str, Any], wall: float) -> None:
    def ms(name: str) -> str:
        return f"p50 {figures[name]['p50'] * 1e3:,.1f} ms, p99 {figures[name]['p99'] * 1e3:,.1f} ms"

    rows = [
        ("requests", f"{figures['requests']:,} ({figures['aborted']} aborted, {figures['failed']} failed)"),
        ("simulated", f"{figures['simulated_s']:,.1f} s in {wall:.1f} s, {figures['forwards']:,} forward passes"),
        ("cache hit rate", f"{figures['hit_rate']:.1%} of {figures['prompt_tokens']:,} prompt tokens"),
        ("throughput", f"{figures['output_tokens_per_s']:,.0f} output tok/s, {figures['requests_per_s']:.2f} req/s"),
        ("first token", ms("ttft_s")),
        ("per output token", ms("tpot_s")),
        ("whole request", ms("e2e_s")),
        ("in the queue", ms("queue_time_s")),
        ("queue length", f"mean {figures['queue_length']['mean']:.1f}, max {figures['queue_length']['max']}"),
        ("retractions", f"{figures['retractions']:,}"),
        ("device busy", f"{figures['device_busy']:.1%}"),
        ("KV ledger", figures["ledger"]),
    ]
    for name, value in rows:
        print(f"{name:>17}  {value}")


if __name__ == "__main__":
    sys.exit(main())
