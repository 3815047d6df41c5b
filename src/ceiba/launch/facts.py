"""What this machine has, measured once at start: memory, cores, instruction sets, GPUs, installed packages. It owns the
reading of ``/proc``, ``/sys`` and the GPU driver; it must never import torch (seconds) nor decide anything.
"""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from ceiba.config.choose import CPU_KERNELS
from ceiba.config.records import DeviceFacts
from ceiba.core.errors import ConfigError
from ceiba.launch.nvml import Gpu, list_gpus

OPTIONAL_PACKAGES = (
    "xgrammar",
    "transformers",
    "triton",
    "flashinfer",
    "outlines_core",
    "mooncake",
    "nixl",
    "opentelemetry",
)

_ISA = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "vnni": {"avx512_vnni"},
    "bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_int8", "amx_bf16"},
}


def device_facts(device: str | None = None, gpu_id: int = 0, *, visible_gpus: str | None = None) -> DeviceFacts:
    """Facts of this machine. ``device``: cpu, cuda, or None: a GPU where torch can use one, else the CPU.

    Raises ConfigError when cuda is asked for and cannot be had, saying what is missing.
    """
    gpus = [] if device == "cpu" else list_gpus(visible_gpus)
    cuda = torch_cuda()
    kind = device or ("cuda" if gpus and cuda else "cpu")
    total, free = host_memory()
    common = {
        "host_memory_bytes": total,
        "host_free_bytes": free,
        "cores": usable_cores(),
        "isa": instruction_sets(),
        "packages": packages(),
    }
    if kind == "cpu":
        return DeviceFacts(kind="cpu", name=cpu_name(), **common)  # type: ignore[arg-type]
    if kind != "cuda":
        raise ConfigError(f"--device {kind}: not available yet. Instead: cpu or cuda.", param="--device")
    gpu = _chosen(gpus, gpu_id, cuda)
    return DeviceFacts(
        kind="cuda",
        name=gpu.name,
        count=len(gpus),
        memory_bytes=gpu.memory_bytes,
        free_bytes=gpu.free_bytes,
        capability=gpu.capability,
        **common,  # type: ignore[arg-type]
    )


def _chosen(gpus: list[Gpu], gpu_id: int, cuda: str | None) -> Gpu:
    if cuda is None:
        raise ConfigError(
            "--device cuda: the installed torch is built without CUDA. Instead: install a CUDA build of torch, or run "
            "with --device cpu.",
            param="--device",
        )
    if not gpus:
        raise ConfigError(
            "--device cuda: no NVIDIA GPU is visible (driver missing, or hidden by CUDA_VISIBLE_DEVICES). Instead: "
            "--device cpu.",
            param="--device",
        )
    if gpu_id >= len(gpus):
        raise ConfigError(
            f"--base-gpu-id {gpu_id}: there are {len(gpus)} GPUs here, 0 to {len(gpus) - 1}.", param="--base-gpu-id"
        )
    return gpus[gpu_id]


def torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version torch was built for, read from its version file; None for a CPU build or no torch."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def packages() -> tuple[str, ...]:
    """Optional packages that are installed, and CPU_KERNELS where the compiled kernels are."""
    found = [name for name in OPTIONAL_PACKAGES if find_spec(name) is not None]
    return (*found, CPU_KERNELS) if cpu_kernels_built() else tuple(found)


def cpu_kernels_built() -> bool:
    from ceiba.kernels import cpu

    return bool(cpu.available)


def cpu_kernel_unit() -> str | None:
    """The instruction set that the compiled kernels will use on this CPU; None where they are not compiled."""
    from ceiba.kernels import cpu

    return cpu.best_set() if cpu.available else None


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes that this process may use: the machine's, bounded by the memory limit of its container."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    unified, split = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    for limit_path, usage_path, stat_key in (
        (unified / "memory.max", unified / "memory.current", "inactive_file"),
        (split / "memory.limit_in_bytes", split / "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(limit_path)
        if limit is None or limit >= total:
            continue
        usage = _number(usage_path) or 0
        reclaimable = _stat(usage_path.with_name("memory.stat"), stat_key)
        total, free = limit, min(free, max(0, limit - usage + reclaimable))
    return total, free


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    """A counter of memory.stat: pages of files that the kernel gives back when asked do not count as used."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores this process may run on: its affinity without hyper-threads, bounded by the container's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores: set[str] = set()
    for cpu in allowed:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    quota = _quota(root)
    count = len(cores)
    return max(1, min(count, int(quota)) if quota else count)


def _quota(root: Path) -> float | None:
    """CPUs granted by the container, None without a limit."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        v1 = root / "sys/fs/cgroup/cpu"
        granted, per = _number(v1 / "cpu.cfs_quota_us"), _number(v1 / "cpu.cfs_period_us")
        return granted / per if granted and per else None
    return int(quota) / int(period) if quota.isdigit() else None


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Of avx2, avx512, vnni, bf16, amx: those that the CPU and the kernel report."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return ()
    line = next((row for row in text.splitlines() if row.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    return tuple(name for name, needed in _ISA.items() if needed <= flags)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()
