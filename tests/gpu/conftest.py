"""GPU tests run where a CUDA device and Triton are; elsewhere they are skipped as a whole."""

from __future__ import annotations

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def fresh_inputs(request: pytest.FixtureRequest) -> None:
    """New random inputs on every run; the seed is printed with a failure."""
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"seed {seed}")
