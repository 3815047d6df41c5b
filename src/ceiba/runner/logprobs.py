"""Log-probabilities of chosen, most likely and fixed tokens, and of prompt positions.

They are those of the model's own distribution: log-softmax of its raw logits in float32, before temperature, penalties,
bias or masks. Knows arrays, never requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor

BLOCK_ELEMENTS = 32 << 20
"""Prompt logits held at once: 128 MiB of float32."""


@dataclass(slots=True)
class Logprobs:
    """Of N positions, on the device."""

    values: Tensor
    """float32 [N]"""
    top_ids: Tensor | None = None
    """int64 [N, top], most likely first"""
    top_values: Tensor | None = None
    fixed: dict[int, Tensor] = field(default_factory=dict)
    """position index -> float32 [len(token_ids)]"""


def logprobs(raw: Tensor, tokens: Tensor, top: int, fixed: list[tuple[int, Tensor]]) -> Logprobs:
    """raw float32 [N, vocab], tokens int64 [N]; ``fixed`` lists (position index, int64 ids)."""
    every = row_log_softmax(raw)
    found = Logprobs(every.gather(1, tokens.unsqueeze(1)).squeeze(1))
    if top:
        found.top_ids = raw.topk(min(top, raw.shape[1]), dim=1).indices
        found.top_values = every.gather(1, found.top_ids)
    for index, ids in fixed:
        found.fixed[index] = every[index].index_select(0, ids)
    return found


def row_log_softmax(raw: Tensor) -> Tensor:
    """Each row by itself. ``logsumexp`` of a single row would share it among threads on a CPU, and add in another order
    than the same row gets in company."""
    return raw.log_softmax(1)


@dataclass(slots=True)
class PromptBlock:
    """Log-probabilities of consecutive prompt positions from ``start``, on the device."""

    start: int
    values: Tensor
    top_ids: Tensor | None
    top_values: Tensor | None
    fixed: Tensor | None
    """float32 [N, len(token_ids)]"""


def block_size(vocab_size: int) -> int:
    """Prompt positions whose logits are computed at once."""
    return max(1, BLOCK_ELEMENTS // vocab_size)


def prompt_block(start: int, raw: Tensor, targets: Tensor, top: int, ids: Tensor | None) -> PromptBlock:
    """raw float32 [N, vocab] predict targets int64 [N], the prompt tokens at [start, start + N)."""
    every = row_log_softmax(raw)
    values = every.gather(1, targets.unsqueeze(1)).squeeze(1)
    top_ids = top_values = None
    if top:
        top_ids = raw.topk(min(top, raw.shape[1]), dim=1).indices
        top_values = every.gather(1, top_ids)
    fixed = None if ids is None else every.index_select(1, ids)
    return PromptBlock(start, values, top_ids, top_values, fixed)
