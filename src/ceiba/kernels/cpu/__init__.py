"""C++ kernels for the CPU. ``available`` is False where the package was installed without a compiler."""

from __future__ import annotations

try:
    from ceiba.kernels.cpu import _cpu  # type: ignore[attr-defined]

    available = True
except ImportError:
    _cpu = None
    available = False

__all__ = ["_cpu", "available"]
