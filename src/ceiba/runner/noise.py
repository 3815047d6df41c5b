"""Sampling noise as a pure function of (seed, output position, token id): no generator, no state.

The same request draws the same noise whatever shares its batch, after a retraction, and on every device. Integer
arithmetic is exact everywhere; only the final logarithms are floating point. Knows nothing of logits.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor

_LOW32 = 0xFFFFFFFF


def _signed(value: int) -> int:
    """A 64-bit constant as the int64 with the same bits (torch has no unsigned multiply)."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


_GOLDEN64 = _signed(0x9E3779B97F4A7C15)
_MIX_A = _signed(0xBF58476D1CE4E5B9)
_MIX_B = _signed(0x94D049BB133111EB)
_GOLDEN32 = 0x9E3779B1
_MURMUR_A = 0x85EBCA6B
_MURMUR_B = 0xC2B2AE35

LARGEST = -math.log(-math.log1p(-(0.5 * 2.0**-32)))
"""The largest value that ``gumbel`` returns (about 22.9)."""
SMALLEST = -math.log(-math.log1p(-(1 - 2.0**-24)))
"""The smallest (about -2.8)."""
SPAN = LARGEST - SMALLEST
"""A token whose logit is this far below the best one's cannot win, whatever the noise: leaving it out is exact."""


def signed_seed(seed: int) -> int:
    """Any Python integer as an int64 with the low 64 bits."""
    return _signed(seed)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 keys [N] from seeds and output positions, int64 [N]; splitmix64 (Steele, Lea, Flood 2014)."""
    x = seeds + (positions + 1) * _GOLDEN64
    x = (x ^ _shift(x, 30)) * _MIX_A
    x = (x ^ _shift(x, 27)) * _MIX_B
    return x ^ _shift(x, 31)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [N, K], for token ids int64 [N, K] (or [1, K]) under the rows' keys [N].

    The 32-bit hash is murmur3's finalizer keyed twice. u is taken near 0, where floats are dense, because the small
    exponentials are the ones that win.
    """
    low = (keys & _LOW32).unsqueeze(1)
    high = _shift(keys, 32).unsqueeze(1)
    x = (ids * _GOLDEN32 + low) & _LOW32
    x = ((x ^ (x >> 16)) * _MURMUR_A) & _LOW32
    x = ((x ^ (x >> 13)) + high) & _LOW32
    x = ((x ^ (x >> 15)) * _MURMUR_B) & _LOW32
    x = ((x ^ (x >> 16)) * _MURMUR_A) & _LOW32
    x = x ^ (x >> 13)
    u = ((x.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
