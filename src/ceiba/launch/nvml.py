"""NVIDIA GPUs as the driver's management library reports them: names, memory, compute capability. It talks to
``libnvidia-ml`` through ctypes, so that no CUDA context and no torch is needed; it must never change a setting.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ceiba.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    """Among those that CUDA_VISIBLE_DEVICES leaves."""
    name: str
    memory_bytes: int
    """What CUDA can use: the total less what the driver reserves."""
    free_bytes: int
    capability: tuple[int, int]


class _MemoryV1(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _MemoryV2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def list_gpus(visible: str | None = None) -> list[Gpu]:
    """The GPUs of this machine in CUDA's PCI order, narrowed by ``visible`` (CUDA_VISIBLE_DEVICES: indices or UUIDs).

    Empty without a driver. An entry of ``visible`` that is no GPU hides itself and all after it, as CUDA does.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        handles = _handles(library)
        chosen = handles if visible is None else _visible(library, handles, visible)
        return [_describe(library, index, handle) for index, handle in enumerate(chosen)]
    finally:
        library.nvmlShutdown()


def _handles(library: Any) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    handles = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            handles.append(handle)
    return handles


def _visible(library: Any, handles: list[ctypes.c_void_p], visible: str) -> list[ctypes.c_void_p]:
    uuids = [_text(library.nvmlDeviceGetUUID, handle) for handle in handles]
    chosen: list[ctypes.c_void_p] = []
    for index in select_visible(uuids, visible):
        chosen.append(handles[index])
    return chosen


def select_visible(uuids: list[str], visible: str) -> list[int]:
    """Indices that a CUDA_VISIBLE_DEVICES value selects among GPUs with ``uuids``."""
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            chosen.append(int(entry))
            continue
        matches = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return chosen


def _text(call: Any, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    return buffer.value.decode(errors="replace") if call(handle, buffer, 96) == 0 else ""


def _describe(library: Any, index: int, handle: ctypes.c_void_p) -> Gpu:
    name = _text(library.nvmlDeviceGetName, handle)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    second = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | (2 << 24))
    if (
        hasattr(library, "nvmlDeviceGetMemoryInfo_v2")
        and library.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(second)) == 0
    ):
        total, free = second.total - second.reserved, second.free
    else:
        first = _MemoryV1()
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(first)) != 0:
            raise ConfigError(f"GPU {index} ({name}): the driver does not tell its memory. Instead: --device cpu.")
        total, free = first.total, first.free
    return Gpu(index, name, total, free, (major.value, minor.value))
