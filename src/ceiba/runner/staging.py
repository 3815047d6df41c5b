"""Host memory on its way to the device: pinned buffers in rotation, one asynchronous transfer for many arrays.

The device buffer keeps its address, so that captured graphs can read it. A host buffer is filled again, or given up,
only after its last transfer has left it, which the steady state never waits for. Knows integers, never what they mean.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Tensor = torch.Tensor

DEPTH = 3
"""Host buffers in rotation: one being filled, one whose transfer waits behind a running step, one spare."""


ALIGNMENT = 32
"""Integers between the starts of two arrays: a kernel compiled for aligned addresses serves every step."""
MOST_ARRAYS = 16
"""Arrays that one filling may consist of."""
PULLED = 1 << 15
"""Integers up to which a kernel reads the host's memory; more are left to the device's copy engine."""


class Staging:
    """int32 arrays packed into one buffer of ``size`` integers. ``fixed``: it must never grow, since captured graphs
    hold its address; else it grows when a step needs more."""

    def __init__(self, size: int, device: torch.device, *, fixed: bool = False) -> None:
        self._device, self._fixed = device, fixed
        self._pinned = device.type == "cuda"
        self._pull: Callable[[Tensor, Tensor], None] | None = None
        if self._pinned:
            from ceiba.kernels.triton.step import pull

            self._pull = pull
        self._turn = 0
        self._used = 0
        self._reserve(size + MOST_ARRAYS * ALIGNMENT)

    def _reserve(self, size: int) -> None:
        self.target = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(DEPTH)]
        self._views = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in range(DEPTH)] if self._pinned else []

    def begin(self, size: int) -> None:
        """Start filling the next host buffer with ``size`` integers in all, in MOST_ARRAYS arrays at most."""
        size += MOST_ARRAYS * ALIGNMENT
        if size > len(self.target):
            if self._fixed:
                raise RuntimeError(f"a captured step needs {size} integers of a buffer of {len(self.target)}")
            for event in self._copied:
                event.synchronize()  # the allocator does not know that a kernel reads the buffers
            self._reserve(max(size, 2 * len(self.target)))
        self._turn = (self._turn + 1) % DEPTH
        if self._copied:
            self._copied[self._turn].synchronize()
        self._used = 0

    def take(self, count: int) -> tuple[np.ndarray, Tensor]:
        """The next ``count`` integers: the host's view to fill and the device's, valid after ``send``."""
        at = slice(self._used, self._used + count)
        self._used += -(-count // ALIGNMENT) * ALIGNMENT
        return self._views[self._turn][at], self.target[at]

    def put(self, values: np.ndarray) -> Tensor:
        """Append an array; its device view, valid after ``send``."""
        host, device = self.take(len(values))
        host[:] = values
        return device

    def send(self) -> None:
        """One transfer of everything taken since ``begin``."""
        source, target = self._hosts[self._turn][: self._used], self.target[: self._used]
        if self._pull is not None and self._used <= PULLED:
            self._pull(source, target)
        else:
            target.copy_(source, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
