"""Figures from outcomes: percentiles, the short JSON line of a workload, the long record and the table of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ceiba.bench.drive import Run


def quantile(values: Sequence[float], p: float) -> float:
    """The value at rank floor(p × n) of the sorted values (the largest at most); NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))] if ordered else float("nan")


def workload_line(name: str, run: Run) -> dict[str, Any]:
    """The compact record of a named workload. Times in ms where a key says so, rates per second of wall time."""
    good = [o for o in run.outcomes if not o.error]
    bad = [o for o in run.outcomes if o.error]
    line: dict[str, Any] = {"workload": name, "ok": len(good), "err": len(bad), "s": round(run.seconds, 3)}
    if good:
        output = sum(o.output_tokens for o in good)
        prompt = sum(o.prompt_tokens for o in good)
        ttft = [o.ttft * 1e3 for o in good]
        gaps = [gap * 1e3 for o in good for gap in o.gaps]
        line |= {
            "req/s": round(len(good) / run.seconds, 2),
            "out_tok/s": round(output / run.seconds, 1),
            "total_tok/s": round((output + prompt) / run.seconds, 1),
            "ttft_ms": {"p50": round(quantile(ttft, 0.5), 1), "p99": round(quantile(ttft, 0.99), 1)},
            "itl_ms": {"p50": round(quantile(gaps, 0.5), 2), "p99": round(quantile(gaps, 0.99), 2)},
            "events_per_token": round(sum(o.events for o in good) / output, 3),
            "tpot_ms_p50": round(quantile([o.tpot for o in good], 0.5) * 1e3, 3),
        }
    if bad:
        line["first_err"] = bad[0].error
    return line


def _spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """mean, median, standard deviation, p90, p99 and maximum of values in ms."""
    if not values:
        return {}
    return {
        f"mean_{prefix}_ms": statistics.fmean(values),
        f"median_{prefix}_ms": statistics.median(values),
        f"std_{prefix}_ms": statistics.pstdev(values),
        f"p90_{prefix}_ms": quantile(values, 0.9),
        f"p99_{prefix}_ms": quantile(values, 0.99),
        f"max_{prefix}_ms": max(values),
    }


def summary(run: Run) -> dict[str, Any]:
    """The full record of a run, in the field's usual key names."""
    good = [o for o in run.outcomes if not o.error]
    bad = [o for o in run.outcomes if o.error]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    cached = [o.cached_tokens for o in good if o.cached_tokens is not None]
    record: dict[str, Any] = {
        "completed": len(good),
        "failed": len(bad),
        "duration": run.seconds,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": sum(cached) if cached else None,
        "request_throughput": len(good) / run.seconds,
        "input_throughput": prompt / run.seconds,
        "output_throughput": output / run.seconds,
        "total_throughput": (prompt + output) / run.seconds,
        "concurrency": sum(o.latency for o in good) / run.seconds,
    }
    record |= _spread("e2e_latency", [o.latency * 1e3 for o in good])
    record |= _spread("ttft", [o.ttft * 1e3 for o in good])
    record |= _spread("tpot", [o.tpot * 1e3 for o in good if o.output_tokens > 1])
    record |= _spread("itl", [gap * 1e3 for o in good for gap in o.gaps])
    if bad:
        record["first_error"] = bad[0].error
    return record


_LATENCIES = (
    ("time to first token", "ttft"),
    ("time per output token", "tpot"),
    ("gap between events", "itl"),
    ("end to end", "e2e_latency"),
)


def print_summary(console: Console, title: str, record: dict[str, Any]) -> None:
    counts = Table(title=title, show_header=False, title_justify="left")
    counts.add_row("requests", f"{record['completed']} completed, {record['failed']} failed")
    counts.add_row("duration", f"{record['duration']:.2f} s")
    cached = record["total_cached_tokens"]
    note = "" if cached is None else f" ({cached} from the cache)"
    counts.add_row("tokens", f"{record['total_input_tokens']} in{note}, {record['total_output_tokens']} out")
    counts.add_row("requests/s", f"{record['request_throughput']:.2f}")
    counts.add_row(
        "tokens/s",
        f"{record['input_throughput']:.1f} in, {record['output_throughput']:.1f} out, "
        f"{record['total_throughput']:.1f} in all",
    )
    counts.add_row("mean in flight", f"{record['concurrency']:.2f}")
    console.print(counts)
    latencies = Table("ms", "mean", "median", "p90", "p99", "max")
    for label, key in _LATENCIES:
        if f"mean_{key}_ms" in record:
            latencies.add_row(
                label, *(f"{record[f'{part}_{key}_ms']:.2f}" for part in ("mean", "median", "p90", "p99", "max"))
            )
    console.print(latencies)
    if record["failed"]:
        console.print(f"[red]first error:[/red] {record['first_error']}", markup=True, highlight=False)


def print_workloads(console: Console, lines: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "workload", "ok", "err", "s", "req/s", "out tok/s", "ttft p50", "ttft p99", "itl p50", "itl p99", "tpot"
    )
    for line in lines:
        if "req/s" not in line:
            table.add_row(line["workload"], str(line["ok"]), str(line["err"]), str(line["s"]))
            continue
        cells = (
            line["ok"], line["err"], line["s"], line["req/s"], line["out_tok/s"],
            line["ttft_ms"]["p50"], line["ttft_ms"]["p99"],
            line["itl_ms"]["p50"], line["itl_ms"]["p99"], line["tpot_ms_p50"],
        )  # fmt: skip
        table.add_row(line["workload"], *map(str, cells))
    console.print(table)
