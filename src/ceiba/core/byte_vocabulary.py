"""The vocabulary of single bytes, in the form that llguidance asks for: what its automata read where text is looked
through and not sampled. Owns that form, and knows nothing of who looks.
"""

from __future__ import annotations


class ByteVocabulary:
    """For ``llguidance.TokenizerWrapper``. Token b is the byte b; 256 ends."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([b]) for b in range(256)), b"<end>"]
    special_token_ids = [256]

    def __call__(self, data: bytes | str) -> list[int]:
        return list(data if isinstance(data, bytes) else data.encode())
