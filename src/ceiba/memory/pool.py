"""KV tensors of one rank, addressed by token slot: how keys and values are stored, written and read back.

What torch does here is the reference of the kernels that do it themselves (``kernels/cpu/kv.h``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ceiba.memory.zeros import lazy_zeros

STEP_BYTES = 4
"""An int8 head is followed by its step, a float32."""


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        width = self.stored(self.head_dim) + self.stored(self.v_head_dim)
        return self.num_layers * self.num_kv_heads * width * self.dtype.itemsize

    def stored(self, dim: int) -> int:
        """Elements of the pool's dtype that a head of ``dim`` values takes."""
        return dim + STEP_BYTES if self.dtype == torch.int8 else dim


class KVPool:
    """Keys and values of every layer: ``k[layer]`` is [slots + page_size, kv_heads, head_dim], ``v[layer]`` likewise.

    Eight-bit floats have scale 1 and saturate. int8 has a step for each token and head, max / 127, which follows the
    head's values as four more bytes. The slots past ``num_slots`` take the writes of graph padding, so that a padded
    batch needs no branch.
    """

    def __init__(self, shape: KVShape, num_slots: int, page_size: int, device: torch.device | str) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.page_size = page_size
        size = num_slots + page_size

        def zeros(dim: int) -> list[torch.Tensor]:
            width = shape.stored(dim)
            return [
                lazy_zeros(size, shape.num_kv_heads, width, dtype=shape.dtype, device=device)
                for _ in range(shape.num_layers)
            ]

        self.k, self.v = zeros(shape.head_dim), zeros(shape.v_head_dim)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [T, kv_heads, dim] to ``slots`` int [T], converted to the pool's dtype."""
        dtype, slots = self.shape.dtype, slots.long()
        for pool, values in ((self.k[layer], k), (self.v[layer], v)):
            values = _stored(values, dtype)
            if dtype.itemsize == 1:
                # index_copy_ does not exist for eight-bit floats; bytes are bytes.
                pool, values = pool.view(torch.uint8), values.view(torch.uint8)
            pool.index_copy_(0, slots, values)

    def values(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of ``k[layer]`` or ``v[layer]`` [n, kv_heads, …] as values [n, kv_heads, dim]."""
        if self.shape.dtype != torch.int8:
            return rows.to(dtype)
        steps = rows[..., -STEP_BYTES:].contiguous().view(torch.float32)
        return (rows[..., :-STEP_BYTES].float() * steps).to(dtype)


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values [T, heads, dim] as the pool holds them: [T, heads, KVShape.stored(dim)]."""
    if dtype == torch.int8:
        values = values.float()
        # A head that holds something infinite or unknown must not be read back as numbers: its step is unknown.
        steps = values.abs().amax(-1, keepdim=True) / 127 + (values * 0).sum(-1, keepdim=True)
        steps = torch.where(steps <= 1e-37, 0.0, steps)
        scaled = torch.nan_to_num(torch.where(steps == 0, 0.0, values / steps))
        codes = (scaled + torch.where(scaled < 0, -0.5, 0.5)).trunc().clamp(-127, 127).to(torch.int8)
        return torch.cat((codes, steps.contiguous().view(torch.int8)), dim=-1)
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        values = values.clamp(-most, most)
    return values.to(dtype)
