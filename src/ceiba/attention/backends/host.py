"""Paged attention in the compiled CPU kernels: prefill, decode, and decode that reads a shared prefix once.

``plan`` turns a step's metadata into the arrays that the kernels take, layer by layer; a fused decoder hands them over
itself and takes only groups (``host_groups``) and context from here. Never knows a model or a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ceiba.attention.base import AttentionBatch, AttentionLayer, Capabilities
from ceiba.core.step import PrefixGroup
from ceiba.kernels import cpu
from ceiba.memory.pool import KVPool

KV_TYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
}
"""The kernels' names of what a pool may hold."""


@dataclass(slots=True)
class HostBatch:
    """A planned step, in the kernels' argument order. int32 unless stated otherwise."""

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    num_prefill: int
    slot_table: np.ndarray
    slots: np.ndarray
    """int64 [T]"""
    groups: Any


def host_groups(groups: list[PrefixGroup], num_segments: int) -> Any:
    """Nested prefix groups as runs of positions: a child serves its members from where its parent ends.

    Cut at the kernels' spans of positions, so that grouping changes no bit of what a row gives.
    """
    span = cpu._cpu.ATTENTION_SPAN
    ordered = sorted(groups, key=lambda group: group.length)
    covered = np.zeros(num_segments, np.int32)
    begins, ends, firsts, counts, members = [], [], [], [], []
    used = 0
    for group in ordered:
        begin = int(covered[group.segments[0]])
        end = group.length // span * span
        if end <= begin:
            continue
        begins.append(begin)
        ends.append(end)
        firsts.append(used)
        counts.append(len(group.segments))
        members.append(group.segments)
        used += len(group.segments)
        covered[group.segments] = end
    if not members:
        return None
    arrays = [np.array(values, np.int32) for values in (begins, ends, firsts, counts)]
    return cpu._cpu.Groups(*arrays, np.concatenate(members).astype(np.int32), covered)


class HostAttention:
    """See ``attention.base.AttentionBackend``."""

    name = "cpu"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset(KV_TYPES),
        head_dims=frozenset(range(32, 257, 32)),
        shared_prefix=True,
    )
    batch: HostBatch
    slots = None
    wants_kv = True

    def __init__(self, context: Any) -> None:
        self.context = context

    def prepare(self, layers: list[AttentionLayer]) -> None:
        """Nothing to know ahead."""

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = HostBatch(
            np.ascontiguousarray(batch.rows, np.int32),
            np.ascontiguousarray(batch.starts, np.int32),
            np.ascontiguousarray(batch.lengths, np.int32),
            batch.num_prefill,
            batch.slot_table.numpy(),
            batch.slots.numpy(),
            host_groups(batch.groups, len(batch.rows)) if batch.groups else None,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        pool: KVPool,
        sinks: torch.Tensor | None = None,
        written: bool = False,
    ) -> torch.Tensor:
        assert k is not None
        assert v is not None
        b = self.batch
        out = torch.empty(q.shape, dtype=torch.float32)
        key_pool, value_pool = pool.k[layer.index], pool.v[layer.index]
        new = [x.float().contiguous().numpy() for x in (q, k, v)]
        cpu._cpu.attention(
            self.context, *new, key_pool.data_ptr(), value_pool.data_ptr(), len(key_pool), layer.num_kv_heads,
            KV_TYPES[pool.shape.dtype], layer.scale, b.rows, b.starts, b.lengths, b.num_prefill, b.slot_table,
            b.slots, b.groups, out.numpy(),
        )  # fmt: skip
        return out.to(q.dtype)
