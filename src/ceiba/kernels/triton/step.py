"""What stands around a forward pass: opening rows, naming the tokens that only the device knows, recording what was
sampled. Knows rows, positions and slots as numbers, nothing of requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import divide_up

BLOCK = 256
PULL_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _pull(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    tl.store(target_ptr + i, tl.load(source_ptr + i, mask=inside), mask=inside)


def pull(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy int32 [N] from pinned host memory. The device's copy engine would have to wait for the kernels before it,
    and those behind it for the engine, which takes longer than reading some kilobytes across the link. A kernel that
    is launched plainly (``begin_step``, ``open_rows``) has to stand between this and those that may start early, since
    they read a step's metadata before they wait."""
    _pull[(divide_up(len(source), PULL_BLOCK),)](source, target, len(source), BLOCK=PULL_BLOCK)


@triton.jit(do_not_specialize=["tokens"])
def _begin(
    token_ptr, row_ptr, position_ptr, slot_ptr, last_token_ptr, table_ptr, out_ptr, tokens, table_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tokens
    token = tl.load(token_ptr + i, mask=inside, other=0)
    row = tl.load(row_ptr + i, mask=inside, other=0).to(tl.int64)
    position = tl.load(position_ptr + i, mask=inside, other=0)
    slot = tl.load(slot_ptr + i, mask=inside, other=0)
    sampled = tl.load(last_token_ptr + row, mask=inside, other=0)
    tl.store(out_ptr + i, tl.where(token < 0, sampled, token), mask=inside)
    tl.store(table_ptr + row * table_stride + position, slot, mask=inside)


def begin_step(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    slot_table: torch.Tensor,
) -> torch.Tensor:
    """Enter a step's slots into the slot table and name its tokens: a negative one stands for the row's last sample.

    tokens, rows, positions, slots int32 [T]; last_token int32 [rows]; slot_table int32 [rows, context]. Returns ids
    int32 [T].
    """
    ids = torch.empty_like(tokens)
    count = len(tokens)
    if count:
        _begin[(divide_up(count, BLOCK),)](
            tokens, rows, positions, slots, last_token, slot_table, ids, count, slot_table.stride(0), BLOCK=BLOCK
        )
    return ids


@triton.jit
def _open(head_ptr, slot_ptr, table_ptr, out_pos_ptr, table_stride, BLOCK: tl.constexpr):
    head = head_ptr + tl.program_id(0) * 4
    row = tl.load(head).to(tl.int64)
    first = tl.load(head + 1)
    length = tl.load(head + 2)
    start = tl.program_id(1) * BLOCK
    if start == 0:
        tl.store(out_pos_ptr + row, tl.load(head + 3).to(tl.int64))
    for at in range(start, length, BLOCK * tl.num_programs(1)):
        i = at + tl.arange(0, BLOCK)
        slot = tl.load(slot_ptr + first + i, mask=i < length, other=0)
        tl.store(table_ptr + row * table_stride + i, slot, mask=i < length)


def open_rows(heads: torch.Tensor, slots: torch.Tensor, slot_table: torch.Tensor, out_pos: torch.Tensor) -> None:
    """heads int32 [N, 4]: row, its first entry in ``slots``, how many of them, output tokens so far; slots int32: the
    cached prefixes back to back. Fills the rows of slot_table int32 [rows, context] and out_pos int64 [rows].
    """
    if len(heads):
        _open[(len(heads), 8)](heads, slots, slot_table, out_pos, slot_table.stride(0), BLOCK=1024)


@triton.jit(do_not_specialize=["count"])
def _end(
    row_ptr, token_ptr, raw_best_ptr, best_ptr, last_token_ptr, out_pos_ptr, result_ptr, count, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(row_ptr + i, mask=inside, other=0).to(tl.int64)
    token = tl.load(token_ptr + i, mask=inside, other=0).to(tl.int32)
    raw_best = tl.load(raw_best_ptr + i, mask=inside, other=0.0)
    best = tl.load(best_ptr + i, mask=inside, other=0.0)
    finite = tl.abs(raw_best) < float("inf")  # false for NaN
    fault = tl.where(finite, tl.where(best == -float("inf"), 2, 0), 1)
    token = tl.where(fault > 0, 0, token)
    tl.store(last_token_ptr + row, token, mask=inside)
    position = tl.load(out_pos_ptr + row, mask=inside, other=0)
    tl.store(out_pos_ptr + row, position + 1, mask=inside)
    tl.store(result_ptr + i, token, mask=inside)
    tl.store(result_ptr + count + i, fault, mask=inside)


def end_step(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    raw_best: torch.Tensor,
    best: torch.Tensor,
    last_token: torch.Tensor,
    out_pos: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """Record a step's samples: rows int32, tokens int64, all [S]; raw_best and best float32 [S], the largest logit
    before and after masks and edits. last_token int32 and out_pos int64 [rows] are updated. ``result`` int32 [2, S], in
    pinned host memory or on the device, gets tokens and faults (1: the logits are not finite, 2: every token is
    excluded); the token of a row at fault is 0.
    """
    count = len(tokens)
    if count:
        grid = (divide_up(count, BLOCK),)
        _end[grid](rows, tokens, raw_best, best, last_token, out_pos, result, count, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["count"])
def _keys(seed_ptr, row_ptr, out_pos_ptr, key_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(row_ptr + i, mask=inside, other=0).to(tl.int64)
    position = tl.load(out_pos_ptr + row, mask=inside, other=0).to(tl.uint64)
    x = tl.load(seed_ptr + i, mask=inside, other=0).to(tl.uint64)
    x += (position + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    tl.store(key_ptr + i, x.to(tl.int64), mask=inside)


def noise_keys(seeds: torch.Tensor, rows: torch.Tensor, out_pos: torch.Tensor) -> torch.Tensor:
    """The reference's ``row_keys`` of seeds int64 [S] at the output positions of rows int32 [S]; int64 [S]."""
    keys = torch.empty_like(seeds)
    if len(seeds):
        _keys[(divide_up(len(seeds), BLOCK),)](seeds, rows, out_pos, keys, len(seeds), BLOCK=BLOCK)
    return keys
