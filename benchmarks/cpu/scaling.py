"""How time grows: attention with the context, throughput with the requests at once. A table and a plot (SVG).

    python benchmarks/cpu/scaling.py [--model MODEL] [--flags "…"] [--lengths 1024,2048,4096,8000]
        [--at-once 1,2,4,8,16,32] [--rounds 5] [--out docs/images/cpu-scaling.svg]

Context: the runner alone decodes one request after a prompt of each length; what a token costs more than after 16
tokens is attention, and stands beside the bytes of KV that it reads over the memory bandwidth of the same minute.
Requests at once: ``ceiba bench serve`` sends 256-token prompts with 64-token answers, so many at a time. Rounds visit
all points in turn; medians count. Needs matplotlib for the plot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from ceilings import ceilings
from server import BUILD, ceiba, free_port, serving

FIRST = 16
"""Tokens of context that cost next to nothing."""
PROMPT, ANSWER = 256, 64
DECODE_TOKENS = 24


def decode_ms(path: str, flags: list[str], lengths: list[int]) -> dict[int, float]:
    """length -> ms a token of one request with a context of that length."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            out = Path(folder) / str(length)
            command = [sys.executable, "-m", "ceiba", "bench", "one-batch", "--model-path", path, "--repeat", "1"]
            command += [
                "--input-len",
                str(length),
                "--output-len",
                str(DECODE_TOKENS),
                "--output-file",
                str(out),
                *flags,
            ]
            subprocess.run(command, check=True, capture_output=True)
            found[length] = json.loads(out.read_text())["decode_ms"]
    return found


def throughput(url: str, at_once: int) -> dict[str, float]:
    """Output tokens a second, and the median gap, with ``at_once`` requests in flight."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        command = [sys.executable, "-m", "ceiba", "bench", "serve", "--url", url, "--dataset-name", "random"]
        command += ["--random-input", str(PROMPT), "--random-output", str(ANSWER), "--random-range-ratio", "1.0"]
        command += ["--num-prompts", str(max(8, 2 * at_once)), "--max-concurrency", str(at_once), "--flush-cache"]
        command += ["--no-progress", "--output-file", out.name]
        subprocess.run(command, check=True, capture_output=True)
        record: dict[str, Any] = json.loads(Path(out.name).read_text())
    return {"tok_s": record["output_throughput"], "itl_ms": record["median_itl_ms"]}


def kv_bytes(path: str, flags: list[str]) -> int:
    """Bytes of keys and values that a token of context adds to what a step reads."""
    from ceiba.checkpoint import open_checkpoint
    from ceiba.config import sizing
    from ceiba.config.parse import parse_args
    from ceiba.launch.configure import configure

    config = configure(parse_args(["--model-path", path, *flags]))
    return sizing.kv_bytes_per_token(open_checkpoint(path).facts(), config.runner.kv_cache_dtype)


def plot(path: Path, context: list[list[float]], load: list[list[float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    lengths, attention, limit = (np.array(column) for column in list(zip(*context, strict=True))[:3])
    left.plot(lengths, attention, "o-", label="attention, ms a token")
    left.plot(lengths, limit, "--", label="KV bytes / memory bandwidth")
    left.set(xlabel="tokens of context", ylabel="ms a token", ylim=(0, None), title="Attention and context")
    left.legend()
    at_once, rate = (np.array(column) for column in list(zip(*load, strict=True))[:2])
    right.plot(at_once, rate, "o-")
    right.set(xscale="log", xlabel="requests at once", ylabel="output tokens/s", title="Throughput", ylim=(0, None))
    right.set_xticks(at_once, [str(int(n)) for n in at_once])
    right.minorticks_off()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description="How time grows with context and with requests at once.")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--flags", default="", help="of server and runner")
    parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 4096, 8000])
    parser.add_argument("--at-once", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=BUILD / "results" / "cpu-scaling.svg")
    args = parser.parse_args()
    from ceiba.checkpoint import resolve_path

    path, flags, threads = resolve_path(args.model), args.flags.split(), len(os.sched_getaffinity(0))
    per_token = kv_bytes(path, flags)
    attention, limits = defaultdict(list), defaultdict(list)
    rates, gaps = defaultdict(list), defaultdict(list)
    for number in range(args.rounds):
        bandwidth = ceilings(threads)["read_gb_s"] * 1e9
        times = decode_ms(path, flags, [FIRST, *args.lengths])
        for length in args.lengths:
            attention[length].append(times[length] - times[FIRST])
            limits[length].append((length - FIRST) * per_token / bandwidth * 1e3)
        port = free_port()
        with serving(ceiba(path, port, flags), port, BUILD / "logs" / "scaling.log") as server:
            throughput(server.url, 2)
            for at_once in args.at_once:
                found = throughput(server.url, at_once)
                rates[at_once].append(found["tok_s"])
                gaps[at_once].append(found["itl_ms"])
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr, flush=True)

    context = [[n, statistics.median(attention[n]), statistics.median(limits[n])] for n in args.lengths]
    load = [[n, statistics.median(rates[n]), statistics.median(gaps[n])] for n in args.at_once]
    print(f"KV cache: {per_token:,} bytes a token\n")
    print("| context, tokens | attention, ms a token | KV bytes / bandwidth, ms | ratio |\n|---|---|---|---|")
    for n, took, limit in context:
        print(f"| {n} | {took:.3f} | {limit:.3f} | {took / limit:.2f} |")
    print("\n| requests at once | output tokens/s | per request | inter-token ms |\n|---|---|---|---|")
    for n, rate, gap in load:
        print(f"| {n} | {rate:.1f} | {rate / n:.1f} | {gap:.2f} |")
    plot(args.out, context, load)
    print(f"\nplot: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
