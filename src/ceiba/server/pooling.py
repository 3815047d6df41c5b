"""Texts that become numbers: from prompts to vectors, for embeddings, classes and rankings.

Owns the table of texts in flight and their hand-over; the front gives it what the engine says. Must never know HTTP or
what the numbers mean.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError
from ceiba.core.messages import Abort, Pool, Pooled, ids_to_bytes
from ceiba.server.generation import fault


@dataclass(slots=True)
class _Waiting:
    left: int
    vectors: list[np.ndarray | None]
    done: asyncio.Future[None]


class PoolTable:
    """One per front. All methods belong to its event loop."""

    def __init__(self, send: Callable[[Any], None], capacity: int) -> None:
        """``send`` takes what ``core.messages.ToPooling`` lists; ``capacity``: ids of one text."""
        self._send = send
        self._capacity = capacity
        self._serial = itertools.count(1)
        self._live: dict[str, tuple[_Waiting, int]] = {}

    def __len__(self) -> int:
        """Texts in flight."""
        return len(self._live)

    def fit(self, ids: np.ndarray, name: str, truncate: bool) -> np.ndarray:
        """``ids`` within the model's context: cut (its last id stays, which is often an end mark), or refused."""
        if len(ids) == 0:
            raise BadRequest(f"{name} gives no token: give at least one character.", param=name)
        if len(ids) <= self._capacity:
            return ids
        if not truncate:
            raise BadRequest(
                f"{name} has {len(ids)} tokens; this model takes {self._capacity}.",
                param=name,
                code="context_length_exceeded",
            )
        return np.concatenate([ids[: self._capacity - 1], ids[-1:]])

    async def run(self, texts: Sequence[tuple[np.ndarray, int]]) -> list[np.ndarray]:
        """float32 vectors, in order, of (ids, how many of them are the second text). Cancelling it aborts what runs.

        Raises the error of the first text that has one.
        """
        if not 1 <= len(texts) <= limits.MAX_BATCH:
            raise BadRequest(f"{len(texts)} texts; it must be 1..{limits.MAX_BATCH}: split the request.", param="input")
        waiting = _Waiting(len(texts), [None] * len(texts), asyncio.get_running_loop().create_future())
        number, now = next(self._serial), time.monotonic()
        rids = [f"pool-{number}#{i}" for i in range(len(texts))]
        for i, rid in enumerate(rids):
            self._live[rid] = (waiting, i)
        try:
            for rid, (ids, second) in zip(rids, texts, strict=True):
                self._send(Pool(rid=rid, input_ids=ids_to_bytes(ids), second=second, arrival=now))
            await waiting.done
        finally:
            open_rids = [rid for rid in rids if self._live.pop(rid, None) is not None]
            if open_rids:
                self._send(Abort(rids=open_rids))
        return [vector for vector in waiting.vectors if vector is not None]

    def arrived(self, message: Pooled) -> None:
        """Hand each entry to whoever waits for it."""
        values, at = np.frombuffer(message.values, "<f4"), 0
        for i, (rid, width) in enumerate(zip(message.rids, np.frombuffer(message.widths, "<i4").tolist(), strict=True)):
            vector, at = values[at : at + width], at + width
            found = self._live.pop(rid, None)
            if found is None or found[0].done.done():
                continue
            waiting, index = found
            finish = message.finishes.get(i)
            if finish is not None:
                waiting.done.set_exception(fault(finish))
                continue
            waiting.vectors[index] = vector
            waiting.left -= 1
            if waiting.left == 0:
                waiting.done.set_result(None)

    def fail(self, error: CeibaError) -> None:
        """End everything with ``error``."""
        for waiting, _ in self._live.values():
            if not waiting.done.done():
                waiting.done.set_exception(error)
        self._live.clear()
