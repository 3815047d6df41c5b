"""The model's tokens as grammars need them. Owns the step from a tokenizer to bytes by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ceiba.core.errors import ConfigError
from ceiba.grammar.base import Vocabulary


class Tokenizer(Protocol):
    """What is asked of ``ceiba.text``'s tokenizer."""

    kind: str
    control_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> np.ndarray: ...


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """``vocab_size``: the model's, padding included; ids that the tokenizer does not know stand for nothing.

    Raises ConfigError where ids are no bytes or nothing ends an answer.
    """
    if tokenizer.kind == "other":
        raise ConfigError("structured output needs a tokenizer whose tokens are bytes, and this model's is not one")
    ends = tuple(i for i in dict.fromkeys(eos_ids) if 0 <= i < vocab_size)
    if not ends:
        raise ConfigError("structured output needs a model with an end token, and this one names none")
    hidden = tokenizer.control_ids | set(ends)
    tokens = [b"" if i in hidden else tokenizer.token_bytes(i) for i in range(vocab_size)]
    special = {name: i for i in sorted(hidden) if i < vocab_size and (name := tokenizer.id_to_token(i))}

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False).tolist()

    return Vocabulary(tokens, ends, special, encode)
