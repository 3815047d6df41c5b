"""A step's arrays in persistent buffers: filled on the host, copied to the device without waiting.

Buffers keep their addresses from step to step (they grow only when a step is larger than any before), so graphs can be
captured over them. On the CPU the host buffer is the device buffer. Knows plans, never models or sampling.
"""

from __future__ import annotations

import numpy as np
import torch

from ceiba.core.step import StepPlan

Tensor = torch.Tensor


class Buffer:
    """One array in host memory (pinned for an accelerator) and on the device."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._source = torch.zeros(size, dtype=dtype, pin_memory=pinned)
        self.host = self._source.numpy()
        self.device = self._source if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)

    def push(self, count: int) -> Tensor:
        """The first ``count`` elements, on the device."""
        view = self.device[:count]
        if self.device is not self._source:
            view.copy_(self._source[:count], non_blocking=True)
        return view


class StepInputs:
    """Everything a forward pass reads besides persistent rows. After ``fill``, device views of the step's arrays:

    ``tokens`` int32 [T] (FUTURE where unknown), ``token_rows`` int64 [T], ``positions`` int64 [T], ``slots`` int64 [T],
    ``rows`` int32 [B], ``kv_lens`` int32 [B], ``offsets`` int32 [B + 1], ``select`` int64 [S]: the last token of each
    sampled segment, and the tokens before its drafts. ``has_future`` says whether any token is unknown.
    """

    PER_TOKEN = {
        "tokens": torch.int32,
        "token_rows": torch.int64,
        "positions": torch.int64,
        "slots": torch.int64,
    }
    PER_SEGMENT = {"rows": torch.int32, "kv_lens": torch.int32, "offsets": torch.int32, "select": torch.int64}

    tokens: Tensor
    token_rows: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    kv_lens: Tensor
    offsets: Tensor
    select: Tensor

    def __init__(self, max_tokens: int, max_segments: int, device: torch.device) -> None:
        self.device = device
        self.has_future = False
        self._tokens = self._segments = 0
        self._buffers: dict[str, Buffer] = {}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._reserve(max_tokens, max_segments)

    def _reserve(self, tokens: int, segments: int) -> None:
        if tokens > self._tokens:
            self._tokens = max(tokens, 2 * self._tokens)
            for name, dtype in self.PER_TOKEN.items():
                self._buffers[name] = Buffer(self._tokens, dtype, self.device)
        if segments > self._segments:
            self._segments = max(segments, 2 * self._segments)
            for name, dtype in self.PER_SEGMENT.items():
                self._buffers[name] = Buffer(self._segments + 1, dtype, self.device)

    def fill(self, plan: StepPlan) -> None:
        """Take a plan's arrays over. The previous step's copies must have left the host buffers: waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        total, count = plan.num_tokens, plan.num_segments
        select = plan.selected
        self._reserve(total, max(count, len(select)))
        host = {name: buffer.host for name, buffer in self._buffers.items()}
        host["tokens"][:total] = plan.tokens
        host["slots"][:total] = plan.slots
        host["rows"][:count] = plan.rows
        np.add(plan.starts, plan.lengths, out=host["kv_lens"][:count])
        offsets = host["offsets"]
        offsets[0] = 0
        np.cumsum(plan.lengths, out=offsets[1 : count + 1])
        if plan.num_prefill:
            np.copyto(host["token_rows"][:total], np.repeat(plan.rows, plan.lengths))
            shift = np.repeat(plan.starts - offsets[:count], plan.lengths)
            np.add(shift, np.arange(total), out=host["positions"][:total])
        else:
            host["token_rows"][:total] = plan.rows
            host["positions"][:total] = plan.starts
        host["select"][: len(select)] = select
        self.has_future = bool((plan.tokens < 0).any())
        for name in self.PER_TOKEN:
            setattr(self, name, self._buffers[name].push(total))
        for name, size in (("rows", count), ("kv_lens", count), ("offsets", count + 1), ("select", len(select))):
            setattr(self, name, self._buffers[name].push(size))
        if self._copied is not None:
            self._copied.record()
