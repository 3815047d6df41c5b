"""KV tensors of one rank, addressed by token slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ceiba.memory.zeros import lazy_zeros


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


class KVPool:
    """Keys and values of every layer: ``k[layer]`` is [slots + page_size, kv_heads, head_dim], ``v[layer]`` likewise.

    The slots past ``num_slots`` take the writes of graph padding, so that a padded batch needs no branch.
    """

    def __init__(self, shape: KVShape, num_slots: int, page_size: int, device: torch.device | str) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.page_size = page_size
        size = num_slots + page_size
        heads, layers = shape.num_kv_heads, range(shape.num_layers)
        self.k = [lazy_zeros(size, heads, shape.head_dim, dtype=shape.dtype, device=device) for _ in layers]
        self.v = [lazy_zeros(size, heads, shape.v_head_dim, dtype=shape.dtype, device=device) for _ in layers]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [T, kv_heads, dim] to ``slots`` int [T], converted to the pool's dtype."""
        dtype, slots = self.shape.dtype, slots.long()
        for pool, values in ((self.k[layer], k), (self.v[layer], v)):
            values = values.to(dtype)
            if dtype.itemsize == 1:
                # index_copy_ does not exist for eight-bit floats; bytes are bytes.
                pool, values = pool.view(torch.uint8), values.view(torch.uint8)
            pool.index_copy_(0, slots, values)
