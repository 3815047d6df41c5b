"""The decoder-only transformer that most families are: pre-norm blocks of attention and gated MLP, rotary positions.

A family is a ``DecoderSpec`` made from its configuration; what differs between families is a field here, not a copy.
Knows layers and attention's contract; never knows files, formats, requests or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ceiba.attention.base import AttentionBackend, AttentionLayer
from ceiba.core.errors import ConfigError
from ceiba.dist import partition
from ceiba.layers.context import LayerContext
from ceiba.layers.embedding import VocabMatrix
from ceiba.layers.linear import ColumnLinear, RowLinear
from ceiba.layers.moe.sparse import SparseMLP
from ceiba.layers.norm import RMSNorm
from ceiba.layers.ops import KVTarget, QKVShape, Routing
from ceiba.layers.quant.base import Slot
from ceiba.layers.rotary import RopeSpec, Rotary, RotaryStep
from ceiba.memory.pool import KVPool, KVShape

BLOCK_WEIGHTS: Mapping[str, tuple[str, str]] = {
    "self_attn.q_proj": ("qkv", "q"),
    "self_attn.k_proj": ("qkv", "k"),
    "self_attn.v_proj": ("qkv", "v"),
    "self_attn.o_proj": ("out", ""),
    "self_attn.q_norm": ("q_norm", ""),
    "self_attn.k_norm": ("k_norm", ""),
    "mlp.gate_proj": ("gate_up", "gate"),
    "mlp.up_proj": ("gate_up", "up"),
    "mlp.down_proj": ("down", ""),
    "input_layernorm": ("attention_norm", ""),
    "post_attention_layernorm": ("mlp_norm", ""),
}
"""Stored module of a block → (our layer, part of it)."""


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The sparse layers of a decoder."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one expert."""
    renormalize: bool
    """Whether the chosen experts' weights are scaled to sum to 1."""
    layers: frozenset[int]
    """Which layers are sparse; the others have a dense MLP."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Everything that tells one decoder from another."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    tied: bool
    """The output head is the embedding matrix."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Per-head RMS norm on q and k before rotation."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for full attention; empty: full everywhere."""
    moe: MoESpec | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **family: Any) -> DecoderSpec:
        """The common keys of config.json; ``family`` sets the rest. Raises ConfigError for missing or odd values."""
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            head_dim = int(config.get("head_dim") or hidden // heads)
            activation = config.get("hidden_act", "silu")
            if activation not in {"silu", "swish"}:
                raise ConfigError(f"hidden_act {activation!r} is not supported by this family; supported: silu")
            return cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                rms_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=RopeSpec.from_config(config, head_dim),
                tied=bool(config.get("tie_word_embeddings", False)),
                **family,
            )
        except KeyError as error:
            raise ConfigError(f"the model's configuration has no {error.args[0]!r}") from None


def sliding_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Per-layer windows as Qwen states them: by ``layer_types``, or after ``max_window_layers`` layers without."""
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", False):
        return ()
    layers = int(config["num_hidden_layers"])
    types = config.get("layer_types")
    if types:
        return tuple(int(window) if kind == "sliding_attention" else 0 for kind in types)
    full = int(config.get("max_window_layers", layers))
    return tuple(0 if index < full else int(window) for index in range(layers))


class DecoderBlock:
    """One layer: attention and gated MLP, each behind a norm, with a residual stream that is updated in place."""

    def __init__(self, spec: DecoderSpec, index: int, ctx: LayerContext) -> None:
        heads, _ = partition(spec.num_heads, ctx.group, "attention heads")
        kv_heads, _ = partition(spec.num_kv_heads, ctx.group, "KV heads", replicate=True)
        dim = spec.head_dim
        self.ops = ctx.ops
        self.shape = QKVShape(heads, kv_heads, dim, spec.rms_eps, ctx.dtype)
        window = spec.windows[index] if spec.windows else 0
        self.layer = AttentionLayer(index, heads, kv_heads, dim, dim**-0.5, window=window)
        self.attention_norm = RMSNorm(ctx, spec.hidden_size, spec.rms_eps)
        self.qkv = ColumnLinear(
            ctx,
            spec.hidden_size,
            (
                ("q", spec.num_heads * dim, dim, False),
                ("k", spec.num_kv_heads * dim, dim, True),
                ("v", spec.num_kv_heads * dim, dim, True),
            ),
            bias=spec.qkv_bias,
        )
        self.q_norm = RMSNorm(ctx, dim, spec.rms_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(ctx, dim, spec.rms_eps) if spec.qk_norm else None
        self.q_scale = self.q_norm.weight.value if self.q_norm else None
        self.k_scale = self.k_norm.weight.value if self.k_norm else None
        self.out = RowLinear(ctx, spec.num_heads * dim, spec.hidden_size, unit=dim, bias=spec.out_bias)
        self.mlp_norm = RMSNorm(ctx, spec.hidden_size, spec.rms_eps)
        self.moe = _sparse_mlp(spec, index, ctx)
        width = spec.intermediate_size
        if self.moe is None:
            self.gate_up = ColumnLinear(
                ctx, spec.hidden_size, (("gate", width, 1, False), ("up", width, 1, False)), bias=spec.mlp_bias
            )
            self.down = RowLinear(ctx, width, spec.hidden_size, bias=spec.mlp_bias)

    def forward(
        self,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        rope: RotaryStep,
        backend: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor | None:
        """One layer over the residual stream [T, hidden] (``layers.ops``): takes ``delta`` in, returns a new one."""
        layer, target = self.layer, None
        if backend.slots is not None:
            k_pool, v_pool = pool.k[layer.index], pool.v[layer.index]
            target = KVTarget(k_pool, v_pool, backend.slots, backend.wants_kv)
        qkv = self.qkv.after(self.attention_norm, delta, residual)
        new = self.ops.prepare_qkv(qkv, self.shape, rope, self.q_scale, self.k_scale, target)
        attended = backend.run(new.q, new.k, new.v, layer, pool, written=new.written)
        delta = self.out.into(attended.reshape(len(residual), -1), residual)
        if self.moe is not None:
            return self.moe(self.mlp_norm, delta, residual)
        return self.down.into(self.gate_up.gated_after(self.mlp_norm, delta, residual), residual)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        if self.moe is not None:
            yield from ((f"{prefix}.mlp.{name}", slot) for name, slot in self.moe.slots().items())
        for stored, (attribute, part) in BLOCK_WEIGHTS.items():
            layer = getattr(self, attribute, None)
            if layer is not None:
                for suffix, slot in layer.slots(part).items():
                    yield f"{prefix}.{stored}.{suffix}", slot


def _sparse_mlp(spec: DecoderSpec, index: int, ctx: LayerContext) -> SparseMLP | None:
    moe = spec.moe
    if moe is None or index not in moe.layers:
        return None
    routing = Routing(moe.top_k, moe.renormalize)
    return SparseMLP(ctx, spec.hidden_size, moe.intermediate_size, moe.num_experts, routing)


class Decoder:
    """A causal language model. Families override ``describe`` alone."""

    def __init__(self, spec: DecoderSpec, ctx: LayerContext) -> None:
        self.spec = spec
        self.ops = ctx.ops
        self.rotary = Rotary(spec.rope, ctx.context_len, ctx.device)
        self.embedding = VocabMatrix(ctx, spec.vocab_size, spec.hidden_size)
        self.blocks = [DecoderBlock(spec, index, ctx) for index in range(spec.num_layers)]
        self.final_norm = RMSNorm(ctx, spec.hidden_size, spec.rms_eps)
        self.head = self.embedding if spec.tied else VocabMatrix(ctx, spec.vocab_size, spec.hidden_size)

    @classmethod
    def describe(cls, config: Mapping[str, Any]) -> DecoderSpec:
        """The family's spec for a configuration in the keys of Hugging Face's config.json."""
        raise NotImplementedError(f"{cls.__name__} does not describe itself")

    @property
    def layers(self) -> list[AttentionLayer]:
        """Attention's view of the layers, as sharded."""
        return [block.layer for block in self.blocks]

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        first = self.blocks[0].layer
        return KVShape(len(self.blocks), first.num_kv_heads, first.head_dim, first.head_dim, dtype)

    @property
    def kinds(self) -> list[DecoderBlock]:
        """A block of each kind, twice, since what comes before a block decides how it begins: whatever a forward pass
        launches, these launch."""
        found: dict[tuple[bool, int], DecoderBlock] = {}
        for block in self.blocks:
            found.setdefault((block.moe is None, block.layer.window), block)
        return [block for block in found.values() for _ in range(2)]

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        backend: AttentionBackend,
        pool: KVPool,
        blocks: Sequence[DecoderBlock] | None = None,
    ) -> torch.Tensor:
        """ids int [T], positions int64 [T] → normed hidden states [T, hidden]. ``backend`` has planned the batch.
        ``blocks``: these in place of the model's."""
        rope = self.rotary.at(positions)
        residual = self.embedding.embed(ids)
        delta: torch.Tensor | None = None
        for block in self.blocks if blocks is None else blocks:
            delta = block.forward(delta, residual, rope, backend, pool)
        return self.final_norm.add(delta, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] of the positions that need them → [N, vocab] in the run's dtype."""
        return self.head.project(hidden)

    def slots(self) -> dict[str, Slot]:
        """Every stored tensor the model needs, by its name in the Hugging Face layout."""
        found = {f"model.embed_tokens.{suffix}": slot for suffix, slot in self.embedding.slots().items()}
        for index, block in enumerate(self.blocks):
            found.update(block.slots(f"model.layers.{index}"))
        found.update({f"model.norm.{suffix}": slot for suffix, slot in self.final_norm.slots().items()})
        if not self.spec.tied:
            found.update({f"lm_head.{suffix}": slot for suffix, slot in self.head.slots().items()})
        return found

    def ignores(self, name: str) -> bool:
        """Stored tensors that are not needed: rotary tables of old checkpoints, a copy of a tied head."""
        return name.endswith("rotary_emb.inv_freq") or (self.spec.tied and name == "lm_head.weight")
