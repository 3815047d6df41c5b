"""Attention of long prefills by cuDNN, through torch: faster there on Hopper than the Triton kernel (benchmarks.md).

It makes a plan for each new shape, which takes milliseconds: for shapes that come again. Knows tensors only, nothing of
pools, slots or segments.
"""

from __future__ import annotations

import torch

from ceiba.kernels.triton.prefill import merge_parts

LEAST_VERSION = 90000
"""Of cuDNN, whose attention torch uses from here on."""


def can_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether cuDNN takes q [T, heads, D], k [S, kv_heads, D] and v [S, kv_heads, D]."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.dtype != k.dtype:
        return False
    if torch.cuda.get_device_capability(q.device)[0] < 9 or (torch.backends.cudnn.version() or 0) < LEAST_VERSION:
        return False
    return q.shape[2] == v.shape[2] and q.shape[2] <= 128 and q.shape[2] % 8 == 0


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of one segment's new tokens over its cached prefix, if it has one, and themselves.

    q [T, heads, D], k and v [T, kv_heads, D] (heads contiguous, any row stride); prefix: its k and v, each
    [S, kv_heads, D]; out [T, heads, D], contiguous. The two parts are merged exactly by their log-sum-exp.
    """
    own, own_lse = _attention(q, k, v, scale, causal=True)
    if prefix is None:
        out.copy_(own)
        return
    before, before_lse = _attention(q, *prefix, scale, causal=False)
    merge_parts(own, own_lse, before, before_lse, out)


def attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """As ``attend`` where there is no prefix, without a copy of the result: [T, heads, D], contiguous."""
    return _attention(q, k, v, scale, causal=True)[0].contiguous()


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, heads, D], natural log-sum-exp float32 [heads, T])"""
    qs, ks, vs = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        qs, ks, vs, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0])
