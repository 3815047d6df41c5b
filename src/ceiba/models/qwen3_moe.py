"""Qwen3 with sparse layers: as dense Qwen3, with a mixture of experts in place of most MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ceiba.core.errors import ConfigError
from ceiba.models.decoder import Decoder, DecoderSpec, MoESpec, sliding_windows


def sparse_layers(config: Mapping[str, Any]) -> MoESpec:
    """The sparse layers as Qwen states them: every ``decoder_sparse_step``-th but those of ``mlp_only_layers``.

    Raises ConfigError for missing or impossible values.
    """
    try:
        experts = int(config.get("num_experts") or config["num_local_experts"])
        top_k = int(config["num_experts_per_tok"])
        width = int(config["moe_intermediate_size"])
    except KeyError as error:
        raise ConfigError(f"the model's configuration has no {error.args[0]!r}") from None
    if not 1 <= top_k <= experts:
        raise ConfigError(f"num_experts_per_tok is {top_k}, but the model has {experts} experts")
    step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    layers = range(int(config.get("num_hidden_layers", 0)))
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=width,
        renormalize=bool(config.get("norm_topk_prob", False)),
        layers=frozenset(index for index in layers if index not in dense and (index + 1) % step == 0),
    )


class Qwen3MoeForCausalLM(Decoder):
    """Yang et al., Qwen3 Technical Report (2025)."""

    @classmethod
    def describe(cls, config: Mapping[str, Any]) -> DecoderSpec:
        bias = bool(config.get("attention_bias", False))
        return DecoderSpec.from_config(
            config,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            windows=sliding_windows(config),
            moe=sparse_layers(config),
        )
