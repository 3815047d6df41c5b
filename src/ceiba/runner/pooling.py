"""The loop of a model that gives numbers: texts come in, are batched by size, and go out as vectors.

Owns queue and batches; there is no cache and no state between batches. Stands in the scheduler's place, so it answers
the same control operations. Must never know HTTP or what the numbers are for.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from ceiba.core.errors import CeibaError
from ceiba.core.messages import Abort, Control, Finish, Heartbeat, Pool, Pooled, Reply, bytes_to_ids, ids_to_bytes
from ceiba.core.ports import PoolingPort

log = logging.getLogger(__name__)
Encoder = Callable[[Sequence[tuple[torch.Tensor, int]]], torch.Tensor]
IDLE_SECONDS = 0.2


class PoolingLoop:
    """``encode``: (ids, length of a second text) of N texts -> float32 [N, width]. ``most_tokens``: of one batch,
    padding included; ``most_texts`` likewise."""

    def __init__(self, encode: Encoder, port: PoolingPort, most_tokens: int, most_texts: int = 256) -> None:
        self._encode = encode
        self._port = port
        self._most_tokens = most_tokens
        self._most_texts = most_texts
        self._queue: OrderedDict[str, Pool] = OrderedDict()
        self._round_at = time.monotonic()
        self._batches = 0
        self._tokens = 0
        self._stop = False

    def latest(self) -> Heartbeat:
        """What a heartbeat says now; safe to call from another thread."""
        stats = {"waiting": float(len(self._queue)), "running": 0.0, "batches": float(self._batches)}
        return Heartbeat(at=self._round_at, stats=stats)

    def run(self) -> None:
        """Until the front asks for ``shutdown``."""
        while not self._stop:
            self.step(IDLE_SECONDS)

    def step(self, timeout: float) -> None:
        """One round: take in what lies ready (waiting for it only when there is nothing to do), run one batch."""
        for message in self._port.receive(0.0 if self._queue else timeout):
            if isinstance(message, Pool):
                self._queue[message.rid] = message
            elif isinstance(message, Abort):
                for rid in list(self._queue) if message.everything else message.rids:
                    self._queue.pop(rid, None)
            else:
                self._port.to_front(self._answer(message))
        self._round_at = time.monotonic()
        if self._queue:
            self._run_batch(self._next())
            self._round_at = time.monotonic()

    def _next(self) -> list[Pool]:
        """The oldest text, and those behind it that are most like it in length while the padded batch fits."""
        first = next(iter(self._queue.values()))
        size = len(first.input_ids) // 4
        rest = [m for m in self._queue.values() if m is not first]
        rest.sort(key=lambda m: abs(len(m.input_ids) // 4 - size))
        batch, longest = [first], size
        for message in rest:
            longest = max(longest, len(message.input_ids) // 4)
            if len(batch) >= self._most_texts or longest * (len(batch) + 1) > self._most_tokens:
                break
            batch.append(message)
        for message in batch:
            del self._queue[message.rid]
        return batch

    def _run_batch(self, batch: list[Pool]) -> None:
        texts = [(torch.from_numpy(bytes_to_ids(m.input_ids).astype("i8")), m.second) for m in batch]
        rids = [m.rid for m in batch]
        self._batches += 1
        self._tokens += sum(len(ids) for ids, _ in texts)
        try:
            values = self._encode(texts)
        except Exception as error:
            if len(batch) > 1:  # find the one that fails, so that it alone does
                for message in batch:
                    self._run_batch([message])
                return
            log.exception("a text could not be encoded")
            text = (
                error.message if isinstance(error, CeibaError) else "internal error: the server's log has the details."
            )
            finish = Finish(kind="error", message=text, status=500)
            self._port.to_front(Pooled(rids=rids, widths=ids_to_bytes([0]), values=b"", finishes={0: finish}))
            return
        widths = ids_to_bytes([values.shape[1]] * len(batch))
        self._port.to_front(Pooled(rids=rids, widths=widths, values=values.numpy().astype("<f4").tobytes()))

    def _answer(self, message: Control) -> Reply:
        waiting = len(self._queue)
        if message.op == "flush_cache":
            return Reply(id=message.id, ok=True, value={"flushed_tokens": 0})
        if message.op in {"state", "load", "idle_check"}:
            value = {"waiting": waiting, "running": 0, "batches": self._batches, "tokens": self._tokens}
            return Reply(id=message.id, ok=True, value=value)
        if message.op == "shutdown":
            self._stop = True
            return Reply(id=message.id, ok=True)
        return Reply(id=message.id, ok=False, error=f"{message.op}: not for a model that gives numbers")
