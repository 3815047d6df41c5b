"""How the kernels of this package are launched: programmatic dependent launch where the device has it, the number of
multiprocessors, block sizes. Knows devices only, never what a kernel computes.

Programmatic dependent launch (Hopper and later) lets a kernel's blocks start while the previous kernel drains. Every
kernel that is launched so keeps one rule: it reads nothing that an earlier kernel of the step wrote, and writes
nothing, before ``gdc_wait``; only weights and step metadata may be touched before. ``gdc_launch_dependents`` comes
after ``gdc_wait``, so a kernel that has started knows that its predecessor's predecessor is complete.

One kernel does otherwise: where stretches are shared, ``decode._decode`` runs beside ``_shared``, its predecessor, and
relies on that last sentence instead of waiting. It lets ``_combine`` start before ``_shared`` has ended, so that one
may do less before its wait than the sentence says: touch metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@functools.cache
def _device_facts(index: int) -> tuple[int, bool]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major >= 9


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; 132 (an H200's) where there is none, so that grids can be tested anywhere."""
    if device.type != "cuda":
        return 132
    return _device_facts(device.index or 0)[0]


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with a ``PDL`` switch."""
    if device.type == "cuda" and _device_facts(device.index or 0)[1]:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def can_copy(device: torch.device) -> bool:
    """Whether the device has an engine that copies tiles (Hopper and later)."""
    return device.type == "cuda" and _device_facts(device.index or 0)[1]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def divide_up(n: int, by: int) -> int:
    return -(-n // by)


@contextmanager
def compile_only(threads: int) -> Iterator[bool]:
    """Within, launching a kernel has it compiled by one of ``threads`` threads and runs nothing, so what kernels would
    write stays as it was; at the end all are ready. Yields whether this version of Triton can do so; if not, launches
    run as ever. For one thread, at start, before anything depends on results: it changes how every kernel launches.
    """
    try:
        from triton import AsyncCompileMode
    except ImportError:
        yield False
        return
    run = JITFunction.run

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(threads, "compile") as pool:
        JITFunction.run = compile_alone
        try:
            with AsyncCompileMode(pool):
                yield True
        finally:
            JITFunction.run = run


def on_compile(report: Callable[[str], None]) -> None:
    """Have ``report`` called with the name of every kernel that is compiled from now on."""

    def compiled(*, fn: Any, **_: Any) -> None:
        report(fn.name)

    triton.knobs.runtime.jit_post_compile_hook = compiled


@contextmanager
def expected() -> Iterator[None]:
    """Within, what is compiled is not reported: it belongs to the start."""
    runtime = triton.knobs.runtime
    report, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, None
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = report


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Everything earlier kernels wrote is visible after this; later kernels may start their prologues."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start although this one's predecessor may still run, which the rule above excludes: the next
    one can rely on nothing before its own wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_to_l2(pointers):
    """Ask for the 128-byte lines under a block of pointers; fetches nothing into registers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
