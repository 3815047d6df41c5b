"""Mixture of experts: routing, the order of tokens by expert, grouped products with fused gather, activation and
weights, and the sum over a token's experts. Small batches (a few tokens) take GEMV kernels that read each chosen
expert once per token. Knows expert weights as one tensor [experts, out, in], nothing of how they are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.activation import silu
from ceiba.kernels.triton.launch import (
    divide_up,
    pdl_options,
    power_of_two,
    wait_for_predecessor,
)
from ceiba.kernels.triton.skinny import GemvShape

GEMV_TOKENS = 4
"""Tokens up to which ``moe_small`` is used."""

SMALL_TILES = (GemvShape(2, 2048, 8), GemvShape(4, 1024, 2))
"""Tiles of ``moe_small``: gate-up and down (whose columns are all of an expert's), measured on an H200."""

ONE_BLOCK_PAIRS = 4096
"""Pairs up to which one block orders them."""


@triton.jit
def _route_row(
    logits,
    e,
    ids_ptr,
    weights_ptr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP_K: tl.constexpr,
    KP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Write the TOP_K largest of logits [EP] (lowest index among equals) and their softmax weights, largest first.
    Indices are in range whatever the logits are; weights of a row that is not finite are NaN.
    """
    top = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - top), axis=0)
    comparable = tl.where(logits == logits, logits, -float("inf"))  # noqa: PLR0124 (NaN is not itself)
    if EP <= 256:
        # An expert's place is the number of experts ahead of it.
        ahead = comparable[None, :] > comparable[:, None]
        ahead = ahead | ((comparable[None, :] == comparable[:, None]) & (e[None, :] < e[:, None]))
        place = tl.sum(ahead.to(tl.int32), axis=1)
        weights = tl.exp(logits - top)
        chosen = place < TOP_K
        if RENORMALIZE:
            total = tl.sum(tl.where(chosen, weights, 0.0), axis=0)
        tl.store(ids_ptr + place, tl.minimum(e, E - 1), mask=chosen)
        tl.store(weights_ptr + place, weights / total, mask=chosen)
    else:
        j = tl.arange(0, KP)
        ids = tl.zeros((KP,), tl.int32)
        weights = tl.zeros((KP,), tl.float32)
        left = comparable
        for i in tl.static_range(TOP_K):
            best = tl.max(left, axis=0)
            index = tl.min(tl.where(left == best, e, EP), axis=0)
            ids = tl.where(j == i, tl.minimum(index, E - 1), ids)
            weights = tl.where(j == i, tl.exp(best - top), weights)
            left = tl.where(e == index, -float("inf"), left)
        if RENORMALIZE:
            total = tl.sum(weights, axis=0)
        tl.store(ids_ptr + j, ids, mask=j < TOP_K)
        tl.store(weights_ptr + j, weights / total, mask=j < TOP_K)


@triton.jit
def _route(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP_K: tl.constexpr,
    KP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    wait_for_predecessor(PDL)
    logits = tl.load(logits_ptr + row * stride + e, mask=e < E, other=-float("inf")).to(tl.float32)
    _route_row(logits, e, ids_ptr + row * TOP_K, weights_ptr + row * TOP_K, E, EP, TOP_K, KP, RENORMALIZE)


def route(logits: torch.Tensor, top_k: int, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over experts, the ``top_k`` largest (lowest id among equals), weights summing to 1 if ``renormalize``.

    logits [T, E], any float dtype. Returns ids int32 [T, top_k] and weights float32 [T, top_k], largest first.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits,
            ids,
            weights,
            logits.stride(0),
            E=experts,
            EP=power_of_two(experts),
            TOP_K=top_k,
            KP=power_of_two(top_k),
            RENORMALIZE=renormalize,
            num_warps=4,
            **pdl_options(logits.device),
        )
    return ids, weights


@triton.jit
def _norm_route(
    x_ptr,
    norm_ptr,
    router_ptr,
    normed_ptr,
    logits_ptr,
    counter_ptr,
    ids_ptr,
    weights_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    BE: tl.constexpr,
    TOP_K: tl.constexpr,
    KP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mine = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = d < D
    weight = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
    router_mask = (mine < E)[:, None] & inside[None, :]
    router = tl.load(router_ptr + mine[:, None] * D + d[None, :], mask=router_mask, other=0.0)
    wait_for_predecessor(PDL)
    x = tl.load(x_ptr + row * D + d, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
    x = x.to(normed_ptr.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + row * D + d, x, mask=inside)
    part = tl.sum(router.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + row * E + mine, part, mask=mine < E)
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        tl.store(counter_ptr + row, 0)
        e = tl.arange(0, EP)
        logits = tl.load(logits_ptr + row * E + e, mask=e < E, other=-float("inf"), cache_modifier=".cg")
        _route_row(logits, e, ids_ptr + row * TOP_K, weights_ptr + row * TOP_K, E, EP, TOP_K, KP, RENORMALIZE)


def norm_route(
    x: torch.Tensor,
    norm: torch.Tensor,
    router: torch.Tensor,
    eps: float,
    top_k: int,
    counters: torch.Tensor,
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm, router product and ``route`` in one kernel, for a few tokens.

    x [T, D]; norm [D]; router [E, D]; counters int32 [≥ T], zero between launches. Returns the normed x [T, D], ids
    int32 [T, top_k], weights float32 [T, top_k].
    """
    tokens, dim = x.shape
    experts = router.shape[0]
    normed = torch.empty_like(x)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    block = 2
    _norm_route[(divide_up(experts, block), tokens)](
        x,
        norm,
        router,
        normed,
        logits,
        counters,
        ids,
        weights,
        eps,
        D=dim,
        BLOCK=power_of_two(dim),
        E=experts,
        EP=power_of_two(experts),
        BE=block,
        TOP_K=top_k,
        KP=power_of_two(top_k),
        RENORMALIZE=renormalize,
        num_warps=4,
        **pdl_options(x.device),
    )
    return normed, ids, weights


@triton.jit
def _expert_gate_up(
    x_ptr, w_ptr, ids_ptr, out_ptr, F, K: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
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
    acc = tl.zeros((BN, BK), tl.float32)
    acc_u = tl.zeros((BN, BK), tl.float32)
    for start in tl.static_range(0, K, BK):
        mask = rows[:, None] & (start + k < K)[None, :]
        w = tl.load(w_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(u_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        acc_u += u.to(tl.float32) * x[None, :]
    y = silu(tl.sum(acc, axis=1)) * tl.sum(acc_u, axis=1)
    tl.store(out_ptr + pair.to(tl.int64) * F + n, y.to(out_ptr.dtype.element_ty), mask=rows)


@triton.jit
def _expert_down(
    h_ptr, w_ptr, ids_ptr, weights_ptr, residual_ptr, out_ptr, N, F: tl.constexpr, TOP_K: tl.constexpr,
    BN: tl.constexpr, BF: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    f = tl.arange(0, BF)
    mask = (n < N)[:, None] & (f < F)[None, :]
    # The ids come from the kernel before last, so the weights can be on their way before the predecessor ends.
    w_at = w_ptr + n[:, None].to(tl.int64) * F + f[None, :]
    w = tl.load(w_at + tl.load(ids_ptr + token * TOP_K).to(tl.int64) * N * F, mask=mask, other=0.0)
    wait_for_predecessor(PDL)
    acc = tl.zeros((BN, BF), tl.float32)
    for i in tl.static_range(TOP_K):
        now = w
        if i + 1 < TOP_K:
            expert = tl.load(ids_ptr + token * TOP_K + i + 1).to(tl.int64)
            w = tl.load(w_at + expert * N * F, mask=mask, other=0.0)
        weight = tl.load(weights_ptr + token * TOP_K + i)
        h = tl.load(h_ptr + (token * TOP_K + i) * F + f, mask=f < F, other=0.0).to(tl.float32) * weight
        acc += now.to(tl.float32) * h[None, :]
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
) -> torch.Tensor:
    """The experts' output for a few tokens: Σ weightᵢ · downᵢ(silu(gateᵢ x) · upᵢ x), plus ``residual`` if given.

    x [T, D]; gate_up [E, 2F, D] (gate rows first); down [E, D, F]; ids int32, weights float32 [T, top_k]. ``ids`` must
    come from a kernel of this package or be complete before the launch. Returns [T, D] in x's dtype; ``out`` may be
    ``residual``.
    """
    tokens, dim = x.shape
    top_k = ids.shape[1]
    inner = down.shape[2]
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    if out is None:
        out = torch.empty_like(x)
    options = pdl_options(x.device)
    first, second = tiles or SMALL_TILES
    _expert_gate_up[(divide_up(inner, first.rows), tokens * top_k)](
        x,
        gate_up,
        ids,
        hidden,
        inner,
        K=dim,
        TOP_K=top_k,
        BN=first.rows,
        BK=min(first.columns, power_of_two(dim)),
        num_warps=first.warps,
        **options,
    )
    _expert_down[(divide_up(dim, second.rows), tokens)](
        hidden,
        down,
        ids,
        weights,
        x if residual is None else residual,
        out,
        dim,
        F=inner,
        TOP_K=top_k,
        BN=second.rows,
        BF=power_of_two(inner),
        RESIDUAL=residual is not None,
        num_warps=second.warps,
        **options,
    )
    return out


@triton.jit
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
    """``_count_experts``, ``_place_blocks`` and ``_scatter_pairs`` for few pairs, in one launch."""
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


@triton.jit
def _count_experts(ids_ptr, counts_ptr, pairs, E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < pairs, other=0)
    # Bins past E take what the mask leaves out.
    histogram = tl.histogram(tl.where(at < pairs, ids, EP - 1), EP)
    e = tl.arange(0, EP)
    tl.atomic_add(counts_ptr + e, histogram, mask=(e < E) & (histogram > 0), sem="relaxed")


@triton.jit
def _place_blocks(
    counts_ptr, cursor_ptr, blocks_ptr, num_blocks_ptr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr
):
    """Expert ``e``'s rows start at a multiple of BM; blocks_ptr[b] is the expert of block b."""
    e = tl.arange(0, EP)
    counts = tl.load(counts_ptr + e, mask=e < E, other=0)
    blocks = (counts + BM - 1) // BM
    after = tl.cumsum(blocks, axis=0)
    before = after - blocks
    tl.store(cursor_ptr + e, before * BM, mask=e < E)
    tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for i in range(0, tl.max(blocks, axis=0)):
        tl.store(blocks_ptr + before + i, e, mask=(e < E) & (i < blocks))


@triton.jit
def _scatter_pairs(ids_ptr, cursor_ptr, sorted_ptr, pairs, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    ids = tl.load(ids_ptr + at, mask=inside, other=0)
    place = tl.atomic_add(cursor_ptr + ids, 1, mask=inside, sem="relaxed")
    tl.store(sorted_ptr + place, at, mask=inside)


@dataclass(slots=True)
class ExpertOrder:
    """(token, choice) pairs grouped by expert, each group padded to whole blocks."""

    pairs: torch.Tensor
    """int32 [max blocks · block]: pair index token·top_k + choice; the padding holds the number of pairs"""
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
    padded_experts = power_of_two(num_experts + 1)
    max_blocks = min(pairs, divide_up(pairs + min(num_experts, pairs) * (block - 1), block))
    if pairs <= ONE_BLOCK_PAIRS:
        cursor = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        order = torch.empty(max_blocks * block, dtype=torch.int32, device=device)
        experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
        _order_in_one_block[(1,)](
            ids,
            cursor,
            order,
            experts,
            cursor[num_experts:],
            pairs,
            E=num_experts,
            EP=padded_experts,
            BM=block,
            BLOCK=max(128, power_of_two(pairs)),
            CAPACITY=1024,
            num_warps=8,
            **pdl_options(device),
        )
        return ExpertOrder(order, experts, cursor[num_experts:], block)
    # One fill for the counters, one for the padding.
    scratch = torch.zeros(2 * num_experts + 1, dtype=torch.int32, device=device)
    counts, cursor, num_blocks = scratch[:num_experts], scratch[num_experts:-1], scratch[-1:]
    order = torch.full((max_blocks * block,), pairs, dtype=torch.int32, device=device)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    step = 1024
    grid = (divide_up(pairs, step),)
    _count_experts[grid](ids, counts, pairs, E=num_experts, EP=padded_experts, BLOCK=step, num_warps=4)
    _place_blocks[(1,)](counts, cursor, experts, num_blocks, E=num_experts, EP=padded_experts, BM=block, num_warps=4)
    _scatter_pairs[grid](ids, cursor, order, pairs, BLOCK=step, num_warps=4)
    return ExpertOrder(order, experts, num_blocks, block)


@triton.jit
def _grouped_matmul(
    x_ptr,
    w_ptr,
    out_ptr,
    order_ptr,
    experts_ptr,
    num_blocks_ptr,
    weights_ptr,
    pairs,
    N,
    K: tl.constexpr,
    DIVIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(1)
    wait_for_predecessor(PDL)
    if block < tl.load(num_blocks_ptr):
        expert = tl.load(experts_ptr + block).to(tl.int64)
        pair = tl.load(order_ptr + block * BM + tl.arange(0, BM))
        live = pair < pairs
        source = tl.where(live, pair // DIVIDE, 0).to(tl.int64)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        n_read = tl.minimum(n, N - 1).to(tl.int64)
        k = tl.arange(0, BK)
        x_at = x_ptr + source[:, None] * K + k[None, :]
        if SILU:
            w_at = w_ptr + expert * 2 * N * K + n_read[None, :] * K + k[:, None]
            u_at = w_at + N.to(tl.int64) * K
            acc_u = tl.zeros((BM, BN), tl.float32)
        else:
            w_at = w_ptr + expert * N * K + n_read[None, :] * K + k[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            if K % BK == 0:
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
            acc = tl.dot(x, w, acc, input_precision="tf32x3")
            if SILU:
                acc_u = tl.dot(x, u, acc_u, input_precision="tf32x3")
        if SILU:
            acc = silu(acc) * acc_u
        if WEIGHTED:
            acc *= tl.load(weights_ptr + pair, mask=live, other=0.0)[:, None]
        out_at = out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Tile of a grouped product: rows, columns and depth of a block, pipeline stages, warps."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


def grouped_shapes(pairs: int, num_experts: int, itemsize: int = 2) -> tuple[GroupedShape, GroupedShape]:
    """Tiles of the gate-up and the down product, by pairs per expert and bytes of an element; measured on an H200
    (docs/benchmarks.md)."""
    mean = pairs / num_experts
    if itemsize > 2:
        both = GroupedShape(16 if mean <= 8 else 64, 64, 32, 2, 4)
        return both, both
    if mean <= 8:
        return GroupedShape(16, 64, 128, 3, 4), GroupedShape(16, 64, 128, 4, 4)
    if mean <= 24:
        return GroupedShape(32, 64, 128, 3, 4), GroupedShape(32, 64, 128, 3, 4)
    if mean <= 96:
        return GroupedShape(64, 128, 64, 4, 4), GroupedShape(64, 128, 64, 4, 4)
    return GroupedShape(128, 128, 64, 4, 8), GroupedShape(128, 128, 64, 4, 8)


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


def moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    shapes: tuple[GroupedShape, GroupedShape] | None = None,
    out: torch.Tensor | None = None,
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
        return moe_small(x, gate_up, down, ids, weights, residual, out=out)
    first, second = shapes or grouped_shapes(pairs, experts, x.dtype.itemsize)
    order = order_by_expert(ids, experts, first.rows)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    split = torch.empty(pairs, dim, dtype=x.dtype, device=x.device)
    if out is None:
        out = torch.empty_like(x)
    blocks = order.experts.shape[0]
    _launch_grouped(x, gate_up, hidden, order, weights, first, inner, dim, top_k, True, blocks)
    _launch_grouped(hidden, down, split, order, weights, second, dim, inner, 1, False, blocks)
    _combine[(tokens, divide_up(dim, 1024))](
        split,
        x if residual is None else residual,
        out,
        dim,
        TOP_K=top_k,
        BLOCK=1024,
        RESIDUAL=residual is not None,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


def _launch_grouped(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    order: ExpertOrder,
    weights: torch.Tensor,
    tile: GroupedShape,
    n: int,
    k: int,
    divide: int,
    paired: bool,
    blocks: int,
) -> None:
    """``paired``: the gate-up product with its activation; else the down product, times the routing weights."""
    _grouped_matmul[(divide_up(n, tile.columns), blocks)](
        x,
        w,
        out,
        order.pairs,
        order.experts,
        order.num_blocks,
        weights,
        weights.numel(),
        n,
        K=k,
        DIVIDE=divide,
        BM=order.block,
        BN=tile.columns,
        BK=min(tile.depth, power_of_two(k)),
        SILU=paired,
        WEIGHTED=not paired,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **pdl_options(x.device),
    )
