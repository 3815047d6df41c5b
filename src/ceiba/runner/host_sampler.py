"""From logits to tokens by the compiled CPU kernels: the rules of ``runner.sampler``, which is the reference, with the
noise of ``runner.noise``. One call chooses for all rows of a step. Knows segments, never requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ceiba.core.step import TokenMasks
from ceiba.kernels import cpu
from ceiba.runner.rows import Rows, SamplingBatch
from ceiba.runner.sampler import Sampled, edit_tokens, mask_lines

Tensor = torch.Tensor


class HostSampler:
    """``sample`` with its scratch; ``context`` is the kernels' (``kernels.cpu``), used by one call at a time."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._batch: SamplingBatch | None = None
        self._draws: Any = None

    def sample(self, logits: Tensor, batch: SamplingBatch, rows: Rows, masks: TokenMasks | None) -> Sampled:
        """Choose a token for each of ``logits`` float32 [S, vocab] (may be overwritten)."""
        if batch is not self._batch:
            self._batch, self._draws = batch, _draws(batch)
        raw = logits.float().contiguous()
        tokens, faults = np.empty(len(raw), np.int64), np.empty(len(raw), np.uint8)
        wants_raw = batch.logprob_segments is not None
        edited, editing = raw, batch.edits or masks is not None
        if editing:
            self._choose(raw, tokens, faults, False, None, rows)
            edited = raw.clone() if wants_raw else raw
            self._edit(edited, batch, rows, masks)
        self._choose(edited, tokens, faults, editing, self._draws, rows)
        return Sampled(torch.from_numpy(tokens), torch.from_numpy(faults), raw if wants_raw else None)

    def _choose(
        self, logits: Tensor, tokens: np.ndarray, faults: np.ndarray, edited: bool, draws: Any, rows: Rows
    ) -> None:
        positions = None if draws is None else rows.out_pos.numpy()
        cpu._cpu.sample(self._context, logits.numpy(), tokens, faults, edited, draws, positions)

    def _edit(self, logits: Tensor, batch: SamplingBatch, rows: Rows, masks: TokenMasks | None) -> None:
        penalties = batch.penalties
        if penalties is not None:
            cpu._cpu.penalize(
                self._context, logits.numpy(), penalties.segments.numpy(), penalties.counts.numpy(),
                rows.counts.output.numpy(), rows.counts.seen.numpy(), _flat(penalties.frequency),
                _flat(penalties.presence), _flat(penalties.repetition),
            )  # fmt: skip
        edit_tokens(logits, batch, rows)
        if masks is not None and len(masks.rows):
            segments, lines = mask_lines(batch, masks)
            cpu._cpu.allow(self._context, logits.numpy(), segments, lines, np.ascontiguousarray(masks.bits))


def _flat(column: Tensor) -> np.ndarray:
    return column.contiguous().view(-1).numpy()


def _draws(batch: SamplingBatch) -> Any:
    """The kernels' form of ``batch.draws``: a value for every segment, temperature 0 where it is greedy."""
    draws = batch.draws
    if draws is None:
        return None
    size = len(batch.rows)
    at = np.arange(size) if draws.segments is None else draws.segments.numpy()

    def column(values: Tensor | None, default: float, kind: type) -> np.ndarray:
        full: np.ndarray = np.full(size, default, kind)
        if values is not None:
            full[at] = values.reshape(-1).numpy()
        return full

    return cpu._cpu.Draws(
        temperature=column(draws.temperature, 0.0, np.float32),
        top_p=column(draws.top_p, 1.0, np.float32),
        min_p=column(draws.min_p, 0.0, np.float32),
        top_k=column(draws.top_k, 0, np.int64),
        seeds=column(draws.seeds, 0, np.int64),
        rows=batch.rows.astype(np.int64),
    )
