"""How a kernel reads the row that it works on: partial sums of a split GEMM added up, the residual added. Called by the
kernels of this package; launches nothing and knows no norm, no rotation, no rounding to eight bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_parts(at, mask, part_stride, PARTS: tl.constexpr):
    """The values at the pointers ``at``, zero where masked, and PARTS - 1 more of them, each ``part_stride`` further:
    float32."""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def add_residual(at, residual_at, mask, part_stride, PARTS: tl.constexpr, ADD: tl.constexpr):
    """``sum_parts``; where ADD, the values at ``residual_at`` on top, and the sum, rounded to their dtype, put there
    and returned: float32."""
    x = sum_parts(at, mask, part_stride, PARTS)
    if ADD:
        x += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_at.dtype.element_ty)
        tl.store(residual_at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    return x
