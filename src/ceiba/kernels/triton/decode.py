"""Paged attention for decode: one query token per segment over keys and values found through a slot table.

Split-KV (flash-decoding, Dao et al. 2023): several blocks share a long segment, and a second kernel merges their
partial softmaxes. Segments whose first slots are the same ones may read them once (``Shared``): all their queries
against one stretch of slots, beside each segment's own part, merged exactly with it. Grids depend on tensor shapes and
on splits chosen by the caller, never on lengths, which are read on the device: launches can be captured in a graph.

Logits are kept in base 2. Knows slots and rows as numbers, nothing of requests or prefix trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import (
    divide_up,
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    power_of_two,
    prefetch_to_l2,
    wait_for_predecessor,
)

TILE: tuple[int, int, int] | None = None
"""Set by the benchmark to try a tile; None: ``decode_tile`` decides."""
LOG2E = 1.4426950408889634
ITEM_FIELDS = 6
"""A shared stretch, int32: first entry in ``members``, number of members, slot-table row, first position, end
position, part that receives the result."""
MOST_BLOCKS = 4096
"""Of ``_combine`` with a head each: more blocks cost more than they hide."""
SHARED_ROWS = 64
"""Query rows (members times heads of a group) of one shared item."""


@triton.jit
def _cap(x, softcap, SOFTCAP: tl.constexpr):
    """softcap·tanh(x/softcap), both in base-2 units."""
    if SOFTCAP:
        e = tl.exp2(2.8853900817779268 * tl.abs(x) / softcap)
        t = 1.0 - 2.0 / (e + 1.0)
        x = softcap * tl.where(x < 0, -t, t)
    return x


@triton.jit
def _attend_slots(
    q,
    acc,
    m,
    total,
    table_ptr,
    k_ptr,
    v_ptr,
    pool_stride,
    begin,
    end,
    lowest,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax of q [M, BD] over positions [begin, end) of one slot-table row that are not below ``lowest``."""
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        at = start + tl.arange(0, BN)
        inside = (at < end) & (at >= lowest)
        slots = tl.load(table_ptr + at, mask=inside, other=0).to(tl.int64)
        k_mask = inside[:, None] if D == BD else inside[:, None] & (d < D)[None, :]
        v_mask = inside[:, None] if DV == BDV else inside[:, None] & (dv < DV)[None, :]
        k = tl.load(k_ptr + slots[:, None] * pool_stride + d[None, :], mask=k_mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + slots[:, None] * (pool_stride // D * DV) + dv[None, :], mask=v_mask, other=0.0).to(q.dtype)
        s = _cap(tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale, softcap, SOFTCAP)
        s = tl.where(inside[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s - base[:, None])
        total = total * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="tf32x3")
        m = m_new
    return acc, m, total


@triton.jit
def _own_part(
    lens_ptr,
    starts_ptr,
    segment,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """What a segment reads by itself: its length, the lowest position within the window, the first position read,
    blocks of BN positions that each split gets, and how many splits have any (at least one)."""
    length = tl.load(lens_ptr + segment)
    lowest = 0
    begin = 0
    if SHARED_PARTS > 0:
        begin = tl.load(starts_ptr + segment)
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
        begin = tl.maximum(begin, lowest // BN * BN)
    blocks = tl.cdiv(tl.maximum(length - begin, 0), BN)
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)
    return length, lowest, begin, per_split, tl.maximum(tl.cdiv(blocks, per_split), 1)


@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=["rows_ptr", "lens_ptr", "starts_ptr", "shared_count_ptr"],
)
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    starts_ptr,
    shared_count_ptr,
    sinks_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    q_stride,
    pool_stride,
    table_stride,
    batch,
    scale,
    softcap,
    G: tl.constexpr,
    GP: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each split of each segment's own part: the result where there is no other part, else one for ``_combine``."""
    if SHARED_PARTS > 0:
        # This kernel runs beside ``_shared``, its predecessor: that it runs means that what wrote q and the newest key,
        # which stands before that one, is complete (``launch``). ``_combine`` may wait for both from now on.
        launch_dependents(PDL)
    segment = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows_ptr + segment).to(tl.int64)
    length, lowest, begin, per_split, used = _own_part(
        lens_ptr, starts_ptr, segment, BN, SPLITS, LEAST, SHARED_PARTS, WINDOW
    )
    shared = 0
    if SHARED_PARTS > 0:
        shared = tl.load(shared_count_ptr + segment)
    if split < used:
        g = tl.arange(0, GP)
        heads = kv_head * G + g
        live = g < G
        d = tl.arange(0, BD)
        dv = tl.arange(0, BDV)
        first = begin + split * per_split * BN
        if PDL:
            # Slots are step metadata, and all keys but the newest are from earlier steps: fetch while the predecessor
            # (the kernel that writes q and the newest key) still runs. What is fetched here is read again below.
            at = first + tl.arange(0, BN)
            table_at = table_ptr + row * table_stride
            slots = tl.load(table_at + tl.minimum(at, tl.maximum(length - 1, 0))).to(tl.int64)
            line = tl.arange(0, LINES) * (BD // LINES)
            prefetch_to_l2(k_ptr + kv_head * D + slots[:, None] * pool_stride + line[None, :])
            prefetch_to_l2(v_ptr + kv_head * DV + slots[:, None] * (pool_stride // D * DV) + line[None, :])
        if SHARED_PARTS == 0:
            wait_for_predecessor(PDL)
        acc = tl.zeros((GP, BDV), tl.float32)
        m = tl.full((GP,), -float("inf"), tl.float32)
        total = tl.zeros((GP,), tl.float32)
        q_mask = live[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + segment * q_stride + heads[:, None] * D + d[None, :], mask=q_mask, other=0.0)
        acc, m, total = _attend_slots(
            q,
            acc,
            m,
            total,
            table_ptr + row * table_stride,
            k_ptr + kv_head * D,
            v_ptr + kv_head * DV,
            pool_stride,
            first,
            tl.minimum(first + per_split * BN, length),
            lowest,
            scale,
            softcap,
            D,
            DV,
            BD,
            BDV,
            BN,
            SOFTCAP,
            STAGES,
        )
        out_at = out_ptr + (segment * HKV * G + heads[:, None]) * DV + dv[None, :]
        out_mask = live[:, None] & (dv < DV)[None, :]
        if used + shared == 1:
            if SINKS:
                sink = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
                top = tl.maximum(m, sink)
                total = total * tl.exp2(m - top) + tl.exp2(sink - top)
                acc *= tl.exp2(m - top)[:, None]
            y = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=out_mask)
        else:
            # The part's place: [PARTS, batch, heads]; shared parts come first.
            place = ((SHARED_PARTS + split) * batch + segment) * HKV * G + heads
            safe = tl.where(total > 0.0, total, 1.0)
            tl.store(part_ptr + place[:, None] * DV + dv[None, :], acc / safe[:, None], mask=out_mask)
            tl.store(lse_ptr + place, tl.where(total > 0.0, m + tl.log2(safe), -float("inf")), mask=live)
        if SHARED_PARTS > 0:  # noqa: SIM102
            # One block ends after ``_shared`` has, so that what waits for this kernel waits for both.
            if segment + kv_head + split == 0:
                wait_for_predecessor(PDL)
    elif SHARED_PARTS == 0:
        wait_for_predecessor(PDL)


@triton.jit
def _merge_parts(
    part_ptr,
    lse_ptr,
    sinks_ptr,
    segment,
    head,
    count,
    shared,
    batch,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum of weights and of weighted values [BDV] of a head over ``count`` parts, WIDE at a time."""
    dv = tl.arange(0, BDV)
    m = -float("inf")
    total = 0.0
    if SINKS:
        m = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    acc = tl.zeros((BDV,), tl.float32)
    for start in range(0, count, WIDE):
        i = start + tl.arange(0, WIDE)
        part = tl.where(i < shared, i, i - shared + SHARED_PARTS)
        place = (part * batch + segment) * HEADS + head
        there = (i < count)[:, None] & (dv < DV)[None, :]
        lse = tl.load(lse_ptr + place, mask=i < count, other=-float("inf"))
        o = tl.load(part_ptr + place[:, None] * DV + dv[None, :], mask=there, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(lse - base)
        alpha = tl.exp2(m - base)
        total = total * alpha + tl.sum(weight, axis=0)
        acc = acc * alpha + tl.sum(o * weight[:, None], axis=0)
        m = m_new
    return total, acc


@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=["lens_ptr", "starts_ptr", "shared_count_ptr"],
)
def _combine(
    lens_ptr,
    starts_ptr,
    shared_count_ptr,
    sinks_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    batch,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge what ``_shared`` and ``_decode`` left of EACH heads of a segment, one head after the other: one warp, eight
    or sixteen parts at a time, so that the sums stay inside a thread and the loads fly together."""
    segment = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * EACH
    _, _, _, _, used = _own_part(lens_ptr, starts_ptr, segment, BN, SPLITS, LEAST, SHARED_PARTS, WINDOW)
    shared = 0
    if SHARED_PARTS > 0:
        shared = tl.load(shared_count_ptr + segment)
    count = shared + used
    wait_for_predecessor(PDL)
    if count > 1:
        for head in range(first_head, first_head + EACH):
            if count > 8:
                total, acc = _merge_parts(
                    part_ptr, lse_ptr, sinks_ptr, segment, head, count, shared, batch, HEADS, DV, BDV, SHARED_PARTS,
                    SINKS, 16,
                )  # fmt: skip
            else:
                total, acc = _merge_parts(
                    part_ptr, lse_ptr, sinks_ptr, segment, head, count, shared, batch, HEADS, DV, BDV, SHARED_PARTS,
                    SINKS, 8,
                )  # fmt: skip
            dv = tl.arange(0, BDV)
            y = acc / tl.where(total > 0.0, total, 1.0)
            tl.store(out_ptr + (segment * HEADS + head) * DV + dv, y.to(out_ptr.dtype.element_ty), mask=dv < DV)


@triton.jit(do_not_specialize=["batch"])
def _shared(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    num_items_ptr,
    members_ptr,
    part_ptr,
    lse_ptr,
    q_stride,
    pool_stride,
    table_stride,
    batch,
    scale,
    softcap,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """All queries of an item's members against its stretch, into each member's part (``ITEM_FIELDS``)."""
    items = tl.load(num_items_ptr)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    r = tl.arange(0, BM)
    wait_for_predecessor(PDL)
    for work in range(tl.program_id(0), items * HKV, tl.num_programs(0)):
        item = items_ptr + (work // HKV) * 6  # ITEM_FIELDS
        kv_head = work % HKV
        first = tl.load(item)
        count = tl.load(item + 1)
        row = tl.load(item + 2).to(tl.int64)
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        part = tl.load(item + 5).to(tl.int64)
        live = r // G < count
        segment = tl.load(members_ptr + first + r // G, mask=live, other=0).to(tl.int64)
        heads = kv_head * G + r % G
        q_at = q_ptr + segment[:, None] * q_stride + heads[:, None] * D + d[None, :]
        q = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.zeros((BM, BDV), tl.float32)
        m = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc, m, total = _attend_slots(
            q,
            acc,
            m,
            total,
            table_ptr + row * table_stride,
            k_ptr + kv_head * D,
            v_ptr + kv_head * DV,
            pool_stride,
            begin,
            end,
            0,
            scale,
            softcap,
            D,
            DV,
            BD,
            BDV,
            BN,
            SOFTCAP,
            STAGES,
        )
        place = (part * batch + segment) * HKV * G + heads
        safe = tl.where(total > 0.0, total, 1.0)
        o_mask = live[:, None] & (dv < DV)[None, :]
        tl.store(part_ptr + place[:, None] * DV + dv[None, :], acc / safe[:, None], mask=o_mask)
        tl.store(lse_ptr + place, tl.where(total > 0.0, m + tl.log2(safe), -float("inf")), mask=live)


@dataclass(frozen=True, slots=True)
class Shared:
    """Stretches of slots that several segments have in common, on the device. All int32, in a step's own numbers of
    segments; the shapes are upper bounds that a captured graph keeps."""

    items: torch.Tensor
    """[n, ITEM_FIELDS], each with at most ``shared_tile(heads // kv_heads)`` members"""
    num_items: torch.Tensor
    """[1]: how many of them are valid"""
    members: torch.Tensor
    """segment indices"""
    own_starts: torch.Tensor
    """[B]: the first position of each segment that no stretch covers"""
    counts: torch.Tensor
    """[B]: parts that each segment gets from stretches"""
    most: int
    """The largest count that may occur"""


@dataclass(slots=True)
class DecodeWorkspace:
    """Scratch of the decode kernels, allocated once and kept for the life of every graph that was captured with it."""

    parts: torch.Tensor
    """float32: partial outputs, viewed as [parts, batch, heads, v_head_dim]"""
    lse: torch.Tensor
    """float32: their log-sum-exp in base 2, viewed as [parts, batch, heads]"""

    @staticmethod
    def allocate(
        max_batch: int, num_heads: int, num_kv_heads: int, v_head_dim: int, shared_parts: int, device: torch.device
    ) -> DecodeWorkspace:
        """Room for every batch up to ``max_batch`` with the splits of ``choose_splits`` and ``shared_parts``."""
        most = max(
            (shared_parts + choose_splits(b, num_kv_heads, num_multiprocessors(device))[0]) * b
            for b in range(1, max_batch + 1)
        )
        return DecodeWorkspace(
            torch.empty(most * num_heads * v_head_dim, dtype=torch.float32, device=device),
            torch.empty(most * num_heads, dtype=torch.float32, device=device),
        )


def decode_tile(
    batch: int, kv_heads: int, group: int, head_dim: int, itemsize: int, beside_shared: bool = False
) -> tuple[int, int, int]:
    """Positions of a step of the loop over slots, its pipeline stages (two for each buffer of keys and values, because
    slots are fetched first) and warps; measured on an H200 (docs/benchmarks.md). ``beside_shared``: small enough to run
    on the multiprocessors that ``_shared`` occupies.
    """
    if head_dim > 128 or itemsize > 2:
        return 32, 5, 4
    if beside_shared:
        return 32, 5, 2
    if batch * kv_heads <= 4:  # one segment: up to 4,096 positions each split has a single step, with nothing to hide
        return 128, 3, 8
    few = batch * kv_heads <= (32 if group <= 4 else 64)
    return (64, 5, 4) if few else (32, 5, 2)


def choose_splits(batch: int, num_kv_heads: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks per segment and kv head, and the least positions of one. Enough blocks to fill the device some four times
    at small batches; at large ones few, so that the longest segments do not hold the step up alone: of lengths between
    512 and 1,900 that takes a tenth off 128 segments, though of equal lengths it costs some. Splits that a short
    segment does not need end at once.
    """
    blocks = batch * num_kv_heads
    splits = power_of_two(divide_up(4 * multiprocessors, blocks))
    splits = max(8 if blocks < 1024 else 4, min(32, splits))
    return splits, 128 if splits >= 16 else 256 if blocks <= multiprocessors else 512


def shared_parts(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_table: torch.Tensor,
    shared: Shared,
    workspace: DecodeWorkspace,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Attend shared stretches for all their members at once; the partial results go to ``workspace``. A part of
    ``decode``, whose arguments these are."""
    batch, num_heads, dim = q.shape
    kv_heads, v_dim = k_pool.shape[1], v_pool.shape[2]
    small = dim <= 128 and q.dtype.itemsize == 2
    block, stages = (64, 7) if small else (32, 3)
    _shared[(num_multiprocessors(q.device) * 2,)](
        q,
        k_pool,
        v_pool,
        slot_table,
        shared.items,
        shared.num_items,
        shared.members,
        workspace.parts,
        workspace.lse,
        q.stride(0),
        k_pool.stride(0),
        slot_table.stride(0),
        batch,
        scale * LOG2E,
        softcap * LOG2E,
        G=num_heads // kv_heads,
        HKV=kv_heads,
        D=dim,
        DV=v_dim,
        BD=power_of_two(dim),
        BDV=power_of_two(v_dim),
        BM=SHARED_ROWS,
        BN=block,
        SOFTCAP=softcap > 0.0,
        STAGES=stages,
        num_warps=4,
        **pdl_options(q.device),
    )


def shared_tile(group: int) -> int:
    """Members that one shared item may have."""
    return SHARED_ROWS // group


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    shared: Shared | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per segment over its keys, itself included.

    q [B, heads, D], rows contiguous; k_pool [slots, kv_heads, D], v_pool [slots, kv_heads, DV], q's dtype or float8;
    slot_table int32 [rows, context]; rows, kv_lens int32 [B] (a length of 0 gives zeros). ``window``: the last so many
    tokens only, without ``shared``. ``softcap``: c·tanh(x/c) on scaled logits. ``sinks`` [heads]: a logit per head that
    takes weight and gives no value. ``shared``: stretches that are read once for all who have them. Returns
    [B, heads, DV].
    """
    if out is None:
        out = torch.empty(*q.shape[:2], v_pool.shape[2], dtype=q.dtype, device=q.device)
    batch, num_heads, _ = out.shape
    if batch == 0:
        return out
    kv_heads = k_pool.shape[1]
    splits, least = choose_splits(batch, kv_heads, num_multiprocessors(q.device))
    parts = splits if shared is None else shared.most + splits
    if parts * batch * num_heads > workspace.lse.numel():
        raise ValueError(f"the decode workspace is too small for a batch of {batch} with {parts} parts; allocate more")
    if shared is not None:
        if window:
            raise ValueError("a window needs a stretch cut at another place for each segment; it cannot be shared")
        shared_parts(q, k_pool, v_pool, slot_table, shared, workspace, scale, softcap)
    tile = _tile_options(out, k_pool, v_pool, splits, least, shared is not None)
    launch = pdl_options(q.device)
    most, has_sinks = 0 if shared is None else shared.most, sinks is not None
    starts, counts = (rows, rows) if shared is None else (shared.own_starts, shared.counts)
    _decode[(batch, kv_heads, splits)](
        q,
        k_pool,
        v_pool,
        slot_table,
        rows,
        kv_lens,
        starts,
        counts,
        q if sinks is None else sinks,
        out,
        workspace.parts,
        workspace.lse,
        q.stride(0),
        k_pool.stride(0),
        slot_table.stride(0),
        batch,
        scale * LOG2E,
        softcap * LOG2E,
        SHARED_PARTS=most,
        WINDOW=window,
        SOFTCAP=softcap > 0.0,
        SINKS=has_sinks,
        **tile,
        **launch,
    )
    each = 1 if batch * num_heads <= MOST_BLOCKS else num_heads // kv_heads
    _combine[(batch, num_heads // each)](
        kv_lens,
        starts,
        counts,
        q if sinks is None else sinks,
        out,
        workspace.parts,
        workspace.lse,
        batch,
        HEADS=num_heads,
        EACH=each,
        SHARED_PARTS=most,
        WINDOW=window,
        SINKS=has_sinks,
        num_warps=1,
        **{name: tile[name] for name in ("DV", "BDV", "BN", "SPLITS", "LEAST")},
        **launch,
    )
    return out


def _tile_options(
    out: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, splits: int, least: int, beside_shared: bool
) -> dict[str, int]:
    """Launch options that follow from shapes."""
    batch, num_heads, _ = out.shape
    kv_heads, dim, v_dim = k_pool.shape[1], k_pool.shape[2], v_pool.shape[2]
    group = num_heads // kv_heads
    block, stages, warps = TILE or decode_tile(
        batch, kv_heads, group, max(dim, v_dim), out.dtype.itemsize, beside_shared
    )
    return {
        "G": group,
        "GP": max(16, power_of_two(group)),
        "HKV": kv_heads,
        "D": dim,
        "DV": v_dim,
        "BD": power_of_two(dim),
        "BDV": power_of_two(v_dim),
        "BN": block,
        "SPLITS": splits,
        "LEAST": least // block,
        "LINES": max(1, power_of_two(dim) * k_pool.element_size() // 128),
        "STAGES": stages,
        "num_warps": warps,
    }
