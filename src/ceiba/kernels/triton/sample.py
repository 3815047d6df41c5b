"""From float32 logits to tokens on the device without a sort: exact thresholds for top-k and top-p by bisection, and
the Gumbel-max choice with noise that is a function of (row key, token id). Knows rows of numbers, never requests.

The rules are those of the reference sampler in torch: top-k, top-p and min-p are each measured on the whole
distribution; among equal values the lower ids come first; greedy rows take the lowest id among the best.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import divide_up, pdl_options, wait_for_predecessor

BLOCK = 4096
"""Vocabulary entries of a step of ``thresholds``."""
NEAR = 16384
"""Entries near the best that are searched apart."""
CHUNK = 8192
"""Vocabulary entries of a block of ``choose``."""
ALIGNED = 4
"""Floats in the 16 bytes at which a compiled kernel may expect its arrays to begin."""


@triton.jit
def gumbel(low, high, ids):
    """Minus the logarithm of standard exponential noise for token ids under a row's 64-bit key (its two 32-bit halves,
    uint32). The integers are those of the torch reference, so that a race of exponentials there and the largest
    logit plus this here have the same winner.
    """
    x = ids.to(tl.uint32) * 0x9E3779B1 + low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = ((x ^ (x >> 13)) + high) * 0xC2B2AE35
    x = (x ^ (x >> 15)) * 0x85EBCA6B
    x = x ^ (x >> 16)
    u = tl.minimum(((x >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    # -log1p(-u): its series where 1 - u would round.
    exponential = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u * (0.3333333333 + u * 0.25))), -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _threshold(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    cut_ptr,
    last_tie_ptr,
    near_ptr,
    V,
    stride,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Per row: the smallest value that is kept, and the last id that is kept among those equal to it."""
    index = tl.program_id(0)
    wait_for_predecessor(PDL)
    row = tl.load(rows_ptr + index).to(tl.int64)
    at = logits_ptr + row * stride
    inverse = 1.0 / tl.load(temperature_ptr + index)
    top_k = tl.load(top_k_ptr + index)
    top_p = tl.load(top_p_ptr + index)
    min_p = tl.load(min_p_ptr + index)
    top_k = tl.where(top_k <= 0, V, tl.minimum(top_k, V))

    best = -float("inf")
    least = float("inf")
    running = tl.full((BLOCK,), -float("inf"), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(at + i, mask=i < V, other=-float("inf"))
        running = tl.maximum(running, x)
        lowest = tl.minimum(lowest, tl.where(x > -float("inf"), x, float("inf")))
    best = tl.max(running, axis=0)
    least = tl.min(lowest, axis=0)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(at + i, mask=i < V, other=-float("inf"))
        mass += tl.exp((x - best) * inverse)
    total = tl.sum(mass, axis=0)
    goal = tl.where(top_p < 1.0, top_p * total, float("inf"))

    # A value t is needed if fewer than top_k entries and less than the goal's mass lie above it. Needed values reach
    # from the best down to the cut. Invariant: high is an entry's value and needed; every needed entry is >= low.
    floor = tl.where(min_p > 0.0, best + tl.log(min_p) / inverse, -float("inf"))
    high = best
    low = tl.maximum(least, floor)
    limited = (top_k < V) | (top_p < 1.0)
    # A row with an infinite value is at fault; it must not keep the search going.
    searching = limited & (low < high) & (best < float("inf"))

    # Copy the entries near the best aside. If the cut is among them, and it nearly always is, the search reads them
    # alone; otherwise they have told that it lies further down.
    border = best - 8.0 / inverse
    source = at
    entries = V
    if searching & (border > low):
        near_at = near_ptr + index.to(tl.int64) * NEAR
        size = 0
        mass = tl.zeros((BLOCK,), tl.float32)
        below = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=4):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(at + i, mask=i < V, other=-float("inf"))
            upper = x > border
            mass += tl.where(upper, tl.exp((x - best) * inverse), 0.0)
            below = tl.maximum(below, tl.where(upper, -float("inf"), x))
            place = size + tl.cumsum(upper.to(tl.int32), axis=0) - 1
            tl.store(near_at + place, x, mask=upper & (place < NEAR))
            size += tl.sum(upper.to(tl.int32), axis=0)
        if (size < top_k) & (tl.sum(mass, axis=0) < goal):
            # The largest entry at or below the border is needed too.
            high = tl.max(below, axis=0)
            searching = low < high
        else:
            low = border
            if size <= NEAR:
                source = near_at
                entries = size
        tl.debug_barrier()
    while searching:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle >= high, low, middle)
        # The smallest entry above the middle decides: is it the cut's side or not.
        count = tl.zeros((BLOCK,), tl.int32)
        mass = tl.zeros((BLOCK,), tl.float32)
        below = tl.full((BLOCK,), -float("inf"), tl.float32)
        above = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, entries, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(source + i, mask=i < entries, other=-float("inf"))
            upper = x > middle
            count += upper.to(tl.int32)
            mass += tl.where(upper, tl.exp((x - best) * inverse), 0.0)
            below = tl.maximum(below, tl.where(upper, -float("inf"), x))
            above = tl.minimum(above, tl.where(upper, x, float("inf")))
        count_here = tl.sum(count, axis=0)
        mass_here = tl.sum(mass, axis=0)
        next_below = tl.max(below, axis=0)
        next_above = tl.min(above, axis=0)
        needed = (count_here < top_k) & (mass_here < goal)
        if needed:
            # The largest entry at or below the middle is needed still.
            high = tl.where(next_below > -float("inf"), next_below, high)
        else:
            # It is not; the cut lies above the middle.
            low = next_above
        searching = (low < high) & (next_below > -float("inf"))
    cut = tl.where(limited, high, -float("inf"))
    cut = tl.maximum(cut, floor)

    # Among entries equal to the cut, the lowest ids are kept until top_k or the goal is reached.
    last = V
    if limited:
        count = tl.zeros((BLOCK,), tl.int32)
        mass = tl.zeros((BLOCK,), tl.float32)
        ties = tl.zeros((BLOCK,), tl.int32)
        for start in tl.range(0, V, BLOCK, num_stages=4):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(at + i, mask=i < V, other=-float("inf"))
            upper = x > cut
            count += upper.to(tl.int32)
            mass += tl.where(upper, tl.exp((x - best) * inverse), 0.0)
            ties += ((x == cut) & (i < V)).to(tl.int32)
        num_ties = tl.sum(ties, axis=0)
        each = tl.exp((cut - best) * inverse)
        by_mass = tl.ceil((goal - tl.sum(mass, axis=0)) / each)
        room = top_k - tl.sum(count, axis=0)
        room = tl.where(by_mass < room.to(tl.float32), by_mass.to(tl.int32), room)
        room = tl.maximum(room, tl.where(cut == best, 1, 0))
        if num_ties > room:
            seen = 0
            last = -1
            for start in tl.range(0, V, BLOCK, num_stages=4):
                i = start + tl.arange(0, BLOCK)
                x = tl.load(at + i, mask=i < V, other=-float("inf"))
                tie = ((x == cut) & (i < V)).to(tl.int32)
                rank = seen + tl.cumsum(tie, axis=0)
                last = tl.maximum(last, tl.max(tl.where((tie > 0) & (rank <= room), i, -1), axis=0))
                seen += tl.sum(tie, axis=0)
    tl.store(cut_ptr + row, cut)
    tl.store(last_tie_ptr + row, last)


@triton.jit
def _choose(
    logits_ptr,
    keys_ptr,
    temperature_ptr,
    cut_ptr,
    last_tie_ptr,
    value_ptr,
    id_ptr,
    sum_ptr,
    counter_ptr,
    token_ptr,
    best_ptr,
    lse_ptr,
    V,
    stride,
    chunks,
    NOISE: tl.constexpr,
    CUT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_predecessor(PDL)
    x = tl.load(logits_ptr + row * stride + i, mask=i < V, other=-float("inf")).to(tl.float32)
    # Statistics of the logits as they are: the row's best value tells a fault, the log-sum-exp gives log-probabilities.
    raw_best = tl.max(x, axis=0)
    base = tl.where(raw_best == -float("inf"), 0.0, raw_best)
    raw_sum = tl.sum(tl.exp(x - base), axis=0)
    y = x
    if NOISE:
        temperature = tl.load(temperature_ptr + row)
        key = tl.load(keys_ptr + row)
        if CUT:
            cut = tl.load(cut_ptr + row)
            last = tl.load(last_tie_ptr + row)
            y = tl.where((x > cut) | ((x == cut) & (i <= last)), y, -float("inf"))
        if temperature > 0.0:
            noise = gumbel(key.to(tl.uint32), (key >> 32).to(tl.uint32), i)
            y = y / temperature + noise
    value = tl.max(y, axis=0)
    token = tl.min(tl.where(y == value, i, 2147483647), axis=0)
    place = row * chunks + chunk
    tl.store(value_ptr + place, value)
    tl.store(id_ptr + place, token)
    tl.store(sum_ptr + 2 * place, raw_best)
    tl.store(sum_ptr + 2 * place + 1, raw_sum)
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel")
    if done == chunks - 1:
        tl.store(counter_ptr + row, 0)
        c = tl.arange(0, CHUNKS)
        spot = row * chunks + c
        values = tl.load(value_ptr + spot, mask=c < chunks, other=-float("inf"), cache_modifier=".cg")
        ids = tl.load(id_ptr + spot, mask=c < chunks, other=2147483647, cache_modifier=".cg")
        bests = tl.load(sum_ptr + 2 * spot, mask=c < chunks, other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(sum_ptr + 2 * spot + 1, mask=c < chunks, other=0.0, cache_modifier=".cg")
        top = tl.max(values, axis=0)
        token = tl.min(tl.where(values == top, ids, 2147483647), axis=0)
        best = tl.max(bests, axis=0)
        # A NaN anywhere makes its chunk's sum NaN, and so the row's.
        scale = tl.where(bests == -float("inf"), 0.0, tl.exp(bests - best))
        total = tl.sum(tl.where(c < chunks, sums, 0.0) * scale, axis=0)
        tl.store(token_ptr + row, tl.where(token < V, token, 0).to(tl.int64))
        tl.store(best_ptr + row, tl.where(total >= 0.0, best, float("nan")))
        tl.store(lse_ptr + row, best + tl.log(total))


def thresholds(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k, top-p and min-p keep, for the rows that limit anything.

    logits float32 [S, V]; rows int [R]: which of them; temperature > 0, top_p, min_p float32 [R], top_k int32 [R]
    (≤ 0: all). Returns cut float32 [S] and last_tie int32 [S]: entry i of a row stays if it is above the cut, or equal
    to it and i ≤ last_tie. Rows not named keep everything.
    """
    size, vocab = logits.shape
    cut = torch.full((size,), -float("inf"), dtype=torch.float32, device=logits.device)
    last = torch.full((size,), vocab, dtype=torch.int32, device=logits.device)
    if len(rows):
        near = torch.empty(len(rows), NEAR, dtype=torch.float32, device=logits.device)
        _threshold[(len(rows),)](
            logits,
            rows,
            temperature,
            top_k,
            top_p,
            min_p,
            cut,
            last,
            near,
            vocab,
            logits.stride(0),
            NEAR=NEAR,
            BLOCK=BLOCK,
            num_warps=16,
            **pdl_options(logits.device),
        )
    return cut, last


def choose(
    logits: torch.Tensor,
    counters: torch.Tensor,
    temperature: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    cut: torch.Tensor | None = None,
    last_tie: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token for each row of logits [S, V] (any float dtype), with the row's statistics in the same read.

    Without ``temperature``: greedy. With it (float32 [S], 0 for greedy rows) and ``keys`` (int64 [S], from the
    reference's ``row_keys``): Gumbel-max on logits / temperature, limited by ``thresholds``' cut and last_tie if given.
    counters int32 [≥ S], zero between launches. Returns tokens int64 [S], best float32 [S] (not finite: the row is at
    fault) and the log-sum-exp of the row float32 [S].
    """
    size, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(size, dtype=torch.int64, device=device)
    best = torch.empty(size, dtype=torch.float32, device=device)
    lse = torch.empty(size, dtype=torch.float32, device=device)
    if size == 0:
        return tokens, best, lse
    chunks = divide_up(vocab, CHUNK)
    # Each part begins where a first one would: one that does not is another kernel to the compiler.
    floats = torch.empty(3, divide_up(size * chunks, ALIGNED) * ALIGNED, dtype=torch.float32, device=device)
    ids = torch.empty(size * chunks, dtype=torch.int32, device=device)
    noise = temperature is not None and keys is not None
    _choose[(size, chunks)](
        logits,
        keys if keys is not None else tokens,
        temperature if temperature is not None else best,
        cut if cut is not None else best,
        last_tie if last_tie is not None else ids,
        floats[0],
        ids,
        floats[1:],
        counters,
        tokens,
        best,
        lse,
        vocab,
        logits.stride(0),
        chunks,
        NOISE=noise,
        CUT=noise and cut is not None,
        CHUNK=CHUNK,
        CHUNKS=max(2, 1 << (chunks - 1).bit_length()),
        num_warps=8,
        **pdl_options(device),
    )
    return tokens, best, lse
