"""The C++ kernels against numpy float64 and torch, over random shapes, on every instruction set of this processor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from ceiba.config.records import RunnerConfig
from ceiba.kernels import cpu
from ceiba.layers.ops import select_ops

pytestmark = pytest.mark.skipif(not cpu.available, reason="installed without a C++ compiler")

QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SPAN = cpu._cpu.ATTENTION_SPAN if cpu.available else 0
SETS = ["generic", *(cpu._cpu.instruction_sets() if cpu.available else [])]


def random_blocks(kind: str, rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of a GGUF type with tame scales, and what they mean in float32 according to the gguf package."""
    qtype = gguf.GGMLQuantizationType[kind]
    block_cols, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    data = rng.integers(0, 256, (rows, cols // block_cols, block_bytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    for at in halves.get(kind, [208]):
        values = rng.normal(size=data.shape[:2]).astype(np.float16) * np.float16(0.02)
        data[..., at : at + 2] = values[..., None].view(np.uint8)
    data = data.reshape(rows, -1)
    return data, gguf.dequantize(data, qtype).astype(np.float32).reshape(rows, cols)


def plain_blocks(kind: str, rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    values = torch.from_numpy(rng.normal(size=(rows, cols)).astype(np.float32))
    if kind == "BF16":
        stored = values.bfloat16()
        return stored.view(torch.uint8).numpy().reshape(rows, -1), stored.float().numpy()
    return values.numpy().view(np.uint8).reshape(rows, -1), values.numpy()


def packed(context: object, kind: str, source: np.ndarray, rows: int, cols: int, bias: np.ndarray | None = None):
    out = np.full(cpu._cpu.packed_size(kind, rows, cols), 0xAA, np.uint8)
    cpu._cpu.pack(context, kind, source, cols, out)
    return cpu._cpu.PackedMatrix(kind, rows, cols, out, bias)


TILES = 4e-3
"""Bound of many rows on tiles, where weights and activations are rounded to bfloat16."""
TILED = {isa for isa in SETS if cpu.available and cpu._cpu.Context(1, isa).tiles}
UNITS = pytest.mark.parametrize(
    ("isa", "fixed"), [(isa, fixed) for isa in SETS for fixed in ([False, True] if isa in TILED else [False])]
)


@UNITS
@pytest.mark.parametrize("kind", [*QUANTS, "F32", "BF16"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 33, 131])
def test_linear_matches_float64(isa: str, kind: str, m: int, fixed: bool) -> None:
    rng = np.random.default_rng()
    context = cpu._cpu.Context(2, isa, fixed_order=fixed)
    rows, cols = int(rng.integers(1, 70)), 256 * int(rng.integers(1, 4))
    source, weight = (random_blocks if kind in QUANTS else plain_blocks)(kind, rows, cols, rng)
    bias = np.zeros((rows + 15) // 16 * 16, np.float32)
    bias[:rows] = rng.normal(size=rows)
    matrix = packed(context, kind, source, rows, cols, bias)
    x = rng.normal(size=(m, cols)).astype(np.float32)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias[:rows]
    # The size that the products have before they cancel: rounding noise is relative to that.
    size = np.linalg.norm(np.sqrt(x.astype(np.float64) ** 2 @ weight.T.astype(np.float64) ** 2))
    # Packed weights meet activations of 16 bits, whose noise is 2e-5 for normal values. Few values do not average it.
    few = m * rows <= 512
    int8_bound = (3e-2 if few else 1e-2) if kind in QUANTS else 1e-6
    wide_bound = 1e-4 if kind in QUANTS else 1e-6
    if isa in TILED and not fixed and kind != "F32":
        tiles = 3 * TILES if few else TILES
        int8_bound, wide_bound = max(int8_bound, tiles), max(wide_bound, tiles)
    for int8, bound in ((False, wide_bound), (True, int8_bound)):
        out = np.full((m, rows), np.nan, np.float32)
        cpu._cpu.linear(context, matrix, x, out, int8)
        error = np.linalg.norm(out - expected) / size
        assert error < bound, (int8, error)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_of_a_wide_matrix_have_the_bits_of_each_alone(isa: str, kind: str, threads: int) -> None:
    """Wide enough for tasks of two panels, an odd number of them and a part of one; rows in every remainder."""
    rng = np.random.default_rng()
    context = cpu._cpu.Context(threads, isa, fixed_order=True)
    rows, cols = 16 * 18 + int(rng.integers(1, 16)), 256 * int(rng.integers(1, 4))
    source, weight = random_blocks(kind, rows, cols, rng)
    matrix = packed(context, kind, source, rows, cols)
    x = rng.normal(size=(80, cols)).astype(np.float32)
    alone = np.full((len(x), rows), np.nan, np.float32)
    for i in range(len(x)):
        cpu._cpu.linear(context, matrix, x[i : i + 1], alone[i : i + 1], False)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    size = np.linalg.norm(np.sqrt(x.astype(np.float64) ** 2 @ weight.T.astype(np.float64) ** 2))
    assert np.linalg.norm(alone - expected) / size < 1e-4
    for m in (8, 9, 11, 14, 16, 31, 64, 65, 80):
        out = np.full((m, rows), np.nan, np.float32)
        cpu._cpu.linear(context, matrix, x[:m], out, False)
        np.testing.assert_array_equal(out, alone[:m])


def reference_attention(q, k_pool, v_pool, table, rows, starts, lengths, scale):
    """float64 softmax attention, one segment at a time."""
    outs, at = [], 0
    group = q.shape[1] // k_pool.shape[1]
    for row, start, length in zip(rows, starts, lengths, strict=True):
        end = start + length
        slots = torch.from_numpy(table[row, :end].astype(np.int64))
        k = k_pool[slots].double().repeat_interleave(group, 1)
        v = v_pool[slots].double().repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q[at : at + length].double(), k) * scale
        mask = torch.arange(end)[None, :] > (start + torch.arange(length))[:, None]
        scores.masked_fill_(mask[None], -torch.inf)
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v))
        at += length
    return torch.cat(outs)


def attention_case(rng: np.random.Generator, dtype: torch.dtype, prefill: list, decode: list, shared: int = 0):
    """Random slots in a random order; the first `shared` positions of all decode rows are the same slots."""
    heads, kv_heads, dim = [(9, 3, 64), (8, 8, 32), (14, 2, 64), (32, 8, 128)][rng.integers(4)]
    starts = np.array([s for s, _ in prefill] + decode, np.int32)
    lengths = np.array([n for _, n in prefill] + [1] * len(decode), np.int32)
    rows = rng.permutation(len(starts) + 3)[: len(starts)].astype(np.int32)
    table = np.zeros((len(starts) + 3, int((starts + lengths).max()) + 5), np.int32)
    pool_slots = int((starts + lengths).sum()) + shared + 7
    order = rng.permutation(pool_slots).astype(np.int32)
    prefix, used = order[:shared], shared
    slots = []
    for i, row in enumerate(rows):
        end = starts[i] + lengths[i]
        own = order[used : used + end]
        used += end
        table[row, :end] = own
        if shared and i >= len(prefill):
            table[row, :shared] = prefix
        slots.append(table[row, starts[i] : end])
    tokens = int(lengths.sum())
    q = torch.randn(tokens, heads, dim)
    k, v = torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, dim)
    pools = [torch.randn(pool_slots, kv_heads, dim).to(dtype) for _ in range(2)]
    return rows, starts, lengths, table, np.concatenate(slots).astype(np.int64), q, k, v, pools


@UNITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_matches_float64(isa: str, dtype: torch.dtype, fixed: bool) -> None:
    rng = np.random.default_rng()
    context = cpu._cpu.Context(2, isa, fixed_order=fixed)
    bound = 1e-2 if isa in TILED and not fixed and dtype != torch.float32 else 2e-6
    for prefill, decode, shared in (
        ([(0, 1)], [], 0),
        ([(0, 37), (90, 130)], [5, 0, 700], 0),
        ([], [int(n) for n in rng.integers(0, 1500, 5)], 0),
        ([(3, 20)], [3 * SPAN + int(n) for n in rng.integers(0, 40, 9)], 2 * SPAN),
    ):
        rows, starts, lengths, table, slots, q, k, v, pools = attention_case(rng, dtype, prefill, decode, shared)
        groups = None
        if shared:
            first, deep = len(prefill), shared + SPAN
            members = np.arange(first, len(rows), dtype=np.int32)
            nested = members[:3]
            for i in nested[1:]:
                table[rows[i], shared:deep] = table[rows[nested[0]], shared:deep]
            covered = np.zeros(len(rows), np.int32)
            covered[members] = shared
            covered[nested] = deep
            arrays = ([0, shared], [shared, deep], [0, len(members)], [len(members), len(nested)])
            groups = cpu._cpu.Groups(
                *(np.array(a, np.int32) for a in arrays), np.concatenate([members, nested]), covered
            )
        out = torch.full_like(q, torch.nan)
        cpu._cpu.attention(
            context, q.numpy(), k.numpy(), v.numpy(), pools[0].data_ptr(), pools[1].data_ptr(), len(pools[0]),
            k.shape[1], str(dtype).removeprefix("torch."), 0.125, rows, starts, lengths, len(prefill), table, slots,
            groups, out.numpy(),
        )  # fmt: skip
        assert torch.equal(pools[0][slots], k.to(dtype))
        assert torch.equal(pools[1][slots], v.to(dtype))
        expected = reference_attention(q, *pools, table, rows, starts, lengths, 0.125)
        error = ((out.double() - expected).norm() / expected.norm()).item()
        assert error < bound, (prefill, decode, shared, error)


@pytest.mark.parametrize(
    ("check", "found", "seconds"),
    [
        (lambda: True, True, 60.0),  # to fork a large process takes long on a busy machine
        (lambda: False, False, 60.0),
        (lambda: 1 / 0, False, 60.0),
        (lambda: os.kill(os.getpid(), signal.SIGILL), False, 60.0),
        (lambda: time.sleep(60), False, 0.3),
    ],
    ids=["right", "wrong", "error", "illegal instruction", "hang"],
)
def test_a_check_that_dies_does_not_hold(
    check: Callable[[], bool],
    found: bool,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cpu, "CHECK_SECONDS", seconds)
    assert cpu.holds(check) is found


def test_a_set_that_does_not_work_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu._cpu, "instruction_sets", lambda: ["generic", "avx2", "avx512", "amx"])
    monkeypatch.setattr(cpu, "agrees", lambda one, other: one == "avx512" and other == "generic")
    assert cpu.best_set.__wrapped__() == "avx512"
    monkeypatch.setattr(cpu, "agrees", lambda one, other: os.kill(os.getpid(), signal.SIGILL))
    assert cpu.best_set.__wrapped__() == "avx2"


def test_the_best_set_agrees_with_plain_code() -> None:
    assert cpu.best_set() in SETS
    assert all(cpu.agrees(isa, "generic") for isa in SETS)


def test_float32_activations_meet_no_tiles_nor_do_any_in_a_fixed_order() -> None:
    made = {
        (dtype, fixed): select_ops(torch.device("cpu"), RunnerConfig(deterministic=fixed), dtype).host.tiles
        for dtype in (torch.float32, torch.bfloat16)
        for fixed in (False, True)
    }
    assert made.pop((torch.bfloat16, False)) is not cpu.same_bits()
    assert not any(made.values())


def test_arguments_out_of_range_are_refused() -> None:
    context = cpu._cpu.Context(1)
    with pytest.raises(ValueError, match="no CPU kernel"):
        cpu._cpu.packed_size("IQ9_X", 4, 32)
    with pytest.raises(ValueError, match="multiple"):
        cpu._cpu.packed_size("Q4_K", 4, 32)
    with pytest.raises(ValueError, match="not available"):
        cpu._cpu.Context(1, "amx9000")
    case = attention_case(np.random.default_rng(), torch.float32, [], [3])
    rows, starts, lengths, table, slots, q, k, v, pools = case
    with pytest.raises(ValueError, match="outside the pool"):
        cpu._cpu.attention(
            context, q.numpy(), k.numpy(), v.numpy(), pools[0].data_ptr(), pools[1].data_ptr(), 1, k.shape[1],
            "float32", 1.0, rows, starts, lengths, 0, table, slots + 1, None, q.numpy(),
        )  # fmt: skip
