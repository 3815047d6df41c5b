"""Reference dequantization to float32 in numpy: owns the bit layouts of ggml's block types. It is what kernels and
loaders are tested against and what serves where no kernel reads a type; must never know tensors' names or models.

The layouts are those of ggml's ``ggml-common.h``. In all formulas d and m are the block's float16 scale and offset.
A "K" block has 256 values in sub-blocks of 16 or 32 with small integer scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ceiba.checkpoint.base import RawTensor
from ceiba.checkpoint.gguf_header import BLOCK_TYPES
from ceiba.core.errors import CheckpointError

Array = np.ndarray
_F32: Final = np.float32
_CHUNK: Final = 1 << 17
"""Values handled at a time, so that the temporaries stay in the cache and small beside the result."""


def _half(blocks: Array, offset: int) -> Array:
    """The float16 at ``offset`` of each block as float32, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(_F32)


def _nibbles(packed: Array) -> Array:
    """uint8 [blocks, n] -> [blocks, 2n]: all low nibbles of the row, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _nibble_groups(packed: Array) -> Array:
    """As ``_nibbles``, within each group of 32 bytes: uint8 [blocks, 32 g] -> [blocks, 64 g]."""
    groups = packed.reshape(len(packed), -1, 32)
    return np.concatenate([groups & 0x0F, groups >> 4], axis=2).reshape(len(packed), -1)


def _bits(packed: Array) -> Array:
    """uint8 [blocks, n] -> 0/1 [blocks, 8n], least significant bit first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _scaled(values: Array, scales: Array) -> Array:
    """values [blocks, n] × scales [blocks, sub-blocks], each scale over its share of the row."""
    parts = values.astype(_F32).reshape(*scales.shape, -1)
    parts *= scales[:, :, None]
    return parts.reshape(len(values), -1)


def _shifted(values: Array, offsets: Array) -> Array:
    """values [blocks, n] − offsets [blocks, sub-blocks], in place."""
    parts = values.reshape(*offsets.shape, -1)
    parts -= offsets[:, :, None]
    return values


def _q4_0(b: Array) -> Array:
    """d (q − 8); 2 + 16 bytes."""
    return _scaled(_nibbles(b[:, 2:]).view(np.int8) - np.int8(8), _half(b, 0))


def _q4_1(b: Array) -> Array:
    """d q + m; 2 + 2 + 16 bytes."""
    out = _scaled(_nibbles(b[:, 4:]), _half(b, 0))
    out += _half(b, 2)
    return out


def _q5_0(b: Array) -> Array:
    """d (q − 16); 2 + 4 bytes of fifth bits + 16."""
    q = _nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4
    return _scaled(q.view(np.int8) - np.int8(16), _half(b, 0))


def _q5_1(b: Array) -> Array:
    """d q + m; 2 + 2 + 4 bytes of fifth bits + 16."""
    out = _scaled(_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4, _half(b, 0))
    out += _half(b, 2)
    return out


def _q8_0(b: Array) -> Array:
    """d q; 2 + 32 bytes."""
    return _scaled(b[:, 2:].view(np.int8), _half(b, 0))


def _two_bits(packed: Array) -> Array:
    """uint8 [blocks, 64] -> [blocks, 256]: of each 32 bytes the lowest bit pairs, then the next, and so on."""
    groups = packed.reshape(len(packed), 2, 32)
    return np.concatenate([groups >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(packed), 256)


def _q2_k(b: Array) -> Array:
    """d s q − m t: 16 bytes of (s, t) nibbles per 16 values, 64 bytes of bit pairs, d, m."""
    out = _scaled(_two_bits(b[:, 16:80]), _half(b, 80) * (b[:, :16] & 0x0F).astype(_F32))
    return _shifted(out, _half(b, 82) * (b[:, :16] >> 4).astype(_F32))


def _q3_k(b: Array) -> Array:
    """d (s − 32) (q − 4): 32 bytes of high bits (set: +4), 64 of bit pairs, 12 of 6-bit scales per 16 values, d."""
    # Bit i of high-bit byte j belongs to value 32 i + j.
    high = np.stack([b[:, :32] >> i & 1 for i in range(8)], axis=1).reshape(len(b), 256)
    q = (_two_bits(b[:, 32:96]) | high << 2).view(np.int8) - np.int8(4)
    low = _nibbles(b[:, 96:104])
    top = np.concatenate([b[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | top << 4).view(np.int8) - np.int8(32)
    return _scaled(q, _half(b, 108) * scales.astype(_F32))


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """The 12 scale bytes of Q4_K and Q5_K -> scales and offsets, float32 [blocks, 8] each.

    The first four of each are the low six bits of bytes 0–3 and 4–7; of the last four the low nibbles are in bytes
    8–11 and the top two bits are those of bytes 0–7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, third & 0x0F | first >> 6 << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(_F32), offsets.astype(_F32)


def _q4_k(b: Array) -> Array:
    """d s q − m t: d, m, 12 bytes of (s, t) per 32 values, 128 bytes of nibbles."""
    scales, offsets = _six_bit_pairs(b[:, 4:16])
    return _shifted(_scaled(_nibble_groups(b[:, 16:]), _half(b, 0) * scales), _half(b, 2) * offsets)


def _q5_k(b: Array) -> Array:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i of byte j belongs to value 32 i + j."""
    scales, offsets = _six_bit_pairs(b[:, 4:16])
    high = np.stack([b[:, 16:48] >> i & 1 for i in range(8)], axis=1).reshape(len(b), 256)
    q = _nibble_groups(b[:, 48:]) | high << 4
    return _shifted(_scaled(q, _half(b, 0) * scales), _half(b, 2) * offsets)


def _q6_k(b: Array) -> Array:
    """d s (q − 32): 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales per 16 values, d."""
    packed = b[:, :128].reshape(len(b), 2, 64)
    low = np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(len(b), 256)
    q = (low | _two_bits(b[:, 128:192]) << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(_F32)
    return _scaled(q, _half(b, 208) * scales)


_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], _F32)


def _iq4_nl(b: Array) -> Array:
    """d codebook[q]; 2 + 16 bytes."""
    return _scaled(_IQ4[_nibbles(b[:, 2:])], _half(b, 0))


_BLOCKS: Final[dict[str, Callable[[Array], Array]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
SUPPORTED: Final = frozenset({*_BLOCKS, "F64", "F32", "F16", "BF16"})


def dequantize(tensor: RawTensor) -> Array:
    """The tensor as a new float32 array of its logical shape.

    Raises CheckpointError for a kind that has no reference here (``SUPPORTED`` lists those that have).
    """
    kind = tensor.kind
    if kind in _BLOCKS:
        return dequantize_rows(kind, tensor.data).reshape(tensor.shape)
    flat = tensor.data.reshape(-1)
    if kind == "BF16":
        return (flat.view("<u2").astype(np.uint32) << 16).view(_F32).reshape(tensor.shape)
    if kind in ("F64", "F32", "F16"):
        return flat.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[kind]).astype(_F32).reshape(tensor.shape)
    known = ", ".join(sorted(SUPPORTED))
    raise CheckpointError(f"{tensor.name}: weights of type {kind} are not read; known: {known}")


def dequantize_rows(kind: str, data: Array) -> Array:
    """Packed rows uint8 [rows, bytes per row] of a block type -> float32 [rows, values per row]."""
    values, size = BLOCK_TYPES[kind]
    blocks = data.reshape(-1, size)
    unpack = _BLOCKS[kind]
    out = np.empty((len(blocks), values), _F32)
    step = _CHUNK // values
    # A damaged scale may be infinite or NaN; it must show in the result, not as a warning in the log.
    with np.errstate(invalid="ignore", over="ignore"):
        for begin in range(0, len(blocks), step):
            out[begin : begin + step] = unpack(blocks[begin : begin + step])
    return out.reshape(len(data), -1)
