"""What eager chunks of long prompts cost: the device's time by kind of kernel beside the floors that operations and
bytes set, and what launching them costs the host. The real scheduler and runner in this process, dummy weights,
prompts of random tokens that share nothing. Some 30 seconds for each size of chunk.

    PYTHONPATH=src python benchmarks/gpu/chunks.py [--models 8b,30b] [--chunks 8192,16384]

Host: a step launched with nothing in the queue, so that no launch waits for room in it. Retries: how often memory had
to be given back to the device for an allocation, each of which waits for all that runs; segments: how often the device
had to give some, which may.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections import Counter

import torch
from kernels import ATTENTION_FLOPS, BANDWIDTH, FLOPS
from serve import MODELS
from steady import Clocked, Port, build, send
from torch.profiler import ProfilerActivity, profile

from ceiba.scheduler.loop import Scheduler

KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "xmma"),
    "attention": ("cudnn", "fprop", "flash", "_prefill"),
    "gathering, merging": ("_gather_slots", "_merge_parts"),
    "experts": ("_grouped_matmul",),
    "experts' order, sum": ("_order", "_count", "_place", "_combine", "_route"),
    "norms, rotation": ("_add_rms_norm", "_qkv_norm_rope"),
    "SiLU": ("_silu_mul",),
}
"""Parts of kernels' names, the first that fits."""
SEEDS = itertools.count(1000)
"""No prompt comes twice, or it would be found in the cache."""


def kind(name: str) -> str:
    lower = name.lower()
    return next((what for what, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def floors(name: str, tokens: int, chunk: int) -> dict[str, float]:
    """Milliseconds of a prompt of ``tokens`` in chunks of ``chunk``, by kind of kernel, for two-byte values: products
    and attention by operations, the rest by the bytes that each kernel reads and writes."""
    shape = MODELS[name]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    q, kv = heads * dim, kv_heads * dim
    weights = hidden * (q + 2 * kv) + q * hidden
    inner = shape.get("moe_intermediate_size", 0) * shape.get("num_experts_per_tok", 0) or shape["intermediate_size"]
    mlp = 3 * hidden * inner
    sparse = "num_experts" in shape
    attention = 4 * q * sum(chunk * (start + chunk / 2) for start in range(0, tokens, chunk))
    # Two norms read a delta and the residual, write the residual and their result; rotation reads and writes qkv.
    moved = 2 * tokens * (2 * 4 * hidden + 2 * (q + 2 * kv) + 2 * kv)
    prefixes = sum(range(0, tokens, chunk))
    merged = sum(chunk for _ in range(chunk, tokens, chunk))
    found = {
        "products": 2 * tokens * (weights + (0 if sparse else mlp)) / FLOPS,
        "attention": attention / ATTENTION_FLOPS,
        "gathering, merging": (prefixes * 4 * kv * 2 + merged * 3 * q * 2) / BANDWIDTH,
        "norms, rotation": moved / BANDWIDTH,
    }
    if sparse:
        found["experts"] = 2 * tokens * mlp / FLOPS
        found["experts' order, sum"] = 2 * tokens * hidden * (shape["num_experts_per_tok"] + 1) / BANDWIDTH
    else:
        found["SiLU"] = 2 * tokens * 3 * inner / BANDWIDTH
    return {what: seconds * layers * 1e3 for what, seconds in found.items()}


def run(scheduler: Scheduler, port: Port, name: str, prompts: int, tokens: int) -> float:
    """Seconds until ``prompts`` prompts of ``tokens`` tokens are computed."""
    send(port, [f"{name}-{index}" for index in range(prompts)], tokens, 1, next(SEEDS))
    begun = time.perf_counter()
    scheduler.step()
    while not scheduler.idle:
        scheduler.step(0.0)
    return time.perf_counter() - begun


def host(scheduler: Scheduler, port: Port, runner: Clocked, tokens: int, chunk: int) -> float:
    """Least milliseconds of a chunk's launches with nothing in the queue."""
    send(port, [f"host-{index}" for index in range(3)], tokens, 1, next(SEEDS))
    best = float("inf")
    scheduler.step()
    while not scheduler.idle:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        runner.reset()
        scheduler.step(0.0)
        if runner.prompt_tokens == min(chunk, tokens):
            best = min(best, runner.launching)
    return best * 1e3


def by_kind(scheduler: Scheduler, port: Port, tokens: int) -> tuple[dict[str, float], int, float, Counter[str]]:
    """(milliseconds by kind, kernels, milliseconds from the first to the last, other kernels by name) of a prompt."""
    prompts = 2
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(scheduler, port, "profiled", prompts, tokens)
        torch.cuda.synchronize()
    spent, others, count, edges = Counter[str](), Counter[str](), 0, []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            length = (event.time_range.end - event.time_range.start) / 1e3 / prompts
            what = kind(event.name)
            spent[what] += length
            if what == "other":
                others[event.name.split("(")[0][:60]] += length
            count += 1
            edges += [event.time_range.start, event.time_range.end]
    return dict(spent), count // prompts, (max(edges) - min(edges)) / 1e3 / prompts, others


def measure(name: str, chunk: int, device: str, tokens: int, prompts: int) -> float:
    """Milliseconds a prompt."""
    pool = (prompts + 4) * (tokens + 64)
    scheduler, port, runner = build(
        name, set(), device, pool, chunk, mixed=False, context=tokens + 64, captured=0, decode=8
    )
    taken = torch.cuda.memory_stats().get("segment.all.allocated", 0) if device == "cuda" else 0
    run(scheduler, port, "warm", 1, tokens)
    # Twice: the device's clock wanders.
    ms = min(run(scheduler, port, f"timed-{turn}", prompts, tokens) * 1e3 / prompts for turn in range(2))
    launching = host(scheduler, port, runner, tokens, chunk)
    print(
        f"{name} chunks of {chunk}: {ms:.1f} ms a prompt ({tokens / ms:.1f}k tok/s), "
        f"launching a chunk {launching:.1f} ms",
        flush=True,
    )
    if device == "cuda":
        spent, count, span, others = by_kind(scheduler, port, tokens)
        least = floors(name, tokens, chunk)
        for what, length in sorted(spent.items(), key=lambda item: -item[1]):
            floor = f"floor {least[what]:7.1f}" if what in least else ""
            print(f"    {length:7.1f} ms  {what:22s} {floor}")
        total = sum(spent.values())
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        segments = torch.cuda.memory_stats().get("segment.all.allocated", 0) - taken
        print(f"    {total:7.1f} ms  in all, of {span:.1f}; floors {sum(least.values()):.1f}")
        print(f"    {count} kernels; {retries} retries, {segments} segments since the start; other: ", end="")
        print(", ".join(f"{what} {length:.2f}" for what, length in others.most_common(5)), flush=True)
    runner.close()
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b")
    parser.add_argument("--chunks", default="8192,16384")
    parser.add_argument("--tokens", type=int, default=16384, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--device", default="cuda", help="cpu: to try this script")
    options = parser.parse_args()
    for name in options.models.split(","):
        found: dict[str, float] = {}
        for chunk in map(int, options.chunks.split(",")):
            begun = time.perf_counter()
            found[f"{name} chunks of {chunk}"] = measure(name, chunk, options.device, options.tokens, options.prompts)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"-- {time.perf_counter() - begun:.0f} s", flush=True)
        base = next(iter(found.values()))
        for label, ms in sorted(found.items(), key=lambda item: item[1]):
            print(f"{ms:8.1f} ms a prompt  {base / ms:6.3f} x  {label}", flush=True)


if __name__ == "__main__":
    main()
