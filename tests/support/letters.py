"""A vocabulary for the tiny models in which 26 tokens are letters, and a grammar provider that knows it."""

from __future__ import annotations

from ceiba.config.records import GrammarConfig
from ceiba.grammar.base import Vocabulary
from ceiba.grammar.provider import Provider

VOCAB, EOS = 320, 2
FIRST = 10
"""The token of the letter a."""


def letter_provider() -> Provider:
    """With llguidance; to be closed."""
    tokens = [bytes([97 + token - FIRST]) if FIRST <= token < FIRST + 26 else b"" for token in range(VOCAB)]
    return Provider(GrammarConfig(backend="llguidance"), lambda: Vocabulary(tokens, (EOS,), {"<eos>": EOS}, None))
