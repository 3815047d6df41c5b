"""Mixture of experts: the order of tokens by expert, grouped products with fused gather, activation and weights, and
the sum over a token's experts. Small batches (a few tokens) take GEMV kernels that read each chosen expert once per
token.

Eight-bit weights become the activations' type in registers; from some tokens an expert on, activations are rounded to
eight bits instead, one scale for each group of 128 columns. Knows expert weights as one tensor [experts, out, in],
nothing of how they are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ceiba.kernels.triton.activation import silu
from ceiba.kernels.triton.launch import (
    can_copy,
    divide_up,
    pdl_options,
    power_of_two,
    wait_for_predecessor,
)
from ceiba.kernels.triton.quantize import FLOAT8, GROUP, quantize, to_float8
from ceiba.kernels.triton.skinny import GemvShape, scale_kind

Scales = tuple[torch.Tensor, torch.Tensor]
"""Of eight-bit gate-up and down weights: float32 by row [E, out], or for blocks [E, ⌈out / 128⌉, ⌈in / 128⌉]."""

GEMV_TOKENS = 4
"""Tokens up to which ``moe_small`` is used."""

SMALL_TILES = (GemvShape(2, 2048, 8), GemvShape(4, 1024, 2))
"""Tiles of ``moe_small``: gate-up and down (whose columns are all of an expert's), measured on an H200."""

SMALL_TILES_SCALED = (GemvShape(2, 2048, 4), GemvShape(4, 1024, 2))
"""The same for eight-bit weights: as many bytes in flight, not yet measured."""

ROUNDED_PAIRS = 24
"""Mean pairs an expert beyond which activations are rounded where weights are eight-bit: with 16 that costs 9% more,
with 64 it saves 40% (H200)."""

ONE_BLOCK_PAIRS = 4096
"""Pairs up to which one block orders them."""

ORDER_PROGRAMS = 128
"""Programs that order more: each reads the counts of all, so their number has a bound."""


@triton.jit
def _expert_gate_up(
    x_ptr, w_ptr, scale_ptr, ids_ptr, out_ptr, F, expert_scales, scale_stride, K: tl.constexpr, TOP_K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = n < F
    wait_for_predecessor(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    x_at = x_ptr + (pair // TOP_K).to(tl.int64) * K
    w_at = w_ptr + expert * 2 * F * K + n[:, None].to(tl.int64) * K + k[None, :]
    u_at = w_at + F.to(tl.int64) * K
    scale_at = scale_ptr + expert * expert_scales
    block_at = scale_at + (tl.program_id(0) * BN // 128) * scale_stride
    block_u_at = scale_at + ((F + tl.program_id(0) * BN) // 128) * scale_stride
    acc = tl.zeros((BN, BK), tl.float32)
    acc_u = tl.zeros((BN, BK), tl.float32)
    for start in tl.static_range(0, K, BK):
        mask = rows[:, None] & (start + k < K)[None, :]
        w = tl.load(w_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(u_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        x_u = x
        if SCALE == 2:
            x_u = x * tl.load(block_u_at + (start + k) // 128, mask=start + k < K, other=0.0)
            x *= tl.load(block_at + (start + k) // 128, mask=start + k < K, other=0.0)
        acc += w.to(tl.float32) * x[None, :]
        acc_u += u.to(tl.float32) * x_u[None, :]
    y = tl.sum(acc, axis=1)
    y_u = tl.sum(acc_u, axis=1)
    if SCALE == 1:
        y *= tl.load(scale_at + n, mask=rows, other=0.0)
        y_u *= tl.load(scale_at + F + n, mask=rows, other=0.0)
    y = silu(y) * y_u
    tl.store(out_ptr + pair.to(tl.int64) * F + n, y.to(out_ptr.dtype.element_ty), mask=rows)


@triton.jit
def _expert_down(
    h_ptr, w_ptr, scale_ptr, ids_ptr, weights_ptr, residual_ptr, out_ptr, N, expert_scales, scale_stride,
    F: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr, RESIDUAL: tl.constexpr,
    SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    f = tl.arange(0, BF)
    mask = (n < N)[:, None] & (f < F)[None, :]
    # The ids come from the kernel before last, so the weights can be on their way before the predecessor ends.
    w_at = w_ptr + n[:, None].to(tl.int64) * F + f[None, :]
    expert = tl.load(ids_ptr + token * TOP_K).to(tl.int64)
    w = tl.load(w_at + expert * N * F, mask=mask, other=0.0)
    wait_for_predecessor(PDL)
    acc = tl.zeros((BN, BF), tl.float32)
    for i in tl.static_range(TOP_K):
        now = w
        scale_at = scale_ptr + expert * expert_scales
        if i + 1 < TOP_K:
            expert = tl.load(ids_ptr + token * TOP_K + i + 1).to(tl.int64)
            w = tl.load(w_at + expert * N * F, mask=mask, other=0.0)
        weight = tl.load(weights_ptr + token * TOP_K + i)
        h = tl.load(h_ptr + (token * TOP_K + i) * F + f, mask=f < F, other=0.0).to(tl.float32) * weight
        if SCALE == 2:
            block_at = scale_at + (tl.program_id(0) * BN // 128) * scale_stride
            h *= tl.load(block_at + f // 128, mask=f < F, other=0.0)
        part = now.to(tl.float32) * h[None, :]
        if SCALE == 1:
            part *= tl.load(scale_at + n, mask=n < N, other=0.0)[:, None]
        acc += part
    y = tl.sum(acc, axis=1)
    if RESIDUAL:
        y += tl.load(residual_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


def moe_small(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    tiles: tuple[GemvShape, GemvShape] | None = None,
    out: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """The experts' output for a few tokens: Σ weightᵢ · downᵢ(silu(gateᵢ x) · upᵢ x), plus ``residual`` if given.

    x [T, D]; gate_up [E, 2F, D] (gate rows first); down [E, D, F]; ids int32, weights float32 [T, top_k]. ``ids`` must
    come from a kernel of this package or be complete before the launch. ``scales`` of eight-bit weights; in blocks, F
    and D are multiples of 128. Returns [T, D] in x's dtype; ``out`` may be ``residual``.
    """
    tokens, dim = x.shape
    top_k = ids.shape[1]
    inner = down.shape[2]
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    if out is None:
        out = torch.empty_like(x)
    options = pdl_options(x.device)
    first, second = tiles or (SMALL_TILES if scales is None else SMALL_TILES_SCALED)
    up_scales, down_scales = scales or (x, x)
    kind = scale_kind(None if scales is None else up_scales, 3)
    _expert_gate_up[(divide_up(inner, first.rows), tokens * top_k)](
        x,
        gate_up,
        up_scales,
        ids,
        hidden,
        inner,
        up_scales.stride(0),
        up_scales.stride(1),
        K=dim,
        TOP_K=top_k,
        BN=first.rows,
        BK=min(first.columns, power_of_two(dim)),
        SCALE=kind,
        num_warps=first.warps,
        **options,
    )
    _expert_down[(divide_up(dim, second.rows), tokens)](
        hidden,
        down,
        down_scales,
        ids,
        weights,
        x if residual is None else residual,
        out,
        dim,
        down_scales.stride(0),
        down_scales.stride(1),
        F=inner,
        TOP_K=top_k,
        BN=second.rows,
        BF=power_of_two(inner),
        RESIDUAL=residual is not None,
        SCALE=kind,
        num_warps=second.warps,
        **options,
    )
    return out


@triton.jit(do_not_specialize=["pairs"])
def _order_in_one_block(
    ids_ptr,
    cursor_ptr,
    order_ptr,
    blocks_ptr,
    num_blocks_ptr,
    pairs,
    E: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_count_experts`` and ``_place_pairs`` for few pairs, in one launch."""
    at = tl.arange(0, BLOCK)
    inside = at < pairs
    e = tl.arange(0, EP)
    wait_for_predecessor(PDL)
    ids = tl.load(ids_ptr + at, mask=inside, other=EP - 1)
    counts = tl.where(e < E, tl.histogram(ids, EP), 0)
    blocks = (counts + BM - 1) // BM
    before = tl.cumsum(blocks, axis=0) - blocks
    total = tl.sum(blocks, axis=0)
    tl.store(cursor_ptr + e, before * BM, mask=e < E)
    tl.store(num_blocks_ptr, total)
    for i in range(0, tl.max(blocks, axis=0)):
        tl.store(blocks_ptr + before + i, e, mask=(e < E) & (i < blocks))
    for start in range(0, total * BM, CAPACITY):
        spot = start + tl.arange(0, CAPACITY)
        tl.store(order_ptr + spot, tl.zeros((CAPACITY,), tl.int32) + pairs, mask=spot < total * BM)
    tl.debug_barrier()
    place = tl.atomic_add(cursor_ptr + ids, 1, mask=inside, sem="acq_rel", scope="cta")
    tl.store(order_ptr + place, at, mask=inside)


@triton.jit(do_not_specialize=["pairs", "span"])
def _count_experts(
    ids_ptr, counts_ptr, pairs, span, E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """counts_ptr [programs, E]: how many of the ``span`` pairs of each program chose each expert."""
    first = tl.program_id(0) * span
    e = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    wait_for_predecessor(PDL)
    for start in range(first, tl.minimum(first + span, pairs), BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < pairs, other=0)
        # What lies past the end was counted as expert 0.
        counts += tl.histogram(ids, EP) - tl.where(e == 0, tl.maximum(start + BLOCK - pairs, 0), 0)
    tl.store(counts_ptr + tl.program_id(0) * E + e, counts, mask=e < E)


@triton.jit(do_not_specialize=["pairs", "span"])
def _place_pairs(
    ids_ptr, counts_ptr, cursor_ptr, order_ptr, blocks_ptr, num_blocks_ptr, pairs, span, E: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Expert ``e``'s rows start at a multiple of BM; within them the pairs of one program follow those of the one
    before. Every program sums the counts of all, which spares a launch, and atomics contend within a program only.
    Block b's expert goes to blocks_ptr[b].
    """
    program = tl.program_id(0)
    e = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    earlier = tl.zeros((EP,), tl.int32)
    wait_for_predecessor(PDL)
    for start in range(0, tl.num_programs(0), ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < tl.num_programs(0))[:, None] & (e < E)[None, :]
        part = tl.load(counts_ptr + row[:, None] * E + e[None, :], mask=inside, other=0)
        counts += tl.sum(part, axis=0)
        earlier += tl.sum(tl.where((row < program)[:, None], part, 0), axis=0)
    blocks = (counts + BM - 1) // BM
    after = tl.cumsum(blocks, axis=0)
    before = after - blocks
    total = tl.sum(blocks, axis=0)
    cursor_at = cursor_ptr + program * E
    tl.store(cursor_at + e, before * BM + earlier, mask=e < E)
    if program == 0:
        tl.store(num_blocks_ptr, total)
    tl.debug_barrier()  # the program's cursors stand before its atomics
    first = program * span
    for start in range(first, tl.minimum(first + span, pairs), BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < pairs, other=0)
        place = tl.atomic_add(cursor_at + ids, 1, mask=at < pairs, sem="relaxed", scope="cta")
        tl.store(order_ptr + place, at, mask=at < pairs)
    # The programs share out the blocks, NB at a time: their experts, and the padding that ends an expert's last one.
    for start in range(program * NB, total, tl.num_programs(0) * NB):
        block = start + tl.arange(0, NB)
        expert = tl.sum((after[None, :] <= block[:, None]).to(tl.int32), axis=1)
        tl.store(blocks_ptr + block, expert, mask=block < total)
        end = tl.sum(tl.where(e[None, :] == expert[:, None], (before * BM + counts)[None, :], 0), axis=1)
        spot = block[:, None] * BM + tl.arange(0, BM)[None, :]
        padding = (spot >= end[:, None]) & (block < total)[:, None]
        tl.store(order_ptr + spot, tl.zeros((NB, BM), tl.int32) + pairs, mask=padding)


@dataclass(slots=True)
class ExpertOrder:
    """(token, choice) pairs grouped by expert, each group padded to whole blocks."""

    pairs: torch.Tensor
    """int32 [max blocks · block]: pair index token·top_k + choice; the padding holds the number of pairs. Past the last
    block nothing is written."""
    experts: torch.Tensor
    """int32 [max blocks]: expert of each block"""
    num_blocks: torch.Tensor
    """int32 [1]"""
    block: int


def order_by_expert(ids: torch.Tensor, num_experts: int, block: int) -> ExpertOrder:
    """Group the pairs of ids int32 [T, top_k] by expert in blocks of ``block`` rows. The order inside a group is not
    fixed, which no result depends on. Sizes depend on shapes only, so it can be captured in a graph.
    """
    pairs = ids.numel()
    device = ids.device
    max_blocks = min(pairs, divide_up(pairs + min(num_experts, pairs) * (block - 1), block))
    order = torch.empty(max_blocks * block, dtype=torch.int32, device=device)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    if pairs <= ONE_BLOCK_PAIRS:
        cursor = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        _order_in_one_block[(1,)](
            ids,
            cursor,
            order,
            experts,
            cursor[num_experts:],
            pairs,
            E=num_experts,
            EP=power_of_two(num_experts + 1),
            BM=block,
            BLOCK=max(128, power_of_two(pairs)),
            CAPACITY=1024,
            num_warps=8,
            **pdl_options(device),
        )
        return ExpertOrder(order, experts, cursor[num_experts:], block)
    step = 512
    span = step * divide_up(pairs, step * ORDER_PROGRAMS)
    programs = divide_up(pairs, span)
    # Sized for all programs, so that the parts are aligned alike whatever the number of pairs: one kernel serves all.
    scratch = torch.empty(2 * ORDER_PROGRAMS * num_experts + 1, dtype=torch.int32, device=device)
    counts, cursor, num_blocks = scratch, scratch[ORDER_PROGRAMS * num_experts :], scratch[-1:]
    sizes = {"E": num_experts, "EP": power_of_two(num_experts), "BLOCK": step, "num_warps": 8}
    options = pdl_options(device)
    _count_experts[(programs,)](ids, counts, pairs, span, **sizes, **options)
    _place_pairs[(programs,)](
        ids,
        counts,
        cursor,
        order,
        experts,
        num_blocks,
        pairs,
        span,
        BM=block,
        ROWS=max(1, 8192 // power_of_two(num_experts)),
        NB=16,
        **sizes,
        **options,
    )
    return ExpertOrder(order, experts, num_blocks, block)


@triton.jit
def _grouped_tile(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, out_scale_ptr, order_at, expert, weights_ptr, pairs, N,
    x_scale_stride, expert_scales, w_scale_stride, out_scale_stride, K: tl.constexpr, DIVIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SILU: tl.constexpr, WEIGHTED: tl.constexpr,
    SCALE: tl.constexpr, ROUNDED: tl.constexpr, COPIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first BM rows of a block, whose pairs lie at ``order_at``, by BN of its expert's columns."""
    pair = tl.load(order_at + tl.arange(0, BM))
    live = pair < pairs
    source = tl.where(live, pair // DIVIDE, 0).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_read = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x_ptr + source[:, None] * K + k[None, :]
    x_scale_at = x_scale_ptr + source * x_scale_stride
    scale_at = w_scale_ptr + expert * expert_scales
    block_at = scale_at + (tl.program_id(0) * BN // 128) * w_scale_stride
    block_u_at = scale_at + ((N + tl.program_id(0) * BN) // 128) * w_scale_stride
    if SILU:
        acc_u = tl.zeros((BM, BN), tl.float32)
    if COPIES:
        # Weights are one matrix of all experts' rows; a tile lies within one expert, since BN divides N.
        w_row = (expert * (2 if SILU else 1) * N + tl.program_id(0) * BN).to(tl.int32)
    elif SILU:
        w_at = w_ptr + expert * 2 * N * K + n_read[None, :] * K + k[:, None]
        u_at = w_at + N.to(tl.int64) * K
    else:
        w_at = w_ptr + expert * N * K + n_read[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if COPIES:
            # Columns past the end are zeros of the copy, so whatever x holds there does not count.
            x = tl.load(x_at + start, mask=(start + k < K)[None, :], other=0.0)
            w = tl.trans(w_ptr.load([w_row, start]))
            if SILU:
                u = tl.trans(w_ptr.load([w_row + N, start]))
        elif K % BK == 0:
            x = tl.load(x_at + start)
            w = tl.load(w_at + start)
            if SILU:
                u = tl.load(u_at + start)
        else:
            inside = start + k < K
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
            if SILU:
                u = tl.load(u_at + start, mask=inside[:, None], other=0.0)
        if ROUNDED or SCALE == 2:
            # One group of x and one block of w at a time: BK divides 128.
            scale = tl.full((BM,), 1.0, tl.float32)
            if ROUNDED:
                scale = tl.load(x_scale_at + start // 128)
            scale_w = 1.0
            scale_u = 1.0
            if SCALE == 2:
                scale_w = tl.load(block_at + start // 128)
                if SILU:
                    scale_u = tl.load(block_u_at + start // 128)
            acc += tl.dot(x, w.to(x.dtype), input_precision="tf32x3") * (scale * scale_w)[:, None]
            if SILU:
                acc_u += tl.dot(x, u.to(x.dtype), input_precision="tf32x3") * (scale * scale_u)[:, None]
        else:
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision="tf32x3")
            if SILU:
                acc_u = tl.dot(x, u.to(x.dtype), acc_u, input_precision="tf32x3")
    if SCALE == 1:
        acc *= tl.load(scale_at + n_read)[None, :]
        if SILU:
            acc_u *= tl.load(scale_at + N + n_read)[None, :]
    if SILU:
        acc = silu(acc) * acc_u
    if WEIGHTED:
        acc *= tl.load(weights_ptr + pair, mask=live, other=0.0)[:, None]
    out_at = out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :]
    inside_out = live[:, None] & (n < N)[None, :]
    if ROUNDED and SILU:
        # A tile is a group of the next product's input: BN is 128.
        acc = tl.where((n < N)[None, :], acc, 0.0)
        scale = tl.maximum(tl.max(tl.abs(acc), axis=1) / 448.0, 1e-12)
        tl.store(out_scale_ptr + pair.to(tl.int64) * out_scale_stride + tl.program_id(0), scale, mask=live)
        tl.store(out_at, to_float8(acc, (1.0 / scale)[:, None]), mask=inside_out)
    else:
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside_out)


@triton.jit(do_not_specialize=["pairs"])
def _grouped_matmul(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    out_scale_ptr,
    order_ptr,
    experts_ptr,
    num_blocks_ptr,
    weights_ptr,
    pairs,
    N,
    x_scale_stride,
    expert_scales,
    w_scale_stride,
    out_scale_stride,
    K: tl.constexpr,
    DIVIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALE: tl.constexpr,
    ROUNDED: tl.constexpr,
    COPIES: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(1)
    wait_for_predecessor(PDL)
    if block < tl.load(num_blocks_ptr):
        expert = tl.load(experts_ptr + block).to(tl.int64)
        order_at = order_ptr + block * BM
        few = False
        if HALVES:
            # A block's pairs stand before its padding.
            few = tl.load(order_at + BM // 2) >= pairs
        if few:
            _grouped_tile(
                x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, out_scale_ptr, order_at, expert, weights_ptr, pairs, N,
                x_scale_stride, expert_scales, w_scale_stride, out_scale_stride, K, DIVIDE, BM // 2, BN, BK, SILU,
                WEIGHTED, SCALE, ROUNDED, COPIES, STAGES,
            )  # fmt: skip
        else:
            _grouped_tile(
                x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, out_scale_ptr, order_at, expert, weights_ptr, pairs, N,
                x_scale_stride, expert_scales, w_scale_stride, out_scale_stride, K, DIVIDE, BM, BN, BK, SILU,
                WEIGHTED, SCALE, ROUNDED, COPIES, STAGES,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Tile of a grouped product: rows, columns and depth of a block, pipeline stages, warps."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    copies: bool = False
    """Whether the copy engine fetches the weights' tiles, where it can (Hopper, columns that divide the matrix)."""
    halves: bool = False
    """Whether of blocks that are at most half full only half the rows are computed: with uneven routing many are."""


TILES: tuple[tuple[float, GroupedShape, GroupedShape], ...] = (
    (8, GroupedShape(16, 64, 128, 3, 4), GroupedShape(16, 64, 128, 4, 4)),
    (13, GroupedShape(32, 128, 64, 4, 4), GroupedShape(32, 128, 128, 3, 4)),
    (23, GroupedShape(32, 128, 64, 3, 4), GroupedShape(32, 128, 128, 3, 4)),
    (78, GroupedShape(64, 256, 64, 3, 8, copies=True), GroupedShape(64, 512, 64, 3, 8)),
    (
        362,
        GroupedShape(128, 128, 64, 4, 8, copies=True, halves=True),
        GroupedShape(128, 256, 64, 4, 8, copies=True, halves=True),
    ),
    (inf, GroupedShape(128, 128, 64, 4, 8, copies=True, halves=True), GroupedShape(128, 256, 64, 3, 8)),
)
"""Up to so many mean pairs an expert: tiles of the gate-up and the down product, with as many rows each, for 16-bit
weights. Measured on an H200; ``benchmarks/gpu/grouped.py`` prints these lines for even and uneven routing."""


def rounds_activations(pairs: int, num_experts: int) -> bool:
    """Whether products with eight-bit weights round their input."""
    return pairs / num_experts > ROUNDED_PAIRS


def grouped_shapes(
    pairs: int, num_experts: int, itemsize: int = 2, scaled: bool = False
) -> tuple[GroupedShape, GroupedShape]:
    """Tiles of the gate-up and the down product, by pairs per expert and bytes of an element: ``TILES``, but for
    float32 and for eight-bit weights (``scaled``), whose tiles are chosen by arithmetic: a step of 128 columns for
    their scales, and for rounded input 128 columns of output, which are a group."""
    mean = pairs / num_experts
    if scaled:
        if not rounds_activations(pairs, num_experts):
            rows = 16 if mean <= 8 else 32
            return GroupedShape(rows, 64, 128, 4, 4), GroupedShape(rows, 64, 128, 4, 4)
        rows = 64 if mean <= 192 else 128
        warps = rows // 16
        return GroupedShape(rows, 128, 128, 3, warps), GroupedShape(rows, 128, 128, 3, warps)
    if itemsize > 2:
        both = GroupedShape(16 if mean <= 8 else 64, 64, 32, 2, 4)
        return both, both
    return next((first, second) for most, first, second in TILES if mean <= most)


@triton.jit
def _combine(
    x_ptr, residual_ptr, out_ptr, N, TOP_K: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    wait_for_predecessor(PDL)
    y = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        y += tl.load(x_ptr + (token * TOP_K + i) * N + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual_ptr + token * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def combine(split: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [T, D] = the sum of each token's rows of ``split`` [T · top_k, D], plus ``residual`` [T, D] if given."""
    tokens, dim = out.shape
    _combine[(tokens, divide_up(dim, 1024))](
        split,
        split if residual is None else residual,
        out,
        dim,
        TOP_K=split.shape[0] // tokens,
        BLOCK=1024,
        RESIDUAL=residual is not None,
        num_warps=4,
        **pdl_options(out.device),
    )


def moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    shapes: tuple[GroupedShape, GroupedShape] | None = None,
    out: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """The experts' output for any number of tokens; arguments and result as in ``moe_small``, which takes over where
    the tokens are few.
    """
    tokens, dim = x.shape
    experts, _, inner = down.shape
    top_k = ids.shape[1]
    pairs = tokens * top_k
    if tokens == 0:
        return torch.empty_like(x)
    if tokens <= GEMV_TOKENS and shapes is None:
        return moe_small(x, gate_up, down, ids, weights, residual, out=out, scales=scales)
    first, second = shapes or grouped_shapes(pairs, experts, x.dtype.itemsize, scales is not None)
    order = order_by_expert(ids, experts, first.rows)
    split = torch.empty(pairs, dim, dtype=x.dtype, device=x.device)
    up_scales, down_scales = scales or (None, None)
    source = Operand(x)
    hidden = Operand(torch.empty(pairs, inner, dtype=x.dtype, device=x.device))
    if scales is not None and rounds_activations(pairs, experts):
        source = Operand(*quantize(x, grouped=True))
        groups = torch.empty(pairs, divide_up(inner, GROUP), dtype=torch.float32, device=x.device)
        hidden = Operand(torch.empty(pairs, inner, dtype=FLOAT8, device=x.device), groups)
    if out is None:
        out = torch.empty_like(x)
    _launch_grouped(source, Operand(gate_up, up_scales), hidden, order, weights, first, top_k, True)
    _launch_grouped(hidden, Operand(down, down_scales), Operand(split), order, weights, second, 1, False)
    combine(split, residual, out)
    return out


@dataclass(frozen=True, slots=True)
class Operand:
    """Values and, of eight-bit ones, their scales."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


def _launch_grouped(
    x: Operand,
    w: Operand,
    out: Operand,
    order: ExpertOrder,
    weights: torch.Tensor,
    tile: GroupedShape,
    divide: int,
    paired: bool,
) -> None:
    """``paired``: the gate-up product with its activation; else the down product, times the routing weights."""
    values, n = x.values, out.values.shape[1]
    if out.scales is not None and tile.columns != GROUP:
        raise ValueError(f"a product that rounds its output writes {GROUP} columns a tile, not {tile.columns}")
    unused = values
    x_scales = unused if x.scales is None else x.scales
    w_scales = unused if w.scales is None else w.scales
    out_scales = unused if out.scales is None else out.scales
    k = values.shape[1]
    depth = min(tile.depth, power_of_two(k), 128 if w.scales is not None else tile.depth)
    copies = tile.copies and can_copy(values.device) and n % tile.columns == 0 and k * w.values.itemsize % 16 == 0
    w_argument: object = w.values
    if copies:
        experts, rows, _ = w.values.shape
        w_argument = TensorDescriptor(w.values, [experts * rows, k], [k, 1], [tile.columns, depth])
    _grouped_matmul[(divide_up(n, tile.columns), order.experts.shape[0])](
        values,
        x_scales,
        w_argument,
        w_scales,
        out.values,
        out_scales,
        order.pairs,
        order.experts,
        order.num_blocks,
        weights,
        weights.numel(),
        n,
        x_scales.stride(0),
        w_scales.stride(0),
        w_scales.stride(1),
        out_scales.stride(0),
        K=k,
        DIVIDE=divide,
        BM=order.block,
        BN=tile.columns,
        BK=depth,
        SILU=paired,
        WEIGHTED=not paired,
        SCALE=scale_kind(w.scales, 3),
        ROUNDED=x.scales is not None,
        COPIES=copies,
        HALVES=tile.halves and order.block > 16,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **pdl_options(values.device),
    )
