"""A row's bits depend on its own values alone, not on how many rows share a call, on how a sequence was cut or on which
prefixes are read once for several; on a processor with tiles, where a fixed order is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_cpu_kernels import QUANTS, SETS, packed, plain_blocks, random_blocks

from ceiba.attention.backends.host import KV_TYPES, host_groups
from ceiba.core.step import PrefixGroup
from ceiba.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available, reason="installed without a C++ compiler")


def linear(context: object, matrix: object, x: np.ndarray, rows: int, int8: bool) -> np.ndarray:
    out = np.empty((len(x), rows), np.float32)
    cpu._cpu.linear(context, matrix, x, out, int8)
    return out


def cuts(total: int, rng: np.random.Generator) -> list[slice]:
    """The whole range in pieces of 1 to 20."""
    found, at = [], 0
    while at < total:
        end = min(total, at + int(rng.integers(1, 21)))
        found.append(slice(at, end))
        at = end
    return found


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", [*QUANTS, "F32", "BF16"])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(isa: str, kind: str) -> None:
    rng = np.random.default_rng()
    context = cpu._cpu.Context(2, isa, fixed_order=True)  # what tiles do without
    rows, cols = int(rng.integers(1, 70)), 256 * int(rng.integers(1, 4))
    source, _ = (random_blocks if kind in QUANTS else plain_blocks)(kind, rows, cols, rng)
    matrix = packed(context, kind, source, rows, cols)
    x = rng.normal(size=(131, cols)).astype(np.float32)
    for int8 in (False, True):
        whole = linear(context, matrix, x, rows, int8)
        for part in cuts(len(x), rng):
            assert np.array_equal(linear(context, matrix, x[part], rows, int8), whole[part])


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 32), (16, 1, 128)])
def test_attention_has_the_same_bits_as_one_prefill_in_chunks_and_token_by_token(
    isa: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng()
    context = cpu._cpu.Context(2, isa, fixed_order=True)
    length, slots = 700, 1700
    pools = [torch.randn(slots, kv_heads, dim).to(dtype) for _ in range(2)]
    table = np.tile(rng.permutation(slots)[:length].astype(np.int32), (3, 1))
    table[1, 600:] = length + np.arange(100)  # rows 1 and 2 share prefixes with row 0
    table[2, 300:] = length + 100 + np.arange(400)
    q = torch.randn(length, heads, dim)

    def attend(
        starts: list[int], lengths: list[int], prefill: int, rows: list[int], groups: object = None
    ) -> np.ndarray:
        """Queries are those of the positions, whatever the row."""
        at = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        out = np.full((len(at), heads, dim), np.nan, np.float32)
        where = np.concatenate([table[r, s : s + n] for r, s, n in zip(rows, starts, lengths, strict=True)])
        cpu._cpu.attention(
            context, q[at].numpy(), None, None, pools[0].data_ptr(), pools[1].data_ptr(), slots, kv_heads,
            KV_TYPES[dtype], dim**-0.5, np.array(rows, np.int32), np.array(starts, np.int32),
            np.array(lengths, np.int32), prefill, table, where.astype(np.int64), groups, out,
        )  # fmt: skip
        return out

    whole = attend([0], [length], 1, [0])
    assert np.isfinite(whole).all()
    for part in cuts(length, rng):
        found = attend([part.start, 5], [part.stop - part.start, 40], 2, [0, 1])
        assert np.array_equal(found[: part.stop - part.start], whole[part])
    for position in [0, 1, 7, 63, 64, 65, 127, 511, 512, 513, 699, *rng.integers(0, length, 12).tolist()]:
        found = attend([position, 250], [1, 1], 0, [0, 1])
        assert np.array_equal(found[0], whole[position])
        assert np.array_equal(found[1], whole[250])  # the shared prefix
    groups = host_groups([PrefixGroup(n, np.arange(m, dtype=np.int32)) for n, m in ((600, 2), (300, 3))], 3)
    other = attend([650], [1], 0, [2])
    for position in [511, 512, 599]:
        found = attend([position, 699, 650], [1, 1, 1], 0, [1, 0, 2], groups)
        assert np.array_equal(found[:2], whole[[position, 699]])
        assert np.array_equal(found[2], other[0])


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", QUANTS)
def test_a_value_that_is_not_finite_shows_in_all_of_its_row_and_in_no_other(isa: str, kind: str) -> None:
    rng = np.random.default_rng()
    context, rows, cols = cpu._cpu.Context(2, isa), 40, 512
    matrix = packed(context, kind, random_blocks(kind, rows, cols, rng)[0], rows, cols)
    for count, int8 in ((3, False), (40, False), (3, True), (40, True)):
        x = rng.normal(size=(count, cols)).astype(np.float32)
        whole = linear(context, matrix, x, rows, int8)
        for value in (np.nan, np.inf, -np.inf):
            odd = x.copy()
            odd[1, rng.integers(cols)] = value
            found = linear(context, matrix, odd, rows, int8)
            assert not np.isfinite(found[1]).any()
            assert np.array_equal(np.delete(found, 1, 0), np.delete(whole, 1, 0))
