"""GPU tests run where a CUDA device and Triton are; elsewhere they are skipped as a whole, but for those that can run
in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = {f"test_triton_{name}.py" for name in ("decode", "fp8", "grouped", "kv8", "move", "order", "residual")}
HERE = Path(__file__).parent

collect_ignore_glob: list[str] = []
if not torch.cuda.is_available():
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    wanted = INTERPRETED if interpreted else set()
    collect_ignore_glob = [path.name for path in HERE.glob("test_*.py") if path.name not in wanted]
    if interpreted:
        import exact_interpreter

        exact_interpreter.install()


@pytest.fixture(autouse=True)
def fresh_inputs(request: pytest.FixtureRequest) -> None:
    """New random inputs on every run; the seed is printed with a failure."""
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"seed {seed}")
