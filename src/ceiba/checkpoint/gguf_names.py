"""GGUF tensor names to Hugging Face names: owns the naming tables, by architecture. Must never know file offsets or how
a block type packs its values.

Most decoders share one table; an architecture adds or overrides only what its Hugging Face class calls otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SANDWICH: Final = {
    # Norms before and after each half (Gemma 2, Gemma 3); OLMo 2 has only the ones after.
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS: Final = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL_EXPERTS: Final = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What Hugging Face calls a GGUF architecture and its parts."""

    hf_class: str
    model_type: str
    layer: dict[str, str] = field(default_factory=dict)
    """Overrides of the common table."""
    top: dict[str, str] = field(default_factory=lambda: _TOP)
    layer_prefix: str = "model.layers"
    experts: str = "mlp.experts"
    expert_parts: dict[str, str] = field(default_factory=lambda: _EXPERTS)
    interleaved_rope: bool = False
    """The converter permuted the rows of q and k for interleaved rotary embedding."""
    norm_plus_one: bool = False
    """The converter stored norm weights as 1 + w where Hugging Face stores w."""
    hidden_act: str = "silu"
    generates: bool = True


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved_rope=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_plus_one=True, hidden_act="gelu_pytorch_tanh"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", layer=_SANDWICH, norm_plus_one=True, hidden_act="gelu_pytorch_tanh"
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", layer=_SANDWICH, norm_plus_one=True, hidden_act="gelu_pytorch_tanh"
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", layer={"ffn_up": "mlp.gate_up_proj"}),
    "granite": Architecture("GraniteForCausalLM", "granite", interleaved_rope=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", interleaved_rope=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", layer=_SANDWICH),
    "bert": Architecture(
        "BertModel",
        "bert",
        top={
            "token_embd": "embeddings.word_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        },
        layer_prefix="encoder.layer",
        layer={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        hidden_act="gelu",
        generates=False,
    ),
}
MIXTRAL: Final = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    layer={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts="block_sparse_moe.experts",
    expert_parts=_MIXTRAL_EXPERTS,
    interleaved_rope=True,
)
"""GGUF calls it ``llama`` with experts."""

_BLOCK: Final = re.compile(r"blk\.(\d{1,5})\.([a-z0-9_]+)(?:\.(\d{1,5}))?\.(weight|bias)")
_STACKED: Final = re.compile(r"ffn_(gate|up|down)_exps")


def hf_name(architecture: Architecture, name: str) -> str:
    """The Hugging Face name of one stored tensor, or ``name`` itself where the tables have none.

    A stack of experts (``ffn_gate_exps``) has many names: see ``expert_name``.
    """
    block = _BLOCK.fullmatch(name)
    if block is None:
        stem, _, suffix = name.rpartition(".")
        return f"{architecture.top[stem]}.{suffix}" if stem in architecture.top else name
    layer, part, expert, suffix = block.groups()
    prefix = f"{architecture.layer_prefix}.{layer}"
    if expert is not None:  # Mixtral files before mid-2024: one tensor per expert
        projection = part.removeprefix("ffn_")
        if projection not in architecture.expert_parts:
            return name
        return f"{prefix}.{architecture.experts}.{expert}.{architecture.expert_parts[projection]}.{suffix}"
    target = architecture.layer.get(part) or _LAYER.get(part)
    return f"{prefix}.{target}.{suffix}" if target else name


def expert_name(architecture: Architecture, name: str, expert: int) -> str | None:
    """The Hugging Face name of one expert of a stacked tensor; None when ``name`` is no stack of experts."""
    block = _BLOCK.fullmatch(name)
    stacked = block and _STACKED.fullmatch(block[2])
    if not block or not stacked:
        return None
    part = architecture.expert_parts[stacked[1]]
    return f"{architecture.layer_prefix}.{block[1]}.{architecture.experts}.{expert}.{part}.{block[4]}"


def rotary_heads(architecture: Architecture, name: str) -> str | None:
    """``q`` or ``k`` when the rows of this stored tensor are permuted for interleaved rotary embedding."""
    if not architecture.interleaved_rope:
        return None
    block = _BLOCK.fullmatch(name)
    return {"attn_q": "q", "attn_k": "k"}.get(block[2]) if block else None
