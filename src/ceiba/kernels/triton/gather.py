"""Rows by index: token embeddings, the last position of each sampled segment, keys and values to their slots. Knows
rows of numbers only.
"""

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


@triton.jit
def _write_rows(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_stride,
    v_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    k = tl.load(k_ptr + row * k_stride + d, mask=d < K, other=0.0)
    v = tl.load(v_ptr + row * v_stride + d, mask=d < V, other=0.0)
    tl.store(k_pool_ptr + slot * K + d, k.to(k_pool_ptr.dtype.element_ty), mask=d < K)
    tl.store(v_pool_ptr + slot * V + d, v.to(v_pool_ptr.dtype.element_ty), mask=d < V)


def write_kv(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    """k [T, kv_heads, D], v [T, kv_heads, DV] (heads contiguous, any row stride) to the rows ``slots`` int64 [T] of the
    pools [slots, kv_heads, dim], in the pools' dtype.
    """
    k_width, v_width = k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]
    if k.shape[0]:
        block = power_of_two(max(k_width, v_width))
        _write_rows[(k.shape[0],)](
            k,
            v,
            slots,
            k_pool,
            v_pool,
            k.stride(0),
            v.stride(0),
            K=k_width,
            V=v_width,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
            **pdl_options(k.device),
        )
