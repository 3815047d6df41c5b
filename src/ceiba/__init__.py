"""Ceiba: an LLM serving engine grown around a radix-tree KV cache.

Light on purpose: importing the package imports no torch. ``ceiba.Engine`` loads on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]

if TYPE_CHECKING:
    from ceiba.launch.engine import Engine


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from ceiba.launch.engine import Engine

        return Engine
    raise AttributeError(f"module 'ceiba' has no attribute {name!r}")
