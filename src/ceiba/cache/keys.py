"""Cache keys: a namespace and the tokens inside it. Owns how keys are compared; knows no tree and no slot.

Two sequences share KV only when their namespaces are equal and their tokens agree. Tokens are int32 arrays and are
compared as arrays or bytes, never as lists. A media item will stand in the sequence as the words of its full digest at
its placeholder positions, so the text before two different images is shared and the rest is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Int32 = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class CacheKey:
    """``namespace`` joins adapter id and version, salt and model revision; ``tokens`` is int32 [N]."""

    namespace: str
    tokens: Int32

    def __post_init__(self) -> None:
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 1:
            raise TypeError(f"a cache key wants int32 [N], not {self.tokens.dtype} {self.tokens.shape}")

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, length: int) -> tuple[str, bytes] | None:
        """A hashable form of the first ``length`` tokens, equal for keys that share at least those; None if shorter."""
        if len(self.tokens) < length:
            return None
        return self.namespace, self.tokens[:length].tobytes()


def common_prefix(a: Int32, b: Int32) -> int:
    """How many leading elements of two int32 arrays agree. O(min length), one vectorised pass."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def floor_page(length: int, page_size: int) -> int:
    """``length`` rounded down to whole pages."""
    return length - length % page_size


def ceil_page(length: int, page_size: int) -> int:
    """``length`` rounded up to whole pages."""
    return -(-length // page_size) * page_size
