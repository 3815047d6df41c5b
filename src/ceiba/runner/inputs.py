"""A step's arrays as tensors in host memory, for models that run layer by layer on the CPU.

Buffers grow when a step is larger than any before and are used again by the next. Knows plans, never models or
sampling. Its counterpart on CUDA is ``runner.device_inputs``.
"""

from __future__ import annotations

import numpy as np
import torch

from ceiba.core.step import StepPlan

Tensor = torch.Tensor


class StepInputs:
    """Everything a forward pass reads besides persistent rows. After ``fill``, views of the step's arrays:

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

    def __init__(self, max_tokens: int, max_segments: int) -> None:
        self.has_future = False
        self._tokens = self._segments = 0
        self._buffers: dict[str, Tensor] = {}
        self._reserve(max_tokens, max_segments)

    def _reserve(self, tokens: int, segments: int) -> None:
        if tokens > self._tokens:
            self._tokens = max(tokens, 2 * self._tokens)
            for name, dtype in self.PER_TOKEN.items():
                self._buffers[name] = torch.zeros(self._tokens, dtype=dtype)
        if segments > self._segments:
            self._segments = max(segments, 2 * self._segments)
            for name, dtype in self.PER_SEGMENT.items():
                self._buffers[name] = torch.zeros(self._segments + 1, dtype=dtype)

    def fill(self, plan: StepPlan) -> None:
        """Take a plan's arrays over."""
        total, count = plan.num_tokens, plan.num_segments
        select = plan.selected
        self._reserve(total, max(count, len(select)))
        host = {name: buffer.numpy() for name, buffer in self._buffers.items()}
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
            setattr(self, name, self._buffers[name][:total])
        for name, size in (("rows", count), ("kv_lens", count), ("offsets", count + 1), ("select", len(select))):
            setattr(self, name, self._buffers[name][:size])
