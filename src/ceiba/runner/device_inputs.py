"""A step's arrays on a CUDA device, sent at once: of any shape for eager steps, at fixed places for captured ones.

Knows plans, never models or sampling. Its counterpart on the CPU, where nothing is copied, is ``runner.inputs``.
"""

from __future__ import annotations

import numpy as np
import torch

from ceiba.core.step import StepPlan
from ceiba.runner.staging import Staging

Tensor = torch.Tensor

MAX_SPARE_TILES = 1024
"""Tiles of a captured prefill beyond one for each token, at most."""


class DeviceInputs:
    """After ``fill`` or ``fill_decode``, int32 device views of the step's arrays: ``tokens``, ``token_rows``,
    ``positions``, ``slots`` [T]; ``rows``, ``kv_lens`` [B]; ``offsets`` [B + 1]; ``select`` and ``sample_rows`` [S],
    the last token and the row of each sampled segment.
    """

    tokens: Tensor
    token_rows: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    kv_lens: Tensor
    offsets: Tensor
    select: Tensor
    sample_rows: Tensor

    def __init__(self, max_decode: int, max_prefill: int, pad_row: int, pad_slot: int, device: torch.device) -> None:
        """``max_decode``: largest batch of a captured decode step; ``max_prefill``: tokens of the largest captured
        prefill; ``pad_row`` and ``pad_slot`` take padding."""
        self._pad_row, self._pad_slot = pad_row, pad_slot
        self._any = Staging(1 << 16, device)
        self._decode = Staging(5 * max_decode, device, fixed=True)
        # Four arrays by token, tiles of one token each at worst, and what is sampled.
        most = 12 * (max_prefill + max_decode) + 6 * (MAX_SPARE_TILES + 1)
        self._mixed = Staging(most, device, fixed=True)
        self._arange = torch.arange(max_decode + 1, dtype=torch.int32, device=device)

    def fill(self, plan: StepPlan) -> None:
        """Any step, unpadded."""
        total, count = plan.num_tokens, plan.num_segments
        sampled = int(np.count_nonzero(plan.samples))
        stage = self._any
        stage.begin(4 * total + 3 * count + 1 + 2 * sampled)
        self.tokens, self.slots = stage.put(plan.tokens), stage.put(plan.slots)
        token_rows, self.token_rows = stage.take(total)
        positions, self.positions = stage.take(total)
        self.rows = stage.put(plan.rows)
        kv_lens, self.kv_lens = stage.take(count)
        np.add(plan.starts, plan.lengths, out=kv_lens)
        offsets, self.offsets = stage.take(count + 1)
        offsets[0] = 0
        np.cumsum(plan.lengths, out=offsets[1:])
        if plan.num_prefill:
            token_rows[:] = np.repeat(plan.rows, plan.lengths)
            np.add(np.repeat(plan.starts - offsets[:count], plan.lengths), np.arange(total), out=positions)
        else:
            token_rows[:] = plan.rows
            positions[:] = plan.starts
        select, self.select = stage.take(sampled)
        np.subtract(offsets[1:][plan.samples], 1, out=select)
        self.sample_rows = stage.put(plan.rows[plan.samples])
        stage.send()

    def fill_decode(self, plan: StepPlan | None, size: int) -> None:
        """A decode step padded to ``size`` segments, at addresses that depend on ``size`` alone; None: only padding."""
        count = 0 if plan is None else plan.num_segments
        stage = self._decode
        stage.begin(5 * size)
        fields = [stage.take(size) for _ in range(5)]
        if plan is not None:
            sources = (plan.tokens, plan.rows, plan.starts, plan.slots)
            for (host, _), values in zip(fields, sources, strict=False):
                host[:count] = values
            np.add(plan.starts, 1, out=fields[4][0][:count])
        for (host, _), filler in zip(fields, (0, self._pad_row, 0, self._pad_slot, 0), strict=True):
            host[count:] = filler
        self.tokens, self.rows, self.positions, self.slots, self.kv_lens = (device for _, device in fields)
        self.token_rows = self.rows
        self.offsets = self._arange[: size + 1]
        self.select = self._arange[:count]
        self.sample_rows = self.rows[:count]
        stage.send()

    def fill_mixed(self, plan: StepPlan, size: int, decode: int, tiles: np.ndarray, num_tiles: int) -> Tensor:
        """Decode segments, then the tokens of prefill segments, padded to ``size`` tokens and ``num_tiles`` tiles, at
        addresses that depend on these and ``decode`` alone. ``rows``, ``kv_lens`` and ``offsets`` are those of the
        decode segments, padded to ``decode`` with segments of length 0, whose tokens are the first prefill ones.
        Returns the tiles on the device, int32 [num_tiles, fields]."""
        count, sampled = plan.num_prefill, int(np.count_nonzero(plan.samples))
        lengths, running, total = plan.lengths[:count], plan.num_segments - count, plan.num_tokens
        stage = self._mixed
        stage.begin(4 * size + decode + tiles.shape[1] * num_tiles + 2 * sampled)
        (tokens, self.tokens), (rows, self.token_rows) = stage.take(size), stage.take(size)
        (positions, self.positions), (slots, self.slots) = stage.take(size), stage.take(size)
        kv_lens, self.kv_lens = stage.take(decode)
        for host, filler in ((tokens, 0), (rows, self._pad_row), (positions, 0), (slots, self._pad_slot)):
            host[total:] = filler
        new = total - running
        for host, values in ((tokens, plan.tokens), (slots, plan.slots)):
            host[:running], host[running:total] = values[new:], values[:new]
        ends = np.cumsum(lengths, dtype=np.int32)
        rows[:running], rows[running:total] = plan.rows[count:], np.repeat(plan.rows[:count], lengths)
        positions[:running] = plan.starts[count:]
        begins = plan.starts[:count] - (ends - lengths)
        np.add(np.repeat(begins, lengths), np.arange(new), out=positions[running:total])
        np.add(plan.starts[count:], 1, out=kv_lens[:running])
        kv_lens[running:] = 0
        self.rows = self.token_rows[:decode]
        self.offsets = self._arange[: decode + 1]
        host, device = stage.take(tiles.shape[1] * num_tiles)
        host[: tiles.size] = tiles.ravel()
        host[tiles.size :] = 0
        select, self.select = stage.take(sampled)
        last = np.concatenate((ends + (running - 1), np.arange(running, dtype=np.int32)))
        select[:] = last[plan.samples]
        self.sample_rows = stage.put(plan.rows[plan.samples])
        stage.send()
        return device.view(num_tiles, tiles.shape[1])
