"""A whole decoder as one call of the compiled CPU kernels: no Python and no dispatch per layer.

``fuse`` takes a loaded model whose every matrix is packed and whose shape the kernels know (Llama, Qwen2, Qwen3), and
returns its fused form; any other model keeps running layer by layer. Knows layers, plans and kernels, never formats
or requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ceiba.attention.backends.host import KV_TYPES, HostAttention, host_groups
from ceiba.attention.base import AttentionLayer
from ceiba.core.step import Int32, StepPlan
from ceiba.kernels import cpu
from ceiba.layers.linear import ColumnLinear, RowLinear
from ceiba.layers.norm import RMSNorm
from ceiba.layers.quant.packed import PackedWeight
from ceiba.memory.pool import KVPool, KVShape
from ceiba.models.decoder import Decoder, DecoderBlock


class FusedDecoder:
    """A ``Decoder`` whose steps are one call each."""

    def __init__(self, model: Decoder, pool: KVPool, attention: HostAttention) -> None:
        self.spec, self.layers = model.spec, model.layers
        self._kv_shape = model.kv_shape
        self._context = attention.context
        self._pool_slots = len(pool.k[0])
        first = model.blocks[0]
        embedding, head = model.embedding.weight, model.head.weight
        assert isinstance(embedding, PackedWeight)
        assert isinstance(head, PackedWeight)
        tables = [table.float().contiguous().numpy() for table in (model.rotary.cos, model.rotary.sin)]
        layers = [_layer(block, pool) for block in model.blocks]
        final = _floats(model.final_norm)
        self._decoder = cpu._cpu.Decoder(
            hidden=model.spec.hidden_size,
            ffn=model.spec.intermediate_size,
            heads=first.layer.num_heads,
            kv_heads=first.layer.num_kv_heads,
            head_dim=first.layer.head_dim,
            eps=model.spec.rms_eps,
            scale=first.layer.scale,
            kv=KV_TYPES[pool.shape.dtype],
            int8=embedding.int8,
            cos=tables[0],
            sin=tables[1],
            final_norm=final,
            embedding=embedding.parts[""].matrix,
            head=head.parts[""].matrix,
            layers=layers,
            keep=(model, pool, layers, tables, final),
        )

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        return self._kv_shape(dtype)

    def step(self, state: Any, plan: StepPlan, select: Int32 | None, hidden: np.ndarray, logits: np.ndarray) -> None:
        """Compute a plan. ``state``: the kernels' RowState, whose slot table receives the plan's slots. Writes hidden
        float32 [T, hidden], before the final norm, and logits float32 [len(select), vocab] of the tokens that
        ``select`` names, of all of them where it is None."""
        groups = host_groups(plan.groups, len(plan.rows)) if plan.groups else None
        self._decoder.step(
            self._context, state, plan.rows, plan.starts, plan.lengths, plan.num_prefill, plan.tokens, plan.slots,
            self._pool_slots, groups, select, hidden, logits,
        )  # fmt: skip

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] as ``step`` wrote it → float32 [N, vocab]."""
        out = torch.empty(len(hidden), self.spec.vocab_size)
        self._decoder.logits(self._context, hidden.contiguous().numpy(), out.numpy())
        return out


def fuse(model: Decoder, pool: KVPool, attention: HostAttention) -> FusedDecoder | None:
    """The fused form, or None when the kernels do not cover this model or this pool."""
    spec = model.spec
    if spec.moe is not None:
        return None
    packed = [model.embedding.weight, model.head.weight, *(w for block in model.blocks for w in _matrices(block))]
    covered = (
        all(isinstance(weight, PackedWeight) for weight in packed)
        and not any(spec.windows)
        and spec.rope.dim == spec.head_dim
        and spec.head_dim % 32 == 0
        and spec.hidden_size % 32 == 0
        and spec.intermediate_size % 32 == 0
        and pool.shape.dtype in attention.capabilities.kv_dtypes
    )
    return FusedDecoder(model, pool, attention) if covered else None


def _matrices(block: DecoderBlock) -> list[Any]:
    return [block.qkv.weight, block.out.weight, block.gate_up.weight, block.down.weight]


def _floats(norm: RMSNorm | None) -> np.ndarray | None:
    return None if norm is None else norm.weight.value.float().contiguous().numpy()


def _part(linear: ColumnLinear | RowLinear, part: str) -> Any:
    weight = linear.weight
    assert isinstance(weight, PackedWeight)
    packed = weight.parts[part]
    if linear.bias is None:
        return packed.matrix
    what, start = linear.bias.spec.part(part)
    return packed.with_bias(linear.bias.value[start : start + what.rows])


def _layer(block: DecoderBlock, pool: KVPool) -> dict[str, Any]:
    layer: AttentionLayer = block.layer
    return {
        "attn_norm": _floats(block.attention_norm),
        "ffn_norm": _floats(block.mlp_norm),
        "q_norm": _floats(block.q_norm),
        "k_norm": _floats(block.k_norm),
        "q": _part(block.qkv, "q"),
        "k": _part(block.qkv, "k"),
        "v": _part(block.qkv, "v"),
        "out": _part(block.out, ""),
        "gate": _part(block.gate_up, "gate"),
        "up": _part(block.gate_up, "up"),
        "down": _part(block.down, ""),
        "k_pool": pool.k[layer.index].data_ptr(),
        "v_pool": pool.v[layer.index].data_ptr(),
    }
