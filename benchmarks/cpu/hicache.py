"""What a restored prefix costs beside a computed one, interleaved in one run.

For each prefix length: a prompt is computed cold, pushed off the device by another one and asked for again, so that it
comes from the host; once more it comes from the storage after host and device were emptied; and once from the device.
Each round measures all four ways one after the other, so that a busy machine disturbs them alike; minimum, median and
the ratios are printed, with the counter of computed prompt tokens as proof. Times are those from the call to the first
token of the answer, without HTTP.

    python benchmarks/cpu/hicache.py [--lengths 128,512,1024] [--rounds 5] [--model M] [--device cuda] [--flags ...]

On a GPU give a model: ``--device cuda --model Qwen/Qwen3-8B --lengths 1024,4096,16384``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from typing import Any

from ceiba import Engine

WAYS = ("computed", "device", "host", "storage")


def ids(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab // 50, vocab - vocab // 50) for _ in range(length)]


def state(engine: Engine) -> dict[str, Any]:
    return engine._run(engine.front.control("state"))


def ask(engine: Engine, prompt: list[int]) -> tuple[float, list[int], dict[str, int], float]:
    """(seconds to the only token, output ids, cached tokens by tier, prompt tokens computed)."""
    before = state(engine)["prefill_tokens"]
    start = time.perf_counter()
    answer = engine.generate(
        input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    )
    seconds = time.perf_counter() - start
    assert isinstance(answer, dict)
    tiers = answer["meta_info"]["cached_tokens_details"]
    return seconds, answer["output_ids"], tiers, state(engine)["prefill_tokens"] - before


def settled(engine: Engine) -> None:
    """Wait until nothing is being copied or written."""
    while True:
        status = engine._run(engine.front.control("hicache_status"))
        if not status["backlog_bytes"] and not status["busy"]:
            return
        time.sleep(0.02)


def measure(engine: Engine, length: int, rounds: int, pool: int, vocab: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    rng = random.Random(length)
    for number in range(rounds + 1):
        prompt, other = ids(rng, length, vocab), ids(rng, pool - 16, vocab)
        answers: list[list[int]] = []
        for way in WAYS:
            if way == "host":
                ask(engine, other)  # pushes the prompt off the device
                settled(engine)
            elif way == "storage":
                settled(engine)
                engine.flush_cache()
            seconds, out, tiers, computed = ask(engine, prompt)
            answers.append(out)
            got = tiers.get(way, 0) if way != "computed" else length - sum(tiers.values())
            least = length - 1 - (64 if way == "storage" else 0)
            if got < least - (pool // 256 + 64 if way == "host" else 0):
                raise SystemExit(f"{length} tokens, {way}: {tiers} came from the tiers, {computed} were computed")
            if number:  # the first round pays for first uses
                times[way].append(seconds)
        others = sum(out != answers[0] for out in answers)
        if others and engine.config.runner.device == "cpu":
            raise SystemExit("a restored prefix gave another answer")
        if others:  # kernels round otherwise for a last token than for a whole prompt
            print(f"{length} tokens: {others} of {len(answers) - 1} answers differ from the computed one")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", default="320,640,1280")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flags", default="{}", help="further flags as JSON, in Python's spelling")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    pool = max(lengths) + 64
    folder = tempfile.mkdtemp(prefix="ceiba-hicache-")
    flags: dict[str, Any] = {
        "device": args.device,
        "max_total_tokens": pool,
        "context_length": pool,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": {"path": folder, "prefetch_threshold": 64},
        "hicache_storage_prefetch_policy": "wait_complete",
        **json.loads(args.flags),
    }
    try:
        with Engine(args.model, **flags) as engine:
            vocab = engine.front.vocab_size
            print(f"{engine.config.model.name}, {args.device}, {args.rounds} rounds; seconds to the first token")
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


if __name__ == "__main__":
    main()
