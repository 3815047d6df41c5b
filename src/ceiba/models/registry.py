"""Architecture name → class. A family registers by one line here and is imported only when a checkpoint names it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from ceiba.core.errors import ConfigError

if TYPE_CHECKING:
    from ceiba.models.decoder import Decoder

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("ceiba.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("ceiba.models.llama", "MistralForCausalLM"),
    "Qwen2ForCausalLM": ("ceiba.models.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("ceiba.models.qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("ceiba.models.qwen3_moe", "Qwen3MoeForCausalLM"),
}


def model_class(architecture: str) -> type[Decoder]:
    """The class of an architecture. Raises ConfigError listing what exists."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    module, name = ARCHITECTURES[architecture]
    return getattr(import_module(module), name)
