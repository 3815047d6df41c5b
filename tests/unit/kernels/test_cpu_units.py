"""The kernels on processors that this one is not: older ones by emulation, tiles in plain C++."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ceiba.kernels import cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not cpu.available, reason="installed without a C++ compiler"),
]
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu" / "units.py"


def test_a_processor_without_avx512_runs_the_module() -> None:
    """As a Haswell every product is right; an instruction of AVX-512 would end the process."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 (package qemu-user) is not installed")
    command = [emulator, "-cpu", "Haswell", sys.executable, str(SCRIPT), "--module", cpu._cpu.__file__]
    done = subprocess.run([*command, "--seconds", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "instruction sets: generic, avx2\n" in done.stdout
    assert "every product is within its bound" in done.stdout


def test_code_around_the_tiles_is_right() -> None:
    if shutil.which("cmake") is None or shutil.which("c++") is None or importlib.util.find_spec("nanobind") is None:
        pytest.skip("building needs cmake, a C++ compiler and nanobind")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--emulate", "--seconds", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "amx_emulated" in done.stdout
