"""From exec to the first healthy answer, part by part, with and without the cache of packed weights.

    python benchmarks/cpu/startup.py [--model MODEL] [--rounds 5] [--flags "…"]

Starts alternate between the two, so that a machine that wanders does so for both. The parts are what the server's own
log says; the first start of all, which fills caches, is not counted.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time

from server import BUILD, ceiba, free_port, serving

VARIANTS = {"packed weights mapped": [], "packed at every start": ["--disable-packed-weight-cache"]}
STARTED = re.compile(r"started in [\d.]+ s \((.*)\)")


def one(model: str | None, flags: list[str]) -> tuple[float, str]:
    port, log = free_port(), BUILD / "logs" / "startup.log"
    with serving(ceiba(model, port, flags), port, log) as server:
        parts = None
        while parts is None:  # the line is written just after health turns green
            time.sleep(0.05)
            parts = STARTED.search(log.read_text(errors="replace"))
        return server.seconds, parts[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="How long a start takes.")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flags", default="")
    args = parser.parse_args()
    one(args.model, args.flags.split())
    time.sleep(2)  # the file of packed weights is written beside the first requests
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name, flags in VARIANTS.items():
            found[name].append(one(args.model, [*args.flags.split(), *flags]))
    print("| start | median s | fastest s | parts of the fastest |\n|---|---|---|---|")
    for name, runs in found.items():
        fastest, parts = min(runs)
        print(f"| {name} | {statistics.median(seconds for seconds, _ in runs):.2f} | {fastest:.2f} | {parts} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
