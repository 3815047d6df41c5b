"""How a CUDA device executes plans: staged inputs, captured decode steps, eager steps for the rest, sampling on the
device. Nothing here waits for the device. Knows rows and slots; never a request.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ceiba.attention.base import AttentionBackend, AttentionBatch
from ceiba.config.records import RunnerConfig
from ceiba.core.step import PrefixGroup, StepPlan, TokenMasks
from ceiba.kernels.triton.launch import compile_only, on_compile
from ceiba.kernels.triton.step import begin_step
from ceiba.memory.pool import KVPool
from ceiba.models.decoder import Decoder, DecoderBlock
from ceiba.runner.device_inputs import DeviceInputs
from ceiba.runner.device_sampler import DeviceSampled, DeviceSampler
from ceiba.runner.graphs import StepGraphs, decode_sizes, prefill_sizes
from ceiba.runner.rows import Rows, SamplingBatch

Tensor = torch.Tensor

log = logging.getLogger("ceiba.runner")

CAPTURE_SECONDS = 30.0
"""Start-up time that graphs may take; those left are captured when their size comes."""
WARM_LENGTHS = (300, 40)
"""Tokens of the prefills that compile kernels at start."""
WARM_MOST = 8192
"""Tokens of the largest of them, whose memory serves every step from then on: no step waits for the device to give
some while requests run."""
SHARED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Decode batches whose kernels for shared prefixes are compiled at start."""
SHARED_CAPTURED, SHARED_SECONDS = 64, 4.0
"""Decode batches under shared prefixes up to this are captured at start, as far as that takes no longer: their first
steps would pay for it one after another. Larger ones are captured when they come."""
COMPILED_AHEAD = (1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 40, 48, 64, 72, 96, 128, 136, 192, 256)
"""Decode batches whose kernels are compiled first, many at a time; others differ from these rarely."""
MOST_COMPILERS = 16
MIXED_SIZES = (64, 256)
"""Decode segments of a captured mixed step are padded to one of these: few, since every size of step is captured with
each, and the padding costs no rows of a product."""
MIXED_SHARED = 512
"""Mixed steps under shared prefixes up to this size are captured at start: where prompts are found in the cache, steps
are small."""
SPARE_TILES = 64
"""Prefill segments that a captured step has room for, beyond a single long one."""


@dataclass(slots=True)
class Launched:
    """A forward pass under way."""

    logits: Tensor
    """[S, vocab]"""
    hidden: Tensor | None
    """[T or more, hidden], the plan's prefill tokens first, in its order; None for a captured decode step"""
    sample_rows: Tensor
    """int32 [S]"""


class DevicePath:
    """``longest``: tokens that a step prefills at most."""

    def __init__(
        self,
        config: RunnerConfig,
        model: Decoder,
        attention: AttentionBackend,
        pool: KVPool,
        rows: Rows,
        longest: int,
    ) -> None:
        self.model, self.attention, self.pool, self.rows = model, attention, pool, rows
        device = rows.device
        able = attention.capabilities.cuda_graph
        most = min(config.cuda_graph_max_bs_decode, rows.max_rows)
        decodes = decode_sizes(most) if able and config.cuda_graph_backend_decode == "full" else []
        cuts = able and hasattr(attention, "cut_prefill") and config.cuda_graph_backend_prefill == "full"
        prefills = prefill_sizes(config.cuda_graph_max_bs_prefill) if cuts else []
        self.graphs = StepGraphs("decode", self._decode, decodes)
        self.prefills = StepGraphs("prefill", self._prefill, prefills)
        self.inputs = DeviceInputs(self.graphs.maximum, self.prefills.maximum, rows.max_rows, pool.num_slots, device)
        self.sampler = DeviceSampler(rows.max_rows + 1, device)
        mixed = (min(size, self.graphs.maximum) for size in MIXED_SIZES)
        self._mixed_sizes = sorted({size for size in mixed if size})
        self._mixes = config.mixed_steps
        self._longest = longest
        self._blocks: list[DecoderBlock] | None = None
        """In place of the model's, while kernels are compiled ahead."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what the first requests need and capture decode graphs."""
        self._compile_ahead()
        self.graphs.prepare(self._plan_padding, CAPTURE_SECONDS)
        self.graphs.compile(self._plan_shared_padding, SHARED_SIZES)
        self.graphs.prepare(self._plan_shared_padding, SHARED_SECONDS, SHARED_CAPTURED)
        self._warm_prefills()
        self._eager(self._empty_prefill(0, min(self._longest, WARM_MOST)))
        if self._num_tiles(1):
            sizes = self._mixed_sizes if self._mixes else []
            for decode in (0, *sizes):
                self.prefills.prepare(partial(self._plan_prefill_padding, decode), CAPTURE_SECONDS)
            for decode in sizes:
                self.prefills.prepare(partial(self._plan_mixed_shared, decode), SHARED_SECONDS, MIXED_SHARED)
        torch.cuda.synchronize()
        on_compile(partial(log.info, "compiled %s while serving: steps like this one wait for it once"))

    def _compile_ahead(self) -> None:
        """Have the kernels of the steps that follow compiled in parallel, by going through them without computing."""
        begun = time.monotonic()
        with compile_only(min(MOST_COMPILERS, len(os.sched_getaffinity(0)))) as able:
            if not able:
                return
            # A launch takes a millisecond or two while kernels are not ready, so few layers must do.
            self._blocks = self.model.kinds
            try:
                for size in sorted({self.graphs.padded(count) for count in COMPILED_AHEAD} - {0}):
                    for plan in (self._plan_padding, self._plan_shared_padding):
                        plan(size)
                        self._decode(size)
                self._warm_prefills()
            finally:
                self._blocks = None
        log.info("kernels ready in %.2f s", time.monotonic() - begun)

    def _warm_prefills(self) -> None:
        context = self.rows.slot_table.shape[1]
        for length in WARM_LENGTHS:
            for start in (0, length):
                if start + length <= context:
                    self._prefill_padding(start, length)
        start, length = getattr(self.attention, "long_prefill", (0, 0))
        if 0 < length <= min(context, self._longest):
            self._prefill_padding(start if start + length <= context else 0, length)

    @property
    def graph_hits(self) -> int:
        return self.graphs.hits + self.prefills.hits

    def _plan_padding(self, size: int) -> Hashable:
        """A step of ``size`` segments of padding."""
        self.inputs.fill_decode(None, size)
        rows = np.full(size, self.rows.max_rows, np.int32)
        self.attention.plan(self._batch(rows, np.zeros(size, np.int32), np.ones(size, np.int32), 0, []))
        return getattr(self.attention, "graph_key", ())

    def _plan_shared_padding(self, size: int) -> Hashable:
        """As ``_plan_padding``, with a prefix that all segments seem to share."""
        self.inputs.fill_decode(None, size)
        rows = np.full(size, self.rows.max_rows, np.int32)
        length, group = self._shared_padding(size)
        starts = np.full(size, length, np.int32)
        self.attention.plan(self._batch(rows, starts, np.ones(size, np.int32), 0, [group]))
        return getattr(self.attention, "graph_key", ())

    def _shared_padding(self, size: int) -> tuple[int, PrefixGroup]:
        """Tokens of each of ``size`` padding segments, and the prefix that they seem to share: long enough that sharing
        pays for two, with little that is not shared, since nobody waits for the result."""
        length = min(self.rows.slot_table.shape[1] - 1, 4160)
        return length, PrefixGroup(length - min(64, length // 2), np.arange(size, dtype=np.int32))

    def _empty_prefill(self, start: int, length: int) -> StepPlan:
        """``length`` tokens of padding after ``start`` cached ones, in as many segments as the context asks for."""
        most = self.rows.slot_table.shape[1] - start
        lengths = np.array([min(most, length - at) for at in range(0, length, most)], np.int32)
        count = len(lengths)
        return StepPlan(
            step=0,
            rows=np.full(count, self.rows.max_rows, np.int32),
            starts=np.full(count, start, np.int32),
            lengths=lengths,
            samples=np.ones(count, bool),
            tokens=np.zeros(length, np.int32),
            slots=np.full(length, self.pool.num_slots, np.int32),
            num_prefill=count,
        )

    def _plan_prefill_padding(self, decode: int, size: int) -> Hashable | None:
        """A step of ``size`` tokens of padding, with room for ``decode`` decode segments; None if too small."""
        return self._plan_prefill(self._empty_prefill(0, size), size, decode) if size >= decode else None

    def _plan_mixed_shared(self, decode: int, size: int) -> Hashable | None:
        """As ``_plan_prefill_padding``, with decode segments that seem to share a prefix."""
        if size <= decode:
            return None
        prefill, (length, group) = self._empty_prefill(0, size - decode), self._shared_padding(decode)
        rows = np.full(decode, self.rows.max_rows, np.int32)
        count = prefill.num_prefill
        plan = replace(
            prefill,
            rows=np.concatenate((prefill.rows, rows)),
            starts=np.concatenate((prefill.starts, np.full(decode, length, np.int32))),
            lengths=np.concatenate((prefill.lengths, np.ones(decode, np.int32))),
            samples=np.concatenate((prefill.samples, np.ones(decode, bool))),
            tokens=np.zeros(size, np.int32),
            slots=np.full(size, self.pool.num_slots, np.int32),
            groups=[PrefixGroup(group.length, group.segments + np.int32(count))],
        )
        return self._plan_prefill(plan, size, decode)

    def _prefill_padding(self, start: int, length: int) -> None:
        launched = self._eager(self._empty_prefill(start, length))
        batch = SamplingBatch(np.array([self.rows.max_rows], np.int32), launched.sample_rows)
        self.sampler.sample(launched.logits, launched.sample_rows, batch, self.rows, None)

    def forward(self, plan: StepPlan) -> Launched:
        count = plan.num_segments
        if plan.num_tokens == count and plan.samples.all():
            # A prompt that is cached but for its last token is like a token that was generated: whatever is asked of
            # the prompt was computed before it.
            size = self.graphs.padded(count)
            if size or not plan.num_prefill:
                return self._captured(plan, size) if size else self._eager(plan)
        running = count - plan.num_prefill
        decode = next((size for size in (0, *self._mixed_sizes) if size >= running), None)
        size = 0 if decode is None else self.prefills.padded(max(plan.num_tokens, decode))
        if size and decode is not None and plan.samples[plan.num_prefill :].all():
            key = self._plan_prefill(plan, size, decode)
            if key is not None:
                hidden = self.prefills.step(size, key)
                launched = self._logits(hidden)
                launched.hidden = hidden[running:]  # tokens of decode segments stand first there
                return launched
        return self._eager(plan)

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
        hidden = self._forward(ids)
        return self.model.logits(hidden)

    def _num_tiles(self, size: int) -> int:
        """Tiles that a captured prefill of ``size`` tokens has room for; 0 where attention knows none yet."""
        tokens = getattr(self.attention, "tile_tokens", 0)
        return -(-size // tokens) + SPARE_TILES if tokens else 0

    def _plan_prefill(self, plan: StepPlan, size: int, decode: int = 0) -> Hashable | None:
        """Make the inputs of a captured step with prefill segments ready, its decode segments padded to ``decode``.
        Returns what its launches depend on besides ``size``; None where this step cannot be captured."""
        attention: Any = self.attention
        count = plan.num_prefill
        running = plan.num_segments - count
        tiles = attention.cut_prefill(
            plan.rows[:count], plan.starts[:count], plan.lengths[:count], running, self.rows.slot_table
        )
        room = self._num_tiles(size)
        if tiles is None or len(tiles) > room:
            return None
        on_device = self.inputs.fill_mixed(plan, size, decode, tiles, room)
        own = [PrefixGroup(group.length, group.segments - np.int32(count)) for group in plan.groups]
        batch = self._batch(plan.rows[count:], plan.starts[count:], plan.lengths[count:], 0, own)
        attention.plan_captured(batch, size, on_device)
        return (decode, attention.graph_key)

    def _prefill(self, size: int) -> Tensor:
        """The launches of a step with prefill segments whose inputs lie at their fixed places: hidden states
        [size, hidden]."""
        return self._forward(self._begin())

    def _logits(self, hidden: Tensor) -> Launched:
        """Of the positions that are sampled."""
        inputs = self.inputs
        sampled = len(inputs.select)
        if not sampled:  # a chunk that is not its prompt's last
            logits = hidden.new_empty(0, self.rows.vocab_size)
        else:
            whole = sampled == len(hidden)
            logits = self.model.logits(hidden if whole else hidden.index_select(0, inputs.select))
        return Launched(logits, hidden, inputs.sample_rows)

    def _eager(self, plan: StepPlan) -> Launched:
        inputs = self.inputs
        inputs.fill(plan)
        ids = self._begin()
        self.attention.plan(self._batch(plan.rows, plan.starts, plan.lengths, plan.num_prefill, plan.groups))
        hidden = self._forward(ids)
        return self._logits(hidden)

    def _forward(self, ids: Tensor) -> Tensor:
        return self.model.forward(ids, self.inputs.positions, self.attention, self.pool, self._blocks)

    def _begin(self) -> Tensor:
        i, rows = self.inputs, self.rows
        return begin_step(i.tokens, i.token_rows, i.positions, i.slots, rows.last_token, rows.slot_table)

    def _batch(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, num_prefill: int, groups: list[PrefixGroup]
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
