"""Makes Triton's interpreter right for narrow floats: it halves a value whose rounding to eight bits carries into the
exponent (127 becomes 64), and multiplies the bits of bfloat16 as integers (seen in 3.6 and 3.9). Conversions go through
torch instead, and bfloat16 products through float32; masks made of a number and a block become booleans, which its
loads insist on. For tests alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

FLOATS = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Bits of ``source`` floats as bits of ``target`` floats, to nearest, what is too large for eight bits as the
    largest: what ``cvt.rn.satfinite`` does."""
    before, after = FLOATS[source.name], FLOATS[target.name]
    integers = data.view(getattr(np, f"int{8 * before.itemsize}" if before.itemsize > 1 else "uint8"))
    values = torch.from_numpy(np.ascontiguousarray(integers)).view(before).to(torch.float64)
    if after.itemsize == 1:
        limit = torch.finfo(after).max
        values = values.clamp(-limit, limit)
    if before.itemsize < 8:
        values = values.float()
    bits = values.to(after).view(INTEGERS[after.itemsize]).numpy()
    return bits.view(getattr(np, f"uint{8 * after.itemsize}"))


def install() -> None:
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar.name not in {"bf16", "fp8e4nv", "fp8e5"}:
            return handle
        values = convert(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), d, *rest)

    def boolean(handle: Any) -> Any:
        return interpreter.TensorHandle(handle.data.astype(bool), handle.dtype)

    load, store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, boolean(mask), *rest)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, boolean(mask), *rest)

    interpreter._convert_float = convert
    builder.create_dot = create_dot
    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
