"""What a grammar costs per output token: the same engine, with and without one, in turns, so that load on the machine
falls on both. Prints the ratio of the median gaps between tokens; the goal is 1.10 or less.

    python benchmarks/grammar.py [--backends llguidance,xgrammar,outlines] [--requests 1,8] [--rounds 7] [--model PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import ceiba

SCHEMA = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
                      "required": ["name", "count"], "additionalProperties": False},
            "minItems": 60,
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}  # fmt: skip
FLAT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}, "required": ["text"]}
"""One long text, in which nothing is forced."""
PROMPT = "A list of fruit with counts, in JSON:\n"


def gaps(engine: ceiba.Engine, number: int, tokens: int, **constraint: Any) -> list[float]:
    """Seconds between the tokens of ``number`` streams at once, the first few left out."""
    found: list[float] = []
    lock = threading.Lock()

    def one(index: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **constraint}
        last, seen, mine = 0.0, 0, []
        for part in engine.generate(f"{index}. {PROMPT}", sampling, stream=True):
            now, count = time.perf_counter(), part["meta_info"]["completion_tokens"]
            if seen > 8 and count > seen:
                mine += [(now - last) / (count - seen)] * (count - seen)
            last, seen = now, count
        with lock:
            found.extend(mine)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backends", default="llguidance,xgrammar,outlines")
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model")
    given = parser.parse_args()
    for backend in given.backends.split(","):
        with ceiba.Engine(given.model, grammar_backend=backend, max_total_tokens=8192) as engine:
            for number in map(int, given.requests.split(",")):
                for name, schema in (("object", SCHEMA), ("text", FLAT)):
                    ratios, with_ms, without_ms = [], [], []
                    text = json.dumps(schema)
                    gaps(engine, number, 32)
                    gaps(engine, number, 32, json_schema=text)
                    for _ in range(given.rounds):
                        free = statistics.median(gaps(engine, number, given.tokens))
                        held = statistics.median(gaps(engine, number, given.tokens, json_schema=text))
                        ratios.append(held / free)
                        without_ms.append(free * 1e3)
                        with_ms.append(held * 1e3)
                    free, held = statistics.median(without_ms), statistics.median(with_ms)
                    print(
                        f"{backend:10} {name:6} {number} at once: {free:6.2f} ms/token without, {held:6.2f} with; "
                        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
