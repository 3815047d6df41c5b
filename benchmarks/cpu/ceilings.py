"""What the machine gives right now: memory read and matrix products, on all cores. One JSON line.

    python benchmarks/cpu/ceilings.py [--threads N]

Machines that are shared wander by a factor of two within minutes, so every figure of the CPU benchmarks stands beside
the ceilings of its own minute. ``read_gb_s`` sums 512 MiB of float32; ``fp32_gflops`` and ``bf16_gflops`` are torch's
products of two 1024 × 1024 matrices. Medians of five.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READ_BYTES = 512 << 20
SIDE = 1024


def median(work: Callable[[], Any], repeat: int = 5) -> float:
    work()
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    block = torch.ones(READ_BYTES // 4)
    found = {"read_gb_s": READ_BYTES / median(block.sum) / 1e9}
    for name, dtype in (("fp32_gflops", torch.float32), ("bf16_gflops", torch.bfloat16)):
        a, b = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
        found[name] = 2 * SIDE**3 / median(lambda a=a, b=b: a @ b) / 1e9
    return {name: round(value, 2) for name, value in found.items()}


def ceilings(threads: int) -> dict[str, float]:
    """``measure`` in a process of its own, so that nothing of it stays behind."""
    command = [sys.executable, str(Path(__file__).resolve()), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, env=environment).stdout
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory read and matrix products of this machine, now.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    print(json.dumps(measure(parser.parse_args().threads)))
