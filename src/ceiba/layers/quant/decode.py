"""Stored bytes to torch values: plain kinds are viewed in place, GGUF blocks are dequantized a slab of rows at a time.

Source memory stays mapped: the only copy is the one into the parameter. Knows kinds, never names of tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ceiba.checkpoint.base import RawTensor
from ceiba.core.errors import CheckpointError

PLAIN_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
SLAB_ELEMENTS = 8 << 20
"""Elements dequantized at once: 32 MiB of float32 on the side, whatever the size of the tensor."""


def view_plain(raw: RawTensor) -> torch.Tensor:
    """The tensor of a plain kind, sharing the file's memory (read only by agreement)."""
    dtype = PLAIN_KINDS.get(raw.kind)
    if dtype is None:
        raise CheckpointError(
            f"tensor {raw.name} is stored as {raw.kind}, which cannot be read without a quantization method; "
            f"plain kinds are {', '.join(PLAIN_KINDS)}"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        data = torch.from_numpy(raw.data.reshape(-1))
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(raw.shape)


def view_float8(raw: RawTensor) -> torch.Tensor:
    """A tensor of eight-bit floats (``F8_E4M3``), sharing the file's memory."""
    if raw.kind != "F8_E4M3":
        raise CheckpointError(
            f"tensor {raw.name} is stored as {raw.kind}, but the checkpoint's configuration says F8_E4M3 for matrices"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw.data.reshape(-1)).view(torch.float8_e4m3fn).view(raw.shape)


def slabs(raw: RawTensor, start: int, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows [start, start + rows) of a stored matrix or vector as (offset from ``start``, values) pieces."""
    if raw.kind in PLAIN_KINDS:
        yield 0, view_plain(raw)[start : start + rows]
        return
    from ceiba.checkpoint.dequantize import dequantize

    if raw.data.ndim != 2:
        raise CheckpointError(f"tensor {raw.name} of kind {raw.kind} is not a matrix of blocks")
    step = max(1, SLAB_ELEMENTS // raw.shape[-1])
    for at in range(start, start + rows, step):
        count = min(step, start + rows - at)
        piece = replace(raw, data=raw.data[at : at + count], shape=(count, *raw.shape[1:]))
        values = np.ascontiguousarray(dequantize(piece), dtype=np.float32)
        yield at - start, torch.from_numpy(values.reshape(piece.shape))
