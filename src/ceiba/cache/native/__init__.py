"""The compiled loops over the prefix tree. ``available`` is False where the package was built without a compiler."""

from __future__ import annotations

try:
    from ceiba.cache.native import _tree  # type: ignore[attr-defined]

    available = True
except ImportError:
    _tree = None
    available = False

__all__ = ["_tree", "available"]
