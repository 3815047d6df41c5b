"""HAZARDS 6: a character split over tokens never shows U+FFFD, in the middle or at the end."""

from __future__ import annotations

import pytest

from ceiba.text.incremental import TextStream
from support import text_vocab

TEXT = "🦙👩‍💻日本é\u0301 鬱"


@pytest.mark.parametrize("name", ["byte_level", "spm"])
def test_no_replacement_character_at_any_cut(name: str) -> None:
    tokenizer = getattr(text_vocab, name)()
    data = TEXT.encode()
    if name == "spm":
        ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in data]
    else:
        table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        ids = [table[bytes([b])] for b in data]
    for cut in range(len(ids) + 1):
        stream = TextStream(tokenizer)
        pieces = [stream.push(i) for i in ids[:cut]] + [stream.flush()]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == data[:cut].decode("utf-8", "ignore")
