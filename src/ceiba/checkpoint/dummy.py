"""A model with a configuration and no weights (``--load-format dummy``): owns nothing but what config.json and the
tokenizer files say. Shapes come from the model code and values from a seed there; must never know either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ceiba.checkpoint.base import Checkpoint, RawTensor, TokenizerSource
from ceiba.checkpoint.facts import config_dtype, facts_from_config
from ceiba.checkpoint.hf_dir import read_config, read_optional, tokenizer_source
from ceiba.config.records import ModelFacts
from ceiba.core.errors import CheckpointError


class DummyCheckpoint:
    """The configuration of a directory, or of another checkpoint (a GGUF file), without its weights."""

    load_format = "dummy"
    files: tuple[str, ...] = ()

    def __init__(self, source: str | Checkpoint) -> None:
        """``source``: a directory with config.json, or an opened checkpoint. Raises CheckpointError."""
        self._source = None if isinstance(source, str) else source
        if isinstance(source, str):
            self.path = os.path.abspath(source)
            self.config: dict[str, Any] = read_config(self.path)
            self.generation_config: dict[str, Any] = read_optional(self.path, "generation_config.json")
        else:
            self.path, self.config, self.generation_config = source.path, source.config, source.generation_config

    def facts(self) -> ModelFacts:
        """Weight bytes and parameters are estimates from the configured shapes, unpacked."""
        return facts_from_config(
            self.path, self.config, weight_bytes=None, num_params=None, quantized=None, dtype=config_dtype(self.config)
        )

    def tokenizer(self) -> TokenizerSource:
        if self._source is not None:
            return self._source.tokenizer()
        return tokenizer_source(self.path, self.config, self.generation_config)

    def names(self) -> list[str]:
        return []

    def get(self, name: str) -> RawTensor:
        raise CheckpointError(f"{self.path}: opened with --load-format dummy, which has no tensor {name}")

    def __iter__(self) -> Iterator[RawTensor]:
        return iter(())

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
