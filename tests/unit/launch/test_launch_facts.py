"""Machine facts: containers, hyper-threads, instruction sets, GPU selection, from files made up for the test."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from ceiba.core.errors import ConfigError
from ceiba.launch import facts
from ceiba.launch.nvml import Gpu, list_gpus, select_visible

SAPPHIRE_RAPIDS = (
    "processor : 0\nmodel name\t: Test CPU @ 2.0GHz\n"
    "flags\t\t: fpu avx avx2 fma f16c avx512f avx512bw avx512vl avx512dq "
    "avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8\n"
)


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SAPPHIRE_RAPIDS, ("avx2", "avx512", "vnni", "bf16", "amx")),
        ("flags : avx avx2 fma f16c avx512f\n", ("avx2",)),
        ("flags : avx2\n", ()),
        ("", ()),
    ],
)
def test_instruction_sets(tmp_path: Path, flags: str, expected: tuple[str, ...]) -> None:
    put(tmp_path, "cpuinfo", flags)
    assert facts.instruction_sets(tmp_path / "cpuinfo") == expected


def test_cpu_name(tmp_path: Path) -> None:
    put(tmp_path, "cpuinfo", SAPPHIRE_RAPIDS)
    assert facts.cpu_name(tmp_path / "cpuinfo") == "Test CPU @ 2.0GHz"
    assert facts.cpu_name(tmp_path / "missing")


def test_memory_without_a_container_is_the_machines(tmp_path: Path) -> None:
    total, free = facts.host_memory(tmp_path)
    assert total == psutil.virtual_memory().total
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("limit", "usage", "stat"),
    [
        ("memory.max", "memory.current", "inactive_file 1000000\nanon 5\n"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file 1000000\n"),
    ],
)
def test_memory_of_a_container(tmp_path: Path, limit: str, usage: str, stat: str) -> None:
    root = "sys/fs/cgroup/"
    put(tmp_path, root + limit, "100000000\n")
    put(tmp_path, root + usage, "41000000\n")
    put(tmp_path, root + str(Path(usage).with_name("memory.stat")), stat)
    assert facts.host_memory(tmp_path) == (100_000_000, 60_000_000)


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", ""])
def test_a_container_without_a_limit(tmp_path: Path, text: str) -> None:
    put(tmp_path, "sys/fs/cgroup/memory.max", text)
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", text)
    assert facts.host_memory(tmp_path)[0] == psutil.virtual_memory().total


def test_hyper_threads_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8})
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings + "\n")
    assert facts.usable_cores(tmp_path) == 3


@pytest.mark.parametrize(("quota", "expected"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
def test_a_quota_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    put(tmp_path, "sys/fs/cgroup/cpu.max", quota + "\n")
    assert facts.usable_cores(tmp_path) == expected


def test_an_old_quota_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert facts.usable_cores(tmp_path) == 3
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert facts.usable_cores(tmp_path) == 4


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        ("1, 2", [1, 2]),
        ("GPU-bb", [1]),
        ("GPU-a", [0]),
        ("GPU-c", []),  # names two
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus(visible: str, expected: list[int]) -> None:
    assert select_visible(["GPU-aa", "GPU-bb", "GPU-c1", "GPU-c2"], visible) == expected


def test_facts_of_this_machine_as_a_cpu() -> None:
    found = facts.device_facts("cpu")
    assert found.kind == "cpu"
    assert 0 < found.host_free_bytes <= found.host_memory_bytes
    assert 1 <= found.cores <= (os.cpu_count() or 1)


def test_cuda_that_is_not_there_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "list_gpus", lambda visible: [])
    monkeypatch.setattr(facts, "torch_cuda", lambda: None)
    with pytest.raises(ConfigError, match="built without CUDA"):
        facts.device_facts("cuda")
    monkeypatch.setattr(facts, "torch_cuda", lambda: "13.0")
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible"):
        facts.device_facts("cuda")
    assert facts.device_facts(None).kind == "cpu"


def test_a_gpu_that_torch_can_use_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(i, f"GPU {i}", 80 << 30, 79 << 30, (9, 0)) for i in range(2)]
    monkeypatch.setattr(facts, "list_gpus", lambda visible: gpus)
    monkeypatch.setattr(facts, "torch_cuda", lambda: "13.0")
    found = facts.device_facts(None, 1)
    assert (found.kind, found.name, found.count, found.memory_bytes) == ("cuda", "GPU 1", 2, 80 << 30)
    assert facts.device_facts("cpu").kind == "cpu"
    with pytest.raises(ConfigError, match="0 to 1"):
        facts.device_facts("cuda", 2)
    monkeypatch.setattr(facts, "torch_cuda", lambda: None)
    assert facts.device_facts(None).kind == "cpu"


def test_the_driver_is_asked_without_an_error() -> None:
    for gpu in list_gpus():
        assert 0 < gpu.free_bytes <= gpu.memory_bytes
        assert gpu.capability >= (3, 0)


def test_torch_is_known_without_importing_it() -> None:
    import torch

    assert facts.torch_version() == torch.__version__.split("+")[0] or facts.torch_version() == torch.__version__
    assert facts.torch_cuda() == torch.version.cuda
