"""What a checkpoint offers, whatever its format. Tensor names are those of the Hugging Face layout in every format
(``model.layers.0.self_attn.q_proj.weight``): a format with names of its own translates here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ceiba.config.records import ModelFacts


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One stored tensor, mapped, not copied.

    ``kind`` is a numpy-like dtype name for plain tensors (``F32``, ``F16``, ``BF16``, ``F8_E4M3``, ``I32``, …: the
    safetensors spelling) or a GGUF block type (``Q4_1``, ``Q6_K``, …). ``data`` is uint8: the bytes of the tensor,
    shape [rows, bytes per row] for block types, flat otherwise. ``shape`` is the logical one, outermost first, as
    torch would show it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(slots=True)
class TokenizerSource:
    """Where a tokenizer comes from: a tokenizer.json path, or the arrays of a GGUF header (see ``text.tokenizer``)."""

    tokenizer_json: str | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    gguf: dict[str, Any] | None = None
    """The ``tokenizer.ggml.*`` keys without that prefix: model, pre, tokens, token_type, scores, merges, …"""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """name -> jinja source; ``default`` is the usual one."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    add_eos: bool = False


class Checkpoint(Protocol):
    """An opened, validated model file or directory."""

    path: str
    config: dict[str, Any]
    """In the keys of Hugging Face's config.json, for every format (GGUF metadata is translated)."""
    generation_config: dict[str, Any]
    """temperature, top_p, eos_token_id … that the model's authors suggest; may be empty."""
    load_format: str
    """``gguf``, ``safetensors``, ``dummy`` (no weights: shapes come from the model code, values from a seed) or ``pt``
    (torch's own files, which only torch can read: see ``files``). ``names`` is empty for the last two."""
    files: tuple[str, ...]
    """Every weight file, absolute, in reading order."""

    def facts(self) -> ModelFacts: ...

    def tokenizer(self) -> TokenizerSource: ...

    def names(self) -> list[str]: ...

    def get(self, name: str) -> RawTensor:
        """Raises CheckpointError when there is no such tensor."""

    def __iter__(self) -> Iterator[RawTensor]:
        """In file order, which is the fast order to read."""

    def close(self) -> None: ...
