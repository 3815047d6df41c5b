"""ModelFacts from a config in Hugging Face's keys: owns their reading for every format. Must never open a file."""

from __future__ import annotations

import math
from typing import Any, Final

from ceiba.config.records import ModelFacts
from ceiba.core.errors import CheckpointError

_LIMIT: Final = 1 << 30
_MAX_LABELS: Final = 100_000
_DTYPES: Final = ("float32", "bfloat16", "float16")
_NOT_GENERATION: Final = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "RewardModel",
    "ForMaskedLM",
    "EmbeddingModel",
)
_ENCODERS: Final = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet", "NomicBert", "ModernBert")


def normalise(config: dict[str, Any]) -> dict[str, Any]:
    """A copy in the older, flat spelling: transformers 5 writes ``rope_parameters`` and ``dtype``, which here also
    appear as ``rope_theta``, ``rope_scaling`` and ``torch_dtype`` where those are absent."""
    config = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope and config.get(key) is None:
                config[key] = rope[key]
        if scaling.get("rope_type", "default") != "default" and not config.get("rope_scaling"):
            config["rope_scaling"] = scaling
    if config.get("torch_dtype") is None and "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = normalise(config["text_config"])
    return config


def facts_from_config(
    path: str,
    config: dict[str, Any],
    *,
    weight_bytes: int | None,
    num_params: int | None,
    quantized: str | None,
    dtype: str,
) -> ModelFacts:
    """``weight_bytes`` and ``num_params`` None: estimated from the shapes in the config (no weights were read).

    Multimodal configs keep the language model under ``text_config``; its values win.
    """
    text = config.get("text_config")
    inner: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config

    def number(keys: tuple[str, ...], default: int | None = None, high: int = _LIMIT) -> int:
        key = next((k for k in keys if inner.get(k) is not None), None)
        value = default if key is None else inner[key]
        if value is None:
            raise CheckpointError(f"{path}: the config has no {keys[0]}")
        if type(value) is not int or not 1 <= value <= high:
            raise CheckpointError(f"{path}: {key} is {value!r:.80}; a whole number of 1 to {high} is needed")
        return value

    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{path}: the config names no architectures; add it to config.json")
    hidden = number(("hidden_size", "n_embd", "d_model"))
    heads = number(("num_attention_heads", "n_head"), high=1 << 16)
    layers = number(("num_hidden_layers", "n_layer", "num_layers"), high=4096)
    kv_heads = number(("num_key_value_heads",), heads, high=1 << 16)
    head_dim = number(("head_dim",), max(hidden // heads, 1), high=1 << 16)
    vocabulary = number(("vocab_size",))
    if num_params is None:
        num_params = _estimate(inner, hidden, layers, heads, kv_heads, head_dim, vocabulary)
    return ModelFacts(
        architecture=architectures[0],
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        context_len=_context(number, inner) - _first_position(architectures[0], inner),
        weight_bytes=num_params * (4 if dtype == "float32" else 2) if weight_bytes is None else weight_bytes,
        num_params=num_params,
        dtype=dtype,
        quantized=quantized,
        is_generation=is_generation(architectures[0]),
        num_labels=_labels(config),
        labels=_label_names(config),
    )


def _first_position(architecture: str, config: dict[str, Any]) -> int:
    """Positions that no token takes: RoBERTa counts from behind the padding id."""
    pad = config.get("pad_token_id", 1)
    return (pad if type(pad) is int and 0 <= pad < 16 else 1) + 1 if "Roberta" in architecture else 0


def _labels(config: dict[str, Any]) -> int:
    names, count = config.get("id2label"), config.get("num_labels")
    if isinstance(names, dict) and names:
        return len(names)
    return count if type(count) is int and 1 <= count <= _LIMIT else 2


def _label_names(config: dict[str, Any]) -> tuple[str, ...]:
    """In order of their ids 0..n-1; empty for a table that is not one of names."""
    names = config.get("id2label")
    if not isinstance(names, dict) or len(names) > _MAX_LABELS:
        return ()
    ordered = [names.get(str(i), names.get(i)) for i in range(len(names))]
    return tuple(n for n in ordered if isinstance(n, str)) if all(isinstance(n, str) for n in ordered) else ()


def _context(number: Any, config: dict[str, Any]) -> int:
    """Positions, with the factor of YaRN where the config states the length before scaling."""
    length: int = number(("max_position_embeddings", "n_positions", "seq_length"), 2048)
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return length
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(original, int) and math.isfinite(factor) and 1 <= factor <= 4096:
        return max(length, min(int(original * factor), _LIMIT))
    return length


def is_generation(architecture: str) -> bool:
    """Whether the class generates text; encoders, classifiers and reward models do not."""
    if architecture.endswith(_NOT_GENERATION):
        return False
    return not (architecture.startswith(_ENCODERS) or architecture in ("Qwen3Model", "Qwen2Model", "LlamaModel"))


def config_dtype(config: dict[str, Any], stored: str = "bfloat16") -> str:
    """What ``--dtype auto`` means: the config's own dtype where we compute in it, else ``stored``."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        name = source.get("torch_dtype")
        if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
            return name.removeprefix("torch.")
    return stored


def _estimate(
    config: dict[str, Any], hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
) -> int:
    """Parameters of a gated-MLP decoder with these shapes: exact for Llama and Qwen, close for the rest."""

    def size(key: str, default: int) -> int:
        value = config.get(key)
        return value if type(value) is int and 0 < value <= _LIMIT else default

    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = size("num_local_experts", size("num_experts", 0))
    width = size("moe_intermediate_size", size("intermediate_size", 4 * hidden))
    mlp = 3 * hidden * width * experts + hidden * experts if experts else 3 * hidden * size("intermediate_size", width)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + mlp + 2 * hidden) + hidden
