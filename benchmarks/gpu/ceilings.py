"""What the device gives at this moment: bytes moved by a copy, products in bfloat16 and in eight bits. Figures are read
beside these, since machines differ from one start to the next and wander while they run.

    python benchmarks/gpu/ceilings.py            # once, as JSON
    python benchmarks/gpu/ceilings.py --serve    # a line of JSON for each line read, a quarter of a second each
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

GIB = 1 << 30
ROWS, COLUMNS, DEPTH = 8192, 12288, 4096


def seconds(call: Callable[[], object], times: int = 9) -> float:
    """Median of one call, after two that do not count."""
    found = []
    for index in range(times + 2):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if index > 1:
            found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


class Ceilings:
    """Buffers on random data, made once; 3 GiB."""

    def __init__(self) -> None:
        self.source = torch.randn(GIB // 2, device="cuda").to(torch.bfloat16)
        self.target = torch.empty_like(self.source)
        self.x = torch.randn(ROWS, DEPTH, device="cuda").to(torch.bfloat16)
        self.w = torch.randn(COLUMNS, DEPTH, device="cuda").to(torch.bfloat16)
        self.x8, self.w8 = (t.to(torch.float8_e4m3fn) for t in (self.x, self.w))
        self.rows = torch.ones(ROWS, 1, device="cuda")
        self.columns = torch.ones(1, COLUMNS, device="cuda")

    def measure(self) -> dict[str, float]:
        work = 2 * ROWS * COLUMNS * DEPTH / 1e12
        moved = 4 * self.source.numel() / 1e12
        found = {
            "copy_TBps": moved / seconds(lambda: self.target.copy_(self.source)),
            "bf16_TFLOPs": work / seconds(lambda: self.x @ self.w.t()),
        }
        if torch.cuda.get_device_capability() >= (8, 9):
            found["fp8_TFLOPs"] = work / seconds(self._eight)
        return {name: round(value, 2) for name, value in found.items()}

    def _eight(self) -> torch.Tensor:
        return torch._scaled_mm(
            self.x8, self.w8.t(), scale_a=self.rows, scale_b=self.columns, out_dtype=torch.bfloat16, use_fast_accum=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    ceilings = Ceilings()
    if not options.serve:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), **ceilings.measure()}))
        return
    for _ in sys.stdin:
        print(json.dumps(ceilings.measure()), flush=True)


if __name__ == "__main__":
    main()
