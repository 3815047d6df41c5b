"""Decode from the raw projection against the two launches it replaces: the same keys and values in the same slots, the
same attention. Runs in Triton's interpreter too, on the small shapes.
"""

from __future__ import annotations

import gpu_reference as ref
import numpy as np
import pytest
import torch

from ceiba.kernels.triton.decode import DecodeWorkspace, NewTokens, decode
from ceiba.kernels.triton.rope import qkv_norm_rope_write

B = torch.bfloat16
INTERPRETED = ref.DEVICE == "cpu"
on_device = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
CASES = {
    "normed": {},
    "plain": {"normed": False},
    "parts": {"parts": 2},
    "window": {"window": 9},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": True},
    "e4m3": {"pool": torch.float8_e4m3fn},
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "lens"),
    [
        (4, 2, 64, [1, 70, 0]),
        pytest.param(32, 8, 128, [1], marks=on_device),
        pytest.param(32, 8, 128, [1024], marks=on_device),
        pytest.param(32, 4, 128, None, marks=on_device),
        pytest.param(9, 3, 64, None, marks=on_device),
        pytest.param(8, 8, 80, None, marks=on_device),
    ],
)
@pytest.mark.parametrize("case", list(CASES))
def test_equals_two_launches(heads: int, kv_heads: int, dim: int, lens: list[int] | None, case: str) -> None:
    options = CASES[case]
    rng = np.random.default_rng()
    lens = rng.integers(0, 3000, 70).tolist() if lens is None else lens
    batch, parts, context = len(lens), options.get("parts", 0), max(lens) + 1
    width = (heads + 2 * kv_heads) * dim
    shape = (parts, batch, width) if parts else (batch, width)
    qkv = torch.randn(*shape, device=ref.DEVICE).to(torch.float32 if parts else B)
    slots_total = sum(lens) + 5
    pool = options.get("pool", B)
    pools = [torch.randn(slots_total, kv_heads, dim, device=ref.DEVICE).to(pool) for _ in range(2)]
    order = torch.randperm(slots_total, device=ref.DEVICE).int()
    table = order[-1].expand(batch, context).clone()
    slots, at = [], 0
    for row, length in enumerate(lens):
        table[row, :length] = order[at : at + length]
        slots.append(int(order[at + length - 1]) if length else int(order[-1]))
        at += length
    angle = torch.rand(context + 1, dim // 2, device=ref.DEVICE) * 6
    gains = [torch.rand(dim, device=ref.DEVICE).to(B) + 0.5 for _ in range(2)]
    weights = gains if options.get("normed", True) else [None, None]
    on = lambda values: torch.tensor(values, device=ref.DEVICE, dtype=torch.int32)  # noqa: E731
    positions = on([max(0, length - 1) for length in lens])
    rows, kv_lens = on(range(batch)), on(lens)
    new = NewTokens(qkv, torch.cat([angle.cos(), angle.sin()], -1), positions, on(slots), heads, B, *weights)
    sinks = torch.randn(heads, device=ref.DEVICE) if options.get("sinks") else None
    more = {"window": options.get("window", 0), "softcap": options.get("softcap", 0.0), "sinks": sinks}
    work = DecodeWorkspace.allocate(batch, heads, kv_heads, dim, 0, qkv.device)

    apart = [p.clone() for p in pools]
    q, _, _ = qkv_norm_rope_write(qkv, new.cos_sin, positions, new.slots, *apart, heads, *weights, eps=new.eps, dtype=B)
    wanted = decode(q, *apart, table, rows, kv_lens, work, dim**-0.5, **more)
    fused = [p.clone() for p in pools]
    for p in fused:  # what is not there yet must not be read
        p.view(torch.uint8)[new.slots.long()] = 0x7F
    work.parts.fill_(float("nan"))
    for _ in range(1 if INTERPRETED else 3):
        out = ref.poisoned(batch, heads, dim)
        decode(new, *fused, table, rows, kv_lens, work, dim**-0.5, out=out, **more)
        assert not work.counters.any()
        assert ref.error(out, wanted) < ref.BF16_BOUND
        assert not out[kv_lens == 0].any()
    for one, other in zip(fused, apart, strict=True):
        written = new.slots[kv_lens > 0].long()
        assert ref.error(one.float()[written], other.float()[written]) < (0.02 if pool.itemsize == 1 else 1e-3)
        rest = torch.ones(slots_total, dtype=torch.bool, device=ref.DEVICE)
        rest[new.slots.long()] = False
        assert torch.equal(one.view(torch.uint8)[rest], other.view(torch.uint8)[rest])
