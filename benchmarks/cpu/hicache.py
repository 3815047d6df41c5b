"""What a restored prefix costs beside a computed one, and whether it is the same, interleaved in one run.

For each prefix length: a prompt is computed cold and asked for again, so that it comes from the device; after another
one has pushed it off, so that it comes from the host; and after host and device were emptied, so that it comes from the
storage. The prefix is whole storage pages and the prompt one token longer, so the three cached ways compute that one
token by the same kernels: what they answer must be the same to the last bit of twenty log-probabilities, or the bytes
that came back are not those that went. That is checked first, with prompts of their own, and ends the run with exit
status 1. The cold prompt is computed by other kernels, which round otherwise: how many of its answers differ is
reported, and for each by how much its token led there, beside how far the two ways' log-probabilities are apart
anyhow. A lead within that distance is a near-tie; a larger one is a fault. On a CPU without tiles there must be none.

Then the times, from the call to the first token of the answer, without HTTP. Each round measures all four ways one
after the other, so that a busy machine disturbs them alike; minimum, median and the ratios are printed. The counter of
computed prompt tokens proves each way: one token, or all.

    python benchmarks/cpu/hicache.py [--lengths 320,640,1280] [--rounds 5] [--model M] [--device cuda] [--flags ...]

On a GPU give a model: ``--device cuda --model Qwen/Qwen3-8B --lengths 1024,4096,16384``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ceiba import Engine
from ceiba.kernels import cpu

WAYS = ("computed", "device", "host", "storage")
PAGE = 64
"""Tokens of a storage page."""
TOP = 20
"""Log-probabilities of the first token that are compared."""


@dataclass
class Answer:
    seconds: float
    """To the only token."""
    token: int
    top: dict[int, float]
    """Token -> log-probability; empty unless asked for."""


def ids(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab // 50, vocab - vocab // 50) for _ in range(length)]


def state(engine: Engine) -> dict[str, Any]:
    return engine._run(engine.front.control("state"))


def status(engine: Engine) -> dict[str, Any]:
    return engine._run(engine.front.control("hicache_status"))


def ask(engine: Engine, prompt: list[int], way: str, top: int) -> Answer:
    """Raises SystemExit if the prompt was not served that way."""
    before = state(engine)["prefill_tokens"]
    fields = {"return_logprob": True, "top_logprobs_num": top} if top else {}
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    start = time.perf_counter()
    answer = engine.generate(input_ids=prompt, sampling_params=sampling, **fields)
    seconds = time.perf_counter() - start
    assert isinstance(answer, dict)
    meta = answer["meta_info"]
    tiers, computed = meta["cached_tokens_details"], state(engine)["prefill_tokens"] - before
    cached = len(prompt) - 1
    right = computed == (len(prompt) if way == "computed" else 1) and sum(tiers.values()) == len(prompt) - computed
    # What the other prompt left on the device stays there: it is less than a restore is worth.
    if not right or tiers.get(way, cached) < (cached // 2 if way == "host" else cached):
        raise SystemExit(f"{len(prompt)} tokens, {way}: {tiers} came from the tiers, {computed} were computed")
    found = meta["output_top_logprobs"][0] if top else []
    return Answer(seconds, answer["output_ids"][0], {token: value for value, token, _ in found})


def settled(engine: Engine) -> None:
    """Wait until nothing is being copied or written."""
    while True:
        found = status(engine)
        if not found["backlog_bytes"] and not found["busy"]:
            return
        time.sleep(0.02)


def all_ways(engine: Engine, prompt: list[int], other: list[int], top: int = 0) -> Iterator[tuple[str, Answer]]:
    """The answer to ``prompt`` by each way; ``other`` fills the device."""
    for way in WAYS:
        if way == "host":
            engine.generate(input_ids=other, sampling_params={"temperature": 0, "max_new_tokens": 1})
            settled(engine)
        elif way == "storage":
            settled(engine)
            engine.flush_cache()
        yield way, ask(engine, prompt, way, top)


def apart(a: Answer, b: Answer) -> float:
    """How far two ways' log-probabilities are apart at most, over the tokens that both name."""
    return max((abs(a.top[token] - b.top[token]) for token in a.top.keys() & b.top.keys()), default=float("inf"))


def check(engine: Engine, length: int, prompts: int, pool: int, vocab: int) -> bool:
    """Whether the cached ways agree to the last bit, and with the computed one where no sum depends on the batch.
    Prints what differs."""
    rng = random.Random(f"compared {length}")
    unequal, differ, farthest = 0, [], 0.0
    for number in range(prompts + 1):
        prompt, other = ids(rng, length + 1, vocab), ids(rng, pool - 16, vocab)
        found = dict(all_ways(engine, prompt, other, TOP))
        if not number:
            continue  # a graph that is captured meanwhile may be another way to compute
        cold, device = found["computed"], found["device"]
        for way in ("host", "storage"):
            if found[way].top != device.top or found[way].token != device.token:
                unequal += 1
                print(f"ERROR {length} tokens: {way} and device differ by {apart(found[way], device):.3g}")
        farthest = max(farthest, apart(cold, device))
        if cold.token != device.token:
            lead = cold.top[cold.token] - cold.top.get(device.token, -float("inf"))
            differ.append(f"led by {lead:.4f}, where the two are up to {apart(cold, device):.4f} apart")
    damaged = status(engine)["detail"]["corrupt_pages"]
    exact = engine.config.runner.device == "cpu" and cpu.available and cpu.same_bits()
    good = not unequal and not damaged and not (differ and exact)
    print(
        f"{length} tokens, {prompts} prompts: {2 * prompts - unequal} of {2 * prompts} answers from host and storage "
        f"equal the device's in all bits, {damaged} damaged pages; {len(differ)} of {prompts} differ from the computed "
        f"one, from which the others are up to {farthest:.4f} apart"
    )
    for line in differ:
        print(f"    the computed token {line}")
    return good


def measure(engine: Engine, length: int, rounds: int, pool: int, vocab: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    rng = random.Random(length)
    for number in range(rounds + 1):
        prompt, other = ids(rng, length + 1, vocab), ids(rng, pool - 16, vocab)
        found = dict(all_ways(engine, prompt, other))
        if len({answer.token for way, answer in found.items() if way != "computed"}) > 1:
            raise SystemExit(f"{length} tokens: device, host and storage gave different answers")
        if number:  # the first round pays for first uses
            for way, answer in found.items():
                times[way].append(answer.seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", default="320,640,1280")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checked", type=int, default=4, help="prompts of each length whose answers are compared")
    parser.add_argument("--flags", default="{}", help="further flags as JSON, in Python's spelling")
    args = parser.parse_args()
    lengths = [-(-int(text) // PAGE) * PAGE for text in args.lengths.split(",")]
    pool = max(lengths) + 64
    good = True
    folder = tempfile.mkdtemp(prefix="ceiba-hicache-")
    flags: dict[str, Any] = {
        "device": args.device,
        "max_total_tokens": pool,
        "context_length": pool,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": {"path": folder, "prefetch_threshold": PAGE},
        "hicache_storage_prefetch_policy": "wait_complete",
        **json.loads(args.flags),
    }
    try:
        with Engine(args.model, **flags) as engine:
            vocab = engine.front.vocab_size
            print(f"{engine.config.model.name}, {args.device}")
            for length in lengths:
                good = check(engine, length, args.checked, pool, vocab) and good
            print(f"{args.rounds} rounds; seconds to the first token, minimum / median")
            print(f"{'tokens':>7} " + " ".join(f"{way:>20}" for way in WAYS) + f" {'host':>10} {'storage':>10}")
            for length in lengths:
                times = measure(engine, length, args.rounds, pool, vocab)
                cells = [f"{min(times[way]):9.4f} /{statistics.median(times[way]):9.4f}" for way in WAYS]
                ratios = [
                    statistics.median(a / b for a, b in zip(times["computed"], times[way], strict=True))
                    for way in ("host", "storage")
                ]
                print(f"{length:>7} " + " ".join(cells) + "".join(f" {ratio:9.1f}x" for ratio in ratios), flush=True)
            tiers = {name: value for name, value in state(engine).items() if name.startswith("hicache.")}
            for what in ("backup", "load_back", "prefetch", "store"):
                seconds, size = tiers[f"hicache.{what}_seconds"], tiers[f"hicache.{what}_bytes"]
                if seconds:
                    print(f"{what}: {size / 2**20:.0f} MiB in {seconds:.3f} s, {size / seconds / 1e9:.2f} GB/s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not good:
        sys.exit("a restored prefix gave another answer")


if __name__ == "__main__":
    main()
