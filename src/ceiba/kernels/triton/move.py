"""Rows of bytes from one set of matrices to another by index, also between the device and pinned host memory, which the
device reaches by its address. Knows addresses and rows only, nothing of tokens or layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import power_of_two

BLOCKS = 24
"""Thread blocks of a copy: with some 8 KiB each under way they keep the link to the host busy, and leave the other
multiprocessors to the step that computes meanwhile."""
BLOCK_BYTES = 8192
WORDS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of bytes that lie alike: the address of each one's first row, and the bytes from row to row."""

    addresses: torch.Tensor
    """int64 [n], on the device"""
    stride: int
    aligned: int
    """A number of bytes that divides every row's address."""

    @classmethod
    def of(cls, addresses: list[int], stride: int, device: torch.device) -> Matrices:
        """Host addresses must be those of pinned memory, or the kernel faults."""
        return cls(torch.tensor(addresses, dtype=torch.int64, device=device), stride, math.gcd(stride, *addresses))


# One kernel for all numbers of rows: it must not be compiled again while somebody waits for a copy.
@triton.jit(do_not_specialize=["rows", "total"], do_not_specialize_on_alignment=["source_rows_ptr", "target_rows_ptr"])
def _move_rows(
    word_ptr,
    sources_ptr,
    targets_ptr,
    source_rows_ptr,
    target_rows_ptr,
    rows,
    total,
    source_stride,
    target_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    word = word_ptr.dtype
    w = tl.arange(0, BLOCK)
    per_matrix = (rows + ROWS - 1) // ROWS
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        row = item % per_matrix * ROWS + tl.arange(0, ROWS)
        live = (row < rows)[:, None] & (w < WIDTH)[None, :]
        source = tl.load(sources_ptr + item // per_matrix).to(word)
        target = tl.load(targets_ptr + item // per_matrix).to(word)
        a = tl.load(source_rows_ptr + row, mask=row < rows, other=0).to(tl.int64)
        b = tl.load(target_rows_ptr + row, mask=row < rows, other=0).to(tl.int64)
        x = tl.load(source + a[:, None] * source_stride + w[None, :], mask=live)
        tl.store(target + b[:, None] * target_stride + w[None, :], x, mask=live)


def move_rows(
    source: Matrices, target: Matrices, source_rows: torch.Tensor, target_rows: torch.Tensor, width: int
) -> None:
    """Row ``source_rows[i]`` of each source to row ``target_rows[i]`` of the matrix with the same number, ``width``
    bytes each. Rows int32 or int64 [N] on the device, those of the target all different."""
    rows = len(source_rows)
    if not rows:
        return
    aligned = math.gcd(width, source.aligned, target.aligned)
    word = next(size for size in WORDS if aligned % size == 0)
    block = power_of_two(width // word)
    per_block = max(1, BLOCK_BYTES // (block * word))
    total = len(source.addresses) * (-(-rows // per_block))
    _move_rows[(min(total, BLOCKS),)](
        torch.empty(0, dtype=WORDS[word], device=source_rows.device),
        source.addresses,
        target.addresses,
        source_rows,
        target_rows,
        rows,
        total,
        source.stride // word,
        target.stride // word,
        WIDTH=width // word,
        BLOCK=block,
        ROWS=per_block,
        num_warps=8,
    )
