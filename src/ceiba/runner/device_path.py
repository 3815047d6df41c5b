"""How a CUDA device executes plans: staged inputs, captured decode steps, eager steps for the rest, sampling on the
device. Nothing here waits for the device. Knows rows and slots; never a request.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from ceiba.attention.base import AttentionBackend, AttentionBatch
from ceiba.config.records import RunnerConfig
from ceiba.core.step import StepPlan, TokenMasks
from ceiba.kernels.triton.step import begin_step
from ceiba.memory.pool import KVPool
from ceiba.models.decoder import Decoder
from ceiba.runner.device_inputs import DeviceInputs
from ceiba.runner.device_sampler import DeviceSampled, DeviceSampler
from ceiba.runner.graphs import DecodeGraphs
from ceiba.runner.rows import Rows, SamplingBatch

Tensor = torch.Tensor

CAPTURE_SECONDS = 30.0
"""Start-up time that graphs may take; those left are captured when their size comes."""
WARM_LENGTHS = (300, 40)
"""Tokens of the prefills that compile kernels at start."""


@dataclass(slots=True)
class Launched:
    """A forward pass under way."""

    logits: Tensor
    """[S, vocab]"""
    hidden: Tensor | None
    """[T, hidden]; None for a captured step"""
    sample_rows: Tensor
    """int32 [S]"""


class DevicePath:
    def __init__(
        self, config: RunnerConfig, model: Decoder, attention: AttentionBackend, pool: KVPool, rows: Rows
    ) -> None:
        self.model, self.attention, self.pool, self.rows = model, attention, pool, rows
        device = rows.device
        captured = attention.capabilities.cuda_graph and config.cuda_graph_backend_decode == "full"
        most = min(config.cuda_graph_max_bs_decode, rows.max_rows) if captured else 0
        self.inputs = DeviceInputs(most, rows.max_rows, pool.num_slots, device)
        self.graphs = DecodeGraphs(self._decode, most)
        self.sampler = DeviceSampler(rows.max_rows + 1, device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what the first requests need and capture decode graphs."""
        self.graphs.prepare(self._plan_padding, CAPTURE_SECONDS)
        row, context = self.rows.max_rows, self.rows.slot_table.shape[1]
        for length in WARM_LENGTHS:
            for start in (0, length):
                if start + length <= context:
                    self._prefill_padding(row, start, length)
        torch.cuda.synchronize()

    def _plan_padding(self, size: int) -> Hashable:
        """A step of ``size`` segments of padding."""
        self.inputs.fill_decode(None, size)
        rows = np.full(size, self.rows.max_rows, np.int32)
        self.attention.plan(self._batch(rows, np.zeros(size, np.int32), np.ones(size, np.int32), 0, []))
        return getattr(self.attention, "graph_key", ())

    def _prefill_padding(self, row: int, start: int, length: int) -> None:
        one = np.array([row], np.int32)
        plan = StepPlan(
            step=0,
            rows=one,
            starts=np.array([start], np.int32),
            lengths=np.array([length], np.int32),
            samples=np.ones(1, bool),
            tokens=np.zeros(length, np.int32),
            slots=np.full(length, self.pool.num_slots, np.int32),
            num_prefill=1,
        )
        launched = self._eager(plan)
        self.sampler.sample(
            launched.logits, launched.sample_rows, SamplingBatch(one, launched.sample_rows), self.rows, None
        )

    def forward(self, plan: StepPlan) -> Launched:
        count = plan.num_segments
        size = self.graphs.padded(count) if plan.num_prefill == 0 else 0
        return self._captured(plan, size) if size else self._eager(plan)

    def sample(self, launched: Launched, batch: SamplingBatch, masks: TokenMasks | None) -> DeviceSampled:
        return self.sampler.sample(launched.logits, launched.sample_rows, batch, self.rows, masks)

    def _captured(self, plan: StepPlan, size: int) -> Launched:
        inputs = self.inputs
        inputs.fill_decode(plan, size)
        self.attention.plan(self._batch(plan.rows, plan.starts, plan.lengths, 0, plan.groups))
        logits = self.graphs.step(size, getattr(self.attention, "graph_key", ()))
        return Launched(logits[: plan.num_segments], None, inputs.sample_rows)

    def _decode(self, size: int) -> Tensor:
        """The launches of a decode step whose inputs lie at their fixed places."""
        ids = self._begin()
        hidden = self.model.forward(ids, self.inputs.positions, self.attention, self.pool)
        return self.model.logits(hidden)

    def _eager(self, plan: StepPlan) -> Launched:
        inputs = self.inputs
        inputs.fill(plan)
        ids = self._begin()
        self.attention.plan(self._batch(plan.rows, plan.starts, plan.lengths, plan.num_prefill, plan.groups))
        hidden = self.model.forward(ids, inputs.positions, self.attention, self.pool)
        sampled = len(inputs.select)
        if not sampled:  # a chunk that is not its prompt's last
            logits = hidden.new_empty(0, self.rows.vocab_size)
        else:
            whole = sampled == len(hidden)
            logits = self.model.logits(hidden if whole else hidden.index_select(0, inputs.select))
        return Launched(logits, hidden, inputs.sample_rows)

    def _begin(self) -> Tensor:
        i, rows = self.inputs, self.rows
        return begin_step(i.tokens, i.token_rows, i.positions, i.slots, rows.last_token, rows.slot_table)

    def _batch(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, num_prefill: int, groups: list
    ) -> AttentionBatch:
        i = self.inputs
        return AttentionBatch(
            rows=rows,
            starts=starts,
            lengths=lengths,
            num_prefill=num_prefill,
            slot_table=self.rows.slot_table,
            slots=i.slots,
            rows_device=i.rows,
            kv_lens_device=i.kv_lens,
            query_offsets_device=i.offsets,
            groups=groups,
        )
