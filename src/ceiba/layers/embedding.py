"""Token embeddings and the output head, their vocabulary split over ranks; one matrix may serve as both (tied)."""

from __future__ import annotations

import torch

from ceiba.layers.context import LayerContext
from ceiba.layers.quant.base import Part, Slot, WeightSpec


class VocabMatrix:
    """A [vocab, hidden] matrix: ``embed`` reads rows, ``project`` multiplies by them.

    Each rank holds ceil(vocab / ranks) rows, so any vocabulary size works; the rows past the end are zero and their
    logits are cut off.
    """

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        self.group = ctx.group
        self.vocab_size = vocab_size
        share = -(-vocab_size // ctx.group.size)
        self.start = min(ctx.group.rank * share, vocab_size)
        self.rows = min(share, vocab_size - self.start)
        part = Part("", self.rows, self.start, vocab_size, pad=share - self.rows)
        spec = WeightSpec((part,), hidden_size, 0, hidden_size, ctx.dtype, ctx.device, vocab=True)
        self.weight = ctx.quant.create(spec)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int32 or int64 [T], all in [0, vocab) → [T, hidden]."""
        if self.group.size == 1:
            return self.weight.lookup(ids)
        local = ids - self.start
        mine = (local >= 0) & (local < self.rows)
        rows = self.weight.lookup(torch.where(mine, local, 0))
        return self.group.all_reduce(rows.masked_fill_(~mine.unsqueeze(1), 0))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] → logits [N, vocab] in hidden's dtype, whole on every rank."""
        logits = self.weight.apply(hidden, None)
        if self.group.size == 1:
            return logits
        return self.group.all_gather(logits, dim=-1)[:, : self.vocab_size]

    def slots(self) -> dict[str, Slot]:
        return self.weight.slots("")
