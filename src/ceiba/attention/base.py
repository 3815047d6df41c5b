"""The attention contract. ``plan`` digests a batch's metadata once per step on the CPU side; ``run`` is called once per
layer, is graph-safe, and never looks at anything but tensors that ``plan`` prepared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ceiba.core.step import PrefixGroup
from ceiba.memory.pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention shape, fixed when the model is built (after tensor-parallel sharding)."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    v_head_dim: int = 0
    """0: same as head_dim."""
    window: int = 0
    """Sliding window in tokens (the token itself counts); 0: full attention."""
    softcap: float = 0.0
    causal: bool = True


@dataclass(slots=True)
class AttentionBatch:
    """Metadata of one step. Segments in plan order: prefill first, then decode. Host arrays are int32 numpy."""

    rows: np.ndarray
    """[B] row of each segment"""
    starts: np.ndarray
    """[B] tokens already in the pool before this step"""
    lengths: np.ndarray
    """[B] tokens computed now (1 for decode)"""
    num_prefill: int
    slot_table: torch.Tensor
    """int32 [max_rows, context], device: slot of position p of row r. Already holds this step's slots."""
    slots: torch.Tensor
    """int [T], device: where this step's keys and values go"""
    rows_device: torch.Tensor
    """int32 [B]"""
    kv_lens_device: torch.Tensor
    """int32 [B]: starts + lengths"""
    query_offsets_device: torch.Tensor
    """int32 [B + 1]: prefix sum of lengths"""
    groups: list[PrefixGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; ``attention.select`` compares it with what the model and the flags need."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]
    head_dims: frozenset[int] | None = None
    """None: any."""
    page_sizes: frozenset[int] | None = None
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    shared_prefix: bool = False
    cuda_graph: bool = False


class AttentionBackend(Protocol):
    name: str
    capabilities: Capabilities

    @property
    def slots(self) -> torch.Tensor | None:
        """Slots of the planned batch, int [T], for a fused kernel that writes keys and values before ``run``; None
        where ``run`` itself has to write them."""

    @property
    def wants_kv(self) -> bool:
        """Whether ``run`` reads the planned batch's new keys and values from tensors although they are written."""

    def prepare(self, layers: list[AttentionLayer]) -> None:
        """Announce the model's layers, once, before the first ``plan``."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for the layers of one step."""

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
        """Write k, v to the pool at the batch's slots, then attend.

        q [T, heads, head_dim]; k [T, kv_heads, head_dim]; v [T, kv_heads, v_head_dim]. ``written``: a fused kernel
        has put them into the pool already, and k and v may be None unless ``wants_kv``. Returns
        [T, heads, v_head_dim] in q's dtype.
        """
