"""Qwen2 and Qwen2.5, dense: Llama with biases on q, k and v, and sliding windows in the upper layers if asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ceiba.models.decoder import Decoder, DecoderSpec, sliding_windows


class Qwen2ForCausalLM(Decoder):
    """Yang et al., Qwen2 Technical Report (2024)."""

    @classmethod
    def describe(cls, config: Mapping[str, Any]) -> DecoderSpec:
        return DecoderSpec.from_config(config, qkv_bias=True, windows=sliding_windows(config))
