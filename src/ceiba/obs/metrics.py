"""Prometheus metrics under the names that dashboards for this kind of server already use (prefix ``sglang:``).

Owns one registry per front. Fed by front events (counters, histograms) and by heartbeats (gauges, read only when
scraped). Must never raise into the request path: an error here is logged once and the number is lost.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ceiba.core.messages import Usage

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

GAUGES: dict[str, tuple[str, str, bool]] = {
    # heartbeat stat: metric, help, whether it is zero by definition when nothing runs or waits
    "num_running_reqs": ("sglang:num_running_reqs", "Requests in the running batch", True),
    "num_queue_reqs": ("sglang:num_queue_reqs", "Requests that wait to be admitted", True),
    "num_used_tokens": ("sglang:num_used_tokens", "KV slots held by running requests", True),
    "token_usage": ("sglang:token_usage", "Share of the KV pool held by running requests, 0..1", True),
    "gen_throughput": ("sglang:gen_throughput", "Generated tokens per second, lately", True),
    "num_retracted_reqs": ("sglang:num_retracted_reqs", "Requests that were retracted and wait to run again", True),
    "decode_sum_seq_lens": ("sglang:decode_sum_seq_lens", "Tokens of all sequences in the running batch", True),
    "utilization": ("sglang:utilization", "Share of running slots in use, 0..1", True),
    "num_grammar_queue_reqs": ("sglang:num_grammar_queue_reqs", "Requests that wait for their grammar", True),
    "cache_hit_rate": ("sglang:cache_hit_rate", "Share of prompt tokens found in the prefix cache, lately", False),
    "max_total_num_tokens": ("sglang:max_total_num_tokens", "KV slots of the pool", False),
    "kv_available_tokens": ("sglang:kv_available_tokens", "Free KV slots", False),
    "kv_evictable_tokens": ("sglang:kv_evictable_tokens", "KV slots that only the prefix cache holds", False),
    "kv_used_tokens": ("sglang:kv_used_tokens", "KV slots neither free nor evictable", True),
    "spec_accept_length": (
        "sglang:spec_accept_length",
        "Tokens that a request gets from a decode step: one, and the drafts that were right; mean since start",
        False,
    ),
    "spec_accept_rate": ("sglang:spec_accept_rate", "Share of drafts that were right, 0..1, since start", False),
    "spec_num_draft_tokens": (
        "sglang:spec_num_draft_tokens",
        "Tokens of a request that a step verifies at most",
        False,
    ),
    "new_token_ratio": ("sglang:new_token_ratio", "Share of max_new_tokens that admission reserves", False),
    "page_size": ("sglang:page_size", "KV slots of a page", False),
    "num_pages": ("sglang:num_pages", "Pages of the KV pool", False),
    "context_len": ("sglang:context_len", "Longest prompt and answer together, in tokens", False),
    "hicache_host_total_tokens": ("sglang:hicache_host_total_tokens", "KV slots of the host tier", False),
    "hicache_host_used_tokens": ("sglang:hicache_host_used_tokens", "KV slots of the host tier in use", False),
    "is_cuda_graph": ("sglang:is_cuda_graph", "Whether the last decode step ran as a graph", False),
}
COUNTERS: dict[str, tuple[str, str]] = {
    "num_retracted_requests_total": ("sglang:num_retracted_requests", "Retractions since start"),
    "num_retracted_input_tokens_total": ("sglang:num_retracted_input_tokens", "Prompt tokens of retracted requests"),
    "num_retracted_output_tokens_total": ("sglang:num_retracted_output_tokens", "Output tokens of retracted requests"),
    "evicted_tokens_total": ("sglang:evicted_tokens", "Tokens evicted from the prefix cache"),
    "cuda_graph_passes_total": ("sglang:cuda_graph_passes", "Forward passes that ran as a graph"),
    "realtime_tokens_total": ("sglang:realtime_tokens", "Tokens computed, prompt and output"),
    "forward_execution_seconds_total": ("sglang:forward_execution_seconds", "Seconds spent in forward passes"),
    "scheduler_idle_seconds_total": ("sglang:scheduler_idle_seconds", "Seconds the scheduler had nothing to do"),
    "scheduler_process_cpu_seconds_total": ("sglang:scheduler_process_cpu_seconds", "CPU seconds of the scheduler"),
    "spec_verify_calls": ("sglang:spec_verify_calls", "Times that drafts of a request were verified"),
    "forwards_total": ("ceiba:forwards", "Forward passes since start"),
    "hicache.backup_tokens": ("sglang:hicache_backup_tokens", "Tokens copied from the device to the host"),
    "hicache.backup_bytes": ("sglang:hicache_backup_bytes", "Bytes copied from the device to the host"),
    "hicache_backup_dropped_tokens": ("sglang:hicache_backup_dropped_tokens", "Tokens for which the host had no room"),
    "hicache_dropped_tokens": ("sglang:hicache_dropped_tokens", "Tokens that left the host tier for good"),
    "hicache.load_back_tokens": ("sglang:load_back_tokens", "Tokens copied from the host to the device"),
    "hicache.load_back_bytes": ("sglang:load_back_bytes", "Bytes copied from the host to the device"),
    "hicache.prefetched_tokens": ("sglang:prefetched_tokens", "Tokens read from the storage"),
    "hicache.backuped_tokens": ("sglang:backuped_tokens", "Tokens written to the storage, or found there"),
    "hicache.prefetch_hit_tokens": ("sglang:storage_prefetch_hit_tokens", "Tokens that the storage had"),
    "hicache.prefetch_unfulfilled_tokens": (
        "sglang:storage_prefetch_unfulfilled_tokens",
        "Tokens that the storage had and that did not come in time",
    ),
    "hicache.prefetch_deferred_tokens": (
        "sglang:storage_prefetch_deferred_tokens",
        "Tokens read from the storage that had to wait for room in the host tier",
    ),
    "hicache.storage_errors": ("ceiba:hicache_storage_errors", "Jobs that the storage failed"),
}
DURATIONS: dict[str, tuple[str, str, str]] = {
    # metric: stat of the sum, stat of the count, help
    "sglang:hicache_backup_duration_seconds": ("backup_seconds", "backup_ops", "Copying from the device to the host"),
    "sglang:load_back_duration_seconds": ("load_back_seconds", "load_back_ops", "Copying from the host to the device"),
    "sglang:prefetch_pgs": ("prefetch_pages", "prefetch_ops", "Pages of one report from the storage"),
    "sglang:backup_pgs": ("backup_pages", "store_ops", "Pages of one write to the storage"),
}
"""Sums and counts of what the cache tiers do."""
BANDWIDTHS: dict[str, tuple[str, str, str]] = {
    # metric: stat of the bytes, stat of the seconds, help
    "sglang:prefetch_bandwidth": ("prefetch_bytes", "prefetch_seconds", "Reading from the storage, GB/s since start"),
    "sglang:backup_bandwidth": ("store_bytes", "store_seconds", "Writing to the storage, GB/s since start"),
}
CACHE_SOURCES = ("device", "host", "storage")
ALIASES: dict[str, str] = {
    # short heartbeat stat -> the name above
    "running": "num_running_reqs",
    "waiting": "num_queue_reqs",
    "tokens_used": "num_used_tokens",
    "tokens_total": "max_total_num_tokens",
    "tokens_free": "kv_available_tokens",
    "tokens_evictable": "kv_evictable_tokens",
    "retractions": "num_retracted_requests_total",
    "evicted_tokens": "evicted_tokens_total",
    "forwards": "forwards_total",
    "forward_seconds": "forward_execution_seconds_total",
}
STALE_SECONDS = 10.0
"""Gauges of a scheduler that has been silent for so long read zero: nothing is known to run."""

_TIME_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_TOKEN_TIME_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
_TOKEN_BUCKETS = (1, 10, 50, 100, 200, 400, 700, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 256000)

F = TypeVar("F", bound=Callable[..., None])


def _never_raises(method: F) -> F:
    @functools.wraps(method)
    def safe(self: FrontMetrics, *args: Any, **kwargs: Any) -> None:
        if not self.enabled:
            return
        try:
            method(self, *args, **kwargs)
        except Exception:
            if not self._complained:
                self._complained = True
                log.exception("metrics: %s failed; further failures are not logged", method.__name__)

    return safe  # type: ignore[return-value]


class FrontMetrics:
    """All metrics of one front. ``enabled`` False: every method returns at once and ``render`` is empty."""

    def __init__(self, enabled: bool, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.enabled = enabled
        self._complained = False
        self._clock = clock
        self._model_name = model_name
        self._stats: Mapping[str, float] = {}
        self._beat_at: float | None = None
        self._utilization = 0.0
        self._busy: tuple[float, float] | None = None
        if enabled:
            self._build()

    def _build(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

        disable_created_metrics()  # a second series for each counter that no dashboard reads
        self._registry = registry = CollectorRegistry()

        def counter(name: str, doc: str) -> Any:
            return Counter(name, doc, ["model_name"], registry=registry).labels(self._model_name)

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(name, doc, ["model_name"], registry=registry, buckets=buckets).labels(self._model_name)

        self._requests = counter("sglang:num_requests", "Choices whose generation ended, in whatever way")
        self._aborted = counter("sglang:num_aborted_requests", "Choices that were aborted")
        self._prompt_tokens = counter("sglang:prompt_tokens", "Prompt tokens of ended choices")
        self._output_tokens = counter("sglang:generation_tokens", "Generated tokens of ended choices")
        cached = Counter(
            "sglang:cached_tokens",
            "Prompt tokens that the prefix cache held, by where they lay",
            ["model_name", "cache_source"],
            registry=registry,
        )
        self._cached_tokens = {tier: cached.labels(self._model_name, tier) for tier in CACHE_SOURCES}
        self._ttft = histogram("sglang:time_to_first_token_seconds", "From arrival to first token", _TIME_BUCKETS)
        self._itl = histogram("sglang:inter_token_latency_seconds", "Between two tokens", _TOKEN_TIME_BUCKETS)
        self._e2e = histogram("sglang:e2e_request_latency_seconds", "From arrival to end", _TIME_BUCKETS)
        self._duration = histogram("sglang_request_duration_seconds", "From arrival to end", _TIME_BUCKETS)
        self._per_token = histogram(
            "sglang:request_time_per_output_token_seconds", "Whole latency over output tokens", _TOKEN_TIME_BUCKETS
        )
        self._queue_time = histogram("sglang:queue_time_seconds", "From arrival to admission", _TIME_BUCKETS)
        self._prompt_sizes = histogram("sglang:prompt_tokens_histogram", "Prompt tokens", _TOKEN_BUCKETS)
        self._uncached_sizes = histogram(
            "sglang:uncached_prompt_tokens_histogram", "Prompt tokens that were computed", _TOKEN_BUCKETS
        )
        self._output_sizes = histogram("sglang:generation_tokens_histogram", "Generated tokens", _TOKEN_BUCKETS)
        self._http_requests = Counter("sglang:http_requests", "HTTP requests", ["path", "method"], registry=registry)
        self._http_responses = Counter(
            "sglang:http_responses", "HTTP responses", ["path", "method", "status_code"], registry=registry
        )
        self._active = 0
        self._live = 0
        registry.register(_Scrape(self))

    # ── events ───────────────────────────────────────────────────────────────

    @_never_raises
    def started(self, choices: int) -> None:
        self._live += choices

    @_never_raises
    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    @_never_raises
    def between_tokens(self, seconds: float, count: int) -> None:
        """``seconds`` since this choice's last report, which brought ``count`` tokens at once."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    @_never_raises
    def finished(self, kind: str, seconds: float, usage: Usage | None) -> None:
        """A choice ended. ``usage`` None: it never reached the engine, or was cut short."""
        self._live -= 1
        self._requests.inc()
        if kind == "abort":
            self._aborted.inc()
        self._e2e.observe(seconds)
        self._duration.observe(seconds)
        if usage is None:
            return
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._output_tokens.inc(usage.completion_tokens)
        for tier, tokens in (usage.cached_by_tier or {"device": usage.cached_tokens}).items():
            self._cached_tokens[tier].inc(tokens)
        self._queue_time.observe(usage.queue_time)
        self._prompt_sizes.observe(usage.prompt_tokens)
        self._uncached_sizes.observe(max(0, usage.prompt_tokens - usage.cached_tokens))
        self._output_sizes.observe(usage.completion_tokens)
        if usage.completion_tokens:
            self._per_token.observe(seconds / usage.completion_tokens)

    @_never_raises
    def heartbeat(self, stats: Mapping[str, float]) -> None:
        now = self._clock()
        known = {ALIASES.get(name, name): float(value) for name, value in stats.items()}
        busy = known.get("forward_execution_seconds_total")
        if busy is not None:
            if self._busy is not None and now > self._busy[0]:
                self._utilization = min(1.0, max(0.0, (busy - self._busy[1]) / (now - self._busy[0])))
            self._busy = (now, busy)
        self._stats, self._beat_at = known, now

    @_never_raises
    def http_started(self, path: str, method: str) -> None:
        self._active += 1
        self._http_requests.labels(path, method).inc()

    @_never_raises
    def http_finished(self, path: str, method: str, status: int) -> None:
        self._active -= 1
        self._http_responses.labels(path, method, str(status)).inc()

    # ── scrape ───────────────────────────────────────────────────────────────

    def render(self) -> bytes:
        """The text exposition format (version 0.0.4)."""
        if not self.enabled:
            return b""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def _families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._stats
        alive = self._beat_at is not None and self._clock() - self._beat_at <= STALE_SECONDS
        idle = not alive or not (stats.get("num_running_reqs", 0) or stats.get("num_queue_reqs", 0))

        def gauge(name: str, doc: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, doc, labels=["model_name"])
            family.add_metric([self._model_name], value)
            return family

        for stat, (name, doc, zero_when_idle) in GAUGES.items():
            if stat in stats or zero_when_idle:
                yield gauge(name, doc, 0.0 if idle and zero_when_idle else stats.get(stat, 0.0))
        for stat, (name, doc) in COUNTERS.items():
            if stat in stats:
                family = CounterMetricFamily(name, doc, labels=["model_name"])
                family.add_metric([self._model_name], stats[stat])
                yield family
        yield from self._tiers(stats, gauge)
        running = 0.0 if idle else stats.get("num_running_reqs", 0.0)
        yield gauge("sglang_batch_size_current", "Requests in the running batch", running)
        usage = 0.0 if idle else stats.get("token_usage", 0.0)
        yield gauge("sglang_kv_cache_usage_ratio", "Share of the KV pool held by running requests, 0..1", usage)
        busy = 0.0 if idle else self._utilization
        yield gauge("sglang_gpu_utilization", "Share of time the device spent in forward passes, 0..1", busy)
        yield gauge("sglang:http_requests_active", "HTTP requests in flight", float(self._active))
        yield gauge("ceiba:live_choices", "Choices that the front waits for", float(max(0, self._live)))

    def _tiers(self, stats: Mapping[str, float], gauge: Callable[[str, str, float], Metric]) -> Iterator[Metric]:
        """What the cache tiers moved, where there are any."""
        from prometheus_client.core import SummaryMetricFamily

        if "hicache.backup_ops" not in stats:
            return
        for name, (total, count, doc) in DURATIONS.items():
            summary = SummaryMetricFamily(name, doc, labels=["model_name"])
            summary.add_metric([self._model_name], int(stats[f"hicache.{count}"]), stats[f"hicache.{total}"])
            yield summary
        for name, (size, seconds, doc) in BANDWIDTHS.items():
            spent = stats[f"hicache.{seconds}"]
            yield gauge(name, doc, stats[f"hicache.{size}"] / spent / 1e9 if spent else 0.0)


class _Scrape:
    """Turns the last heartbeat into gauges when somebody looks, so that a heartbeat costs nothing."""

    def __init__(self, metrics: FrontMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics._families()
