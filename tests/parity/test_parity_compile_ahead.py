"""Kernels compiled ahead for a device that is not here: many at a time, nothing launched, and not compiled again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

PROGRAM = textwrap.dedent(
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    driver.set_active(Hopper())
    from ceiba.kernels.triton import activation, move, norm
    from ceiba.kernels.triton.launch import compile_only

    x, weight = torch.ones(4, 512), torch.ones(512)
    residual = torch.zeros(4, 512)
    with compile_only(2) as able:
        assert able
        out = norm.add_rms_norm(x, weight, 1e-6, residual, out=torch.full((4, 512), 7.0))
        norm.add_rms_norm(x[:3], weight, 1e-6, residual[:3])
        activation.silu_mul(x)
    assert (out == 7).all() and not residual.any(), "a kernel ran"
    for kernel in (norm._add_rms_norm, activation._silu_mul):
        (cache, *_) = kernel.device_caches[0]
        (compiled,) = cache.values()
        assert compiled.metadata.target.arch == 90 and compiled.asm["cubin"]

    # Copies between device and host: their number of rows, and where the rows' list begins, makes no new kernel.
    sides = [move.Matrices(torch.zeros(3, dtype=torch.int64), 2048, 2048) for _ in range(2)]
    for count in (1, 3, 4, 16, 100):
        rows = torch.zeros(2, count, dtype=torch.int32)
        with compile_only(2):
            move.move_rows(*sides, rows[0], rows[1], 2048)
    assert len(move._move_rows.device_caches[0][0]) == 1
    try:
        norm.add_rms_norm(x, weight, 1e-6)  # not added to a residual: another kernel, compiled at once and launched
    except Exception as error:
        print("launching again fails without a device:", type(error).__name__)
    """
)


def test_compiled_ahead(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "launching again fails without a device" in done.stdout
