"""GGUF metadata to the keys of Hugging Face's config.json and to a tokenizer source: owns that translation and the
range checks on each value. Must never read a file or touch tensor data, the small rope_freqs tensor apart, which
carries the frequency scaling of Llama 3 and arrives as an array.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ceiba.checkpoint.base import TokenizerSource
from ceiba.checkpoint.gguf_header import StringArray
from ceiba.checkpoint.gguf_names import ARCHITECTURES, MIXTRAL, Architecture
from ceiba.core.errors import CheckpointError

_MAX_DIMENSION: Final = 1 << 24
_MAX_LAYERS: Final = 4096
_TURN_ENDS: Final = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
"""Control tokens that end a turn by convention; files often name only one of them as end of sequence."""
_TEMPLATE: Final = "tokenizer.chat_template"
_CONTROL: Final = 3


class Metadata:
    """Typed, range-checked access to the metadata of one file, with the architecture's prefix understood."""

    def __init__(self, path: str, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        name = values.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: the metadata has no general.architecture")
        self.name = name
        if name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(f"{path}: GGUF architecture {name!r} is not known here; known: {known}")
        experts = self.integer("expert_count", 0, low=0)
        self.architecture: Architecture = MIXTRAL if name == "llama" and experts else ARCHITECTURES[name]

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = _MAX_DIMENSION) -> int:
        """``{architecture}.{key}`` within [low, high]. An array (a value per layer) counts when all are equal."""
        value = self.values.get(f"{self.name}.{key}")
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.path}: the metadata has no {self.name}.{key}")
            return default
        if type(value) is not int or not low <= value <= high:
            shown = "an array of unequal values" if isinstance(value, np.ndarray) else repr(value)[:80]
            raise CheckpointError(
                f"{self.path}: {self.name}.{key} is {shown}; a whole number of {low} to {high} is needed"
            )
        return value

    def real(self, key: str) -> float | None:
        """``{architecture}.{key}``, finite; None when absent. Seven digits: the file holds float32."""
        value = self.values.get(f"{self.name}.{key}")
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(f"{self.path}: {self.name}.{key} is {value!r:.80}; a finite number is needed")
        return float(f"{value:.7g}")

    def token_id(self, key: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{key}")
        return value if type(value) is int and 0 <= value < _MAX_DIMENSION else None


def hf_config(metadata: Metadata, shapes: dict[str, tuple[int, ...]], rope_freqs: np.ndarray | None) -> dict[str, Any]:
    """config.json's content.

    ``shapes``: stored tensor name -> shape, for what the metadata leaves to the tensors (vocabulary, biases, tying).
    ``rope_freqs``: the rope_freqs.weight tensor, float32 [head_dim / 2], when there is one.
    """
    architecture = metadata.architecture
    if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
        raise CheckpointError(f"{metadata.path}: no token_embd.weight matrix; adapters and projectors are not models")
    hidden = metadata.integer("embedding_length")
    heads = metadata.integer("attention.head_count", high=1 << 16)
    head_dim = metadata.integer("attention.key_length", max(hidden // heads, 1), high=1 << 16)
    if shapes["token_embd.weight"][1] != hidden:
        raise CheckpointError(
            f"{metadata.path}: token_embd.weight is {shapes['token_embd.weight']}, hidden size {hidden}"
        )
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "hidden_act": architecture.hidden_act,
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer("block_count", high=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads, high=1 << 16),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length", 2048, high=1 << 30),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": metadata.real("rope.freq_base") or 10000.0,
    }
    if heads % config["num_key_value_heads"]:
        raise CheckpointError(
            f"{metadata.path}: {heads} heads do not divide over {config['num_key_value_heads']} KV heads"
        )
    feed_forward = metadata.integer("feed_forward_length", 0, low=0)
    if feed_forward:
        config["intermediate_size"] = feed_forward
    for key, source in (
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("layer_norm_eps", "attention.layer_norm_epsilon"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        value = metadata.real(source)
        if value is not None:
            config[key] = value
    rotary = metadata.integer("rope.dimension_count", head_dim, high=1 << 16)
    if rotary < head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    scaling = _rope_scaling(metadata, rope_freqs, config)
    if scaling:
        config["rope_scaling"] = scaling
    for hf_key, key in (
        ("bos_token_id", "bos_token_id"),
        ("eos_token_id", "eos_token_id"),
        ("pad_token_id", "padding_token_id"),
    ):
        token = metadata.token_id(key)
        if token is not None:
            config[hf_key] = token
    _moe(metadata, config)
    _family(metadata, config, shapes)
    return config


def _rope_scaling(metadata: Metadata, freqs: np.ndarray | None, config: dict[str, Any]) -> dict[str, Any] | None:
    """``rope_scaling`` as transformers spells it, or None."""
    kind = metadata.values.get(f"{metadata.name}.rope.scaling.type")
    # The oldest files have rope.scale_linear instead of type and factor.
    factor = metadata.real("rope.scaling.factor") or metadata.real("rope.scale_linear") or 1.0
    original = metadata.integer("rope.scaling.original_context_length", 0, low=0, high=1 << 30)
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if original:
            scaling["original_max_position_embeddings"] = original
        for hf_key, key in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("attention_factor", "attn_factor"),
        ):
            value = metadata.real(f"rope.scaling.{key}")
            if value is not None:
                scaling[hf_key] = value
        return scaling
    if freqs is not None:
        return _llama3_scaling(metadata, freqs, config)
    if kind not in (None, "none", "linear", "longrope"):
        raise CheckpointError(f"{metadata.path}: rope scaling {kind!r:.40} is not known; none, linear and yarn are")
    if kind == "longrope":
        raise CheckpointError(
            f"{metadata.path}: longrope scaling in GGUF is not read; use the safetensors of this model"
        )
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 and kind != "none" else None


def _llama3_scaling(metadata: Metadata, freqs: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """Divisors of the rotary frequencies back to the parameters they were computed from.

    Llama 3's rule (Meta's reference code, ``rope_type: llama3``) has four parameters; all released models share three
    of them, and the fourth is the largest divisor. Where the recomputed divisors do not match the stored ones, the
    divisors themselves are passed on in the form of ``longrope`` with equal short and long factors, which every
    implementation of it divides by.
    """
    rotary = metadata.integer("rope.dimension_count", config["head_dim"], high=1 << 16)
    if freqs.shape != (rotary // 2,) or not np.isfinite(freqs).all() or freqs.min(initial=1.0) <= 0:
        raise CheckpointError(f"{metadata.path}: rope_freqs.weight must hold {rotary // 2} positive numbers")
    scaling = {
        "rope_type": "llama3",
        "factor": float(f"{freqs.max():.6g}"),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if np.allclose(freqs, llama3_divisors(scaling, config["rope_theta"], rotary), rtol=1e-3):
        return scaling
    divisors = [float(v) for v in freqs]
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": divisors,
        "long_factor": divisors,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def llama3_divisors(scaling: dict[str, Any], theta: float, rotary: int) -> np.ndarray:
    """What ``rope_type: llama3`` divides each inverse frequency by, float64 [rotary / 2]."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary, 2) / rotary)
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]) / (
        scaling["high_freq_factor"] - scaling["low_freq_factor"]
    )
    middle = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return np.where(wavelength < high, 1.0, np.where(wavelength > low, scaling["factor"], middle))


def _moe(metadata: Metadata, config: dict[str, Any]) -> None:
    experts = metadata.integer("expert_count", 0, low=0, high=1 << 16)
    if not experts:
        return
    config["num_local_experts" if metadata.name == "llama" else "num_experts"] = experts
    config["num_experts_per_tok"] = metadata.integer("expert_used_count", high=experts)
    if metadata.name == "llama":
        return
    config["moe_intermediate_size"] = metadata.integer("expert_feed_forward_length")
    shared = metadata.integer("expert_shared_feed_forward_length", 0, low=0)
    if shared:
        config["shared_expert_intermediate_size"] = shared
    # Not stored: what the released models of these architectures have.
    config |= {"norm_topk_prob": metadata.name == "qwen3moe", "decoder_sparse_step": 1, "mlp_only_layers": []}


def _family(metadata: Metadata, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Keys that only one family has."""
    name = metadata.name
    window = metadata.integer("attention.sliding_window", 0, low=0, high=1 << 30)
    if window:
        config["sliding_window"] = window
        if name.startswith("qwen"):
            config["use_sliding_window"] = True
    if name in ("gemma2", "gemma3"):
        # Not stored: 1/sqrt(head_dim) in all sizes but 27B, which scales by its mean head width.
        large = config["num_hidden_layers"] == (46 if name == "gemma2" else 62)
        scalar = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
        config["query_pre_attn_scalar"] = scalar
        config["hidden_activation"] = config["hidden_act"]
    if name == "gemma3":
        config |= {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
    if name == "granite":
        for hf_key, key, default in (
            ("embedding_multiplier", "embedding_scale", 1.0),
            ("residual_multiplier", "residual_scale", 1.0),
            ("attention_multiplier", "attention.scale", config["head_dim"] ** -0.5),
            ("logits_scaling", "logit_scale", 1.0),
        ):
            config[hf_key] = metadata.real(key) or default
    if name == "smollm3":
        # Every fourth layer has no rotary embedding; llama.cpp fixes the same pattern.
        config["no_rope_layer_interval"] = 4
    if name == "bert":
        config["type_vocab_size"] = shapes.get("token_types.weight", (2,))[0]


def tokenizer_source(metadata: Metadata) -> TokenizerSource:
    """The tokenizer.ggml.* arrays, decoded, with templates and special ids."""
    values = metadata.values
    prefix = "tokenizer.ggml."
    raw = {key.removeprefix(prefix): _plain(value) for key, value in values.items() if key.startswith(prefix)}
    model = raw.get("model")
    tokens = raw.get("tokens")
    if not isinstance(model, str) or not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(f"{metadata.path}: the file carries no tokenizer; name one with --tokenizer-path")
    for key in ("scores", "token_type"):
        if key in raw and (not isinstance(raw[key], list) or len(raw[key]) != len(tokens)):
            raise CheckpointError(f"{metadata.path}: tokenizer.ggml.{key} does not match the {len(tokens)} tokens")
    merges = raw.get("merges", [])
    if not isinstance(merges, list) or (merges and not isinstance(merges[0], str)):
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.merges is not a list of strings")
    templates = {}
    for key, value in values.items():
        if isinstance(value, str) and key == _TEMPLATE:
            templates["default"] = value
        elif isinstance(value, str) and key.startswith(f"{_TEMPLATE}."):
            templates[key.removeprefix(f"{_TEMPLATE}.")] = value
    for key in [k for k in raw if k.endswith("_token_id")]:
        if type(raw[key]) is not int or not 0 <= raw[key] < len(tokens):
            # Some converters write -1 or 2**32 - 1 for "none".
            del raw[key]
    return TokenizerSource(
        gguf=raw,
        chat_templates=templates,
        bos_id=raw.get("bos_token_id"),
        eos_ids=_end_ids(raw, tokens),
        add_bos=_flag(raw, "add_bos_token", model == "llama" or raw.get("pre") in ("llama-bpe", "llama3", "llama-v3")),
        add_eos=_flag(raw, "add_eos_token", False),
    )


def _flag(raw: dict[str, Any], key: str, default: bool) -> bool:
    return bool(raw.get(key, default))


def _plain(value: Any) -> Any:
    if isinstance(value, StringArray):
        return value.decode()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _end_ids(raw: dict[str, Any], tokens: list[str]) -> tuple[int, ...]:
    """End of sequence, end of turn, end of message, then the control tokens that end a turn by convention."""
    named = [raw[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in raw]
    kinds = raw.get("token_type", [])
    control = [i for i, kind in enumerate(kinds) if kind == _CONTROL and tokens[i] in _TURN_ENDS]
    return tuple(dict.fromkeys(named + control))
