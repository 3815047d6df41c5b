"""Sampling noise as a pure function of (seed, output position, token id): no generator, no state.

The same request draws the same noise whatever shares its batch, after a retraction, and on every device. Integer
arithmetic is exact everywhere; only the final logarithm is floating point. Knows nothing of logits.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def _signed(value: int, bits: int) -> int:
    """The signed integer with the same low bits (torch has no unsigned arithmetic)."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX_A = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_B = _signed(0x94D049BB133111EB, 64)
_GOLDEN32 = _signed(0x9E3779B1, 32)
_MURMUR_A = _signed(0x85EBCA6B, 32)
_MURMUR_B = _signed(0xC2B2AE35, 32)

LARGEST = 17.0
"""No value of ``exponential`` is above this (24 ln 2 = 16.6)."""
SMALLEST = 2.0**-32
"""No value is below this."""
BLOCK_ELEMENTS = 1 << 16
"""On the CPU noise is made for so many tokens at a time, so that the passes over it stay in the cache."""


def signed_seed(seed: int) -> int:
    """Any Python integer as an int64 with the low 64 bits."""
    return _signed(seed, 64)


def _shift64(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 keys [N] from seeds and output positions, int64 [N]; splitmix64 (Steele, Lea, Flood 2014)."""
    x = seeds + (positions + 1) * _GOLDEN64
    x = (x ^ _shift64(x, 30)) * _MIX_A
    x = (x ^ _shift64(x, 27)) * _MIX_B
    return x ^ _shift64(x, 31)


def _fold(x: Tensor, bits: int, scratch: Tensor) -> None:
    """x ^= x >> bits in place, the shift logical; int32."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def exponential(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard exponential noise, float32 [N, vocab], for every token id under the rows' int64 keys [N].

    u = (hash + ½) / 2³¹ with 31 bits of murmur3's finalizer, keyed before and between its rounds; the value is
    -ln(1 - u), exact to float32 near 0, where the winners of a race lie.
    """
    low = keys.to(torch.int32).unsqueeze(1)
    high = (keys >> 32).to(torch.int32).unsqueeze(1)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device).mul_(_GOLDEN32).unsqueeze(0)
    if keys.device.type != "cpu":
        return _exponential(ids, low, high)
    out = torch.empty(len(keys), vocab_size)
    rows = max(1, BLOCK_ELEMENTS // vocab_size)
    for at in range(0, len(keys), rows):
        out[at : at + rows] = _exponential(ids, low[at : at + rows], high[at : at + rows])
    return out


def _exponential(ids: Tensor, low: Tensor, high: Tensor) -> Tensor:
    x = ids + low
    scratch = torch.empty_like(x)
    _fold(x, 16, scratch)
    x.mul_(_MURMUR_A)
    _fold(x, 13, scratch)
    x.add_(high).mul_(_MURMUR_B)
    _fold(x, 15, scratch)
    x.mul_(_MURMUR_A)
    _fold(x, 16, scratch)
    torch.bitwise_right_shift(x, 1, out=scratch)
    u = scratch.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return u.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
