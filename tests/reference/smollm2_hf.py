"""The embedded SmolLM2 as transformers' LlamaForCausalLM in float32, for references and parity tests.

Reads the GGUF with the gguf package and nothing of the engine's, so that what it says is independent evidence. Also
writes the model as a Hugging Face directory of safetensors (``python smollm2_hf.py MODEL.gguf OUTDIR``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""As in the model's own config.json; the GGUF stores the same values."""


def state_dict(gguf_path: str | Path) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 array."""
    import gguf

    out: dict[str, np.ndarray] = {}
    for tensor in gguf.GGUFReader(str(gguf_path)).tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem == "token_embd":
            name = "model.embed_tokens"
        elif stem == "output_norm":
            name = "model.norm"
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{_NAMES[part]}"
            if part in ("attn_q", "attn_k"):
                # The converter interleaved the two rotary halves of each head: rows (head, 2, d/2) -> (head, d/2, 2).
                heads = CONFIG["num_attention_heads"] if part == "attn_q" else CONFIG["num_key_value_heads"]
                rows, cols = weight.shape
                weight = weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)
        out[f"{name}.weight"] = np.ascontiguousarray(weight)
    return out


def load_model(gguf_path: str | Path) -> Any:
    """transformers' model in float32, eval mode, on the CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().eval()
    weights = {name: torch.from_numpy(array) for name, array in state_dict(gguf_path).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def load_tokenizer(gguf_path: str | Path) -> Any:
    """A ``tokenizers.Tokenizer`` with the model's vocabulary: digits one by one, then GPT-2's byte-level BPE."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = gguf.GGUFReader(str(gguf_path)).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return tokenizer


def save_directory(gguf_path: str | Path, out: str | Path, shards: int = 1) -> Path:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and safetensors (float32).

    ``shards`` > 1 writes that many files and model.safetensors.index.json.
    """
    import gguf
    from safetensors.numpy import save_file

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    weights = state_dict(gguf_path)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **CONFIG}
    config["torch_dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    (out / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = load_tokenizer(gguf_path)
    tokenizer.save(str(out / "tokenizer.json"))
    template = gguf.GGUFReader(str(gguf_path)).fields["tokenizer.chat_template"].contents()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    (out / "tokenizer_config.json").write_text(json.dumps(special))
    if shards == 1:
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return out
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        save_file(part, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


if __name__ == "__main__":
    print(save_directory(sys.argv[1], sys.argv[2]))
