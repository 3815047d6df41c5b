"""Schedule policies side by side, as Markdown: traces through the simulator, and two, scaled down, on the real server.

    python benchmarks/policies.py                 simulated: the same figures on any machine
    python benchmarks/policies.py --server        on the embedded model; ratios to fcfs, policies interleaved in rounds

The simulated device has the default costs of ``ceiba simulate`` (an 8B model on one large GPU). On the real server the
pool holds less than the traces' prefixes, so that the order decides what is still cached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import httpx
import numpy as np

from ceiba.scheduler import simulate_command

POLICIES = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "lof", "random", "routing-key")
SIMULATED: dict[str, tuple[str, str]] = {
    # title -> arguments, variants
    "chat with shared system prompts": (
        "--synthetic chat --requests 250 --rate 60 --max-running-requests 16 --max-total-tokens 10000",
        ",".join(POLICIES),
    ),
    "multi-turn agents": (
        "--synthetic agents --requests 500 --rate 10 --max-running-requests 48 --max-total-tokens 30000",
        ",".join(POLICIES),
    ),
    "few-shot": (
        "--synthetic fewshot --requests 600 --rate 40 --max-running-requests 48 --max-total-tokens 30000",
        ",".join(POLICIES),
    ),
    "unrelated long documents": (
        "--synthetic long --requests 150 --rate 4 --max-running-requests 48 --max-total-tokens 100000",
        ",".join(POLICIES),
    ),
    "mixed priorities": (
        "--synthetic priorities --requests 400 --rate 14 --max-running-requests 48 --max-total-tokens 100000",
        "fcfs,fcfs+priority,lof+priority,lpm,shortest-prefill-first",
    ),
    "a heavy tenant and a light one": (
        "--synthetic tenants --requests 400 --rate 3 --max-running-requests 48 --max-total-tokens 100000",
        "fcfs,fcfs+fair,lpm,lpm+fair",
    ),
}


def simulated() -> None:
    for title, (arguments, variants) in SIMULATED.items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            simulate_command.main([*arguments.split(), "--compare", variants, "--markdown", "--no-progress"])
        print(f"### {title}\n\n`ceiba simulate {arguments} --compare {variants} --markdown`\n\n{out.getvalue()}")


# ── the real server ──────────────────────────────────────────────────────────

Session = list[tuple[list[int], int]]
"""Turns one after the other: (what comes on top of the turn before and its answer, output tokens)."""

SERVER_POLICIES = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
FLAGS = ("--max-running-requests", "4", "--chunked-prefill-size", "256", "--log-level", "warning")


def few_shot() -> tuple[int, list[Session]]:
    """72 questions at once behind 12 example lists of 150 tokens; the pool holds five of them."""
    rng = np.random.default_rng(1)
    lists = [rng.integers(1000, 49000, 150).tolist() for _ in range(12)]
    order = rng.permutation(np.repeat(np.arange(12), 6)).tolist()
    return 900, [[([*lists[i], *rng.integers(1000, 49000, 8).tolist()], 4)] for i in order]


def agents() -> tuple[int, list[Session]]:
    """14 agents with one tool description of 200 tokens, four turns each; the pool holds half of their contexts."""
    rng = np.random.default_rng(2)
    tools = rng.integers(1000, 49000, 200).tolist()
    return 1100, [
        [([*(tools if turn == 0 else []), *rng.integers(1000, 49000, 30).tolist()], 4) for turn in range(4)]
        for _ in range(14)
    ]


TRACES: dict[str, Callable[[], tuple[int, list[Session]]]] = {"few-shot": few_shot, "multi-turn agents": agents}


async def replay(url: str, sessions: list[Session]) -> dict[str, float]:
    """Every session at once. Hit rate, times to first token in seconds, output tokens per second."""
    waits: list[float] = []
    cached = prompts = outputs = 0

    async def run(client: httpx.AsyncClient, session: Session) -> None:
        nonlocal cached, prompts, outputs
        history: list[int] = []
        for added, new in session:
            history += added
            sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0}
            body = {"input_ids": history, "sampling_params": sampling, "stream": True}
            begin, first, last = time.perf_counter(), 0.0, {}
            async with client.stream("POST", "/generate", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.perf_counter() - begin
                        last = json.loads(line[6:])
            waits.append(first)
            cached += last["meta_info"]["cached_tokens"]
            prompts += len(history)
            outputs += new
            history += last["output_ids"]

    begin = time.perf_counter()
    async with httpx.AsyncClient(
        base_url=url, timeout=900, limits=httpx.Limits(max_connections=len(sessions))
    ) as client:
        await asyncio.gather(*(run(client, session) for session in sessions))
    seconds = time.perf_counter() - begin
    p50, p99 = np.percentile(waits, [50, 99])
    return {"hit": cached / prompts, "p50": float(p50), "p99": float(p99), "rate": outputs / seconds, "wall": seconds}


def serve_once(policy: str, pool: int, sessions: list[Session], more: list[str]) -> dict[str, float]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "ceiba", "serve", "--port", str(port), "--schedule-policy", policy, *FLAGS, *more]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen([*command, "--max-total-tokens", str(pool)], stdout=log, stderr=subprocess.STDOUT)
        try:
            _until_healthy(url, server)
            return asyncio.run(replay(url, sessions))
        finally:
            server.terminate()
            server.wait(30)


def _until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("the server did not start")


def on_server(rounds: int, only: list[str], policies: list[str], more: list[str]) -> None:
    """Policies take turns, each in a fresh server; medians over the rounds, times as ratios to fcfs."""
    for title, make in TRACES.items():
        if only and title not in only:
            continue
        pool, sessions = make()
        found: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
        for _ in range(rounds):
            for policy in policies:
                found[policy].append(serve_once(policy, pool, sessions, more))
                print(f"{title}, {policy}: {found[policy][-1]}", file=sys.stderr, flush=True)
        print(f"### {title}, real server (pool of {pool} tokens, {rounds} rounds)\n\n{make.__doc__}\n")
        print("|  | hit rate % | TTFT p50 | TTFT p99 | output tok/s |\n|---|---|---|---|---|")
        for policy, runs in found.items():
            hit = 100 * statistics.median(run["hit"] for run in runs)
            ratios = [
                statistics.median(run[key] / base[key] for run, base in zip(runs, found["fcfs"], strict=True))
                for key in ("p50", "p99", "rate")
            ]
            print(f"| {policy} | {hit:.1f} | {' | '.join(f'{ratio:.2f} ×' for ratio in ratios)} |")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="store_true", help="replay on the real server instead of simulating")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=sorted(TRACES), help="with --server: this trace only")
    parser.add_argument("--policies", default=",".join(SERVER_POLICIES), help="with --server: fcfs first")
    parser.add_argument("--flags", default="", help="with --server: further flags, as in --flags='--threads 1'")
    args = parser.parse_args()
    if args.server:
        on_server(args.rounds, args.only or [], args.policies.split(","), args.flags.split())
    else:
        simulated()


if __name__ == "__main__":
    main()
