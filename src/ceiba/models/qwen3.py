"""Qwen3, dense: per-head norms on q and k in place of Qwen2's biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ceiba.models.decoder import Decoder, DecoderSpec, sliding_windows


class Qwen3ForCausalLM(Decoder):
    """Yang et al., Qwen3 Technical Report (2025)."""

    @classmethod
    def describe(cls, config: Mapping[str, Any]) -> DecoderSpec:
        bias = bool(config.get("attention_bias", False))
        return DecoderSpec.from_config(
            config, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=sliding_windows(config)
        )
