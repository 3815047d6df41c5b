"""Our dequantizer against the gguf package's, bit for bit, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ceiba.checkpoint.base import RawTensor
from ceiba.checkpoint.dequantize import SUPPORTED, dequantize
from ceiba.checkpoint.gguf_header import BLOCK_TYPES, GGML_TYPES
from ceiba.core.errors import CheckpointError

PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def _half_offsets(kind: str) -> tuple[int, ...]:
    """Where a block keeps its float16 scales."""
    return {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(
        kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,)
    )


@pytest.mark.parametrize("kind", sorted(SUPPORTED - {"BF16", *PLAIN}))
def test_every_block_type_equals_the_reference(kind: str) -> None:
    values, size = BLOCK_TYPES[kind]
    rng = np.random.default_rng(len(kind) + size)
    rows, blocks = 37, 3
    data = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for offset in _half_offsets(kind):
        scales = rng.standard_normal(rows * blocks).astype(np.float16)
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    data = data.reshape(rows, blocks * size)
    got = dequantize(RawTensor("w", kind, (rows, blocks * values), data))
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


def test_a_tensor_larger_than_one_chunk_is_whole() -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 120, (601, 34 * 16), dtype=np.uint8)
    got = dequantize(RawTensor("w", "Q8_0", (601, 512), data))
    np.testing.assert_array_equal(got, gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("kind", sorted(PLAIN))
def test_plain_types(kind: str) -> None:
    array = np.random.default_rng(1).standard_normal((3, 5)).astype(PLAIN[kind])
    got = dequantize(RawTensor("w", kind, (3, 5), array.view(np.uint8).reshape(-1)))
    np.testing.assert_array_equal(got, array.astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    array = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    upper = (array.view(np.uint32) >> 16).astype(np.uint16)
    got = dequantize(RawTensor("w", "BF16", (4, 8), upper.view(np.uint8).reshape(-1)))
    np.testing.assert_array_equal(got.view(np.uint32), array.view(np.uint32) & 0xFFFF0000)


@pytest.mark.filterwarnings("error")
def test_an_infinite_scale_shows_in_the_values_and_not_as_a_warning() -> None:
    data = np.zeros((1, 20), np.uint8)
    data[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    assert np.isnan(dequantize(RawTensor("w", "Q4_1", (1, 32), data))).all()


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"blk\.0.*IQ1_S.*Q4_1"):
        dequantize(RawTensor("blk.0", "IQ1_S", (1, 256), np.zeros((1, 50), np.uint8)))


def test_the_type_table_is_that_of_ggml() -> None:
    for number, (name, values, size) in GGML_TYPES.items():
        type_ = gguf.GGMLQuantizationType(number)
        assert (type_.name, *gguf.GGML_QUANT_SIZES[type_]) == (name, values, size)
