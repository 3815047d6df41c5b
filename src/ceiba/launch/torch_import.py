"""The import of torch, which takes most of a start: without the part that only compilers and fake tensors need.

Owns nothing but that import. Where torch is a build for CPUs this process computes with its operators and compiled
kernels, and traces or compiles nothing; so the Python registrations of what operators do to shapes alone (a quarter of
the import's time, most of it for reference decompositions) are left out. They are not lost: whoever imports them later
gets the real modules.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

SHAPES_ONLY = ("torch._meta_registrations", "torch.distributed._meta_registrations")


def import_torch() -> None:
    """Import torch, once; a second call does nothing."""
    if "torch" in sys.modules:
        return
    left_out = SHAPES_ONLY if cpu_build() else ()
    for name in left_out:
        sys.modules[name] = types.ModuleType(name)
    try:
        import torch  # noqa: F401
    finally:
        for name in left_out:
            package, _, attribute = name.rpartition(".")
            del sys.modules[name]
            if package in sys.modules:
                vars(sys.modules[package]).pop(attribute, None)


def cpu_build() -> bool:
    """Whether the installed torch computes on CPUs alone, by its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    devices = re.findall(r"^(?:cuda|hip|xpu)\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
    return bool(devices) and all(value.strip() == "None" for value in devices)
