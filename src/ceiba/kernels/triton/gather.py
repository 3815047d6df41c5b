"""Row gathers: token embeddings, and the last position of each sampled segment. Knows rows of numbers only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ceiba.kernels.triton.launch import pdl_options, power_of_two, wait_for_predecessor


@triton.jit
def _gather_rows(
    table_ptr, index_ptr, out_ptr, stride, num_rows, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    index = tl.load(index_ptr + row).to(tl.int64)
    inside = (d < D) & (index >= 0) & (index < num_rows)
    x = tl.load(table_ptr + index * stride + d, mask=inside, other=0.0)
    tl.store(out_ptr + row * D + d, x, mask=d < D)


def gather_rows(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """table [V, D] at int32 or int64 index [T] -> [T, D]. An index outside the table gives zeros, never a fault, so
    the padding of a graph and a shard of a vocabulary need no branch.
    """
    rows, dim = index.shape[0], table.shape[1]
    if out is None:
        out = torch.empty(rows, dim, dtype=table.dtype, device=table.device)
    if rows:
        block = power_of_two(dim)
        _gather_rows[(rows,)](
            table,
            index,
            out,
            table.stride(0),
            table.shape[0],
            D=dim,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
            **pdl_options(table.device),
        )
    return out
