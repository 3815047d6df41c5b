"""What the checkpoint package works out from a header equals what transformers makes of the same configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ceiba.checkpoint import open_checkpoint
from support.tiny_gguf import llama_tensors, write_gguf


def divisors(factor: float, theta: float) -> np.ndarray:
    """transformers' own, for a head of 64."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": theta}
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=scaling)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return (theta ** -(np.arange(0, 64, 2) / 64) / inverse.numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path, factor: float) -> None:
    extra = {"attention.key_length": 64, "rope.dimension_count": 64}
    tensors = {**llama_tensors(), "rope_freqs.weight": divisors(factor, 50000.0)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, extra=extra))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.names()


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 20,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("config_class", "model_class", "more"),
    [
        (LlamaConfig, LlamaForCausalLM, {}),
        (Qwen2Config, Qwen2ForCausalLM, {}),
        (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16}),
    ],
)
def test_a_saved_model_is_described_rightly(
    tmp_path: Path, config_class: Any, model_class: Any, more: dict[str, Any], tied: bool
) -> None:
    """The directory that transformers writes: parameters, shapes, dtype; and, without its weights, the estimate."""
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **more, tie_word_embeddings=tied)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    count = sum(p.numel() for p in model.parameters())
    facts = checkpoint.facts()
    assert (facts.num_params, facts.weight_bytes, facts.dtype) == (count, 2 * count, "bfloat16")
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim) == (2, 2, more.get("head_dim", 8))
    assert facts.architecture == model_class.__name__
    saved = json.loads((tmp_path / "config.json").read_text())
    assert checkpoint.config["rope_theta"] == saved["rope_parameters"]["rope_theta"]
    state = model.state_dict()
    for raw in checkpoint:
        if raw.name in state:
            bits = state[raw.name].view(torch.int16).numpy()
            np.testing.assert_array_equal(raw.data.view(np.int16).reshape(raw.shape), bits)
    estimate = open_checkpoint(tmp_path, "dummy").facts().num_params
    assert abs(estimate - count) <= 0.03 * count
    if model_class is LlamaForCausalLM:
        assert estimate == count
