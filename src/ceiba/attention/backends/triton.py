"""Attention on CUDA devices with the project's Triton kernels: ragged prefill, split-KV decode, shared-prefix decode.

``plan`` cuts the step into tiles and shared items on the host and copies them to the device; every tensor that a
captured graph reads is allocated once and updated in place. Decode steps can be captured: one graph for each batch
size and ``graph_key``. Never knows a model or a request.
"""

from __future__ import annotations

import numpy as np
import torch

from ceiba.attention.base import AttentionBatch, AttentionLayer, Capabilities
from ceiba.attention.shared_prefix import MAX_PARTS, SharedPlan, plan_shared
from ceiba.kernels import cudnn
from ceiba.kernels.triton.decode import ITEM_FIELDS, DecodeWorkspace, Shared, decode, shared_tile
from ceiba.kernels.triton.gather import write_kv
from ceiba.kernels.triton.launch import num_multiprocessors, power_of_two
from ceiba.kernels.triton.prefill import GATHER_TOKENS, gather_slots, plan_tiles, prefill, prefill_shape
from ceiba.memory.pool import KVPool

Tensor = torch.Tensor

CAPABILITIES = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
    kv_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2}),
    head_dims=frozenset(range(16, 257, 8)),
    sliding_window=True,
    softcap=True,
    sinks=True,
    shared_prefix=True,
    cuda_graph=True,
)
CAPTURED_PREFIX = 4096
"""Cached tokens that a captured step can gather; beyond them it reads prefixes through the slot table."""
CAPTURED_PAIRS = 1 << 22
"""New tokens times cached ones up to which a captured step reads prefixes through the slot table, which takes some 40%
longer than from contiguous rows: by arithmetic at most 2 ms a step, far below launching kernels one by one."""
LONG_TOKENS, LONG_GRAIN, LONG_SEGMENTS = 4096, 1024, 4
"""Eager prefills of at most so many segments, each of so many new tokens or more, go to cuDNN, where new and cached
tokens are multiples of the grain: chunks of long prompts, whose shapes come again."""
STAGING_BUFFERS = 3
"""Host buffers in rotation: a step's copy may still be under way while the next steps are planned."""


class SharedBuffers:
    """The device side of a ``SharedPlan``, at fixed addresses, and the pinned buffers it is copied from."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_members = 4 * max_rows
        self.max_items = 4 * max_rows + 1024
        at = np.cumsum([0, 32, max_rows, max_rows, self.max_members]).tolist()
        self.offsets = at
        size = at[4] + self.max_items * ITEM_FIELDS
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self.host = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_BUFFERS)]
        self.copied = [torch.cuda.Event() for _ in range(STAGING_BUFFERS)]
        self.turn = 0
        self.work = Shared(
            items=self.device[at[4] :].view(-1, ITEM_FIELDS),
            num_items=self.device[:1],
            members=self.device[at[3] : at[4]],
            own_starts=self.device[at[1] : at[2]],
            counts=self.device[at[2] : at[3]],
            most=MAX_PARTS,
        )

    def fits(self, plan: SharedPlan) -> bool:
        return len(plan.members) <= self.max_members and len(plan.items) <= self.max_items

    def copy(self, plan: SharedPlan) -> None:
        """One asynchronous copy; segments past the plan's batch (a graph's padding) are set to share nothing."""
        self.turn = (self.turn + 1) % STAGING_BUFFERS
        self.copied[self.turn].synchronize()
        host, at = self.host[self.turn].numpy(), self.offsets
        batch, used = len(plan.counts), at[4] + plan.items.size
        host[0] = len(plan.items)
        host[at[1] : at[3]] = 0
        host[at[1] : at[1] + batch] = plan.own_starts
        host[at[2] : at[2] + batch] = plan.counts
        host[at[3] : at[3] + len(plan.members)] = plan.members
        host[at[4] : used] = plan.items.ravel()
        self.device[:used].copy_(self.host[self.turn][:used], non_blocking=True)
        self.copied[self.turn].record()


class TritonAttention:
    """See ``attention.base.AttentionBackend``."""

    name = "triton"
    capabilities = CAPABILITIES
    long_prefill = LONG_GRAIN, LONG_TOKENS
    """Cached and new tokens of a prefill that takes another way than short ones, for a first run at start."""

    def __init__(self) -> None:
        self._prefix_slots: Tensor | None = None
        self._workspaces: dict[tuple[int, int, int, int], DecodeWorkspace] = {}
        self._shared: dict[tuple[int, int], SharedBuffers] = {}
        self._sharing: dict[tuple[int, int], bool] = {}
        self._planned: dict[tuple[int, int], bytes] = {}
        self._tiles: dict[tuple[int, int], Tensor] = {}
        self._tile_kinds: set[tuple[int, int]] = set()
        self._padded = self._long = False
        self._captured_prefix: tuple[Tensor, Tensor] | None = None
        """At fixed places: int32 [CAPTURED_PREFIX] slots of cached prefixes, and int32 [1], how many they are."""
        self._shapes: set[tuple[int, int]] = set()

    @property
    def slots(self) -> Tensor:
        return self._batch.slots

    @property
    def wants_kv(self) -> bool:
        return self._prefill_tokens > 0

    def prepare(self, layers: list[AttentionLayer]) -> None:
        """Announce the layers, so that the first step is planned whole (else it is from the second step on)."""
        self._shapes.update((layer.num_heads, layer.num_kv_heads) for layer in layers)

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        count = batch.num_prefill
        self._prefill_tokens = int(batch.lengths[:count].sum())
        self._tiles.clear()
        self._padded = False
        self._long = _long(batch.starts[:count], batch.lengths[:count])
        self._prefix_slots = self._cached_slots(batch)
        for shape in self._shapes:
            self._plan_shape(shape)

    def cut_prefill(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, first: int, slot_table: Tensor
    ) -> np.ndarray | None:
        """Tiles int32 [n, TILE_FIELDS] of prefill segments whose tokens begin at row ``first`` of the step, for
        ``plan_captured``; None where such a step cannot be captured: layers differ in shape, no prefill has run yet,
        or prefixes are too long. Names the prefixes to gather."""
        total = int(starts.sum(dtype=np.int64))
        gathers = total <= CAPTURED_PREFIX and _gathers(starts, lengths)
        pairs = 0 if gathers else int((starts.astype(np.int64) * lengths).sum())
        if len(self._tile_kinds) != 1 or pairs > CAPTURED_PAIRS:
            return None
        if self._captured_prefix is None:
            device = slot_table.device
            slots = torch.zeros(CAPTURED_PREFIX, dtype=torch.int32, device=device)
            self._captured_prefix = slots, torch.zeros(1, dtype=torch.int32, device=device)
        slots, used = self._captured_prefix
        used.fill_(total if gathers else 0)
        if gathers:
            torch.cat(_prefixes(slot_table, rows, starts), out=slots[:total])
        ((group, tile_rows),) = self._tile_kinds
        tiles = plan_tiles(lengths, starts, rows, group, tile_rows, first)
        if not gathers:
            tiles[:, 5] = -1
        return tiles

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile of ``cut_prefill``; 0 before the first prefill, and where layers differ in shape."""
        if len(self._tile_kinds) != 1:
            return 0
        ((group, rows),) = self._tile_kinds
        return rows // group

    def plan_captured(self, batch: AttentionBatch, tokens: int, tiles: Tensor) -> None:
        """A step padded to ``tokens``: first those of ``batch``, which holds the decode segments alone, then those of
        the prefill segments, with tiles int32 [n, TILE_FIELDS] from ``cut_prefill``, padded with zeros, at a fixed
        place. What ``run`` launches then depends on ``tokens``, n, the batch's padded size and ``graph_key``."""
        self._batch = batch
        self._prefill_tokens = tokens
        self._prefix_slots = None if self._captured_prefix is None else self._captured_prefix[0]
        self._padded, self._long = True, False
        self._tiles = dict.fromkeys(self._tile_kinds, tiles)
        for shape in self._shapes:
            self._plan_shape(shape)

    def _cached_slots(self, batch: AttentionBatch) -> Tensor | None:
        """Slots of the cached prefixes back to back, where they are worth gathering."""
        count = batch.num_prefill
        starts = batch.starts[:count]
        if not _gathers(starts, batch.lengths[:count]):
            return None
        return torch.cat(_prefixes(batch.slot_table, batch.rows[:count], starts))

    @property
    def graph_key(self) -> tuple[bool, ...]:
        """What, besides the batch size, a captured decode step depends on: whether each layer shape shares prefixes."""
        return tuple(self._sharing[shape] for shape in sorted(self._shapes))

    def _plan_shape(self, shape: tuple[int, int]) -> None:
        """Shared items for layers with these (heads, kv heads)."""
        batch, (heads, kv_heads) = self._batch, shape
        group, count = heads // kv_heads, batch.num_prefill
        device = batch.slot_table.device
        self._sharing[shape] = False
        if not batch.groups or shared_tile(group) < 2:
            return
        key = batch.rows[count:].tobytes() + b"".join(
            np.int64(g.length).tobytes() + g.segments.tobytes() for g in batch.groups
        )
        key += np.int64(count).tobytes()
        buffers = self._shared.get(shape)
        if buffers is None:
            buffers = self._shared[shape] = SharedBuffers(batch.slot_table.shape[0], device)
        if self._planned.get(shape) == key:
            self._sharing[shape] = True
            return
        kv_lens = (batch.starts + batch.lengths)[count:]
        plan = plan_shared(
            batch.groups, count, batch.rows[count:], kv_lens, shared_tile(group), kv_heads, num_multiprocessors(device)
        )
        if plan is not None and buffers.fits(plan):
            buffers.copy(plan)
            self._planned[shape] = key
            self._sharing[shape] = True

    def _tiles_for(self, group: int, tile_rows: int) -> Tensor:
        """This step's prefill tiles, cut and copied by the first layer that needs them."""
        self._tile_kinds.add((group, tile_rows))
        found = self._tiles.get((group, tile_rows))
        if found is None:
            batch, count = self._batch, self._batch.num_prefill
            tiles = plan_tiles(batch.lengths[:count], batch.starts[:count], batch.rows[:count], group, tile_rows)
            found = torch.from_numpy(tiles).pin_memory().to(batch.slot_table.device, non_blocking=True)
            self._tiles[group, tile_rows] = found
        return found

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
        """As the contract says. ``written``: k and v are in the pool already and are passed for prefill to read, which
        is faster from contiguous rows.
        """
        batch, tokens = self._batch, self._prefill_tokens
        k_pool, v_pool = pool.k[layer.index], pool.v[layer.index]
        if k is not None and v is not None and not written:
            write_kv(k, v, batch.slots, k_pool, v_pool)
        shape = (layer.num_heads, layer.num_kv_heads)
        if shape not in self._shapes:
            self._shapes.add(shape)
            self._plan_shape(shape)
        plain = layer.causal and not (layer.window or layer.softcap) and sinks is None
        long = self._long and plain and k is not None and v is not None and cudnn.can_attend(q, k, v)
        if long and k is not None and v is not None and len(batch.starts) == 1 and not batch.starts[0]:
            return cudnn.attend_alone(q, k, v, layer.scale)
        decodes = len(batch.kv_lens_device) - batch.num_prefill
        first = 0 if self._padded else tokens  # row of the first decode segment
        # No tile covers padding, whose rows must stay finite: the next layer's keys and values come from them.
        make = torch.zeros if self._padded else torch.empty
        out = make(q.shape[0], layer.num_heads, v_pool.shape[2], dtype=q.dtype, device=q.device)
        if decodes:
            # Before the prefill: the padding of captured decode segments lies over its rows.
            own = slice(first, first + decodes)
            self._decode(q[own], layer, shape, k_pool, v_pool, sinks, out[own])
        if long and k is not None and v is not None:
            self._attend_long(q, k, v, layer, k_pool, v_pool, out)
        elif tokens:
            dim = max(q.shape[2], v_pool.shape[2])
            prefill(
                q[:tokens],
                None if k is None else k[:tokens],
                None if v is None else v[:tokens],
                k_pool,
                v_pool,
                batch.slot_table,
                self._tiles_for(layer.num_heads // layer.num_kv_heads, prefill_shape(dim, q.dtype.itemsize).rows),
                layer.scale,
                layer.window,
                layer.softcap,
                sinks,
                layer.causal,
                out=out[:tokens],
                prefix_slots=None if layer.window else self._prefix_slots,
                prefix_used=self._captured_prefix[1] if self._padded and self._captured_prefix else None,
            )
        return out

    def _attend_long(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, k_pool: Tensor, v_pool: Tensor, out: Tensor
    ) -> None:
        """Segment by segment: there are few."""
        batch, count, first, cached = self._batch, self._batch.num_prefill, 0, 0
        for start, length in zip(batch.starts[:count].tolist(), batch.lengths[:count].tolist(), strict=True):
            own, prefix = slice(first, first + length), None
            if start:
                assert self._prefix_slots is not None
                prefix = gather_slots(k_pool, v_pool, self._prefix_slots[cached : cached + start], q.dtype)
            cudnn.attend(q[own], k[own], v[own], prefix, layer.scale, out[own])
            first, cached = first + length, cached + start

    def _decode(
        self,
        q: Tensor,
        layer: AttentionLayer,
        shape: tuple[int, int],
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        batch, count = self._batch, self._batch.num_prefill
        workspace = self._workspace(q.shape[0], shape, v_pool.shape[2], q.device)
        # A window would need the stretch cut at a different place for each member.
        sharing = self._sharing[shape] and not layer.window
        decode(
            q,
            k_pool,
            v_pool,
            batch.slot_table,
            batch.rows_device[count:],
            batch.kv_lens_device[count:],
            workspace,
            layer.scale,
            layer.window,
            layer.softcap,
            sinks,
            self._shared[shape].work if sharing else None,
            out=out,
        )

    def _workspace(self, batch: int, shape: tuple[int, int], v_dim: int, device: torch.device) -> DecodeWorkspace:
        """Scratch by power of two of the batch, kept for good because captured graphs hold its addresses. The first
        step of a size must run outside of a capture, as the warm-up before a capture does.
        """
        size = power_of_two(batch)
        key = (size, *shape, v_dim)
        found = self._workspaces.get(key)
        if found is None:
            found = DecodeWorkspace.allocate(size, shape[0], shape[1], v_dim, MAX_PARTS, device)
            self._workspaces[key] = found
        return found


def _long(starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether all segments of a prefill are chunks that cuDNN computes faster."""
    if not 0 < len(lengths) <= LONG_SEGMENTS or lengths.min() < LONG_TOKENS:
        return False
    return not ((starts % LONG_GRAIN).any() or (lengths % LONG_GRAIN).any())


def _gathers(starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether a step's new tokens are many enough for gathering the cached prefixes first to pay."""
    total = int(starts.sum(dtype=np.int64))
    return total > 0 and int((starts.astype(np.int64) * lengths).sum()) >= GATHER_TOKENS * total


def _prefixes(slot_table: Tensor, rows: np.ndarray, starts: np.ndarray) -> list[Tensor]:
    """Slots of the cached tokens of each segment."""
    return [slot_table[row, :start] for row, start in zip(rows.tolist(), starts.tolist(), strict=True)]
