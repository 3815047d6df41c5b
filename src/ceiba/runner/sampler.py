"""From logits to tokens, for all sampled segments of a step at once, on any device.

Order: frequency and presence penalties, repetition penalty, logit bias, end tokens held back until the minimum length,
grammar mask; then temperature, top-k, top-p and min-p, each measured on the whole distribution at that temperature
(none renormalizes for the next); then the choice by an exponential race (the Gumbel-max trick without its logarithms:
Maddison et al., A* Sampling, 2014) with noise from ``runner.noise``. Greedy rows take the most likely token, the lowest
id among equals, and a step of greedy rows that asks for nothing else is one reduction. Knows segments, never requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ceiba.core.step import TokenMasks
from ceiba.runner.noise import LARGEST, SMALLEST, exponential, row_keys
from ceiba.runner.rows import Draws, Rows, SamplingBatch

Tensor = torch.Tensor

FAULTS = {
    1: "the model produced logits that are not finite numbers for this request",
    2: "no token is allowed at this position: the constraints of this request exclude every token",
}
UNREACHABLE = math.log(LARGEST / SMALLEST)
"""A token whose logit over temperature is this far below the best one's cannot win, whatever the noise."""
BINS = 2048
_BOUNDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_BOUNDS = _BOUNDS.astype(np.float32)
"""float32 [256, 8]: for each byte of a mask the most that its 8 tokens' logits may be."""


@dataclass(slots=True)
class Sampled:
    tokens: Tensor
    """int64 [S]; 0 for rows at fault"""
    faults: Tensor
    """uint8 [S]: a key of FAULTS, 0 for none"""
    raw: Tensor | None
    """float32 [S, vocab]: the model's own logits, kept where log-probabilities are wanted"""


def sample(logits: Tensor, batch: SamplingBatch, rows: Rows, masks: TokenMasks | None) -> Sampled:
    """Choose a token for each of ``logits`` [S, vocab] (any float dtype; may be overwritten)."""
    raw = logits.float()
    best, tokens = _best(raw)
    wants_raw = batch.logprob_segments is not None
    bad = torch.isfinite(best).logical_not_()
    if not batch.edits and masks is None and batch.draws is None:
        faults = bad.to(torch.uint8)
        return Sampled(tokens.masked_fill_(bad, 0), faults, raw if wants_raw else None)
    faults = bad.to(torch.uint8)
    edited = raw
    if batch.edits or masks is not None:
        edited = raw.clone() if wants_raw else raw
        edit(edited, batch, rows, masks)
        best, tokens = _best(edited)
        empty = torch.isneginf(best) & ~bad
        faults.masked_fill_(empty, 2)
        bad = bad | empty
    draws = batch.draws
    if draws is not None:
        if draws.segments is None:
            tokens = draw((edited - best.unsqueeze(1)).div_(draws.temperature), draws, rows)
        else:
            chosen = edited.index_select(0, draws.segments)
            chosen = chosen.sub_(best.index_select(0, draws.segments).unsqueeze(1)).div_(draws.temperature)
            tokens.index_copy_(0, draws.segments, draw(chosen, draws, rows))
    return Sampled(tokens.masked_fill_(bad, 0), faults, raw if wants_raw else None)


def edit(logits: Tensor, batch: SamplingBatch, rows: Rows, masks: TokenMasks | None) -> None:
    """Everything that comes before temperature, in place on float32 [S, vocab]."""
    penalties = batch.penalties
    if penalties is not None:
        part = logits.index_select(0, penalties.segments)
        counts = rows.counts.output.index_select(0, penalties.counts)
        seen = rows.counts.seen.index_select(0, penalties.counts)
        part -= penalties.frequency * counts
        part -= penalties.presence * (counts > 0)
        scaled = torch.where(part > 0, part / penalties.repetition, part * penalties.repetition)
        logits.index_copy_(0, penalties.segments, torch.where(seen, scaled, part))
    edit_tokens(logits, batch, rows)
    if masks is not None and len(masks.rows):
        _mask(logits, batch, rows, masks)


def edit_tokens(logits: Tensor, batch: SamplingBatch, rows: Rows) -> None:
    """Biased tokens and held back end tokens, in place on float32 [S, vocab]."""
    if batch.bias is not None:
        segments, ids, values = batch.bias
        logits.index_put_((segments, ids), values, accumulate=True)
    if batch.hold is not None:
        segments, ids, until = batch.hold
        early = rows.out_pos.index_select(0, batch.rows_device.index_select(0, segments)) < until
        value = torch.where(early, float("-inf"), logits[segments, ids])
        logits.index_put_((segments, ids), value)


def _best(values: Tensor) -> tuple[Tensor, Tensor]:
    """(largest value, its index; the lowest among equals) of each row of float32 [S, vocab]; NaN counts as largest."""
    if values.device.type != "cpu":
        return tuple(values.max(dim=1))  # type: ignore[return-value]
    table = values.numpy()  # numpy searches with vector instructions, torch does not
    at = table.argmax(axis=1)
    return torch.from_numpy(table[np.arange(len(table)), at]), torch.from_numpy(at)


def _mask(logits: Tensor, batch: SamplingBatch, rows: Rows, masks: TokenMasks) -> None:
    """Exclude the tokens that the masks of this step's rows do not allow, in place."""
    found, lines = mask_lines(batch, masks)
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        # A row at a time, without torch: its threads would fight with the kernels' own for the cores.
        table = logits.numpy()
        bounds = np.empty((4 * masks.bits.shape[1], 8), np.float32)
        for segment, at in zip(found.tolist(), lines.tolist(), strict=True):
            np.take(_BOUNDS, masks.bits[at].view(np.uint8), axis=0, out=bounds, mode="clip")
            np.minimum(table[segment], bounds.reshape(-1)[:vocab], out=table[segment])
        return
    segments = rows.move(torch.from_numpy(found))
    bits = rows.move(torch.from_numpy(masks.bits[lines]))
    allowed = unpack_bits(bits, vocab)
    part = logits.index_select(0, segments)
    logits.index_copy_(0, segments, part.masked_fill_(~allowed, float("-inf")))


def mask_lines(batch: SamplingBatch, masks: TokenMasks) -> tuple[np.ndarray, np.ndarray]:
    """Segments of the step that a mask is for, and the masks' lines: int64 [M] each."""
    order = {int(row): index for index, row in enumerate(batch.rows)}
    lines = [(order[int(row)], at) for at, row in enumerate(masks.rows) if int(row) in order]
    pairs = np.asarray(lines, np.int64).reshape(-1, 2)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def unpack_bits(bits: Tensor, size: int) -> Tensor:
    """int32 [M, ceil(size / 32)], bit t % 32 of word t // 32 → bool [M, size]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    wide = (bits.unsqueeze(2) >> shifts) & 1
    return wide.view(len(bits), -1)[:, :size].bool()


def draw(x: Tensor, draws: Draws, rows: Rows, in_order: bool | None = None) -> Tensor:
    """Tokens int64 [N] for x [N, vocab]: logits over temperature, the best of each row at 0.

    The choice is an exponential race: of independent exponentials over the tokens' weights the smallest belongs to
    token i with probability weight_i / total. ``in_order`` finds the borders of top-k and top-p by sorting, which never
    waits for the device (the default on accelerators), otherwise by histogram. Both keep the same tokens.
    """
    if in_order is None:
        in_order = x.device.type != "cpu"
    weights = x.exp()
    if draws.top_p is not None or draws.top_k is not None:
        mass = None
        if draws.top_p is not None:
            mass = torch.where(draws.top_p < 1, draws.top_p * weights.sum(dim=1, keepdim=True), math.inf)
        (_trim_sorted if in_order else _trim_binned)(x, weights, draws.top_k, mass)
    if draws.min_p is not None:
        # The best token weighs 1.
        weights.masked_fill_(weights < draws.min_p, 0.0)
    keys = row_keys(draws.seeds, rows.out_pos.index_select(0, draws.rows))
    return exponential(keys, x.shape[1]).div_(weights).argmin(dim=1)


def _trim_sorted(x: Tensor, weights: Tensor, top_k: Tensor | None, mass: Tensor | None) -> None:
    """Zero the weights of all tokens beyond the k best, and of all before which ``mass`` has been reached already, so
    that the smallest set that reaches it stays. Equal tokens stand in order of id."""
    values, order = x.sort(dim=1, descending=True, stable=True)
    ordered = values.exp()
    if mass is not None:
        ordered = ordered.masked_fill(ordered.cumsum(dim=1) - ordered >= mass, 0.0)
    if top_k is not None:
        beyond = torch.arange(x.shape[1], device=x.device).unsqueeze(0) >= top_k
        ordered = ordered.masked_fill(beyond, 0.0)
    weights.scatter_(1, order, ordered)


def _trim_binned(x: Tensor, weights: Tensor, top_k: Tensor | None, mass: Tensor | None) -> None:
    """As ``_trim_sorted``, sorting only the one bin of a histogram in which each border lies.

    Tokens so far below the best that no noise lets them win share the last bin, where no border is looked for.
    """
    bins = (x * (-BINS / UNREACHABLE)).nan_to_num_(nan=0.0, posinf=BINS).clamp_(max=BINS - 1).long()
    total = weights.clone() if mass is not None and top_k is not None else weights
    if top_k is not None:
        _trim_at(x, weights, bins, torch.ones((), dtype=x.dtype).expand_as(x), top_k.to(x.dtype))
    if mass is not None:
        _trim_at(x, weights, bins, total, mass)


def _trim_at(x: Tensor, weights: Tensor, bins: Tensor, measure: Tensor, limit: Tensor) -> None:
    """Zero the weights of tokens before which ``measure``, added up from the best token on, has reached ``limit``."""
    sums = torch.zeros(len(x), BINS, dtype=torch.float64).scatter_add_(1, bins, measure.double())
    reached = sums.cumsum(dim=1)
    border = (reached < limit).sum(dim=1, keepdim=True).clamp_(max=BINS - 1)
    inside = (bins == border) & (border < BINS - 1)
    lines, ids = inside.nonzero(as_tuple=True)
    counts = torch.bincount(lines, minlength=len(x))
    width = max(1, int(counts.max()))
    at = torch.arange(len(lines)) - (counts.cumsum(0) - counts).index_select(0, lines)
    values = torch.full((len(x), width), -math.inf)
    values[lines, at] = x[lines, ids]
    share = torch.zeros(len(x), width, dtype=torch.float64)
    share[lines, at] = measure[lines, ids].double()
    order = values.argsort(dim=1, descending=True, stable=True)
    share = share.gather(1, order)
    before = (reached - sums).gather(1, border) + share.cumsum(dim=1) - share
    dropped = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, before >= limit)
    weights.masked_fill_(bins > border, 0.0)
    out = dropped[lines, at]
    weights[lines[out], ids[out]] = 0.0
