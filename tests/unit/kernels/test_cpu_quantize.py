"""Quantization of plain values to GGUF blocks, judged by the gguf package: its reading of the bytes, its own result."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ceiba.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available, reason="installed without a C++ compiler")

BLOCK_BYTES = {"Q8_0": 34, "Q4_1": 20}


def quantized(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the blocks, what the gguf package reads in them)."""
    rows, cols = values.shape
    blocks = np.full((rows, cols // 32 * BLOCK_BYTES[kind]), 0xAA, np.uint8)
    cpu._cpu.quantize(cpu._cpu.Context(2), kind, values, blocks)
    return blocks, gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(rows, cols)


def spread(rows: int, cols: int) -> np.ndarray:
    """Values of very different sizes from block to block, some blocks zero or constant, some with one large value."""
    rng = np.random.default_rng()
    values = rng.standard_t(4, size=(rows, cols // 32, 32)) * 10.0 ** rng.uniform(-7, 3, (rows, cols // 32, 1))
    values[0, 0] = 0
    values[1, 0] = 0.37
    values[2, 0, 5] = 4000
    return values.reshape(rows, cols).astype(np.float32)


def test_int8_is_within_half_a_step() -> None:
    values = spread(40, 256)
    blocks, read = quantized("Q8_0", values)
    step = blocks.reshape(-1, 34)[:, :2].copy().view(np.float16).astype(np.float64)
    top = np.abs(values.reshape(-1, 32)).max(1, keepdims=True)
    # The step is max / 127 rounded up to a half, whose own steps are 2^-24 at least.
    assert (step >= top / 127 * (1 - 1e-6)).all()
    assert (step <= top / 127 * (1 + 2**-9) + 2**-24).all()
    error = np.abs(read.astype(np.float64) - values).reshape(-1, 32)
    assert (error <= step * 0.5001).all()


def test_int4_leaves_less_error_than_the_range_alone() -> None:
    values = spread(64, 512)
    _, read = quantized("Q4_1", values)
    kind = gguf.GGMLQuantizationType.Q4_1
    other = gguf.dequantize(gguf.quantize(values, kind), kind).reshape(values.shape)

    def by_block(found: np.ndarray) -> np.ndarray:
        return np.square(found.astype(np.float64) - values).reshape(-1, 32).sum(1)

    ours, theirs = by_block(read), by_block(other)
    size = np.square(values.astype(np.float64)).reshape(-1, 32).sum(1)
    # A block's offset and scale are halves: below 1e-6 of the block's size, rounding of these two decides, not the fit.
    assert (ours <= theirs * 1.01 + size * 1e-6 + 32 * 2.0**-48).all()
    normal = np.random.default_rng().normal(size=(64, 512)).astype(np.float32)
    values = normal
    ours, theirs = by_block(quantized("Q4_1", normal)[1]), by_block(gguf.dequantize(gguf.quantize(normal, kind), kind))
    assert ours.sum() < 0.9 * theirs.sum()


def test_values_past_the_range_of_a_half_stay_finite() -> None:
    values = np.full((1, 64), 3e38, np.float32)
    values[0, ::2] = -3e38
    for kind in BLOCK_BYTES:
        assert np.isfinite(quantized(kind, values)[1]).all()


def test_other_types_and_shapes_are_refused() -> None:
    context, values = cpu._cpu.Context(1), np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match="Q8_0 and Q4_1"):
        cpu._cpu.quantize(context, "Q5_0", values, np.zeros((2, 44), np.uint8))
    with pytest.raises(ValueError, match="multiple of 32"):
        cpu._cpu.quantize(context, "Q8_0", values[:, :40].copy(), np.zeros((2, 34), np.uint8))
    with pytest.raises(ValueError, match="wrong shape"):
        cpu._cpu.quantize(context, "Q8_0", values, np.zeros((2, 67), np.uint8))
