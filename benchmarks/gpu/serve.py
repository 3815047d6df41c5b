"""The whole server on one GPU with dummy weights: start it, load it, print one table. Runs on a bare machine that has
torch and Triton; what else is missing comes from a folder of wheels.

    python benchmarks/gpu/serve.py --models 8b,30b [--workloads single,burst] [--wheels .whl] [--client load.py]
        [--out DIR] [--cache triton-cache.tgz] [--flags "--disable-cuda-graph"] [--tests tests/gpu/test_gpu_runner.py]

``--client`` names a load client with the arguments of ``ceiba bench serve --workload`` (``--url --model --vocab
--only``); without it, that command is the client. ``--cache``: compiled kernels of an earlier run, read if it exists
and written to --out at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

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
}  # fmt: skip
"""Shapes of Qwen3-8B and Qwen3-30B-A3B."""


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


def start(path: Path, port: int, flags: str, log: Path) -> tuple[subprocess.Popen[bytes], float]:
    """A server that has just been launched, and the moment."""
    command = [sys.executable, "-m", "ceiba", "serve", str(path), "--load-format", "dummy", "--port", str(port)]
    with log.open("wb") as out:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*command, *shlex.split(flags)], env=environment(), stdout=out, stderr=subprocess.STDOUT
        )
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


def load(client: str, port: int, model: str, workloads: str, limit: float) -> list[dict[str, object]]:
    """One JSON line for each workload."""
    url = f"http://127.0.0.1:{port}"
    if client:
        command = [sys.executable, client, "--only", workloads]
    else:
        command = [sys.executable, "-m", "ceiba", "bench", "serve", "--workload", workloads]
    command += ["--url", url, "--model", model, "--vocab", str(VOCAB - 1000)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b")
    parser.add_argument("--workloads", default="warm,single,burst,prefix,long,online")
    parser.add_argument("--wheels", default=".whl")
    parser.add_argument("--client", default="")
    parser.add_argument("--out", default=os.environ.get("OUT", "/tmp"))
    parser.add_argument("--cache", default="")
    parser.add_argument("--flags", default="")
    parser.add_argument("--tests", default="", help="pytest arguments, run while the first server starts")
    parser.add_argument("--start-limit", type=float, default=200.0)
    parser.add_argument("--load-limit", type=float, default=300.0)
    options = parser.parse_args()
    out = Path(options.out)
    if options.cache and Path(options.cache).exists():
        with tarfile.open(options.cache) as archive:
            archive.extractall(CACHE.parent, filter="data")
    install(options.wheels)
    rows = []
    for index, name in enumerate(options.models.split(",")):
        path, port, log = write_model(name), 30000 + index, out / f"serve-{name}.log"
        process, begun = start(path, port, options.flags, log)
        tests = None
        if options.tests and not index:
            tests = subprocess.Popen([sys.executable, "-m", "pytest", *shlex.split(options.tests)], env=environment())
        try:
            seconds = wait_healthy(process, port, begun, options.start_limit)
            print(f"{name}: healthy after {seconds:.1f} s", flush=True)
            if tests is not None:
                tests.wait()
            results = load(options.client, port, str(path), options.workloads, options.load_limit)
            rows += [(name, seconds, line) for line in results]
            print(json.dumps(counters(port)), flush=True)
        finally:
            stop(process)
            print(excerpt(log, 20, 12), flush=True)
    if CACHE.exists():
        with tarfile.open(out / "triton-cache.tgz", "w:gz") as archive:
            archive.add(CACHE, CACHE.name)
    print(f"{'model':6}{'workload':10}{'ok':>5}{'err':>5}{'req/s':>9}{'out tok/s':>11}{'all tok/s':>11}"
          f"{'ttft p50':>10}{'p99':>9}{'tpot':>8}{'itl p50':>9}{'p99':>8}{'start s':>9}")  # fmt: skip
    for name, seconds, line in rows:
        ttft, itl = line.get("ttft_ms", {}), line.get("itl_ms", {})
        print(f"{name:6}{line['workload']:10}{line['ok']:5}{line['err']:5}{line.get('req/s', 0):9}"
              f"{line.get('out_tok/s', 0):11}{line.get('total_tok/s', 0):11}{ttft.get('p50', 0):10}"
              f"{ttft.get('p99', 0):9}{line.get('tpot_ms_p50', 0):8}{itl.get('p50', 0):9}{itl.get('p99', 0):8}"
              f"{seconds:9.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
