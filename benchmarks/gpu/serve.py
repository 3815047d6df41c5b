"""The whole server on one GPU with dummy weights: start it, load it, print tables. Runs on a bare machine that has
torch and Triton; what else is missing comes from a folder of wheels.

    python benchmarks/gpu/serve.py --models 8b,30b [--workloads single,burst] [--runs 3] [--starts 3] [--wheels .whl]
        [--client load.py] [--variant "fp8=--quantization fp8"] [--out DIR] [--cache triton-cache.tgz]
        [--tests tests/gpu/test_gpu_runner.py]

``--client`` names a load client with the arguments of ``ceiba bench serve --workload`` (``--url --model --vocab
--only``); without it, that command is the client; ``--load-arguments`` go to either. ``--variant NAME=FLAGS`` (any
number) starts the server once for each with these flags; none: once with its defaults. ``--runs``: every workload so
many times, the cache emptied between, medians in the table; before each the device's ceilings are measured by a process
that lives as long as the benchmark.
``--starts``: so many servers are only started and stopped, after the workloads, whose server has then compiled the
kernels; without workloads one more start, which is not counted, does so. With ``--cold`` each starts without compiled
kernels, in an empty TRITON_CACHE_DIR.
``--cache``: compiled kernels of an earlier run, read if it exists and written to --out at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = Path("/tmp/ceiba-site")
CACHE = Path.home() / ".triton"
VOCAB = 151936
COMMON = {
    "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "num_attention_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": VOCAB,
}  # fmt: skip
MODELS = {
    "8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_key_value_heads": 8, **COMMON,
    },
    "30b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8, **COMMON,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 128, "num_hidden_layers": 2,
        **COMMON, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
"""Shapes of Qwen3-8B and Qwen3-30B-A3B, and one to try this script on."""


def write_model(name: str) -> Path:
    """config.json and a tokenizer in which every id has a text of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = Path("/tmp") / f"ceiba-{name}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"Ġw{index}" for index in range(VOCAB - len(alphabet))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(SITE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def install(wheels: str) -> None:
    found = sorted(str(path) for path in Path(wheels).glob("*.whl"))
    if found:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--no-cache-dir", "--upgrade", "--target", str(SITE), *found], check=True)


def start(path: Path, port: int, flags: str, log: Path, cache: str = "") -> tuple[subprocess.Popen[bytes], float]:
    """A server that has just been launched, and the moment. ``cache``: a folder of its own for compiled kernels."""
    command = [sys.executable, "-m", "ceiba", "serve", str(path), "--load-format", "dummy", "--port", str(port)]
    with log.open("wb") as out:
        own = {**environment(), **({"TRITON_CACHE_DIR": cache} if cache else {})}
        begun = time.perf_counter()
        process = subprocess.Popen([*command, *shlex.split(flags)], env=own, stdout=out, stderr=subprocess.STDOUT)
    return process, begun


def wait_healthy(process: subprocess.Popen[bytes], port: int, begun: float, limit: float) -> float:
    """Seconds from launch to the first 200 of /health."""
    while time.perf_counter() - begun < limit:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return time.perf_counter() - begun
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    raise SystemExit(f"the server is not healthy after {time.perf_counter() - begun:.0f} s (status {process.poll()})")


def load(client: str, port: int, model: str, workloads: str, limit: float, more: str = "") -> list[dict[str, Any]]:
    """One JSON line for each workload."""
    url = f"http://127.0.0.1:{port}"
    if client:
        command = [sys.executable, client, "--only", workloads]
    else:
        command = [sys.executable, "-m", "ceiba", "bench", "serve", "--workload", workloads]
    command += ["--url", url, "--model", model, "--vocab", str(VOCAB - 1000), *shlex.split(more)]
    lines = []
    begun = time.perf_counter()
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    watch = threading.Timer(limit, process.kill)
    watch.start()
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("{"):
            print(text, end="", flush=True)
            lines.append(json.loads(text))
    watch.cancel()
    if process.wait():
        print(f"the load ended with status {process.returncode} after {time.perf_counter() - begun:.0f} s", flush=True)
    return lines


def counters(port: int) -> dict[str, float]:
    """What the scheduler counted, from /server_info."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=5) as answer:
        state = json.load(answer)["internal_states"][0]
    return {key: value for key, value in state.items() if isinstance(value, int | float)}


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def excerpt(log: Path, first: int, last: int) -> str:
    """The beginning and the end of a log, which grows by a line for every few steps."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines if len(lines) <= first + last else [*lines[:first], "...", *lines[-last:]])


class Ceilings:
    """``ceilings.py --serve`` beside the server; it measures while nothing else runs."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "benchmarks/gpu/ceilings.py"), "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self) -> dict[str, float]:
        """Nothing where there is no CUDA device."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is not None:
            return {}
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def flush(port: int) -> None:
    """Empty the prefix cache: the next run sends the same prompts."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/flush_cache", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


@dataclass
class Record:
    """What one workload gave, over its runs."""

    model: str
    variant: str
    workload: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    ceilings: list[dict[str, float]] = field(default_factory=list)


FIGURES: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "single": [("inter-token ms", ("itl_ms", "p50")), ("first token ms", ("ttft_ms", "p50"))],
    "burst": [("output tok/s", ("out_tok/s",))],
    "prefix": [("requests/s", ("req/s",))],
    "long": [("total tok/s", ("total_tok/s",))],
    "online": [
        ("first token ms p50", ("ttft_ms", "p50")),
        ("first token ms p99", ("ttft_ms", "p99")),
        ("time per output token ms p50", ("tpot_ms_p50",)),
        ("gap ms p99", ("itl_ms", "p99")),
    ],
}
"""What a workload is judged by: title, and where its line has it."""


def figure(line: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = line
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def spread(values: list[float]) -> str:
    """Median, and the range of several."""
    middle = statistics.median(values)
    text = f"{middle:,.0f}" if middle >= 1000 else f"{middle:.4g}"
    return text if len(values) < 2 else f"{text} ({min(values):.4g}-{max(values):.4g})"


def markdown(records: list[Record], starts: list[tuple[str, str, list[float]]]) -> str:
    rows = ["| model | variant | workload | figure | median (range) | copy TB/s | bf16 TFLOP/s | errors |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for record in records:
        errors = sum(line.get("err", 0) for line in record.lines)
        limits = [
            spread([c[name] for c in record.ceilings if name in c]) if any(name in c for c in record.ceilings) else "-"
            for name in ("copy_TBps", "bf16_TFLOPs")
        ]
        for title, path in FIGURES.get(record.workload, []):
            values = [value for line in record.lines if (value := figure(line, path)) is not None]
            if values:
                cells = [record.model, record.variant, record.workload, title, spread(values), *limits, str(errors)]
                rows.append("| " + " | ".join(cells) + " |")
    rows += [f"| {model} | {kind} | start | healthy, s | {spread(found)} | | | |" for model, kind, found in starts]
    return "\n".join(rows)


def run_loads(options: argparse.Namespace, port: int, path: Path, name: str, variant: str, found: list[Record]) -> None:
    """Every workload --runs times into ``found``; the first run after a warm-up."""
    ceilings = Ceilings()
    workloads = options.workloads.split(",")
    records = {workload: Record(name, variant, workload) for workload in workloads}
    found += records.values()
    try:
        load(options.client, port, str(path), "warm", 60, options.load_arguments)
        for _ in range(options.runs):
            for workload in workloads:
                flush(port)
                limits = ceilings.measure()
                for line in load(options.client, port, str(path), workload, options.load_limit, options.load_arguments):
                    records[workload].lines.append(line)
                    records[workload].ceilings.append(limits)
    finally:
        ceilings.close()


def only_start(options: argparse.Namespace, path: Path, port: int, flags: str, log: Path) -> list[float]:
    """Seconds to healthy of --starts fresh servers, without compiled kernels where --cold."""
    found = []
    uncounted = 0 if options.cold or options.workloads else 1
    for turn in range(options.starts + uncounted):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
            process, begun = start(path, port, flags, log, empty if options.cold else "")
            try:
                seconds = wait_healthy(process, port, begun, options.start_limit)
            except SystemExit:
                print(excerpt(log, 5, 20), flush=True)
                raise
            finally:
                stop(process)
        if turn >= uncounted:
            found.append(seconds)
        note = "" if turn >= uncounted else ", not counted: it may have compiled kernels"
        print(f"{path.name} started in {seconds:.1f} s{note}", flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b")
    parser.add_argument("--workloads", default="single,burst,prefix,long,online", help="empty: none")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--wheels", default=".whl")
    parser.add_argument("--client", default="")
    parser.add_argument("--load-arguments", default="")
    parser.add_argument("--out", default=os.environ.get("OUT", "/tmp"))
    parser.add_argument("--cache", default="")
    parser.add_argument("--tests", default="", help="pytest arguments, run while the first server starts")
    parser.add_argument("--start-limit", type=float, default=200.0)
    parser.add_argument("--load-limit", type=float, default=300.0)
    return parser.parse_args()


def loaded(
    options: argparse.Namespace, path: Path, port: int, name: str, variant: str, flags: str, tests: str, log: Path,
    records: list[Record],
) -> None:  # fmt: skip
    """A server with these flags under every workload, into ``records``; ``tests``: pytest's arguments, run first."""
    process, begun = start(path, port, flags, log)
    beside = None
    if tests:
        beside = subprocess.Popen([sys.executable, "-m", "pytest", *shlex.split(tests)], env=environment())
    try:
        seconds = wait_healthy(process, port, begun, options.start_limit)
        print(f"{name} {variant}: healthy after {seconds:.1f} s", flush=True)
        if beside is not None:
            beside.wait()
        run_loads(options, port, path, name, variant, records)
        print(json.dumps(counters(port)), flush=True)
    finally:
        stop(process)
        print(excerpt(log, 20, 8), flush=True)


def main() -> None:
    options = arguments()
    out = Path(options.out)
    if options.cache and Path(options.cache).exists():
        with tarfile.open(options.cache) as archive:
            archive.extractall(CACHE.parent, filter="data")
    install(options.wheels)
    variants = [tuple(text.split("=", 1)) for text in options.variant] or [("defaults", "")]
    records: list[Record] = []
    starts: list[tuple[str, str, list[float]]] = []
    failed = []
    for index, (name, (variant, flags)) in enumerate(itertools.product(options.models.split(","), variants)):
        path, port, log = write_model(name), 30000 + index, out / f"serve-{name}-{variant}.log"
        try:
            if options.workloads:
                tests = "" if index else options.tests
                loaded(options, path, port, name, variant, flags, tests, log, records)
            if options.starts:
                kind = f"{variant}, nothing compiled" if options.cold else f"{variant}, kernels compiled before"
                log = log.with_name(f"start-{name}-{variant}{'-cold' if options.cold else ''}.log")
                starts.append((name, kind, only_start(options, path, port, flags, log)))
        except SystemExit as error:  # the other variants are still worth their time
            failed.append(f"{name} {variant}: {error}")
            print(failed[-1], flush=True)
        finally:
            (out / "serve.md").write_text(markdown(records, starts) + "\n")
    if CACHE.exists():
        with tarfile.open(out / "triton-cache.tgz", "w:gz") as archive:
            archive.add(CACHE, CACHE.name)
    print(markdown(records, starts))
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
