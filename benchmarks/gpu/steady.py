"""Where a steady decode step goes: how much of it kernels fill, which kernels, what host and scheduler add. The real
scheduler and runner in this process, dummy weights, prompts of random tokens.

    PYTHONPATH=src python benchmarks/gpu/steady.py [--models 8b,30b] [--batches 64,256] [--flags fp8,kv8] [--chunk 1280]
        [--prompt-every 4]

Busy share: the union of all kernel and copy intervals over the span from the first to the last of the profiled steps.
Host: wall time of a step outside of waiting for results and messages, split into what the runner launches and what the
scheduler plans and applies. Waits: calls in which the host waited for the device, by name; in a steady state only the
one for the step before last. Under the profiler a graph of hundreds of kernels is launched more slowly, so idle time
before a graph of one row need not be there without it: compare ``step ms``. With ``--chunk``, prompts wait at every
step, which then decodes and computes so many tokens in all. With ``--prompt-every N`` a prompt arrives behind every N
steps and is computed before the next one, as online.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from serve import VOCAB, write_model
from torch.profiler import ProfilerActivity, profile

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.config.records import Config, ModelConfig, RunnerConfig, SchedulerConfig
from ceiba.core.messages import Generate, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.runner.worker import ModelRunner
from ceiba.scheduler.loop import Scheduler

STEPS = 40
PROFILED = 12
ARRIVALS = itertools.count(1_000_000)
"""No prompt comes twice, or it would be found in the cache."""


class Port:
    """Messages in memory; what comes back is dropped."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.slept = 0.0
        """Seconds that the scheduler waited for messages: steps are planned late."""

    def receive(self, timeout: float) -> list[Any]:
        found, self.messages = self.messages, []
        if not found and timeout > 0:
            begun = time.perf_counter()
            time.sleep(timeout)
            self.slept += time.perf_counter() - begun
        return found

    def to_detokenizer(self, batch: Any) -> None:
        return None

    def to_front(self, message: Any) -> None:
        return None


class Clocked:
    """A runner that notes how long its calls take, and how long results are waited for."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.reset()

    def reset(self) -> None:
        self.launching = self.waiting = 0.0
        self.prompt_tokens = 0
        self.hits = self.runner.stats().get("graph_hits", 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def forward(self, plan: Any) -> Any:
        self.prompt_tokens += int(plan.lengths[: plan.num_prefill].sum())
        begun = time.perf_counter()
        try:
            return self.runner.forward(plan)
        finally:
            self.launching += time.perf_counter() - begun

    def sample(self, handle: Any, masks: Any = None) -> Any:
        begun = time.perf_counter()
        result = self.runner.sample(handle, masks)
        self.launching += time.perf_counter() - begun
        original = result.wait

        def wait() -> Any:
            begun = time.perf_counter()
            try:
                return original()
            finally:
                self.waiting += time.perf_counter() - begun

        result.wait = wait
        return result


def build(
    name: str, flags: set[str], device: str, tokens: int, chunk: int, *, mixed: bool = True, context: int = 8192,
    captured: int = 2048, decode: int = 256,
) -> tuple[Scheduler, Port, Clocked]:  # fmt: skip
    """Scheduler, its messages and runner. ``chunk``: tokens of a step, with ``mixed`` decoding ones among them; 0: the
    default of an H200. ``captured`` and ``decode``: tokens of the largest prefill and rows of the
    largest batch that has a graph."""
    path = str(write_model(name))
    cuda = device == "cuda"
    sizes = {"decode": decode, "prefill": captured}
    graphs: dict[str, Any] = {}
    for phase, size in sizes.items() if cuda else ():
        graphs |= {f"cuda_graph_backend_{phase}": "full", f"cuda_graph_max_bs_{phase}": size}
    config = Config(
        model=ModelConfig(
            path=path, name=name, tokenizer_path=path, load_format="dummy", context_len=context,
            dtype="bfloat16" if cuda else "float32", quantization="fp8" if "fp8" in flags else None,
        ),
        scheduler=SchedulerConfig(
            max_running_requests=512, max_total_tokens=tokens, chunked_prefill_size=chunk or 8192,
            enable_mixed_chunk=chunk > 0 and mixed,
        ),
        runner=RunnerConfig(
            device=device, attention_backend="triton" if cuda else "torch_native", mem_fraction_static=0.9,
            cpu_kernels=False, mixed_steps=chunk > 0 and mixed,
            kv_cache_dtype="fp8_e4m3" if "kv8" in flags else "auto", **graphs,
        ),
    )  # fmt: skip
    port = Port()
    runner = Clocked(ModelRunner(config, open_checkpoint(path, "dummy")))
    return Scheduler(config.scheduler, runner, port), port, runner  # type: ignore[arg-type]


def send(port: Port, rids: list[str], context: int, new: int, seed: int | None = None) -> None:
    """Requests with ``context`` random tokens each and ``new`` to come; the same tokens for the same ``seed``, which is
    their number if none is given."""
    rng = np.random.default_rng(len(rids) if seed is None else seed)
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True, temperature=0.0)
    for rid in rids:
        ids = rng.integers(1000, VOCAB - 1000, context).astype(np.int32)
        port.messages.append(
            Generate(rid=rid, input_ids=ids_to_bytes(ids), sampling=sampling, stream=True, arrival=0.0)
        )


def fill(scheduler: Scheduler, port: Port, batch: int, context: int, new: int) -> None:
    """``batch`` requests with ``context`` tokens each, prefilled, that will decode on: up to ``new`` tokens."""
    send(port, [f"{batch}-{index}" for index in range(batch)], context, new)
    scheduler.step()
    while len(scheduler.rows.running()) < batch:
        scheduler.step()
    for _ in range(8):  # graphs are captured when a size comes again
        scheduler.step()


class Arrivals:
    """A prompt of ``context`` tokens with one token to come, behind every ``every`` steps; 0: never."""

    def __init__(self, port: Port, context: int, every: int) -> None:
        self.port, self.context, self.every = port, context, every
        self.left = every

    def step(self, scheduler: Scheduler) -> None:
        self.left -= 1
        if self.left == 0:
            number, self.left = next(ARRIVALS), self.every
            send(self.port, [f"arrival-{number}"], self.context, 1, seed=number)
        scheduler.step()


def timed(scheduler: Scheduler, port: Port, runner: Clocked, arrivals: Arrivals) -> dict[str, float]:
    """Milliseconds of a step."""
    runner.reset()
    port.slept = 0.0
    begun = time.perf_counter()
    for _ in range(STEPS):
        arrivals.step(scheduler)
    total = time.perf_counter() - begun
    unit = 1e3 / STEPS
    own = total - runner.launching - runner.waiting - port.slept
    return {
        "step": total * unit,
        "launch": runner.launching * unit,
        "scheduler": own * unit,
        "prompt": runner.prompt_tokens / STEPS,
        "captured": (runner.runner.stats().get("graph_hits", 0.0) - runner.hits) / STEPS,
    }


def union(intervals: list[tuple[float, float]]) -> float:
    """Length covered by at least one interval."""
    covered, reached = 0.0, -float("inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def idle(device: list[tuple[float, float, str]]) -> list[tuple[str, float, float]]:
    """Where the device had nothing to do: (the kernels before and after, how often a step, µs a step)."""
    times, counts = Counter[str](), Counter[str]()
    reached, before = None, ""
    for begin, end, name in sorted(device):
        if reached is not None and begin > reached:
            times[f"{before} -> {name}"] += begin - reached
            counts[f"{before} -> {name}"] += 1
        if reached is None or end > reached:
            reached, before = end, name
    return [(where, counts[where] / PROFILED, spent / PROFILED) for where, spent in times.most_common(12)]


def profiled(
    scheduler: Scheduler, arrivals: Arrivals
) -> tuple[float, list[tuple[str, float]], list[tuple[str, float, float]], Counter[str]]:
    """(busy share of the span, kernels with their milliseconds a step, idle times, waits of the host by name)."""
    # The device alone: recording the host's operations as well would slow it.
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            arrivals.step(scheduler)
        torch.cuda.synchronize()
    device, times, waits = [], Counter[str](), Counter[str]()
    for event in found.events():
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0][:48]
            device.append((begin, end, name))
            times[name] += end - begin
        elif "Synchronize" in event.name:
            waits[event.name] += 1
    span = max(end for _, end, _ in device) - min(begin for begin, _, _ in device)
    busy = union([(begin, end) for begin, end, _ in device])
    kernels = [(name, spent / 1e3 / PROFILED) for name, spent in times.most_common(16)]
    return busy / span, kernels, idle(device), waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--flags", default="", help="fp8: eight-bit weights; kv8: eight-bit KV cache")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step, filled up from waiting prompts")
    parser.add_argument("--prompt-every", type=int, default=0, metavar="STEPS", help="a prompt arrives so often")
    parser.add_argument("--device", default="cuda", help="cpu: to try this script; no busy share")
    options = parser.parse_args()
    flags = set(filter(None, options.flags.split(",")))
    if unknown := flags - {"fp8", "kv8"}:
        parser.error(f"no such flag: {', '.join(sorted(unknown))}; there are fp8 and kv8")
    batches = [int(batch) for batch in options.batches.split(",")]
    tokens = 2 * max(batches) * (options.context + 16 * STEPS)
    rows = ["| model | batch | prompt tokens a step | step ms | captured | busy share | host: launches ms | "
            "host: scheduler ms | waits a step |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in options.models.split(","):
        scheduler, port, runner = build(name, flags, options.device, tokens, options.chunk)
        for batch in batches:
            new = 4 * STEPS + (2 * batch * options.context // options.chunk if options.chunk else 0)
            fill(scheduler, port, batch, options.context, new)
            if options.chunk:  # one token each: they come and go, and the batch stays what it is
                count = (STEPS + 2 * PROFILED) * options.chunk // options.context
                send(port, [f"{batch}-new-{index}" for index in range(count)], options.context, 1)
                for _ in range(8):
                    scheduler.step()
            arrivals = Arrivals(port, options.context, options.prompt_every)
            for _ in range(8 if options.prompt_every else 0):  # compile and capture
                arrivals.step(scheduler)
            spent = timed(scheduler, port, runner, arrivals)
            share, kernels, gaps, waits = 0.0, [], [], Counter[str]()
            if options.device != "cpu":
                share, kernels, gaps, waits = profiled(scheduler, arrivals)
            seen = ", ".join(f"{what} {count / PROFILED:.1f}" for what, count in waits.items())
            what = [name, *sorted(flags), *([f"mixed {options.chunk}"] if options.chunk else [])]
            what += [f"a prompt every {options.prompt_every}"] if options.prompt_every else []
            rows.append(
                f"| {' '.join(what)} | {batch} | {spent['prompt']:.0f} | "
                f"{spent['step']:.3f} | {spent['captured']:.0%} | {share:.1%} | "
                f"{spent['launch']:.3f} | {spent['scheduler']:.3f} | {seen} |"
            )
            print(rows[-1])
            for kernel, part in kernels:
                print(f"    {part:7.3f} ms  {kernel}", flush=True)
            for where, times, gap in gaps:
                print(f"    {gap:7.1f} µs  idle, {times:.1f} times: {where}", flush=True)
            scheduler.abort_all("measured")
            while not scheduler.idle:
                scheduler.step(0.0)
        runner.close()
        del scheduler, port, runner
        gc.collect()
        torch.cuda.empty_cache()
    print("\n".join(rows))


if __name__ == "__main__":
    main()
