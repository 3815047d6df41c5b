"""The reference backend: gathers keys and values from the pool and attends with torch, exactly and on any device.

Prefill runs segment by segment with the causal border at the right offset; decode runs in padded groups of similar
length, so a step costs a few operations a layer however many requests decode. Never knows a model or a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from ceiba.attention.base import AttentionBatch, AttentionLayer, Capabilities
from ceiba.memory.pool import KVPool

Tensor = torch.Tensor
Slots = torch.Tensor | slice
"""int64 slots to gather, or a run of consecutive ones."""

CAPABILITIES = Capabilities(
    devices=frozenset({"cpu", "cuda", "mps", "xpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    kv_dtypes=frozenset(
        {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8}
    ),
    sliding_window=True,
    softcap=True,
    sinks=True,
)

QUERY_BLOCK = 256
"""Queries scored at once where scores must be held in memory (soft cap, sinks)."""
PAD_SLACK = 128
"""A decode group takes a segment that is at most this much shorter than its longest one, or half as long."""


@dataclass(slots=True)
class Prefill:
    """One prefill segment: queries [begin, end) of the step, keys at positions [0, kv_len) of ``row``."""

    row: int
    begin: int
    end: int
    start: int
    kv_len: int
    slots: dict[int, Slots] = field(default_factory=dict)
    """first key position -> slots from there on"""
    masks: dict[tuple[int, bool], Tensor | None] = field(default_factory=dict)
    """(window, causal) -> bool [queries, keys], None where every key counts"""


@dataclass(slots=True)
class Decode:
    """Decode segments of similar length, padded to the longest."""

    queries: Tensor | None
    """int64 [b] indices into the step's queries; None: all the decode queries in order"""
    rows: Tensor
    kv_lens: Tensor
    longest: int
    padded: bool
    views: dict[int, tuple[Slots, Tensor | None]] = field(default_factory=dict)
    """window -> (slots [b · L], bool mask [b, 1, 1, L] or None)"""


class TorchNative:
    """See ``attention.base.AttentionBackend``."""

    name = "torch_native"
    capabilities = CAPABILITIES
    slots = None
    wants_kv = True

    def prepare(self, layers: list[AttentionLayer]) -> None:
        """Nothing to know ahead."""

    def plan(self, batch: AttentionBatch) -> None:
        self._slots = batch.slots
        self._table = batch.slot_table
        count = batch.num_prefill
        kv_lens = batch.starts + batch.lengths
        ends = np.cumsum(batch.lengths[:count]).tolist()
        self._prefill = [
            Prefill(row, end - length, end, start, start + length)
            for row, start, length, end in zip(
                batch.rows[:count].tolist(),
                batch.starts[:count].tolist(),
                batch.lengths[:count].tolist(),
                ends,
                strict=True,
            )
        ]
        self._first_decode = ends[-1] if ends else 0
        self._decode = self._group(batch, kv_lens[count:])

    def _group(self, batch: AttentionBatch, kv_lens: np.ndarray) -> list[Decode]:
        """Split the decode segments so that padding stays below their own size."""
        if not len(kv_lens):
            return []
        rows = batch.rows_device[batch.num_prefill :]
        lens = batch.kv_lens_device[batch.num_prefill :]
        longest, shortest = int(kv_lens.max()), int(kv_lens.min())
        if longest <= max(2 * shortest, shortest + PAD_SLACK):
            return [Decode(None, rows, lens, longest, longest != shortest)]
        order = np.argsort(-kv_lens, kind="stable")
        groups, at = [], 0
        while at < len(order):
            top = int(kv_lens[order[at]])
            fits = kv_lens[order[at:]] >= min(top // 2, top - PAD_SLACK)
            members = order[at : at + int(fits.sum())]
            index = torch.from_numpy(members).to(rows.device)
            padded = int(kv_lens[members[-1]]) != top
            groups.append(Decode(index, rows[index], lens[index], top, padded))
            at += len(members)
        return groups

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        pool: KVPool,
        sinks: Tensor | None = None,
        written: bool = False,
    ) -> Tensor:
        if k is not None and v is not None and not written:
            pool.write(layer.index, self._slots, k, v)
        out = q.new_empty(q.shape[0], q.shape[1], layer.v_head_dim or layer.head_dim)
        for segment in self._prefill:
            self._run_prefill(segment, q, layer, pool, sinks, out)
        for group in self._decode:
            self._run_decode(group, q, layer, pool, sinks, out)
        return out

    def _locate(self, slots: Tensor) -> Slots:
        """How a step reads these int64 slots; called once per step and segment, not per layer."""
        return slots

    def _run_prefill(
        self, segment: Prefill, q: Tensor, layer: AttentionLayer, pool: KVPool, sinks: Tensor | None, out: Tensor
    ) -> None:
        window = layer.window
        first = max(0, segment.start - window + 1) if window and layer.causal else 0
        slots = segment.slots.get(first)
        if slots is None:
            slots = self._locate(self._table[segment.row, first : segment.kv_len].long())
            segment.slots[first] = slots
        queries = q[segment.begin : segment.end]
        keys = pool.values(_read(pool.k[layer.index], slots), q.dtype).transpose(0, 1)
        values = pool.values(_read(pool.v[layer.index], slots), q.dtype).transpose(0, 1)
        plain = not layer.softcap and sinks is None
        if plain and layer.causal and not window and segment.start == 0:
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], keys[None], values[None],
                is_causal=True, scale=layer.scale, enable_gqa=layer.num_heads != layer.num_kv_heads,
            )[0]  # fmt: skip
            out[segment.begin : segment.end] = attended.transpose(0, 1)
            return
        key = (window, layer.causal)
        if key not in segment.masks:
            segment.masks[key] = _segment_mask(segment, first, window, layer.causal, q.device)
        mask = segment.masks[key]
        if plain:
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], keys[None], values[None],
                attn_mask=mask, scale=layer.scale, enable_gqa=layer.num_heads != layer.num_kv_heads,
            )[0]  # fmt: skip
            out[segment.begin : segment.end] = attended.transpose(0, 1)
            return
        heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
        for at in range(0, len(queries), QUERY_BLOCK):
            block = queries[at : at + QUERY_BLOCK]
            grouped = block.view(len(block), *heads, -1).permute(1, 2, 0, 3)
            part = None if mask is None else mask[at : at + QUERY_BLOCK]
            result = _weigh(grouped[None], keys[None], values[None], part, layer, sinks)[0]
            target = out[segment.begin + at : segment.begin + at + len(block)]
            target.copy_(result.permute(2, 0, 1, 3).reshape(target.shape))

    def _run_decode(
        self, group: Decode, q: Tensor, layer: AttentionLayer, pool: KVPool, sinks: Tensor | None, out: Tensor
    ) -> None:
        view = group.views.get(layer.window)
        if view is None:
            where, mask = _decode_view(group, self._table, layer.window)
            view = group.views[layer.window] = (self._locate(where), mask)
        slots, mask = view
        size = len(group.rows)
        queries = q[self._first_decode :]
        if group.queries is not None:
            queries = queries.index_select(0, group.queries)
        kv_heads, per_kv = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        keys = pool.values(_read(pool.k[layer.index], slots), q.dtype).view(size, -1, kv_heads, layer.head_dim)
        values = pool.values(_read(pool.v[layer.index], slots), q.dtype)
        values = values.view(size, -1, kv_heads, values.shape[-1])
        grouped = queries.view(size, kv_heads, per_kv, layer.head_dim)
        if not layer.softcap and sinks is None:
            result = F.scaled_dot_product_attention(
                grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=layer.scale
            )
        else:
            wide = grouped.unsqueeze(3)
            part = None if mask is None else mask.unsqueeze(1)
            result = _weigh(wide, keys.transpose(1, 2), values.transpose(1, 2), part, layer, sinks).squeeze(3)
        result = result.reshape(size, layer.num_heads, -1)
        target = out[self._first_decode :]
        if group.queries is None:
            target.copy_(result)
        else:
            target.index_copy_(0, group.queries, result)


def _read(values: Tensor, slots: Slots) -> Tensor:
    return values[slots] if isinstance(slots, slice) else values.index_select(0, slots)


def _segment_mask(segment: Prefill, first: int, window: int, causal: bool, device: torch.device) -> Tensor | None:
    """bool [queries, keys from ``first``]: key j counts for query i when j ≤ i and, with a window, i - j < window."""
    if not causal and not window:
        return None
    query = torch.arange(segment.start, segment.kv_len, device=device).unsqueeze(1)
    key = torch.arange(first, segment.kv_len, device=device).unsqueeze(0)
    mask = key <= query if causal else (key - query) < window
    if window:
        mask = mask & (query - key < window)
    return mask


def _decode_view(group: Decode, table: Tensor, window: int) -> tuple[Tensor, Tensor | None]:
    """Slots of each segment's keys, padded to one length, and the mask of what is real.

    Padding repeats the segment's own last slot: what a masked position holds is multiplied by zero, and zero times
    another request's infinity would not be zero.
    """
    length = min(group.longest, window) if window else group.longest
    last = (group.kv_lens - 1).long().unsqueeze(1)
    positions = torch.arange(length, device=table.device).unsqueeze(0)
    if window:
        positions = positions + (last - (window - 1)).clamp(min=0)
    mask = (positions <= last)[:, None, None] if group.padded else None
    slots = table[group.rows.long().unsqueeze(1), torch.minimum(positions, last)]
    return slots.reshape(-1).long(), mask


def _weigh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: AttentionLayer, sinks: Tensor | None) -> Tensor:
    """Attention with its scores in memory: q [b, kv, per_kv, T, d], k and v [b, kv, L, d]; mask broadcasts to
    [b, 1, 1, T, L]. A sink is a logit per head that takes part in the softmax and carries no value."""
    scores = torch.matmul(q.float() * layer.scale, k.float().transpose(-1, -2).unsqueeze(2))
    if layer.softcap:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, layer.num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights, v.float().unsqueeze(2)).to(q.dtype)
