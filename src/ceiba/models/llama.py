"""Llama 1 to 3, and Mistral, which is Llama with a sliding window in its first version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ceiba.models.decoder import Decoder, DecoderSpec


class LlamaForCausalLM(Decoder):
    """Touvron et al. (2023); biases where the configuration says so."""

    @classmethod
    def describe(cls, config: Mapping[str, Any]) -> DecoderSpec:
        bias = bool(config.get("attention_bias", False))
        return DecoderSpec.from_config(
            config, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
        )


class MistralForCausalLM(Decoder):
    """Jiang et al., Mistral 7B (2023)."""

    @classmethod
    def describe(cls, config: Mapping[str, Any]) -> DecoderSpec:
        window = int(config.get("sliding_window") or 0)
        windows = (window,) * int(config.get("num_hidden_layers", 0)) if window else ()
        return DecoderSpec.from_config(config, windows=windows)
