"""float64 references of the GPU kernels, the error measure, and what tests hand to kernels. Plain torch."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ceiba.attention.shared_prefix import MAX_PARTS, SharedPlan
from ceiba.kernels.triton.decode import Shared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU serves tests in Triton's interpreter, which checks indices and masks, not a device's arithmetic."""
BF16_BOUND = 8e-3
"""Relative error that bf16 operands and outputs explain."""


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖, NaN if any element of ``out`` is."""
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def shared(plan: SharedPlan) -> Shared:
    """The plan on the device, in the order of its fields."""
    count = np.array([len(plan.items)], np.int32)
    arrays = (plan.items, count, plan.members, plan.own_starts, plan.counts)
    return Shared(*(torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE) for a in arrays), most=MAX_PARTS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, -1)
    return F.silu(gate) * up


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos_sin [T, D]."""
    half = x.shape[-1] // 2
    c, s = cos_sin[:, None, :half].double(), cos_sin[:, None, half:].double()
    a, b = x[..., :half].double(), x[..., half:].double()
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """q [t, heads, D] are the last t of the n positions of k, v [n, kv_heads, D]."""
    t, n = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    keys, values = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = torch.einsum("thd,nhd->htn", q.double(), keys) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(t, device=q.device)[:, None] + n - t
    j = torch.arange(n, device=q.device)[None]
    seen = torch.ones(t, n, dtype=torch.bool, device=q.device)
    if causal:
        seen &= j <= i
    if window:
        seen &= j > i - window
    s = s.masked_fill(~seen, -float("inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, t, 1)], 2)
    return torch.einsum("htn,nhd->thd", s.softmax(-1)[..., :n], values)


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in ids.unique().tolist():
        token, choice = (ids == e).nonzero(as_tuple=True)
        h = silu_mul(x[token].double() @ gate_up[e].double().t())
        out.index_add_(0, token, (h @ down[e].double().t()) * weights[token, choice].double()[:, None])
    return out
