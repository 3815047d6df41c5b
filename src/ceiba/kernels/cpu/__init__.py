"""C++ kernels for the CPU. ``available`` is False where the package was installed without a compiler."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import cache, partial

try:
    from ceiba.kernels.cpu import _cpu  # type: ignore[attr-defined]

    available = True
except ImportError:
    _cpu = None
    available = False

__all__ = ["_cpu", "available", "best_set", "same_bits"]

log = logging.getLogger(__name__)

NEAR = 1e-2
"""Products on tiles round to bfloat16, which leaves 2e-3 of their size, everything else less; a unit that computes
something else is off by about 1."""

PROVEN = frozenset({"generic", "avx2"})
"""Sets that are taken unchecked."""
CHECK_SECONDS = 5.0


@cache
def best_set() -> str:
    """The fastest instruction set that works here, by a check of some milliseconds, once per process.

    A processor may be the first of its kind to run a unit, and a virtual machine may claim instructions that it does
    not have: whatever a unit does then, a wrong product or an illegal instruction, another one is used.
    """
    sets = [str(name) for name in _cpu.instruction_sets()]
    while sets and sets[-1] not in PROVEN and not holds(partial(agrees, sets[-1], "generic")):
        log.warning("the CPU kernels for %s do not work on this processor and are not used", sets.pop())
    return sets[-1] if sets else "generic"


def same_bits() -> bool:
    """Whether ``best_set`` gives a row the same bits in any company without being asked to: it multiplies no tiles."""
    return not _cpu.Context(1, best_set()).tiles


def holds(check: Callable[[], bool]) -> bool:
    """Whether ``check`` is true, found out by a forked child, which may die of it. ``check`` must import nothing."""
    if not hasattr(os, "fork"):
        return check()
    import numpy.random  # noqa: F401 (here: another thread may hold the import lock while the child runs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads; the child uses this one alone
        child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()
            code = 0 if check() else 1
        finally:
            os._exit(code)
    until = time.monotonic() + CHECK_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)
    return ended[1] == 0


def agrees(one: str, other: str) -> bool:
    """Whether two instruction sets give about the same: products of 33 rows, of a plain, a simple and a K type, and a
    prompt's attention."""
    import numpy as np  # not for ``--help``

    rng = np.random.default_rng(0)
    contexts = [_cpu.Context(1, name) for name in (one, other)]
    x = rng.normal(size=(33, 256)).astype(np.float32)
    for kind, row_bytes, scales in (("BF16", 512, ()), ("Q4_1", 160, range(0, 160, 20)), ("Q6_K", 210, (208,))):
        source = rng.integers(0, 256, (48, row_bytes), dtype=np.uint8)
        if kind == "BF16":
            values = rng.normal(size=(48, 256)).astype(np.float32)
            source = np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        for at in scales:
            source[:, at : at + 2] = np.full((48, 1), 0.01, np.float16).view(np.uint8)
            if kind == "Q4_1":
                source[:, at + 2 : at + 4] = np.full((48, 1), -0.07, np.float16).view(np.uint8)
        packed = np.empty(_cpu.packed_size(kind, 48, 256), np.uint8)
        _cpu.pack(contexts[1], kind, source, 256, packed)
        matrix = _cpu.PackedMatrix(kind, 48, 256, packed)
        found, wanted = (np.empty((33, 48), np.float32) for _ in contexts)
        _cpu.linear(contexts[0], matrix, x, found, False)
        _cpu.linear(contexts[1], matrix, x, wanted, False)
        if not np.linalg.norm(found - wanted) < NEAR * np.linalg.norm(wanted):
            return False
    pools = [
        np.ascontiguousarray(rng.normal(size=(48, 1, 64)).astype(np.float32).view(np.uint16)[..., 1::2]) for _ in "kv"
    ]
    q, slots = rng.normal(size=(40, 2, 64)).astype(np.float32), rng.permutation(48)[:40]
    segment = [np.array([value], np.int32) for value in (0, 0, 40)]
    found, wanted = (np.empty_like(q) for _ in contexts)
    for context, out in zip(contexts, (found, wanted), strict=True):
        pointers = [pool.ctypes.data for pool in pools]
        table = slots.astype(np.int32)[None]
        _cpu.attention(
            context,
            q,
            None,
            None,
            *pointers,
            48,
            1,
            "bfloat16",
            0.125,
            *segment,
            1,
            table,
            slots.astype(np.int64),
            None,
            out,
        )
    return bool(np.linalg.norm(found - wanted) < NEAR * np.linalg.norm(wanted))
