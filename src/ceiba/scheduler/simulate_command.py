"""The command ``ceiba simulate``: one trace under one policy, or under several side by side. Owns flags and printing;
the simulation is ``simulate``, the drawing ``simulate_report``.
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

import msgspec

from ceiba.cache import eviction
from ceiba.config.records import SchedulerConfig
from ceiba.scheduler import policy, simulate_report
from ceiba.scheduler.fake import CostModel
from ceiba.scheduler.simulate import simulate
from ceiba.scheduler.traces import SYNTHETIC, TraceError, TraceRequest, make_trace, read_trace


class VariantError(ValueError):
    """A variant of --compare that does not exist; the text says what does."""


def variant(text: str, base: SchedulerConfig) -> SchedulerConfig:
    """``base`` with what ``text`` names: POLICY, then +fair, +priority, +nocache, +mixed or @EVICTION, in any order."""
    name, *rest = text.replace("@", "+@").split("+")
    if name not in policy.POLICIES:
        raise VariantError(f"{text}: no schedule policy {name!r}; there are {', '.join(policy.POLICIES)}")
    changes: dict[str, Any] = {"policy": name, "enable_priority_scheduling": name == "priority"}
    options: dict[str, dict[str, Any]] = {
        "fair": {"fair_share": "routing-key"},
        "priority": {"enable_priority_scheduling": True},
        "nocache": {"disable_radix_cache": True},
        "mixed": {"enable_mixed_chunk": True},
    }
    for option in rest:
        if option.startswith("@") and option[1:] in eviction.POLICIES:
            changes["radix_eviction_policy"] = option[1:]
        elif option in options:
            changes |= options[option]
        else:
            raise VariantError(
                f"{text}: {option!r} is none of +{', +'.join(options)}, @{', @'.join(eviction.POLICIES)}"
            )
    if changes["enable_priority_scheduling"] and name not in {"fcfs", "lof", "priority"}:
        raise VariantError(f"{text}: priorities go with fcfs and lof only")
    return msgspec.structs.replace(base, **changes)


def _parser() -> argparse.ArgumentParser:
    defaults = SchedulerConfig(max_running_requests=256, max_total_tokens=400_000, chunked_prefill_size=8192)
    cost = CostModel()
    parser = argparse.ArgumentParser(
        prog="ceiba simulate",
        description="Run the real scheduler on a trace with a simulated device and clock.",
    )
    parser.add_argument("trace", nargs="?", type=Path, help="JSONL, one request a line (docs/scheduling.md)")
    parser.add_argument("--synthetic", choices=sorted(SYNTHETIC), help="a made-up trace instead of a file")
    parser.add_argument("--requests", type=int, default=1000, help="length of a made-up trace")
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals per second of a made-up trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compare",
        metavar="VARIANTS",
        help="several policies side by side, as in fcfs,lpm,fcfs+fair,lpm@slru; "
        "after a policy: +fair +priority +nocache +mixed @EVICTION",
    )
    parser.add_argument("--report", metavar="FILE", type=Path, help="draw queue, hit rate and latency: .html or .svg")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--radix-eviction-policy", choices=sorted(eviction.POLICIES), default="lru")
    parser.add_argument("--fair-share", action="store_true", help="share between the trace's routing keys")
    parser.add_argument("--prefill-decode-interval", type=int, default=0)
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
    parser.add_argument("--disable-late-planning", action="store_true", help="plan a step when the one before begins")
    parser.add_argument("--enable-mixed-chunk", action="store_true")
    parser.add_argument("--mixed-chunk-target-ms", type=float, default=0.0, help="cut mixed chunks to this; 0: never")
    parser.add_argument("--cost-step-ms", type=float, default=cost.step * 1e3, help="per forward pass")
    parser.add_argument("--cost-prefill-us", type=float, default=cost.prefill_token * 1e6, help="per prompt token")
    parser.add_argument("--cost-decode-us", type=float, default=cost.decode_row * 1e6, help="per decoding request")
    parser.add_argument("--cost-context-ns", type=float, default=cost.context_token * 1e9, help="per token attended to")
    parser.add_argument("--cost-hidden", action="store_true", help="weights are read while a prompt's products run")
    parser.add_argument("--cost-tile", type=int, default=1, help="a step with prompts costs such multiples of tokens")
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
    if args.report is not None and args.report.suffix not in {".html", ".svg"}:
        parser.error(f"--report {args.report}: the name must end in .html or .svg")
    base = _config(args)
    try:
        variants = (
            {args.schedule_policy: variant(args.schedule_policy, base)}
            if args.compare is None
            else {name: variant(name, base) for name in args.compare.split(",")}
        )
    except VariantError as error:
        print(f"ceiba simulate: {error}", file=sys.stderr)
        return 2
    cost = CostModel(
        step=args.cost_step_ms / 1e3,
        prefill_token=args.cost_prefill_us / 1e6,
        decode_row=args.cost_decode_us / 1e6,
        context_token=args.cost_context_ns / 1e9,
        host=args.cost_host_ms / 1e3,
        hidden=args.cost_hidden,
        tile=max(1, args.cost_tile),
    )
    runs: dict[str, dict[str, Any]] = {}
    walls: dict[str, float] = {}
    hidden = args.no_progress or not sys.stderr.isatty()
    for name, config in variants.items():
        started = time.perf_counter()
        with _quiet(), _progress(len(trace), name, hidden=hidden) as update:
            runs[name] = simulate(
                trace,
                config,
                context_len=args.context_length,
                cost=cost,
                progress=update,
                detail=args.report is not None,
            )
        walls[name] = time.perf_counter() - started
    if args.report is not None:
        args.report.write_text(_report(args, trace, runs), encoding="utf-8")
    _show(args, runs, walls)
    return 0


def _config(args: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        max_total_tokens=args.max_total_tokens,
        max_prefill_tokens=max(args.max_prefill_tokens, args.context_length),
        chunked_prefill_size=args.chunked_prefill_size,
        page_size=args.page_size,
        conservativeness=args.schedule_conservativeness,
        disable_radix_cache=args.disable_radix_cache,
        radix_eviction_policy=args.radix_eviction_policy,
        fair_share="routing-key" if args.fair_share else "off",
        prefill_decode_interval=args.prefill_decode_interval,
        overlap=not args.disable_overlap_schedule,
        late_planning=not args.disable_late_planning,
        enable_mixed_chunk=args.enable_mixed_chunk,
        mixed_chunk_target=args.mixed_chunk_target_ms / 1e3,
        random_seed=args.seed,
    )


def _report(args: argparse.Namespace, trace: list[TraceRequest], runs: dict[str, dict[str, Any]]) -> str:
    source = str(args.trace.name) if args.trace is not None else f"{args.synthetic} (made up, seed {args.seed})"
    title = f"Simulated: {source}"
    subtitle = (
        f"{len(trace):,} requests, pool {args.max_total_tokens:,} tokens, at most {args.max_running_requests} running, "
        f"chunk {args.chunked_prefill_size}."
    )
    if args.report.suffix == ".svg":
        return simulate_report.svg(runs, title)
    return simulate_report.page(runs, title, subtitle)


def _show(args: argparse.Namespace, runs: dict[str, dict[str, Any]], walls: dict[str, float]) -> None:
    plain = {name: {k: v for k, v in run.items() if k not in {"timeline", "queue_times"}} for name, run in runs.items()}
    text = json.dumps(plain if args.compare is not None else next(iter(plain.values())), indent=2)
    if args.json == "-":
        print(text)
        return
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.compare is None and not args.markdown:
        _print(next(iter(runs.values())), next(iter(walls.values())))
        return
    tables = filter(None, (simulate_report.table(runs), simulate_report.tenant_table(runs)))
    print("\n\n".join((simulate_report.markdown if args.markdown else _columns)(rows) for rows in tables))


def _columns(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(v.rjust(w) if i else v.ljust(w) for i, (v, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join(lines)


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
def _progress(total: int, name: str, *, hidden: bool) -> Iterator[Any]:
    if hidden:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
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
        ("retractions", f"{figures['retractions']:,} ({figures['preemptions']:,} for a higher priority)"),
        ("device busy", f"{figures['device_busy']:.1%}"),
        ("KV ledger", figures["ledger"]),
    ]
    for name, value in rows:
        print(f"{name:>17}  {value}")


if __name__ == "__main__":
    sys.exit(main())
