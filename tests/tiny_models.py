"""Tiny random models of every family, from transformers' own classes, saved in the formats we read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama-tied-biased": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "llama-head-dim": (LlamaConfig, LlamaForCausalLM, {"head_dim": 24, "num_key_value_heads": 4}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, _rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": (LlamaConfig, LlamaForCausalLM, _rope(rope_type="dynamic", factor=2.0)),
    "llama-llama3": (
        LlamaConfig,
        LlamaForCausalLM,
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-all": (  # no choice that rounding could turn
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 64},
    ),
    "qwen3-moe-mixed": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
}


def reference(case: str) -> PreTrainedModel:
    """A float32 model whose logits are far enough apart for greedy comparison; the same at every call."""
    config_class, model_class, extra = CASES[case]
    torch.manual_seed(sum(case.encode()))
    model = model_class(config_class(**{**SIZE, **extra})).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):
                value.uniform_(0.5, 1.5)
            elif value.dim() == 1:
                value.normal_(0, 0.3)
            else:
                value.normal_(0, 0.15)
    return model


def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab]"""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[module]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama's converter: rotated pairs side by side instead of half a head apart."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(model: PreTrainedModel, path: Path, kind: str = "F32") -> None:
    """The model as a GGUF file with matrices of a ggml type (norms and biases stay float32)."""
    config = model.config
    arch = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}[config.model_type]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([])
    quant = gguf.GGMLQuantizationType[kind]
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = value.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            data = _interleave(data, heads[part])
        if data.ndim == 2 and kind != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(data, quant), raw_dtype=quant)
        else:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
