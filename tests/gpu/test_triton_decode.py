"""Decode attention where segments have several splits, small enough for Triton's interpreter: how parts are merged."""

from __future__ import annotations

import gpu_reference as ref
import numpy as np
import pytest
import torch

from ceiba.attention.shared_prefix import MAX_PARTS, plan_shared
from ceiba.core.step import PrefixGroup
from ceiba.kernels.triton import decode as module
from ceiba.kernels.triton.decode import DecodeWorkspace, decode, shared_tile

KINDS = {"full": {}, "window": {"window": 37}, "softcap": {"softcap": 5.0}, "sinks": {}}
LENS = [0, 1, 63, 64, 65, 1100, 129, 300]


class Case:
    """Segments of LENS (the last two under a common prefix) in a pool of float32, slots scattered, parts poisoned."""

    def __init__(self, heads: int, kv_heads: int, dim: int, v_dim: int, prefix: int = 0) -> None:
        self.lens = np.array([*LENS[:-2], *(prefix + n for n in LENS[-2:])], np.int32)
        batch, context = len(LENS), int(self.lens.max())
        slots = torch.randperm(batch * context + 1)[: batch * context]
        self.table = slots.view(batch, context).int().to(ref.DEVICE)
        self.table[-1, :prefix] = self.table[-2, :prefix]
        self.k = torch.randn(batch * context + 1, kv_heads, dim, device=ref.DEVICE)
        self.v = torch.randn(batch * context + 1, kv_heads, v_dim, device=ref.DEVICE)
        self.q = torch.randn(batch, heads, dim, device=ref.DEVICE)
        self.workspace = DecodeWorkspace.allocate(batch, heads, kv_heads, v_dim, MAX_PARTS, self.q.device)
        self.workspace.parts.fill_(float("nan"))
        self.workspace.lse.fill_(float("nan"))

    def check(self, **extra: object) -> None:
        batch, scale = len(LENS), self.q.shape[2] ** -0.5
        rows = torch.arange(batch, dtype=torch.int32, device=ref.DEVICE)
        out = ref.poisoned(batch, self.q.shape[1], self.v.shape[2], dtype=torch.float32)
        lens = torch.from_numpy(self.lens).to(ref.DEVICE)
        decode(self.q, self.k, self.v, self.table, rows, lens, self.workspace, scale, out=out, **extra)  # type: ignore[arg-type]
        extra.pop("shared", None)
        assert not out[0].any()  # of no length
        for b in range(1, batch):
            slots = self.table[b, : self.lens[b]].long()
            expected = ref.attention(self.q[b : b + 1], self.k[slots], self.v[slots], scale, **extra)  # type: ignore[arg-type]
            assert ref.error(out[b : b + 1], expected) < 2e-5, b


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(8, 2, 32, 32), (6, 3, 40, 24), (8, 8, 16, 16)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [4, 32])
def test_splits(heads, kv_heads, dim, v_dim, kind, splits, monkeypatch):
    monkeypatch.setattr(module, "choose_splits", lambda *shape: (splits, 64))
    extra = {"sinks": torch.randn(heads, device=ref.DEVICE)} if kind == "sinks" else KINDS[kind]
    Case(heads, kv_heads, dim, v_dim).check(**extra)


@pytest.mark.parametrize("kind", ["full", "softcap", "sinks"])
def test_splits_beside_a_shared_stretch(kind, monkeypatch):
    """Segments have parts of the stretch and several of their own, parts of their own alone, and one."""
    monkeypatch.setattr(module, "choose_splits", lambda *shape: (8, 64))
    prefix, members = 2100, np.array([len(LENS) - 2, len(LENS) - 1], np.int32)
    case = Case(8, 2, 32, 32, prefix)
    rows = np.arange(len(LENS), dtype=np.int32)
    plan = plan_shared([PrefixGroup(prefix, members)], 0, rows, case.lens, shared_tile(4), 2, 132)
    assert plan is not None
    extra = {"sinks": torch.randn(8, device=ref.DEVICE)} if kind == "sinks" else KINDS[kind]
    case.check(shared=ref.shared(plan), **extra)
