"""From logits to tokens on a CUDA device in a few launches and without waiting: the rules of ``runner.sampler``, which
is the reference, with the noise of ``runner.noise``. Knows segments, never requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ceiba.core.step import TokenMasks
from ceiba.kernels.triton.sample import choose, thresholds
from ceiba.kernels.triton.step import end_step, noise_keys
from ceiba.runner.rows import Rows, SamplingBatch
from ceiba.runner.sampler import edit
from ceiba.runner.staging import ALIGNMENT, DEPTH

Tensor = torch.Tensor

RESULTS = 4 * DEPTH
"""Results in rotation. Fewer steps are under way or not yet read: their inputs are staged in three buffers, each with
room for DEPTH."""


@dataclass(slots=True)
class DeviceSampled:
    result: Tensor
    """int32 [2, S] in pinned host memory, filled when the device comes to it, and again RESULTS steps later: tokens,
    and keys of ``sampler.FAULTS`` or 0"""
    tokens: Tensor
    """int64 [S], unspecified for rows at fault"""
    raw: Tensor | None
    """float32 [S, vocab]: the model's own logits, kept where log-probabilities are wanted"""


class DeviceSampler:
    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._counters = torch.zeros(max_rows, dtype=torch.int32, device=device)
        width = -(-2 * max_rows // ALIGNMENT) * ALIGNMENT
        self._results = torch.empty(RESULTS, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._turn = 0

    def sample(
        self, logits: Tensor, sample_rows: Tensor, batch: SamplingBatch, rows: Rows, masks: TokenMasks | None
    ) -> DeviceSampled:
        """Choose a token for each of ``logits`` [S, vocab] of ``sample_rows`` int32 [S], and record it in ``rows``."""
        raw = logits.float() if batch.logprob_segments is not None else None
        edited, raw_best = logits, None
        if batch.edits or masks is not None:
            raw_best = logits.amax(dim=1).float()
            edited = logits.float() if raw is None else raw.clone()
            if edited is logits:
                edited = logits.clone()
            edit(edited, batch, rows, masks)
        draws = batch.dense
        if draws is None:
            tokens, best, _ = choose(edited, self._counters)
        else:
            keys = noise_keys(draws.seeds, sample_rows, rows.out_pos)
            cut = last = None
            if draws.limited is not None:
                edited = edited.float()
                cut, last = thresholds(edited, draws.limited, *draws.limits)
            tokens, best, _ = choose(edited, self._counters, draws.temperature, keys, cut, last)
        raw_best = best if raw_best is None else raw_best
        self._turn = (self._turn + 1) % RESULTS
        result = self._results[self._turn, : 2 * len(tokens)].view(2, len(tokens))
        end_step(sample_rows, tokens, raw_best, best, rows.last_token, rows.out_pos, result)
        if batch.penalties is not None:
            drawn = rows.last_token.index_select(0, sample_rows.index_select(0, batch.penalties.segments))
            rows.counts.add(batch.penalties.counts, drawn.long())
        return DeviceSampled(result, tokens, raw)
