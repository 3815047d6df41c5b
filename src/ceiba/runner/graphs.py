"""CUDA graphs of padded steps: which sizes there are, capture, replay. A step without a graph runs eagerly and never
fails; the graph of its size is captured when the size comes a second time. Knows sizes and keys, never plans or models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable

import torch

Tensor = torch.Tensor

log = logging.getLogger("ceiba.runner")


def decode_sizes(maximum: int) -> list[int]:
    """Padded batch sizes up to ``maximum``: dense where padding costs a large share."""
    steps = [1, 2, 3, 4, *range(6, 16, 2), *range(16, 64, 4), *range(64, 128, 8), *range(128, maximum + 1, 16)]
    return sorted({size for size in steps if size < maximum} | ({maximum} if maximum else set()))


def prefill_sizes(maximum: int) -> list[int]:
    """Padded numbers of prefill tokens up to ``maximum``: steps of 128, the rows of a matrix product's tile."""
    steps = [64, *range(128, maximum + 1, 128)]
    return [size for size in steps if size <= maximum]


class StepGraphs:
    """``run(size)`` launches a padded step over the static inputs and returns what is read of it."""

    def __init__(self, what: str, run: Callable[[int], Tensor], sizes: list[int]) -> None:
        """``what`` names the steps in the log; ``sizes`` ascending, empty where nothing is captured."""
        self._what, self._run, self.sizes = what, run, sizes
        self.maximum = sizes[-1] if sizes else 0
        self._padded = [0] * (self.maximum + 1)
        for size in reversed(self.sizes):
            for count in range(size + 1):
                self._padded[count] = size
        self._graphs: dict[tuple[int, Hashable], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: set[tuple[int, Hashable]] = set()
        self._pool = torch.cuda.graph_pool_handle() if sizes else None
        self._stream = torch.cuda.Stream() if sizes else None
        self.hits = 0

    def padded(self, count: int) -> int:
        """The size that a step of ``count`` is padded to; 0 where it is too large for a graph."""
        return self._padded[count] if count <= self.maximum else 0

    def step(self, size: int, key: Hashable) -> Tensor:
        """Run a step whose inputs lie ready. ``key``: what else its launches depend on (attention's plan)."""
        found = self._graphs.get((size, key))
        if found is None and (size, key) in self._seen:
            found = self.capture(size, key)
        if found is None:
            self._seen.add((size, key))
            return self._run(size)
        self.hits += 1
        found[0].replay()
        return found[1]

    def capture(self, size: int, key: Hashable) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Record a size whose kernels have run once; None where it cannot be captured, so that it stays eager."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    value = self._run(size)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            log.warning("no CUDA graph for a %s of %d, it runs eagerly: %s", self._what, size, error)
            self._padded = [0 if padded == size else padded for padded in self._padded]
            return None
        torch.cuda.current_stream().wait_stream(stream)
        found = self._graphs[size, key] = (graph, value)
        return found

    def compile(self, plan: Callable[[int], Hashable], counts: Iterable[int]) -> None:
        """Run the sizes of these counts once, so that the next step of theirs is captured at once."""
        for size in sorted({self.padded(count) for count in counts} - {0}):
            self._seen.add((size, plan(size)))
            self._run(size)

    def prepare(self, plan: Callable[[int], Hashable | None], seconds: float, largest: int = 1 << 30) -> None:
        """Run and capture sizes up to ``largest`` ahead, the largest first, for about ``seconds``; ``plan(size)`` makes
        an empty step of a size and returns its key, or None where there can be none. What is left is captured when it
        comes."""
        begun = time.monotonic()
        done = 0
        sizes = [size for size in self.sizes if size <= largest]
        if not sizes:
            return
        for size in reversed(sizes):
            if time.monotonic() - begun > seconds:
                break
            key = plan(size)
            if key is None or (size, key) in self._graphs:
                continue
            self._run(size)
            self._seen.add((size, key))
            if self.capture(size, key) is not None:
                done += 1
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun
        log.info("captured %d of %d %s graphs in %.2f s", done, len(sizes), self._what, seconds)
