"""Which experts a token goes through: softmax, the largest of it, and for a few tokens the norm and the router's
product in the same launch. Knows logits, never experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import divide_up, pdl_options, power_of_two, wait_for_predecessor

MANY = 1024
"""Tokens from which a program routes several: of 128 experts 14.2 to 2.5 µs at 1,024, 97 to 7.2 µs at 8,192 (H200)."""


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


@triton.jit(do_not_specialize=["T"])
def _route_rows(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    T,
    stride,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP_K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_route`` for ROWS tokens a program: the largest is taken TOP_K times, which costs a row a twentieth of the
    instructions that comparing all pairs of experts does, but one after the other."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    e = tl.arange(0, EP)
    j = tl.arange(0, KP)
    live = (row < T)[:, None]
    wait_for_predecessor(PDL)
    mask = live & (e < E)[None, :]
    logits = tl.load(logits_ptr + row[:, None] * stride + e[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - top[:, None]), axis=1)
    # NaN is not itself. What is taken, and what is past E, is NaN: it equals no maximum.
    left = tl.where((e < E)[None, :] & (logits == logits), logits, float("nan"))  # noqa: PLR0124
    ids = tl.zeros((ROWS, KP), tl.int32)
    weights = tl.zeros((ROWS, KP), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(left, axis=1)
        index = tl.min(tl.where(left == best[:, None], e[None, :], E - 1), axis=1)
        chosen = (j == i)[None, :]
        ids = tl.where(chosen, index[:, None], ids)
        weights = tl.where(chosen, tl.exp(best - top)[:, None], weights)
        left = tl.where(e[None, :] == index[:, None], float("nan"), left)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1)
    at = row[:, None] * TOP_K + j[None, :]
    inside = live & (j < TOP_K)[None, :]
    tl.store(ids_ptr + at, ids, mask=inside)
    tl.store(weights_ptr + at, weights / total[:, None], mask=inside)


def route(logits: torch.Tensor, top_k: int, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over experts, the ``top_k`` largest (lowest id among equals), weights summing to 1 if ``renormalize``.

    logits [T, E], any float dtype. Returns ids int32 [T, top_k] and weights float32 [T, top_k], largest first.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens >= MANY:
        rows = max(1, 1024 // power_of_two(experts))
        _route_rows[(divide_up(tokens, rows),)](
            logits,
            ids,
            weights,
            tokens,
            logits.stride(0),
            E=experts,
            EP=power_of_two(experts),
            TOP_K=top_k,
            KP=power_of_two(top_k),
            ROWS=rows,
            RENORMALIZE=renormalize,
            num_warps=4,
            **pdl_options(logits.device),
        )
    elif tokens:
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
