"""The CPU backend: attention over the pool where the tensors lie in host memory.

Adds to the reference what only host memory allows: a prefix whose slots are consecutive is read in place instead of
being gathered. Compiled kernels take over inside ``run``. Never knows a model or a request.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ceiba.attention.backends.torch_native import CAPABILITIES, Slots, TorchNative


class CPUAttention(TorchNative):
    """See ``attention.base.AttentionBackend``."""

    name = "cpu"
    capabilities = replace(CAPABILITIES, devices=frozenset({"cpu"}))

    def _locate(self, slots: torch.Tensor) -> Slots:
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and bool((slots.diff() == 1).all()):
            return slice(first, last + 1)
        return slots
