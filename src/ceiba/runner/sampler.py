"""From logits to tokens, for all sampled segments of a step at once, on any device.

Order: frequency and presence penalties, repetition penalty, logit bias, end tokens held back until the minimum length,
grammar mask; then temperature, top-k, top-p and min-p, each measured on the whole distribution at that temperature
(none renormalizes for the next); then the Gumbel-max choice (Maddison et al., A* Sampling, 2014) with noise from
``runner.noise``. Greedy rows take the most likely token, the lowest id among equals, and a step of greedy rows that
asks for nothing else is one reduction. Knows segments, never requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ceiba.core.step import TokenMasks
from ceiba.runner.noise import SPAN, gumbel, row_keys
from ceiba.runner.rows import Draws, Rows, SamplingBatch

Tensor = torch.Tensor

FAULTS = {
    1: "the model produced logits that are not finite numbers for this request",
    2: "no token is allowed at this position: the constraints of this request exclude every token",
}
MARGIN = 1e-3
"""Candidates are taken this much (in logits) below the exact border, which is then applied to them alone."""


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
    best, tokens = raw.max(dim=1)
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
        best, tokens = edited.max(dim=1)
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
    if batch.bias is not None:
        segments, ids, values = batch.bias
        logits.index_put_((segments, ids), values, accumulate=True)
    if batch.hold is not None:
        segments, ids, until = batch.hold
        early = rows.out_pos.index_select(0, batch.rows_device.index_select(0, segments)) < until
        value = torch.where(early, float("-inf"), logits[segments, ids])
        logits.index_put_((segments, ids), value)
    if masks is not None and len(masks.rows):
        order = {int(row): index for index, row in enumerate(batch.rows)}
        lines = [(order[int(row)], at) for at, row in enumerate(masks.rows) if int(row) in order]
        segments = torch.tensor([segment for segment, _ in lines], dtype=torch.int64).to(logits.device)
        bits = torch.from_numpy(masks.bits[[at for _, at in lines]]).to(logits.device)
        allowed = unpack_bits(bits, logits.shape[1])
        part = logits.index_select(0, segments)
        logits.index_copy_(0, segments, part.masked_fill_(~allowed, float("-inf")))


def unpack_bits(bits: Tensor, size: int) -> Tensor:
    """int32 [M, ceil(size / 32)], bit t % 32 of word t // 32 → bool [M, size]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    wide = (bits.unsqueeze(2) >> shifts) & 1
    return wide.view(len(bits), -1)[:, :size].bool()


def draw(x: Tensor, draws: Draws, rows: Rows, dense: bool | None = None) -> Tensor:
    """Tokens int64 [N] for x [N, vocab]: logits over temperature, the best of each row at 0; x may be overwritten.

    ``dense`` works on the whole vocabulary without ever waiting for the device (the default on accelerators); otherwise
    on the candidates alone. Both choose the same tokens.
    """
    if dense is None:
        dense = x.device.type != "cpu"
    keys = row_keys(draws.seeds, rows.out_pos.index_select(0, draws.rows))
    total = torch.logsumexp(x, dim=1, keepdim=True) if draws.top_p is not None else None
    ordered = draws.top_p is not None or draws.top_k is not None
    if not dense:
        values, ids = _candidates(x, draws, total)
        if ordered:
            values, order = values.sort(dim=1, descending=True, stable=True)
            ids = ids.gather(1, order)
    elif ordered:
        values, ids = x.sort(dim=1, descending=True, stable=True)
    else:
        values, ids = x, torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    drop = None
    if draws.min_p is not None:
        drop = values < draws.min_p.log()
    if ordered:
        drop = _outside(values, draws, total, drop)
    if drop is not None:
        values = values.masked_fill(drop, float("-inf"))
    winner = (values + gumbel(keys, ids)).argmax(dim=1, keepdim=True)
    return ids.expand(len(x), -1).gather(1, winner).squeeze(1)


def _outside(values: Tensor, draws: Draws, total: Tensor | None, drop: Tensor | None) -> Tensor:
    """What top-k and top-p leave out of values [N, K], sorted downwards: all beyond the k-th, and all before which
    the mass has reached top_p already (so the set is the smallest that reaches it)."""
    if draws.top_k is not None:
        beyond = torch.arange(values.shape[1], device=values.device).unsqueeze(0) >= draws.top_k
        drop = beyond if drop is None else drop | beyond
    if draws.top_p is not None and total is not None:
        mass = (values - total).exp()
        before = mass.cumsum(dim=1) - mass
        beyond = before >= draws.top_p
        beyond[:, 0] = False
        beyond &= draws.top_p < 1
        drop = beyond if drop is None else drop | beyond
    assert drop is not None
    return drop


def _candidates(x: Tensor, draws: Draws, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens that can still be chosen, as (values, ids) [N, K] in order of id, padded with -inf and 0.

    Exact, and far smaller than the vocabulary: a token further than the noise's span below the best cannot win; the
    tokens whose probability is under (1 - top_p) / vocab together weigh less than 1 - top_p, so top-p never reaches
    them; and min-p is a border by itself. Reading K waits for the device, hence for host tensors only.
    """
    border = torch.full((len(x), 1), -SPAN)
    if draws.top_p is not None and total is not None:
        border = torch.maximum(border, total + ((1 - draws.top_p) / x.shape[1]).log())
    if draws.min_p is not None:
        border = torch.maximum(border, draws.min_p.log())
    near = x >= border - MARGIN
    lines, ids = near.nonzero(as_tuple=True)
    sizes = torch.bincount(lines, minlength=len(x))
    width = max(1, int(sizes.max()))
    at = torch.arange(len(lines)) - (sizes.cumsum(0) - sizes).index_select(0, lines)
    values = torch.full((len(x), width), -math.inf)
    padded = torch.zeros(len(x), width, dtype=torch.int64)
    values[lines, at] = x[lines, ids]
    padded[lines, at] = ids
    return values, padded
