"""Log-probabilities of one request that have arrived and not been sent. Owns the arrays between runner and message."""

from __future__ import annotations

import numpy as np

from ceiba.core.messages import TopLogprobs
from ceiba.core.step import Int32


class LogprobBuffer:
    """Appends per step, drains per report; positions stay consecutive."""

    __slots__ = ("_fixed", "_top", "_top_ids", "_top_values", "_values", "count")

    def __init__(self) -> None:
        self.count = 0
        """Positions that lie here."""
        self._top = 0
        self._values: list[np.ndarray] = []
        self._top_ids: list[Int32] = []
        self._top_values: list[np.ndarray] = []
        self._fixed: list[np.ndarray] = []

    def add(
        self,
        values: np.ndarray,
        top: int = 0,
        top_ids: Int32 | None = None,
        top_values: np.ndarray | None = None,
        fixed: np.ndarray | None = None,
    ) -> None:
        """``values`` [N]; ``top_ids`` and ``top_values`` [N, >= top], cut to ``top`` columns; ``fixed`` [N, F]."""
        self.count += len(values)
        self._top = top
        self._values.append(values)
        if top:
            if top_ids is None or top_values is None:
                raise ValueError(f"{top} top log-probabilities are owed and the runner sent none")
            self._top_ids.append(top_ids[:, :top])
            self._top_values.append(top_values[:, :top])
        if fixed is not None:
            self._fixed.append(fixed)

    def drain(self) -> TopLogprobs | None:
        """Everything as one message, or None when nothing lies here."""
        if not self.count:
            return None
        message = TopLogprobs(
            values=_bytes(self._values, "<f4"),
            top=self._top,
            top_ids=_bytes(self._top_ids, "<i4"),
            top_values=_bytes(self._top_values, "<f4"),
            fixed_values=_bytes(self._fixed, "<f4"),
        )
        self.count = 0
        for part in (self._values, self._top_ids, self._top_values, self._fixed):
            part.clear()
        return message


def _bytes(parts: list[np.ndarray], dtype: str) -> bytes:
    return b"".join(np.ascontiguousarray(part, dtype=dtype).tobytes() for part in parts)
